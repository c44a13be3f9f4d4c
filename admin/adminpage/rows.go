package adminpage

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/internal/filters"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/task"
)

func (h *Handler) outbox(ctx context.Context, q *query, v viewer) (*view, error) {
	list := filterOf[filters.Entries](q)
	f := list.Filter()
	f.After, f.Limit = q.number("after"), rows
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

func (h *Handler) parked(ctx context.Context, q *query, v viewer) (*view, error) {
	list := filterOf[filters.Parked](q)
	f := list.Filter()
	f.After, f.Limit = q.number("after"), rows
	found, err := h.ops.Parked(ctx, f)
	if err != nil {
		return nil, err
	}
	t := &table{Label: "Parked messages", Head: []string{"#Number", "Parked", "Handler", "#Generation", "State", "Class", "Code", "Needs", "Key", "Type", "#Attempts", "Decided by"},
		Empty: "No message is parked, or none has these values."}
	for _, m := range found {
		t.Rows = append(t.Rows, []cell{to(fmt.Sprint(m.Seq), link("message", "seq", fmt.Sprint(m.Seq))).marked("number"), at(m.At), plain(cmp.Or(m.Handler, m.Projector)), num(int64(m.Generation)),
			stateCell(m.State), plain(m.Class.String()), plain(m.Code), plain(admin.NeedsText(m.Needs)), to(m.Key, link("parked", "projector", m.Projector, "key", m.Key)), plain(m.Type), num(int64(m.Attempts)), plain(m.By)})
	}
	if len(found) == rows {
		t.More = page("parked", list, "after", fmt.Sprint(found[rows-1].Seq))
	}
	p := &view{Title: "Parked messages", Live: []block{{Table: t}},
		Intro: "Messages that a handler could not apply, and those that wait behind them. Waiting messages are tried again, or wait for a program that meets their needs; stuck ones need a decision."}
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
	switch {
	case !m.State.IsOpen() || !m.DueAt.IsZero():
	case m.Needs != "":
		due = plain("when a program runs that meets its needs")
	default:
		due = plain("when a person decides")
	}
	p.Live = []block{{Fields: fields(
		field{"State", stateCell(m.State)}, field{"Projector", to(m.Projector, link("projector", "name", m.Projector))}, field{"Generation", plain(fmt.Sprint(m.Generation))},
		field{"Failed in", plain(m.Handler)}, field{"Class", plain(m.Class.String())}, field{"Code", plain(m.Code)}, field{"Needs", plain(admin.NeedsText(m.Needs))}, field{"Attempts", plain(fmt.Sprint(m.Attempts))},
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

func (h *Handler) tasks(ctx context.Context, q *query, v viewer) (*view, error) {
	list := filterOf[filters.Tasks](q)
	f := list.Filter()
	f.After, f.Limit = q.text("after"), rows
	store, err := h.ops.Tasks()
	if err != nil {
		return nil, err
	}
	facts, err := h.facts(ctx)
	if err != nil {
		return nil, err
	}
	found, err := store.Tasks(ctx, f)
	if err != nil {
		return nil, err
	}
	counts := &table{Label: "Tasks by status", Head: []string{"Status", "#Tasks", "Oldest", "Claimed by", "Until"}, Empty: "Every task is over."}
	for _, c := range facts.Tasks {
		counts.Rows = append(counts.Rows, []cell{to(string(c.Status), link("tasks", "status", string(c.Status))), marked(count(c.Count), "number"), at(c.Oldest), plain(c.Holder), at(c.Until)})
	}
	t := &table{Label: "Tasks", Head: []string{"Task", "Kind", "Status", "Code", "#Attempts", "Waits for", "Created", "Last attempt", "Next"}, Empty: "No task has these values."}
	for _, one := range found {
		t.Rows = append(t.Rows, []cell{to(one.ID, link("task", "id", one.ID)), plain(one.Kind), statusCell(one.Status, task.Abandoned, ""), plain(one.Code), num(int64(one.Attempts)), plain(one.Waits), at(one.CreatedAt), at(one.LastAttemptedAt), at(one.NextAt)})
	}
	if len(found) == rows {
		t.More = page("tasks", list, "after", found[rows-1].ID)
	}
	p := &view{Title: "Tasks", Intro: "Calls to other systems, timers and processes. An abandoned task needs a decision.", Live: []block{{Table: counts}, {Title: "Tasks", Table: t}}}
	p.Forms = []form{find("tasks", list)}
	if v.by != "" && list.Confirm() != "" {
		p.Forms = append(p.Forms, taskForms(list, "All tasks with these values: "+show(selection(list))+".")...)
	}
	return p, nil
}

func taskForms(list filters.Tasks, note string) []form {
	return rowForms(list, note,
		form{Title: "Run again", Action: "requeue-tasks", Button: "Requeue", Note: " Abandoned and failed ones run again, perhaps at once. Recorded steps do not run again."},
		form{Title: "Give up", Action: "cancel-tasks", Button: "Cancel", Danger: true, Note: " Their recorded steps are undone. This cannot be undone."})
}

func (h *Handler) task(ctx context.Context, q *query, v viewer) (*view, error) {
	id := q.required("id")
	store, err := h.ops.Tasks()
	if err != nil {
		return nil, err
	}
	found, err := store.Tasks(ctx, task.Filter{IDs: []string{id}, Limit: 1})
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, problem{404, "No task has this id. It may be over and deleted."}
	}
	trail, err := store.TaskTrail(ctx, id)
	if err != nil {
		return nil, err
	}
	t := found[0]
	direction := ""
	if t.Undo {
		direction = "its steps are being undone: " + t.Why
	}
	history := &table{Label: "What happened", Head: []string{"At", "What", "Detail", "By", "Reason"}, Empty: "Nothing is recorded yet."}
	if n := len(trail); n > 500 {
		trail = trail[n-500:]
	}
	for _, r := range trail {
		history.Rows = append(history.Rows, []cell{at(r.At), plain(r.What), plain(r.Detail), plain(r.By), plain(r.Reason)})
	}
	state, err := json.Marshal(t.State)
	if err != nil {
		return nil, err
	}
	p := &view{Title: "Task " + show(t.ID), Live: []block{{Fields: fields(
		field{"Status", statusCell(t.Status, task.Abandoned, "")}, field{"Kind", to(t.Kind, link("tasks", "kind", t.Kind))}, field{"Group", to(t.Group, link("tasks", "group", t.Group))}, field{"Direction", plain(direction)},
		field{"Version", plain(fmt.Sprint(t.Version))}, field{"Attempts", plain(fmt.Sprint(t.Attempts))}, field{"Waits for", plain(t.Waits)}, field{"Code", plain(t.Code)},
		field{"Claimed by", plain(t.ClaimedBy)}, field{"Created", at(t.CreatedAt)}, field{"Last attempt", at(t.LastAttemptedAt)}, field{"Next", at(t.NextAt)}, field{"Ended", at(t.EndedAt)})},
		{Title: "What happened", Table: history},
		v.private("Input, steps and result", text{"Input", indented(t.Input)}, text{"Steps", indented(state)}, text{"Result", indented(t.Result)})}}
	if v.by != "" && !t.Status.Final() {
		p.Forms = taskForms(filters.Tasks{ID: []string{t.ID}}, "This task.")
		if t.Status == task.Abandoned {
			p.Forms = append(p.Forms, form{Title: "Its work was done by hand", Action: "complete-task", Button: "Complete", Hidden: [][2]string{{"id", t.ID}}, Confirm: t.ID, Danger: true,
				Note:   "The task ends with this result, without running.",
				Inputs: []input{{Name: "result", Label: "Result, as JSON", Type: "area", Value: "null", Required: true}, reason()}})
		}
	}
	return p, nil
}
