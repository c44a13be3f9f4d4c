package commands

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/projector"
)

type projectorsForgetCmd struct {
	Projector  string `arg:"" help:"The name of the projector."`
	DropTables bool   `help:"Drop the tables that the projector has created, and their views. By default they are kept."`
	decision   `embed:""`
}

// Run shows what would be deleted, asks, and deletes it.
func (c *projectorsForgetCmd) Run(ctx context.Context, app *App) error {
	return app.with(ctx, func(_ *Session, ops *admin.Admin) error {
		o := projector.ForgetOptions{DropTables: c.DropTables, Preview: !c.Yes}
		f, err := ops.Forget(ctx, c.Projector, o, c.decision.decision())
		if err != nil {
			return err
		}
		if o.Preview {
			c.print(app.err(), f)
			if err := c.confirm(app, "This is deleted, and no runner of "+c.Projector+" starts until 'projectors release'"); err != nil {
				return err
			}
			o.Preview = false
			if f, err = ops.Forget(ctx, c.Projector, o, c.decision.decision()); err != nil {
				return err
			}
		}
		return app.show(f, func(w io.Writer) {
			c.print(w, f)
			_, _ = fmt.Fprintln(w, printable(c.Projector), "is forgotten")
		})
	})
}

func (c *projectorsForgetCmd) print(w io.Writer, f projector.Forgotten) {
	var checkpoints []string
	for _, n := range slices.Sorted(maps.Keys(f.Checkpoints)) {
		checkpoints = append(checkpoints, fmt.Sprintf("generation %d at position %d", n, f.Checkpoints[n]))
	}
	tables := "tables, which are kept"
	if c.DropTables {
		tables = "tables and views"
	}
	fields(w, "checkpoints", strings.Join(checkpoints, ", "), "handlers with markers", strings.Join(f.Handlers, ", "), "parked messages", number(f.Parked), tables, strings.Join(f.Tables, ", "))
}

type projectorsReleaseCmd struct {
	Projector string `arg:"" help:"The name of the projector."`
	decision  `embed:""`
}

func (c *projectorsReleaseCmd) Run(ctx context.Context, app *App) error {
	return app.with(ctx, func(_ *Session, ops *admin.Admin) error {
		if err := ops.Release(ctx, c.Projector, c.decision.decision()); err != nil {
			return err
		}
		return app.show(map[string]string{"released": c.Projector}, func(w io.Writer) {
			_, _ = fmt.Fprintln(w, printable(c.Projector), "is released: a runner of it begins at Options.From")
		})
	})
}
