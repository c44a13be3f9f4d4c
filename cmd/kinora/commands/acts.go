package commands

import (
	"context"
	"errors"
	"fmt"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/internal/filters"
	"github.com/kinora-go/kinora/provider"
)

type actsCmd struct {
	Ls     actsLsCmd     `cmd:"" help:"List acts, the newest first. Decisions about parked messages and tasks are with these."`
	Cancel actsCancelCmd `cmd:"" help:"Cancel a request that is not over."`
}

type actsLsCmd struct {
	filters.Acts `embed:""`
	Before       int64 `placeholder:"N" help:"Only smaller numbers: the next page."`
	Payload      bool  `help:"With --json: also the details and outcomes, which may have data of users."`
	page         `embed:""`
}

const actHead = "act | at (UTC) | what | target | state | by | reason | progress"

func actCells(a provider.Act) []string {
	progress := ""
	if a.Total > 0 {
		progress = fmt.Sprintf("%d of %d", a.Applied, a.Total)
	}
	return []string{fmt.Sprint(a.ID), at(a.At), a.Verb, a.Kind + " " + a.Name, string(a.State), a.By, a.Reason, progress}
}

func (c *actsLsCmd) Run(ctx context.Context, app *App) error {
	return list(ctx, app, actHead, actCells, func(_ *Session, ops *admin.Admin) ([]provider.Act, error) {
		f := c.Filter()
		f.Before, f.Limit = c.Before, c.Limit
		found, err := ops.Acts(ctx, f)
		for i := range found {
			if !c.Payload {
				found[i].Detail, found[i].Outcome = nil, nil
			}
		}
		return found, err
	})
}

type actsCancelCmd struct {
	Act      int64 `arg:"" help:"The number of the request."`
	decision `embed:""`
}

func (c *actsCancelCmd) Run(ctx context.Context, app *App) error {
	return app.change(ctx, c.decision, "", "canceled", func(ops *admin.Admin, d provider.Decision) (int, error) {
		canceled, err := ops.Cancel(ctx, c.Act, d)
		if err == nil && !canceled {
			err = errors.New("the request is over, or does not exist")
		}
		return 1, err
	})
}
