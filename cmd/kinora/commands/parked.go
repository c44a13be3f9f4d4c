package commands

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/internal/filters"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

type parkedCmd struct {
	Ls     parkedLsCmd     `cmd:"" help:"List parked messages, in the order of parking."`
	Show   parkedShowCmd   `cmd:"" help:"Show a parked message."`
	DryRun parkedDryRunCmd `cmd:"" help:"Show what a replay would do. Changes nothing. The exit status is 1 if a message would fail."`
	Replay parkedReplayCmd `cmd:"" help:"Apply parked messages again."`
	Skip   parkedSkipCmd   `cmd:"" help:"Give parked messages up, so that the messages behind them are applied."`
}

type parkedLsCmd struct {
	filters.Parked `embed:""`
	After          int64 `placeholder:"N" help:"Only greater numbers: the next page."`
	page           `embed:""`
}

// message is a parked message as JSON, with the payload as text.
type message struct {
	projector.Parked
	Payload string `json:"payload,omitempty"`
}

// messageOf leaves out what may be data of users, unless payload is set.
func messageOf(p projector.Parked, payload bool) message {
	m := message{p, string(p.Payload)}
	if !payload {
		m.Error, m.Headers, m.Payload = "", nil, ""
	}
	return m
}

func (c *parkedLsCmd) Run(ctx context.Context, app *App) error {
	const head = "seq | parked (UTC) | handler | generation | state | class | code | needs | key | type | attempts | by"
	cells := func(m message) []string {
		return []string{
			fmt.Sprint(m.Seq), at(m.At), cmp.Or(m.Handler, m.Projector), fmt.Sprint(m.Generation), m.State.String(), m.Class.String(), m.Code, admin.NeedsText(m.Needs), m.Key, m.Type,
			fmt.Sprint(m.Attempts), m.By,
		}
	}
	return list(ctx, app, head, cells, func(_ *Session, ops *admin.Admin) ([]message, error) {
		f := c.Filter()
		f.After, f.Limit = c.After, c.Limit
		found, err := ops.Parked(ctx, f)
		return each(found, func(p projector.Parked) message { return messageOf(p, false) }), err
	})
}

type parkedShowCmd struct {
	Seq     int64 `arg:"" help:"The number of the message."`
	Payload bool  `help:"Show the payload, the headers and the text of the error, which may have data of users."`
}

func (c *parkedShowCmd) Run(ctx context.Context, app *App) error {
	return app.with(ctx, func(_ *Session, ops *admin.Admin) error {
		found, err := ops.Parked(ctx, projector.ParkedFilter{Seqs: []int64{c.Seq}, States: []projector.ParkedState{
			projector.StateWaiting, projector.StateStuck, projector.StateReplayed, projector.StateSkipped,
		}})
		if err != nil {
			return err
		}
		if len(found) == 0 {
			return fmt.Errorf("message %d is not parked: it may have been applied", c.Seq)
		}
		m := messageOf(found[0], c.Payload)
		return app.show(m, func(w io.Writer) {
			fields(w, "seq", fmt.Sprint(m.Seq), "projector", m.Projector, "generation", fmt.Sprint(m.Generation), "handler", m.Handler, "state", m.State.String(), "class", m.Class.String(),
				"code", m.Code, "needs", admin.NeedsText(m.Needs), "key", m.Key, "message", m.MessageID, "topic", m.Topic, "type", m.Type, "attempts", fmt.Sprint(m.Attempts), "version", m.Version,
				"parked", at(m.At), "due", at(m.DueAt), "resolved", at(m.ResolvedAt), "by", m.By, "reason", m.Reason)
			if !c.Payload {
				_, _ = fmt.Fprintln(w, "the error, the headers and the payload may have data of users: --payload shows them")
				return
			}
			pairs := []string{"error", m.Error}
			for _, name := range slices.Sorted(maps.Keys(m.Headers)) {
				pairs = append(pairs, "header "+name, m.Headers[name])
			}
			fields(w, append(pairs, "payload", m.Payload)...)
		})
	})
}

type parkedDryRunCmd struct {
	filters.Parked `embed:""`
	All            bool          `help:"All parked messages of the projector, at most --limit."`
	Payload        bool          `help:"Show the rows that would change, and the texts of errors, which may have data of users."`
	Wait           time.Duration `default:"1m" help:"How long to wait for a runner."`
	page           `embed:""`
	decision       `embed:""`
}

func (c *parkedDryRunCmd) Validate() error {
	switch {
	case c.Projector == "":
		return errors.New("--projector is missing")
	case c.Limit < 1:
		return c.page.Validate()
	}
	return selects(c.Parked, c.All, true)
}

