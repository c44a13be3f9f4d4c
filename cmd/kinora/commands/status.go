package commands

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/internal/filters"
	"github.com/kinora-go/kinora/provider"
)

type statusCmd struct{}

func (c *statusCmd) Run(ctx context.Context, app *App) error {
	return app.with(ctx, func(_ *Session, ops *admin.Admin) error {
		f, err := ops.Facts(ctx)
		if err != nil {
			return err
		}
		for i := range f.Waits { // the text of statements may have data
			f.Waits[i].Blocker.Query, f.Waits[i].Waiter.Query = "", ""
		}
		return app.show(f, func(w io.Writer) { printStatus(w, f) })
	})
}

func printStatus(w io.Writer, f *admin.Facts) {
	_, _ = fmt.Fprintf(w, "log         position %d, recorded %s; settled up to %d\n", f.Log.Head, orNever(f.Log.HeadAt), f.Log.Settled)
	for _, open := range f.Log.Waiting {
		_, _ = fmt.Fprintln(w, "            waits for the append of", printable(open))
	}
	keeps := func(part string, rows int) bool {
		has := rows > 0 || !slices.Contains(f.Missing, part)
		if !has {
			_, _ = fmt.Fprintln(w, "the store keeps no "+part)
		}
		return has
	}
	_, _ = fmt.Fprintln(w, "\nPROJECTORS")
	if keeps("projectors", len(f.Projectors)) {
		table(w, projectorHead, f.Projectors, projectorCells)
	}
	_, _ = fmt.Fprintln(w, "\nOUTBOX")
	table(w, "status | entries | oldest (UTC) | claimed by | until (UTC)", f.Outbox, func(e provider.EntryCount) []string {
		return []string{string(e.Status), number(e.Count), at(e.Oldest), e.Holder, at(e.Until)}
	})
	_, _ = fmt.Fprintln(w, "\nTASKS")
	if keeps("tasks", len(f.Tasks)) {
		table(w, "status | tasks | oldest (UTC) | claimed by | until (UTC)", f.Tasks, func(t provider.TaskCount) []string {
			return []string{string(t.Status), number(t.Count), at(t.Oldest), t.Holder, at(t.Until)}
		})
	}
	_, _ = fmt.Fprintln(w, "\nSERVICES")
	if keeps("operations", len(f.Services)) {
		table(w, "kind | process | state | version | started (UTC) | seen (UTC) | projectors", f.Services, func(s provider.ServiceReport) []string {
			state := "alive"
			if !s.ExpiresAt.After(f.At) {
				state = "gone"
			}
			return []string{s.Kind, s.Process, state, s.Version, at(s.StartedAt), at(s.SeenAt), strings.Join(s.Served(), ", ")}
		})
	}
	if all := f.Programs(); all.Differ {
		_, _ = fmt.Fprintln(w, "\nPROGRAMS")
		table(w, strings.Join(append([]string{"process", "version"}, each(all.Columns, printable)...), " | "), all.Rows, func(p admin.Program) []string {
			row := []string{p.Process, p.Version}
			for _, can := range p.Can {
				row = append(row, can.String())
			}
			return row
		})
	}
	if len(f.Needs) > 0 {
		_, _ = fmt.Fprintln(w, "\nMESSAGES WAIT FOR A PROGRAM THAT HAS WHAT THEY NEED")
		table(w, "projector | generation | needs | since (UTC) | programs that have it", f.Needs, func(n admin.Need) []string {
			return []string{n.Projector, fmt.Sprint(n.Number()), admin.NeedsText(n.Needs), at(n.Since), strings.Join(n.Able, ", ")}
		})
	}
	if len(f.Waits) > 0 {
		_, _ = fmt.Fprintln(w, "\nWHO WAITS FOR WHOM")
		table(w, "who | waits for | application | state | since (UTC)", f.Waits, func(x provider.Wait) []string {
			waiter := x.Waiter.Name
			if x.What == "append" {
				waiter = "readers of the log"
			}
			return []string{waiter, x.Blocker.Name, x.Blocker.Application, x.Blocker.State, at(x.Blocker.Since)}
		})
	}
	if len(f.Pauses) > 0 {
		_, _ = fmt.Fprintln(w, "\nPAUSED")
		table(w, "what | name | by | reason | since (UTC)", f.Pauses, func(p provider.Pause) []string {
			return []string{p.Kind, p.Name, p.By, p.Reason, at(p.At)}
		})
	}
	if len(f.Requests) > 0 {
		_, _ = fmt.Fprintln(w, "\nREQUESTS")
		table(w, actHead, f.Requests, actCells)
	}
}

