package commands

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/alecthomas/kong"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

type projectorsCmd struct {
	Ls      projectorsLsCmd      `cmd:"" help:"List projectors: their generations, lag, and parked messages."`
	Pause   projectorsPauseCmd   `cmd:"" help:"Pause a projector: nothing is applied to it. With --rebuild, pause its rebuild."`
	Resume  projectorsPauseCmd   `cmd:"" help:"Resume a projector, or its rebuild."`
	Rebuild projectorsRebuildCmd `cmd:"" help:"Rebuild a read model from the log. A running runner does it."`
	Verify  projectorsVerifyCmd  `cmd:"" help:"Compare a read model with the log. The exit status is 1 if rows differ."`
	Cancel  projectorsCancelCmd  `cmd:"" help:"Give a rebuild up, and drop its tables."`
	Promote generationCmd        `cmd:"" help:"Make a generation live: the one before (a rollback), or a rebuild that waits."`
	Drop    generationCmd        `cmd:"" help:"Drop the tables of a generation that was kept for a rollback."`
	Forget  projectorsForgetCmd  `cmd:"" help:"Delete what is stored of a projector that no program has any more. Shows what that is, and asks."`
	Release projectorsReleaseCmd `cmd:"" help:"Let the name of a forgotten projector be used again, by one that begins at Options.From."`
}

type projectorsLsCmd struct{}

const projectorHead = "projector | generation | state | versions | mode | position | lag | seconds | runners | parked | keys | stuck keys | rebuild"

func projectorCells(p admin.Projector) []string {
	state, lag, seconds, runners := p.State, number(p.Lag), fmt.Sprintf("%.0f", p.LagSeconds), fmt.Sprint(p.Runners)
	if p.Others > 0 {
		runners += fmt.Sprintf(" (+%d of another version)", p.Others)
	}
	if p.Paused {
		state += ", paused"
	}
	if p.OtherLog {
		lag, seconds = "?", "?"
	}
	return []string{
		p.Name, fmt.Sprint(p.Generation), state, p.VersionRange(), p.Mode, fmt.Sprint(p.Position), lag, seconds,
		runners, number(p.Parked), number(p.Keys), number(p.StuckKeys), rebuildText(p.Rebuild),
	}
}

func rebuildText(r *admin.Rebuild) string {
	if r == nil {
		return ""
	}
	text := r.How
	if r.Total > 0 {
		text += fmt.Sprintf(": %d of %d, %.0f/s", r.Applied, r.Total, r.PerSecond)
	}
	if r.Paused {
		text += ", paused"
	}
	if r.Failed != "" {
		text += ": " + r.Failed
	}
	return text
}

func (c *projectorsLsCmd) Run(ctx context.Context, app *App) error {
	return list(ctx, app, projectorHead, projectorCells, func(_ *Session, ops *admin.Admin) ([]admin.Projector, error) {
		f, err := ops.Facts(ctx)
		if err != nil {
			return nil, err
		}
		return f.Projectors, nil
	})
}

type projectorsPauseCmd struct {
	Projector string `arg:"" help:"The name of the projector."`
	Rebuild   bool   `help:"Its rebuild, and not the projector."`
	decision  `embed:""`
}

func (c *projectorsPauseCmd) Run(ctx context.Context, app *App, k *kong.Context) error {
	paused := k.Selected().Name == "pause"
	switch {
	case !c.Rebuild:
		return app.pause(ctx, provider.PauseProjector, c.Projector, paused, c.decision)
	case paused:
		return c.control(ctx, app, c.Projector, 0, projector.Pause, "")
	}
	return c.control(ctx, app, c.Projector, 0, projector.Resume, "")
}

// control applies an action to a generation, and asks before if there is a warning. Zero means the one that is being rebuilt.
func (d decision) control(ctx context.Context, a *App, name string, generation int, do projector.GenerationAction, warning string) error {
	if err := d.confirm(a, warning); err != nil {
		return err
	}
	return a.with(ctx, func(_ *Session, ops *admin.Admin) error {
		if generation == 0 {
			f, err := ops.Facts(ctx)
			if err != nil {
				return err
			}
			i := slices.IndexFunc(f.Projectors, func(p admin.Projector) bool {
				return p.Name == name && (p.State == "requested" || p.State == "building" || p.State == "live" && p.Rebuild != nil)
			})
			if i < 0 {
				return fmt.Errorf("no rebuild of %s is going on", name)
			}
			generation = f.Projectors[i].Generation
		}
		if err := ops.Control(ctx, name, generation, do, d.decision()); err != nil {
			return err
		}
		return a.show(map[string]int{"generation": generation}, func(w io.Writer) {
			_, _ = fmt.Fprintf(w, "%s generation %d of %s: done\n", do, generation, printable(name))
		})
	})
}

type projectorsCancelCmd struct {
	Projector string `arg:"" help:"The name of the projector."`
	decision  `embed:""`
}

