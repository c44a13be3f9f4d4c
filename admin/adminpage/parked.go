package adminpage

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/kinora-go/kinora/internal/filters"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

func (h *Handler) parked(ctx context.Context, q *query, v viewer) (*view, error) {
	list := filterOf[filters.Parked](q)
	f := list.Filter()
	f.After, f.Limit = q.number("after"), rows
	if q.err != nil {
		return nil, q.err
	}
	found, err := h.ops.Parked(ctx, f)
	if err != nil {
		return nil, err
	}
	t := &table{Label: "Parked messages", Head: []string{"#Number", "Parked", "Handler", "#Generation", "State", "Class", "Code", "Key", "Type", "#Attempts", "Decided by"},
		Empty: "No message is parked, or none has these values."}
	for _, m := range found {
		t.Rows = append(t.Rows, []cell{to(fmt.Sprint(m.Seq), link("message", "seq", fmt.Sprint(m.Seq))).marked("number"), at(m.At), plain(cmp.Or(m.Handler, m.Projector)), num(int64(m.Generation)),
			stateCell(m.State), plain(m.Class.String()), plain(m.Code), to(m.Key, link("parked", "projector", m.Projector, "key", m.Key)), plain(m.Type), num(int64(m.Attempts)), plain(m.By)})
	}
	if len(found) == rows {
		t.More = page("parked", list, "after", fmt.Sprint(found[rows-1].Seq))
	}
	p := &view{Title: "Parked messages", Live: []block{{Table: t}},
		Intro: "Messages that a handler could not apply, and those that wait behind them. Waiting messages are tried again; stuck ones need a decision."}
	p.Forms = []form{find("parked", list)}
	isOpen := func(m provider.Parked) bool { return m.State.IsOpen() }
	if v.by != "" && f.Projector != "" && slices.ContainsFunc(found, isOpen) {
		p.Forms = append(p.Forms, decisionForms(list, "Selected: "+show(selection(list))+".")...)
	}
	return p, nil
}

func stateCell(s projector.ParkedState) cell {
	return statusCell(s.String(), projector.StateStuck.String(), projector.StateReplayed.String())
}

// decisionForms are the acts on parked messages: a dry run, a replay and a skip.
func decisionForms(list filters.Parked, note string) []form {
	dryRun := form{Title: "Try it: a dry run", Action: "dry-run", Button: "Dry run", Hidden: filters.Values(list), Inputs: []input{reason()},
		Note: note + " A running runner applies at most 100 messages, shows the rows that would change, and undoes it."}
	return append([]form{dryRun}, rowForms(list, note,
		form{Title: "Replay", Action: "replay", Button: "Replay", Note: " The messages are applied again, in order, with those that wait behind them."},
		form{Title: "Skip", Action: "skip", Button: "Skip", Danger: true, Note: " The messages are never applied. This cannot be undone."})...)
}

func (h *Handler) message(ctx context.Context, q *query, v viewer) (*view, error) {
	seq := q.number("seq")
	if q.err != nil {
		return nil, q.err
	}
	found, err := h.ops.Parked(ctx, projector.ParkedFilter{Seqs: []int64{seq}, Limit: 1, States: []projector.ParkedState{
		projector.StateWaiting, projector.StateStuck, projector.StateReplayed, projector.StateSkipped}})
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, problem{404, "No message with this number is parked. It may have been applied."}
	}
	m := found[0]
	p := &view{Title: fmt.Sprintf("Parked message %d", m.Seq)}
	due := at(m.DueAt)
	if m.DueAt.IsZero() && m.State.IsOpen() {
		due = plain("when a person decides")
	}
	p.Live = []block{{Fields: fields(
		field{"State", stateCell(m.State)}, field{"Projector", to(m.Projector, link("projector", "name", m.Projector))}, field{"Generation", plain(fmt.Sprint(m.Generation))},
		field{"Failed in", plain(m.Handler)}, field{"Class", plain(m.Class.String())}, field{"Code", plain(m.Code)}, field{"Attempts", plain(fmt.Sprint(m.Attempts))},
		field{"Parked", at(m.At)}, field{"Tried again", due}, field{"Program version", plain(m.Version)},
		field{"Message", to(m.MessageID, link("event", "id", m.MessageID))}, field{"Type", plain(m.Type)}, field{"Topic", plain(m.Topic)},
		field{"Key", to(m.Key, link("parked", "projector", m.Projector, "key", m.Key))},
		field{"Resolved", at(m.ResolvedAt)}, field{"Decided by", plain(m.By)}, field{"Reason", plain(m.Reason)})}}
	p.Live = append(p.Live, v.private("What failed, and the message", text{"Error", m.Error}, text{"Headers", headers(m.Headers)}, text{"Payload", indented(m.Payload)}))
	if v.by != "" && m.State.IsOpen() {
		one := filters.Parked{Projector: m.Projector, Seq: []int64{m.Seq}}
		f := one
		note := "This message alone."
		if m.Key != "" {
			f = filters.Parked{Projector: m.Projector, Generation: m.Generation, Key: m.Key}
			note = "All parked messages of the key " + show(m.Key) + ", which wait for each other."
		}
		p.Forms = decisionForms(f, note)
		if m.Key != "" {
			p.Forms[2] = decisionForms(one, "This message alone; the others of its key are then applied.")[2]
		}
	}
	return p, nil
}