func orNever(t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return at(t) + " UTC"
}

type doctorCmd struct {
	Payload         bool          `help:"Show the text of statements too, which may have data of users."`
	AllowUnchecked  bool          `help:"The exit status is 0 if nothing was found, also if a check could not look."`
	OpenTransaction time.Duration `default:"5s" help:"How long a transaction may keep others waiting."`
	Snapshot        time.Duration `default:"10m" help:"How long a transaction may keep dead rows."`
	Lag             time.Duration `default:"30s" help:"How old the first event that is not applied may be."`
	Watch           time.Duration `default:"2s" help:"How long to watch whether a lag grows."`
	Skew            time.Duration `default:"2s" help:"How much clocks may differ."`
}

func (c *doctorCmd) Run(ctx context.Context, app *App) error {
	return app.with(ctx, func(_ *Session, ops *admin.Admin) error {
		d, err := ops.Doctor(ctx, provider.DiagnosisLimits{OpenTransaction: c.OpenTransaction, Snapshot: c.Snapshot, Lag: c.Lag, Watch: c.Watch, Skew: c.Skew})
		if err != nil {
			return err
		}
		for i := range d.Findings {
			if !c.Payload {
				d.Findings[i].Private = nil
			}
			for j, line := range d.Findings[i].Remedy {
				d.Findings[i].Remedy[j] = app.complete(line)
			}
		}
		d.Findings, d.Unchecked = append([]provider.Finding{}, d.Findings...), append([]provider.Unchecked{}, d.Unchecked...) // [] as JSON
		if err := app.show(d, func(w io.Writer) { printDiagnosis(w, d) }); err != nil {
			return err
		}
		switch {
		case len(d.Findings) > 0:
			return foundError{}
		case len(d.Unchecked) > 0 && !c.AllowUnchecked:
			return foundError{unchecked: true}
		}
		return nil
	})
}

// complete returns a line of a remedy that is a command as a command of this program, with the flag that chooses the schema.
func (a *App) complete(line string) string {
	flags, is := strings.CutPrefix(line, "kinora ")
	if !is {
		return line
	}
	line = cmp.Or(a.Name, "kinora") + " " + flags
	if s := a.flags.Schema; s != "" && s != "kinora" {
		line += " --schema " + s
	}
	return line
}

func printDiagnosis(w io.Writer, d provider.Diagnosis) {
	switch {
	case len(d.Findings) > 0:
	case len(d.Unchecked) > 0:
		_, _ = fmt.Fprintln(w, "Nothing was found, but not everything could be checked.")
	default:
		_, _ = fmt.Fprintln(w, "Nothing is wrong.")
	}
	for i, f := range d.Findings {
		if i > 0 {
			_, _ = fmt.Fprintln(w)
		}
		_, _ = fmt.Fprintf(w, "%d. %s\n   %s\n", i+1, printable(f.Title), printable(f.Meaning))
		for _, fact := range append(f.Facts, f.Private...) {
			if fact.Value != "" {
				_, _ = fmt.Fprintf(w, "   - %s: %s\n", printable(fact.Name), printable(fact.Value))
			}
		}
		printRemedy(w, f.Remedy)
	}
	for _, u := range d.Unchecked {
		_, _ = fmt.Fprintf(w, "\nNot checked: %s\n   because %s\n", printable(u.What), printable(u.Why))
		printRemedy(w, u.Remedy)
	}
}

func printRemedy(w io.Writer, lines []string) {
	for _, line := range lines {
		_, _ = fmt.Fprintf(w, "   > %s\n", printable(line))
	}
}

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