func (c *projectorsCancelCmd) Run(ctx context.Context, app *App) error {
	return c.control(ctx, app, c.Projector, 0, projector.Cancel, "The rebuild of "+c.Projector+" is given up, and its tables are dropped")
}

type generationCmd struct {
	Projector  string `arg:"" help:"The name of the projector."`
	Generation int    `arg:"" help:"The number of the generation."`
	decision   `embed:""`
}

func (c *generationCmd) Run(ctx context.Context, app *App, k *kong.Context) error {
	if k.Selected().Name == "promote" {
		return c.control(ctx, app, c.Projector, c.Generation, projector.Promote, "")
	}
	warning := fmt.Sprintf("The tables of generation %d of %s are dropped: a rollback to it is not possible any more", c.Generation, c.Projector)
	return c.control(ctx, app, c.Projector, c.Generation, projector.Drop, warning)
}

type projectorsRebuildCmd struct {
	Projector string        `arg:"" help:"The name of the projector."`
	InPlace   bool          `help:"Empty the tables and fill them again: readers see an incomplete read model meanwhile. By default new tables are filled, and readers see them once they are complete."`
	Rate      int           `placeholder:"N" help:"The most events per second."`
	Check     bool          `help:"Compare the new tables with the old ones first. If they differ, wait for 'promote' or 'cancel'."`
	Anyway    bool          `help:"Also if messages are lost that are not in the log."`
	Wait      time.Duration `default:"24h" help:"How long to wait for the end. Zero means not at all; the rebuild goes on."`
	decision  `embed:""`
}

func (c *projectorsRebuildCmd) Validate() error {
	switch {
	case c.Rate < 0:
		return errors.New("--rate must be at least 0")
	case c.InPlace && c.Check:
		return errors.New("--check compares new tables with the old ones, and --in-place makes none: use one of them")
	}
	return nil
}

// Run requests a rebuild, and waits until readers see its result.
func (c *projectorsRebuildCmd) Run(ctx context.Context, app *App) error {
	r := projector.Rebuild{How: projector.BlueGreen, Decision: c.decision.decision(), Rate: c.Rate, Check: c.Check, Anyway: c.Anyway}
	warning := ""
	if c.InPlace {
		r.How, warning = projector.InPlace, "The read model of "+c.Projector+" is emptied, and readers see it incomplete until it is filled again"
	}
	if err := c.confirm(app, warning); err != nil {
		return err
	}
	return app.with(ctx, func(_ *Session, ops *admin.Admin) error {
		n, err := ops.Rebuild(ctx, c.Projector, r)
		state := "requested"
		if err == nil && c.Wait > 0 {
			state, err = "live", app.follow(ctx, ops, c.Projector, n, c.Wait)
		}
		if err != nil {
			return err
		}
		return app.show(map[string]int{"generation": n}, func(w io.Writer) { _, _ = fmt.Fprintf(w, "generation %d is %s\n", n, state) })
	})
}

const followEvery = 300 * time.Millisecond

// follow waits until a generation is live and has caught up.
func (a *App) follow(ctx context.Context, ops *admin.Admin, name string, n int, wait time.Duration) error {
	ctx, cancel := timeLeft(ctx, wait)
	defer cancel()
	m := a.meter("rebuild")
	defer m.clear()
	told := false
	for {
		f, err := ops.Facts(ctx)
		if err != nil {
			return cmp.Or(waitOver(ctx), err)
		}
		i := slices.IndexFunc(f.Projectors, func(p admin.Projector) bool { return p.Name == name && p.Generation == n })
		if i >= 0 {
			p := f.Projectors[i]
			switch {
			case p.Rebuild != nil && p.Rebuild.Failed != "":
				m.clear()
				return fmt.Errorf("generation %d: %s", n, p.Rebuild.Failed)
			case p.State == "live" && p.Rebuild == nil:
				return nil
			case p.State == "requested" && p.Runners == 0 && !told && !runs(f, name):
				told = true
				_, _ = fmt.Fprintf(a.err(), "no runner of %s runs: the request waits for one\n", printable(name))
			case p.Rebuild != nil:
				m.show(p.Rebuild.Applied, p.Rebuild.Total)
			}
		} else if failed, err := ops.Failed(ctx, name, n); err != nil || failed != "" {
			return cmp.Or(err, fmt.Errorf("generation %d: %s", n, failed))
		}
		if pauses.Wait(ctx, followEvery, nil); ctx.Err() != nil {
			return waitOver(ctx)
		}
	}
}

// runs reports whether a runner of the projector is alive.
func runs(f *admin.Facts, name string) bool {
	return slices.ContainsFunc(f.Services, func(s provider.ServiceReport) bool {
		return s.ExpiresAt.After(f.At) && s.Serves(name)
	})
}

func waitOver(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return errors.New("it is not over after --wait, and goes on")
	}
	return ctx.Err()
}

