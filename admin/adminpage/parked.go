package adminpage

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// parkedFilter reads the filter of a list or of an act.
func (q *query) parkedFilter() projector.ParkedFilter {
	f := projector.ParkedFilter{
		Projector: q.text("projector"), Generation: int(q.number("generation")), Handler: q.text("handler"), Key: q.text("key"), Code: q.text("code"),
	}
	if class := q.oneOf("class", "permanent", "unknown", "transient", "held"); class != "" {
		c := provider.ParseClass(class)
		f.Class = &c
	}
	if seq := q.number("seq"); seq > 0 {
		f.Seqs = []int64{seq}
	}
	return f
}

// parkedValues is the inverse of parkedFilter.
func parkedValues(f projector.ParkedFilter) (pairs [][2]string) {
	class, seq, generation := "", "", ""
	if f.Class != nil {
		class = f.Class.String()
	}
	if len(f.Seqs) == 1 {
		seq = fmt.Sprint(f.Seqs[0])
	}
	if f.Generation > 0 {
		generation = fmt.Sprint(f.Generation)
	}
	for _, p := range [][2]string{{"projector", f.Projector}, {"generation", generation}, {"handler", f.Handler}, {"key", f.Key}, {"class", class}, {"code", f.Code}, {"seq", seq}} {
		if p[1] != "" {
			pairs = append(pairs, p)
		}
	}
	return pairs
}

// selection describes a filter.
func selection(f projector.ParkedFilter) string {
	var parts []string
	for _, p := range parkedValues(f) {
		parts = append(parts, p[0]+" "+p[1])
	}
	return strings.Join(parts, ", ")
}

func flat(pairs [][2]string, more ...string) (all []string) {
	for _, p := range pairs {
		all = append(all, p[0], p[1])
	}
	return append(all, more...)
}

var parkedStates = []string{"open", "waiting", "stuck", "replayed", "skipped"}

func (h *Handler) parked(ctx context.Context, q *query, v viewer) (*view, error) {
	f := q.parkedFilter()
	state := cmp.Or(q.oneOf("state", parkedStates...), "open")
	f.After, f.Limit = q.number("after"), rows
	if state != "open" {
		f.States = []projector.ParkedState{provider.ParseParkedState(state)}
	}
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
	values := parkedValues(f)
	if len(found) == rows {
		t.More = link("parked", flat(values, "state", state, "after", fmt.Sprint(found[rows-1].Seq))...)
	}
	p := &view{Title: "Parked messages", Live: []block{{Table: t}},
		Intro: "Messages that a handler could not apply, and those that wait behind them. Waiting messages are tried again; stuck ones need a decision."}
	p.Forms = []form{{Title: "Find", Method: "get", Action: "parked", Button: "Find", Inputs: []input{
		{Name: "projector", Label: "Projector", Value: f.Projector}, {Name: "key", Label: "Key", Value: f.Key}, {Name: "handler", Label: "Handler (projector/handler)", Value: f.Handler},
		{Name: "code", Label: "Code", Value: f.Code}, choice("class", "Class", values, "", "permanent", "unknown", "transient", "held"),
		choice("state", "State", [][2]string{{"state", state}}, parkedStates...)}}}
	if v.by != "" && f.Projector != "" && (state == "open" || state == "stuck" || state == "waiting") && len(found) > 0 {
		p.Forms = append(p.Forms, decisionForms(f, "Selected: "+show(selection(f))+".")...)
	}
	return p, nil
}

func stateCell(s projector.ParkedState) cell {
	switch s {
	case projector.StateStuck:
		return marked(s.String(), "bad")
	case projector.StateReplayed:
		return marked(s.String(), "good")
	}
	return plain(s.String())
}

// choice is a select. Its value is that of the pair with its name.
func choice(name, label string, values [][2]string, options ...string) input {
	i := input{Name: name, Label: label, Type: "select"}
	for _, v := range values {
		if v[0] == name {
			i.Value = v[1]
		}
	}
	for _, o := range options {
		i.Options = append(i.Options, [2]string{o, cmp.Or(o, "any")})
	}
	return i
}

// isOne reports whether a filter selects one message, or one key of a projector.
func isOne(f projector.ParkedFilter) bool {
	return len(f.Seqs) == 1 || f.Projector != "" && f.Key != ""
}

// decisionForms are the acts on parked messages. For more than a message or a key, and for what cannot be
// undone, the name of the projector must be typed.
func decisionForms(f projector.ParkedFilter, note string) []form {
	hidden, confirm := parkedValues(f), f.Projector
	if isOne(f) {
		confirm = ""
	}
	return []form{
		{Title: "Try it: a dry run", Action: "dry-run", Button: "Dry run", Hidden: hidden, Inputs: []input{reason()},
			Note: note + " A running runner applies at most 100 messages, shows the rows that would change, and undoes it."},
		{Title: "Replay", Action: "replay", Button: "Replay", Hidden: hidden, Inputs: []input{reason()}, Confirm: confirm,
			Note: note + " The messages are applied again, in order, with those that wait behind them."},
		{Title: "Skip", Action: "skip", Button: "Skip", Hidden: hidden, Inputs: []input{reason()}, Confirm: f.Projector, Danger: true,
			Note: note + " The messages are never applied. This cannot be undone."},
	}
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
		f := projector.ParkedFilter{Projector: m.Projector, Seqs: []int64{m.Seq}}
		note := "This message alone."
		if m.Key != "" {
			f = projector.ParkedFilter{Projector: m.Projector, Generation: m.Generation, Key: m.Key}
			note = "All parked messages of the key " + show(m.Key) + ", which wait for each other."
		}
		p.Forms = decisionForms(f, note)
		if m.Key != "" {
			one := decisionForms(projector.ParkedFilter{Projector: m.Projector, Seqs: []int64{m.Seq}}, "This message alone; the others of its key are then applied.")
			p.Forms[2] = one[2]
		}
	}
	return p, nil
}
