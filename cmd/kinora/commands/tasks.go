package commands

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/filters"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/task"
)

type tasksCmd struct {
	Ls       tasksLsCmd       `cmd:"" help:"List tasks in order of their ids."`
	Show     tasksShowCmd     `cmd:"" help:"Show a task and what happened to it."`
	Requeue  tasksRequeueCmd  `cmd:"" help:"Run abandoned and failed tasks again."`
	Cancel   tasksCancelCmd   `cmd:"" help:"Give tasks up: what their steps did is undone."`
	Complete tasksCompleteCmd `cmd:"" help:"End an abandoned task whose work was done by hand."`
	Patch    tasksPatchCmd    `cmd:"" help:"Change the recorded results of a task."`
}

// changeTasks is change for the tasks of the store. It explains that a task is not as a person has seen it.
func (a *App) changeTasks(
	ctx context.Context, d decision, warning, done string, do func(provider.TaskInspector, provider.Decision) (int, error),
) error {
	return a.change(ctx, d, warning, done, func(ops *admin.Admin, d provider.Decision) (int, error) {
		tasks, err := ops.Tasks()
		if err != nil {
			return 0, err
		}
		n, err := do(tasks, d)
		if errors.Is(err, provider.ErrTaskVersion) && !errors.Is(err, provider.ErrTaskEnded) {
			err = fmt.Errorf("%w: look at it again with 'tasks show'", err)
		}
		return n, err
	})
}

type tasksLsCmd struct {
	filters.Tasks `embed:""`
	After         string `placeholder:"ID" help:"Only greater ids: the next page."`
	page          `embed:""`
}

// taskRow is a task as JSON.
type taskRow struct {
	task.Task
	Trail []provider.TaskRecord `json:"trail,omitempty"`
}

// taskOf leaves out the token, and what may be data of users unless payload is set.
func taskOf(t task.Task, payload bool) taskRow {
	t.Token = claim.Token{}
	if !payload {
		t.Input, t.State, t.Result, t.Metadata = nil, nil, nil, eventstore.Metadata{}
	}
	return taskRow{Task: t}
}

func (c *tasksLsCmd) Run(ctx context.Context, app *App) error {
	const head = "id | kind | status | code | attempts | waits for | created (UTC) | last attempt (UTC) | next (UTC)"
	cells := func(t taskRow) []string {
		return []string{t.ID, t.Kind, string(t.Status), t.Code, fmt.Sprint(t.Attempts), t.Waits, at(t.CreatedAt), at(t.LastAttemptedAt), at(t.NextAt)}
	}
	return list(ctx, app, head, cells, func(_ *Session, ops *admin.Admin) ([]taskRow, error) {
		tasks, err := ops.Tasks()
		if err != nil {
			return nil, err
		}
		f := c.Filter()
		f.After, f.Limit = c.After, c.Limit
		found, err := tasks.Tasks(ctx, f)
		return each(found, func(t task.Task) taskRow { return taskOf(t, false) }), err
	})
}

type tasksShowCmd struct {
	ID      string `arg:"" help:"The id of the task."`
	Payload bool   `help:"Show the input, the recorded results and the result, which may be data of users."`
}

