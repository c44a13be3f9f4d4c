package commands

import (
	"context"
	"fmt"
	"io"

	"github.com/kinora-go/kinora/admin"
)

type migrateCmd struct {
	Up     migrateUpCmd     `cmd:"" help:"Create the tables, or bring them up to date. Any number may run at the same time."`
	Status migrateStatusCmd `cmd:"" help:"Show the version of the tables. The exit status is 1 if it is not that of this program."`
	SQL    migrateSQLCmd    `cmd:"" name:"sql" help:"Print the statements that create the tables, to be run by other means."`
}

type migrateUpCmd struct{}

func (c *migrateUpCmd) Run(ctx context.Context, app *App) error {
	app.create = true
	return app.with(ctx, func(s *Session, ops *admin.Admin) error {
		if err := s.Migrate(ctx); err != nil {
			return err
		}
		return printVersion(ctx, app, ops)
	})
}

type migrateStatusCmd struct{}

func (c *migrateStatusCmd) Run(ctx context.Context, app *App) error {
	return app.with(ctx, func(_ *Session, ops *admin.Admin) error { return printVersion(ctx, app, ops) })
}

func printVersion(ctx context.Context, app *App, ops *admin.Admin) error {
	o, err := ops.Operations()
	if err != nil {
		return err
	}
	is, known, err := o.SchemaVersion(ctx)
	if err != nil {
		return err
	}
	err = app.show(map[string]int64{"database": is, "program": known}, func(w io.Writer) {
		_, _ = fmt.Fprintf(w, "the tables have version %d, and this program has version %d\n", is, known)
	})
	if err == nil && is != known {
		err = foundError{}
	}
	return err
}

type migrateSQLCmd struct{}

func (c *migrateSQLCmd) Run(ctx context.Context, app *App) error {
	return app.with(ctx, func(s *Session, _ *admin.Admin) error {
		text, err := s.SQL()
		if err != nil {
			return err
		}
		return app.show(map[string]string{"sql": text}, func(w io.Writer) { _, _ = io.WriteString(w, text) })
	})
}
