package adminpage

import (
	"context"
	"fmt"
	"slices"

	"github.com/kinora-go/kinora/internal/filters"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

func (h *Handler) outbox(ctx context.Context, q *query, v viewer) (*view, error) {
	list := filterOf[filters.Entries](q)
	f := list.Filter()
	f.After, f.Limit = q.number("after"), rows
	if q.err != nil {
		return nil, q.err
	}
	facts, err := h.facts(ctx)
	if err != nil {
		return nil, err
	}
	found, err := h.store.Entries(ctx, f)
	if err != nil {
		return nil, err
	}
	counts := &table{Label: "Open entries by status", Head: []string{"Status", "#Entries", "Oldest", "Claimed by", "Until"}, Empty: "Every entry is published."}
	for _, e := range facts.Outbox {
		counts.Rows = append(counts.Rows, []cell{to(string(e.Status), link("outbox", "status", string(e.Status))), marked(count(e.Count), "number"), at(e.Oldest), plain(e.Holder), at(e.Until)})
	}
	t := &table{Label: "Entries", Head: []string{"#Number", "Created", "Status", "Topic", "Key", "Message", "#Attempts", "Last error", "Next"}, Empty: "No entry has these values."}
	for _, e := range found {
		t.Rows = append(t.Rows, []cell{to(fmt.Sprint(e.Seq), link("entry", "seq", fmt.Sprint(e.Seq))).marked("number"), at(e.CreatedAt), statusCell(e.Status, outbox.Abandoned, ""), plain(e.Topic),
			to(e.Key, page("outbox", filters.Entries{Key: e.Key, Status: list.Status})), plain(e.ID), num(int64(e.Attempts)), plain(e.LastError), at(e.NextAttemptAt)})
	}
	if len(found) == rows {
		t.More = page("outbox", list, "after", fmt.Sprint(found[rows-1].Seq))
	}
	p := &view{Title: "Outbox", Intro: "Messages that relays publish. An abandoned entry holds the later ones of its key.",
		Live: []block{{Table: counts}, {Title: "Entries", Table: t}}}
	if pauses := pauseTable(facts); len(pauses.Rows) > 0 {
		p.Live = append(p.Live, block{Title: "Paused", Table: pauses})
	}
	p.Forms = []form{find("outbox", list)}
	if v.by == "" {
		return p, nil
	}
	if list.Confirm() != "" {
		p.Forms = append(p.Forms, entryForms(list, "All entries with these values: "+show(selection(list))+".")...)
	}
	if f.Topic != "" {
		paused := slices.ContainsFunc(facts.Pauses, func(x provider.Pause) bool { return x.Kind == provider.PauseTopic && x.Name == f.Topic })
		p.Forms = append(p.Forms, pauseForm(provider.PauseTopic, f.Topic, paused))
	}
	return p, nil
}

func entryForms(list filters.Entries, note string) []form {
	return rowForms(list, note,
		form{Title: "Requeue", Action: "requeue", Button: "Requeue", Note: " Abandoned and failed ones are published again, perhaps at once."},
		form{Title: "Skip", Action: "skip-entries", Button: "Skip", Danger: true, Note: " Open ones are never published. This cannot be undone."})
}

func (h *Handler) entry(ctx context.Context, q *query, v viewer) (*view, error) {
	seq := q.number("seq")
	if q.err != nil {
		return nil, q.err
	}
	found, err := h.store.Entries(ctx, outbox.Filter{Seqs: []int64{seq}, Limit: 1})
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, problem{404, "No entry has this number. It may be published and deleted."}
	}
	e := found[0]
	malformed := ""
	if e.Malformed {
		malformed = "yes: another program has changed it"
	}
	p := &view{Title: fmt.Sprintf("Entry %d", e.Seq), Live: []block{{Fields: fields(
		field{"Status", plain(string(e.Status))}, field{"Topic", to(e.Topic, link("outbox", "topic", e.Topic))}, field{"Key", to(e.Key, link("outbox", "key", e.Key))},
		field{"Message", to(e.ID, link("event", "id", e.ID))}, field{"Attempts", plain(fmt.Sprint(e.Attempts))}, field{"Claimed by", plain(e.ClaimedBy)},
		field{"Last error", plain(e.LastError)}, field{"Malformed", plain(malformed)}, field{"Created", at(e.CreatedAt)}, field{"Next attempt", at(e.NextAttemptAt)},
		field{"Last attempt", at(e.LastAttemptedAt)}, field{"Published", at(e.PublishedAt)})},
		v.private("Headers and payload", text{"Headers", headers(e.Headers)}, text{"Payload", indented(e.Payload)})}}
	if v.by != "" && e.Status.Open() {
		p.Forms = entryForms(filters.Entries{Seq: []int64{e.Seq}}, "This entry alone.")
	}
	return p, nil
}
