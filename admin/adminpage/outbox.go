package adminpage

import (
	"context"
	"fmt"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Lists begin with open entries: without a status a list would read all.
var entryStatuses = []string{"open", "pending", "claimed", "failed", "held", "abandoned", "published", "skipped"}

func (q *query) entryFilter() outbox.Filter {
	f := outbox.Filter{Topic: q.text("topic"), Key: q.text("key"), Stream: q.text("stream")}
	if seq := q.number("seq"); seq > 0 {
		f.Seqs = []int64{seq}
	}
	return f
}

func entryValues(f outbox.Filter) (pairs [][2]string) {
	seq := ""
	if len(f.Seqs) == 1 {
		seq = fmt.Sprint(f.Seqs[0])
	}
	for _, p := range [][2]string{{"topic", f.Topic}, {"key", f.Key}, {"stream", f.Stream}, {"seq", seq}} {
		if p[1] != "" {
			pairs = append(pairs, p)
		}
	}
	return pairs
}

func (h *Handler) outbox(ctx context.Context, q *query, v viewer) (*view, error) {
	f := q.entryFilter()
	status := q.oneOf("status", entryStatuses...)
	f.After, f.Limit = q.number("after"), rows
	switch status {
	case "", "open":
		status = "open"
		for _, s := range provider.EntryStatuses() {
			if s.Open() {
				f.Status = append(f.Status, s)
			}
		}
	default:
		f.Status = []outbox.Status{outbox.Status(status)}
	}
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
		state := plain(string(e.Status))
		if e.Status == outbox.Abandoned {
			state.Mark = "bad"
		}
		t.Rows = append(t.Rows, []cell{to(fmt.Sprint(e.Seq), link("entry", "seq", fmt.Sprint(e.Seq))).marked("number"), at(e.CreatedAt), state, plain(e.Topic),
			to(e.Key, link("outbox", "key", e.Key, "status", status)), plain(e.ID), num(int64(e.Attempts)), plain(e.LastError), at(e.NextAttemptAt)})
	}
	values := entryValues(f)
	if len(found) == rows {
		t.More = link("outbox", flat(values, "status", status, "after", fmt.Sprint(found[rows-1].Seq))...)
	}
	p := &view{Title: "Outbox", Intro: "Messages that relays publish. An abandoned entry holds the later ones of its key.",
		Live: []block{{Table: counts}, {Title: "Entries", Table: t}}}
	if pauses := pauseTable(facts); len(pauses.Rows) > 0 {
		p.Live = append(p.Live, block{Title: "Paused", Table: pauses})
	}
	p.Forms = []form{{Title: "Find", Method: "get", Action: "outbox", Button: "Find", Inputs: []input{{Name: "topic", Label: "Topic", Value: f.Topic}, {Name: "key", Label: "Key", Value: f.Key},
		{Name: "stream", Label: "Stream", Value: f.Stream}, choice("status", "Status", [][2]string{{"status", status}}, entryStatuses...)}}}
	if v.by == "" {
		return p, nil
	}
	if len(values) > 0 {
		confirm := values[0][1]
		note := "All entries with the " + values[0][0] + " " + show(confirm) + "."
		if len(values) > 1 {
			note = "All entries with these values."
		}
		p.Forms = append(p.Forms, entryForms(values, note, confirm)...)
	}
	if f.Topic != "" {
		paused := false
		for _, x := range facts.Pauses {
			paused = paused || x.Kind == provider.PauseTopic && x.Name == f.Topic
		}
		p.Forms = append(p.Forms, pauseForm(provider.PauseTopic, f.Topic, paused))
	}
	return p, nil
}

func entryForms(hidden [][2]string, note, confirm string) []form {
	return []form{
		{Title: "Requeue", Action: "requeue", Button: "Requeue", Hidden: hidden, Inputs: []input{reason()}, Confirm: confirm,
			Note: note + " Abandoned and failed ones are published again, perhaps at once."},
		{Title: "Skip", Action: "skip-entries", Button: "Skip", Hidden: hidden, Inputs: []input{reason()}, Confirm: confirm, Danger: true,
			Note: note + " Open ones are never published. This cannot be undone."},
	}
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
		p.Forms = entryForms([][2]string{{"seq", fmt.Sprint(e.Seq)}}, "This entry alone.", "")
		p.Forms[1].Confirm = fmt.Sprint(e.Seq)
	}
	return p, nil
}