func (c *parkedDryRunCmd) Run(ctx context.Context, app *App) error {
	return app.with(ctx, func(s *Session, ops *admin.Admin) error {
		f := c.Filter()
		f.Limit = c.Limit
		report, err := c.dryRun(ctx, app, s, ops, f)
		if err != nil {
			return err
		}
		tables, count := []string{}, map[string]int{}
		for i, change := range report.Changes {
			if count[change.Table]++; count[change.Table] == 1 {
				tables = append(tables, change.Table)
			}
			if !c.Payload {
				report.Changes[i] = provider.Change{Table: change.Table}
			}
		}
		for i := range report.Failures {
			if !c.Payload {
				report.Failures[i].Error = ""
			}
		}
		err = app.show(report, func(w io.Writer) {
			for _, change := range report.Changes {
				if c.Payload {
					_, _ = fmt.Fprintf(w, "%s\n  - %s\n  + %s\n", printable(change.Table), rowOr(change.Before, "none"), rowOr(change.After, "none"))
				}
			}
			for _, name := range tables {
				_, _ = fmt.Fprintf(w, "%s: %d rows would change\n", printable(name), count[name])
			}
			for _, failure := range report.Failures {
				_, _ = fmt.Fprintf(w, "message %d would fail: %s %s %s\n", failure.Seq, failure.Class, printable(failure.Code), printable(failure.Error))
			}
			_, _ = fmt.Fprintf(w, "%d would be applied, %d would fail, %d would wait, %d messages would be sent; nothing is changed\n",
				report.Messages, len(report.Failures), report.Waiting, len(report.Output))
		})
		switch {
		case err != nil:
		case len(report.Failures) > 0:
			err = foundError{}
		case report.Messages+report.Waiting == 0:
			err = errors.New("no message was selected")
		}
		return err
	})
}

// dryRun uses the handlers of this binary, or asks a running runner.
func (c *parkedDryRunCmd) dryRun(ctx context.Context, app *App, s *Session, ops *admin.Admin, f projector.ParkedFilter) (provider.DryRunReport, error) {
	if h := s.handlers(c.Projector); h != nil {
		return h.DryRun(ctx, f)
	}
	return answer[provider.DryRunReport](ctx, app, ops, c.Projector, c.Wait, app.meter("dry run"), func() (int64, error) {
		return ops.DryRun(ctx, f, c.decision.decision())
	})
}

// parkedActFlags are the flags of acts on parked messages.
type parkedActFlags struct {
	filters.Parked `embed:""`
	All            bool `help:"All parked messages of the projector."`
	decision       `embed:""`
}

func (c *parkedActFlags) Validate() error {
	if c.Projector == "" && len(c.Seq) == 0 {
		return errors.New("--projector is missing, or --seq")
	}
	return selects(c.Parked, c.All, true)
}

type parkedReplayCmd struct {
	parkedActFlags `embed:""`
	Wait           time.Duration `default:"1m" help:"How long to wait until they are applied. Zero means not at all."`
}

// Run makes the messages due, and waits until the handlers of this binary, or a runner, have applied them.
func (c *parkedReplayCmd) Run(ctx context.Context, app *App) error {
	return app.with(ctx, func(s *Session, ops *admin.Admin) error {
		f := c.Filter()
		n, err := ops.Replay(ctx, f, c.decision.decision())
		if err != nil {
			return err
		}
		if n == 0 {
			return errors.New("no message was selected: list them with 'parked ls'")
		}
		f.Class, f.Code, f.Handler, f.States = nil, "", "", nil // they change when a message fails for another reason
		waiting, stuck, err := c.finish(ctx, s, ops, f)
		if err != nil {
			return err
		}
		err = app.show(map[string]int{"replayed": n, "waiting": waiting, "stuck": stuck}, func(w io.Writer) {
			_, _ = fmt.Fprintf(w, "%d selected: %d still waiting, %d stuck\n", n, waiting, stuck)
		})
		if err == nil && c.Wait > 0 && waiting+stuck > 0 {
			err = errors.New("some messages were not applied: 'parked ls' lists them, and what they need; a runner of the projector that has it must run")
		}
		return err
	})
}

// finish waits until no selected message is waiting, or --wait is over.
func (c *parkedReplayCmd) finish(ctx context.Context, s *Session, ops *admin.Admin, f projector.ParkedFilter) (waiting, stuck int, err error) {
	limited, cancel := timeLeft(ctx, c.Wait)
	defer cancel()
	for {
		if h := s.handlers(c.Projector); h != nil && limited.Err() == nil {
			if err := h.ApplyParked(limited); err != nil && limited.Err() == nil {
				return 0, 0, err
			}
		}
		if waiting, stuck, err = count(ctx, ops, f); err != nil || waiting == 0 || limited.Err() != nil {
			return waiting, stuck, err
		}
		pauses.Wait(limited, followEvery, nil)
	}
}

// count counts the messages that are still parked, at most 10,000.
func count(ctx context.Context, ops *admin.Admin, f projector.ParkedFilter) (waiting, stuck int, err error) {
	f.Limit = 1000
	for waiting+stuck < 10_000 {
		list, err := ops.Parked(ctx, f)
		if err != nil || len(list) == 0 {
			return waiting, stuck, err
		}
		for _, p := range list {
			f.After = p.Seq
			if p.State == projector.StateStuck || p.DueAt.IsZero() { // or it waits behind a stuck one
				stuck++
			} else {
				waiting++
			}
		}
	}
	return waiting, stuck, nil
}

type parkedSkipCmd struct {
	parkedActFlags `embed:""`
}

func (c *parkedSkipCmd) Run(ctx context.Context, app *App) error {
	return app.change(ctx, c.decision, "The selected messages are never applied", "skipped", func(ops *admin.Admin, d provider.Decision) (int, error) {
		return ops.SkipParked(ctx, c.Filter(), d)
	})
}