type projectorsVerifyCmd struct {
	Projector string        `arg:"" help:"The name of the projector."`
	Ignore    []string      `placeholder:"COLUMN" help:"Columns that are not compared."`
	Rows      int           `default:"1000" help:"The most differences."`
	Rate      int           `placeholder:"N" help:"The most events per second."`
	Repair    bool          `help:"Change the rows that differ to what they should be."`
	Payload   bool          `help:"Show the rows, which may have data of users."`
	Wait      time.Duration `default:"24h" help:"How long to wait for the result."`
	decision  `embed:""`
}

func (c *projectorsVerifyCmd) Validate() error {
	if c.Rows < 1 || c.Rate < 0 {
		return errors.New("--rows must be at least 1, and --rate at least 0")
	}
	return nil
}

func (c *projectorsVerifyCmd) Run(ctx context.Context, app *App) error {
	if c.Repair {
		if err := c.confirm(app, "Rows of the read model of "+c.Projector+" that differ are replaced"); err != nil {
			return err
		}
	}
	return app.with(ctx, func(s *Session, ops *admin.Admin) error {
		report, err := c.verify(ctx, app, s, ops)
		if err != nil {
			return err
		}
		count, tables := map[string]int{}, []string{}
		for i, d := range report.Differences {
			if count[d.Table]++; count[d.Table] == 1 {
				tables = append(tables, d.Table)
			}
			if !c.Payload {
				report.Differences[i] = provider.Difference{Table: d.Table}
			}
		}
		report.Differences = append([]provider.Difference{}, report.Differences...)
		err = app.show(report, func(w io.Writer) {
			for _, d := range report.Differences {
				if c.Payload {
					_, _ = fmt.Fprintf(w, "%s %s\n  is      %s\n  must be %s\n", printable(d.Table), printable(string(d.Key)), rowOr(d.Got, "missing"), rowOr(d.Want, "absent"))
				}
			}
			for _, name := range tables {
				_, _ = fmt.Fprintf(w, "%s: %d rows differ\n", printable(name), count[name])
			}
			_, _ = fmt.Fprintf(w, "%d events applied, %d of them failed; %d rows differ at position %d; %d were repaired\n",
				report.Events, report.Parked, len(report.Differences), report.Position, report.Repaired)
		})
		if n := len(report.Differences); err == nil && n > 0 && (!c.Repair || n >= c.Rows) {
			err = foundError{}
		}
		return err
	})
}

func rowOr(row json.RawMessage, none string) string {
	if row == nil {
		return none
	}
	return printable(string(row))
}

// verify uses the handlers of this binary, or asks a running runner.
func (c *projectorsVerifyCmd) verify(ctx context.Context, app *App, s *Session, ops *admin.Admin) (provider.VerifyReport, error) {
	m := app.meter("verify")
	defer m.clear()
	if h := s.handlers(c.Projector); h != nil {
		v := projector.Verification{Ignore: c.Ignore, Limit: c.Rows, Rate: c.Rate, Progress: m.show}
		if c.Repair {
			v.Repair = c.decision.decision()
		}
		return h.Verify(ctx, v)
	}
	return answer[provider.VerifyReport](ctx, app, ops, c.Projector, c.Wait, m, func() (int64, error) {
		return ops.Verify(ctx, c.Projector, provider.VerifyRequest{Ignore: c.Ignore, Limit: c.Rows, Rate: c.Rate, Repair: c.Repair}, c.decision.decision())
	})
}

// answer makes a request, and waits for its report. A person who interrupts it, or the end of --wait, cancels the request.
func answer[R any](
	ctx context.Context, a *App, ops *admin.Admin, name string, wait time.Duration, m *meter, request func() (int64, error),
) (report R, err error) {
	id, err := request()
	if err != nil {
		return report, err
	}
	f, err := ops.Facts(ctx)
	if err != nil {
		return report, err
	}
	if why := f.Unanswered(id); why != "" {
		_, _ = fmt.Fprintf(a.err(), "request %d waits: %s\n", id, printable(why))
	}
	limited, cancel := timeLeft(ctx, wait)
	defer cancel()
	act, err := ops.Await(limited, id, func(act provider.Act) { m.show(act.Applied, act.Total) })
	if err != nil {
		end, stop := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer stop()
		_, canceled := ops.Cancel(end, id, provider.Decision{By: cmp.Or(act.By, "kinora"), Reason: "not answered in time, or interrupted"})
		if limited.Err() != nil && ctx.Err() == nil {
			err = fmt.Errorf("request %d was not answered within %s, and is canceled: a runner of %s must run", id, wait, name)
		}
		return report, errors.Join(err, canceled)
	}
	if act.State == provider.ActCanceled {
		return report, fmt.Errorf("request %d was canceled", id)
	}
	var failed struct{ Error string }
	if err = errors.Join(json.Unmarshal(act.Outcome, &report), json.Unmarshal(act.Outcome, &failed)); err == nil && failed.Error != "" {
		err = errors.New(failed.Error)
	}
	return report, err
}
