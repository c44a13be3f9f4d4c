package adminpage

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/kinora-go/kinora/internal/filters"
	"github.com/kinora-go/kinora/task"
)

func (h *Handler) tasks(ctx context.Context, q *query, v viewer) (*view, error) {
	list := filterOf[filters.Tasks](q)
	f := list.Filter()
	f.After, f.Limit = q.text("after"), rows
	if q.err != nil {
		return nil, q.err
	}
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
	if q.err != nil {
		return nil, q.err
	}
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
