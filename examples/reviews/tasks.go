package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/task"
)

// tasksCmd lists tasks, and decides about them.
type tasksCmd struct {
	operatorFlags `embed:""`
	decisionFlags `embed:""`
	Status        string   `enum:"all,pending,claimed,failed,waiting,done,undone,abandoned" default:"abandoned" help:"Only tasks with this status: abandoned (an operator must act), pending, claimed, failed, waiting, done, undone, or all."`
	ID            []string `placeholder:"ID" help:"Only tasks with these ids."`
	Code          string   `help:"Only tasks whose last failure has this code."`
	After         string   `placeholder:"ID" help:"Only greater ids: the next page of the list."`
	Limit         int      `default:"100" help:"Maximum number of tasks of the list."`
	Requeue       bool     `xor:"decision" help:"Run these tasks again, as soon as a service runs. They must be abandoned or failed."`
	Cancel        bool     `xor:"decision" help:"Give these tasks up: their reviews stay visible."`
}

// Validate is called by kong.
func (c *tasksCmd) Validate() error {
	switch {
	case c.Limit < 1:
		return errors.New("--limit must be at least 1")
	case (c.Requeue || c.Cancel) && c.Reason == "":
		return errNoReason
	}
	return nil
}

// Run prints the list, or takes a decision about all tasks that are selected.
func (c *tasksCmd) Run(ctx context.Context) error {
	return c.with(ctx, func(db serviceStore) error {
		f := task.Filter{Kind: moderateKind, IDs: c.ID, Code: c.Code, After: c.After}
		if c.Status != "all" {
			f.Status = []task.Status{task.Status(c.Status)}
		}
		decide, what := db.RequeueTasks, "requeued"
		switch {
		case c.Cancel:
			decide, what = db.CancelTasks, "canceled"
		case !c.Requeue:
			f.Limit = c.Limit
			list, err := db.Tasks(ctx, f)
			if err != nil {
				return err
			}
			fmt.Print(columns(taskTable(list)))
			return nil
		}
		n, err := decide(ctx, f, c.decision())
		if err != nil {
			return err
		}
		fmt.Println(n, what)
		if n == 0 {
			return errors.New("no task was selected: list them with 'reviews tasks --status all'")
		}
		return nil
	})
}

func taskTable(list []task.Task) []string {
	table := []string{"id\tstatus\tcode\tattempts\twaits\tcreated (UTC)\tnext (UTC)"}
	for _, t := range list {
		next := ""
		if !t.NextAt.IsZero() && !t.Status.Final() {
			next = t.NextAt.Format(time.DateTime)
		}
		table = append(table, fmt.Sprintf("%s\t%s\t%s\t%d\t%s\t%s\t%s", printable(t.ID), t.Status, printable(t.Code),
			t.Attempts, printable(t.Waits), t.CreatedAt.Format(time.DateTime), next))
	}
	return table
}