func (c *tasksShowCmd) Run(ctx context.Context, app *App) error {
	return app.with(ctx, func(_ *Session, ops *admin.Admin) error {
		tasks, err := ops.Tasks()
		if err != nil {
			return err
		}
		found, err := tasks.Tasks(ctx, task.Filter{IDs: []string{c.ID}})
		if err != nil {
			return err
		}
		if len(found) == 0 {
			return fmt.Errorf("the task %s does not exist: it may be over and deleted", c.ID)
		}
		t := taskOf(found[0], c.Payload)
		if t.Trail, err = tasks.TaskTrail(ctx, c.ID); err != nil {
			return err
		}
		return app.show(t, func(w io.Writer) {
			undo := ""
			if t.Undo {
				undo = "its steps are being undone: " + t.Why
			}
			fields(w, "id", t.ID, "kind", t.Kind, "group", t.Group, "status", string(t.Status), "direction", undo, "version", fmt.Sprint(t.Version), "attempts", fmt.Sprint(t.Attempts),
				"waits for", t.Waits, "code", t.Code, "claimed by", t.ClaimedBy, "created", at(t.CreatedAt), "last attempt", at(t.LastAttemptedAt), "next", at(t.NextAt))
			if c.Payload {
				state, _ := json.Marshal(t.State)
				fields(w, "input", string(t.Input), "state", string(state), "result", string(t.Result))
			}
			if len(t.Trail) > 0 {
				table(w, "at (UTC) | what | detail | by | reason", t.Trail, func(r provider.TaskRecord) []string {
					return []string{at(r.At), r.What, r.Detail, r.By, r.Reason}
				})
			}
		})
	})
}

type tasksRequeueCmd struct {
	filters.Tasks `embed:""`
	All           bool `help:"All abandoned and failed tasks."`
	decision      `embed:""`
}

func (c *tasksRequeueCmd) Validate() error {
	return selects(c.Tasks, c.All, true)
}

func (c *tasksRequeueCmd) Run(ctx context.Context, app *App) error {
	const warning = "The selected tasks run again, perhaps at once"
	return app.changeTasks(ctx, c.decision, warning, "requeued", func(tasks provider.TaskInspector, d provider.Decision) (int, error) {
		return tasks.RequeueTasks(ctx, c.Filter(), d)
	})
}

type tasksCancelCmd struct {
	filters.Tasks `embed:""`
	decision      `embed:""`
}

func (c *tasksCancelCmd) Validate() error {
	return selects(c.Tasks, false, false)
}

func (c *tasksCancelCmd) Run(ctx context.Context, app *App) error {
	const warning = "The selected tasks are given up, and what their steps did is undone"
	return app.changeTasks(ctx, c.decision, warning, "canceled", func(tasks provider.TaskInspector, d provider.Decision) (int, error) {
		return tasks.CancelTasks(ctx, c.Filter(), d)
	})
}

type tasksCompleteCmd struct {
	ID       string `arg:"" help:"The id of the task."`
	Result   string `default:"null" help:"Its result, as JSON."`
	decision `embed:""`
}

func (c *tasksCompleteCmd) Validate() error {
	if !json.Valid([]byte(c.Result)) {
		return errors.New("--result is not JSON")
	}
	return nil
}

func (c *tasksCompleteCmd) Run(ctx context.Context, app *App) error {
	warning := "The task " + c.ID + " ends with this result, without running"
	return app.changeTasks(ctx, c.decision, warning, "completed", func(tasks provider.TaskInspector, d provider.Decision) (int, error) {
		return 1, tasks.CompleteTask(ctx, c.ID, json.RawMessage(c.Result), d)
	})
}

type tasksPatchCmd struct {
	ID       string `arg:"" help:"The id of the task."`
	Patch    string `arg:"" help:"A JSON merge patch of its state: {\"step\":{\"out\":1}}. A null removes a slot, so that its step runs again."`
	Version  int64  `required:"" help:"The version that 'tasks show' has shown."`
	decision `embed:""`
}

func (c *tasksPatchCmd) Validate() error {
	if !json.Valid([]byte(c.Patch)) {
		return errors.New("the patch is not JSON")
	}
	return nil
}

func (c *tasksPatchCmd) Run(ctx context.Context, app *App) error {
	warning := "Recorded results of the task " + c.ID + " are changed"
	return app.changeTasks(ctx, c.decision, warning, "changed", func(tasks provider.TaskInspector, d provider.Decision) (int, error) {
		return 1, tasks.PatchTask(ctx, c.ID, c.Version, json.RawMessage(c.Patch), d)
	})
}
