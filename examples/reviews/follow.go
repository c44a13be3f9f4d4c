package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/projector"
)

const (
	followEvery = 500 * time.Millisecond
	// followPatience is the default of --wait: a running service needs at most two seconds to begin.
	followPatience = 3 * time.Second
)

// follow shows the progress of a generation until readers see it. It leaves the work to a running
// service. If there is no progress for as long as wait, it starts a runner.
func follow(ctx context.Context, db serviceStore, n int, wait time.Duration) (err error) {
	m := meter{what: "rebuild"}
	defer m.clear()
	var own *kinora.Group
	var ended <-chan struct{}
	defer func() {
		if own != nil {
			err = errors.Join(err, own.Stop())
		}
	}()
	var was projector.Generation
	for moved := time.Now(); ; {
		g, err := generation(ctx, db, n)
		if ended, err := hasEnded(ctx, g, err); ended {
			return err
		}
		if g.Paused || g.State != was.State || g.Applied != was.Applied || g.Behind != was.Behind {
			moved, was = time.Now(), g
		}
		if g.Total > 0 {
			m.show(g.Applied, g.Total)
		}
		if own == nil && time.Since(moved) > wait {
			if err := checkVersion(ctx, db, g); err != nil {
				return orInterrupted(ctx, err)
			}
			slog.Info("no other process does the work: this one does", "generation", n, "state", g.State)
			if own, err = startRunner(ctx, db); err != nil {
				return orInterrupted(ctx, err)
			}
			ended = own.Ended()
		}
		select {
		case <-time.After(followEvery):
		case <-ended:
			return nil // Stop returns the reason
		case <-ctx.Done():
		}
	}
}

// hasEnded reports whether a rebuild has ended, and how. err is that of the last look at it.
func hasEnded(ctx context.Context, g projector.Generation, err error) (bool, error) {
	switch {
	case ctx.Err() != nil:
		return true, errInterrupted
	case err != nil:
		return true, err
	case g.State == "live" && g.CaughtUp:
		return true, nil
	case g.State == "retired" && g.Failed == "":
		return true, errCanceled
	case g.Failed != "":
		return true, fmt.Errorf("generation %d: %s", g.Number, g.Failed)
	}
	return false, nil
}

var (
	errCanceled    = errors.New("the rebuild was canceled")
	errInterrupted = errors.New("interrupted: a process that updates the read model continues the rebuild; see 'reviews rebuild list'")
)

// orInterrupted returns errInterrupted if ctx has ended, which is then the cause of err.
func orInterrupted(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return errInterrupted
	}
	return err
}

// checkVersion returns an error if this program cannot do the work for a generation: each generation
// is fed by programs of its version, and a request is taken up by a program that is not older than
// the live generation.
func checkVersion(ctx context.Context, db serviceStore, g projector.Generation) error {
	oldest, newest := g.Oldest, g.Newest
	if g.State == "requested" {
		all, err := db.generations(ctx)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(all, func(g projector.Generation) bool { return g.State == "live" })
		oldest, newest = all[i].Newest, max(all[i].Newest, reviewsVersion)
	}
	if reviewsVersion < oldest || reviewsVersion > newest {
		return fmt.Errorf("no program with version %d works on generation %d, and this one has version %d: start one",
			oldest, g.Number, reviewsVersion)
	}
	return nil
}

func startRunner(ctx context.Context, db serviceStore) (*kinora.Group, error) {
	runner, err := db.runner(fromLog(db))
	if err != nil {
		return nil, err
	}
	return kinora.Start(ctx, runner)
}

// generation returns a generation. Those of canceled rebuilds disappear after a while.
func generation(ctx context.Context, db serviceStore, n int) (g projector.Generation, err error) {
	all, err := db.generations(ctx)
	if err != nil {
		return g, err
	}
	i := slices.IndexFunc(all, func(g projector.Generation) bool { return g.Number == n })
	if i < 0 {
		return g, errCanceled
	}
	return all[i], nil
}

// meter shows how many events are applied: as a bar if stderr is a terminal, else as log lines.
type meter struct {
	what   string
	bar    *progressbar.ProgressBar
	first  int64 // applied at began
	began  time.Time
	logged time.Time
}

const meterLogEvery = 2 * time.Second

func (m *meter) show(applied, total int64) {
	now := time.Now()
	if m.began.IsZero() {
		m.first, m.began = applied, now
	}
	if term.IsTerminal(int(os.Stderr.Fd())) {
		if m.bar == nil {
			m.bar = newBar(total, progressbar.OptionShowCount(), progressbar.OptionShowIts(), progressbar.OptionSetItsString("events"))
			m.bar.Describe(m.what)
		}
		m.bar.ChangeMax64(max(total, applied))
		_ = m.bar.Set64(applied)
		return
	}
	if now.Sub(m.logged) < meterLogEvery {
		return
	}
	m.logged = now
	attrs := []any{"events", applied, "of", total}
	if rate := float64(applied-m.first) / now.Sub(m.began).Seconds(); applied > m.first {
		left := time.Duration(float64(max(total-applied, 0)) / rate * float64(time.Second))
		attrs = append(attrs, "per_second", int(rate), "left", left.Round(time.Second))
	}
	slog.Info(m.what+" progress", attrs...)
}

// clear removes the bar.
func (m *meter) clear() {
	if m.bar != nil {
		_ = m.bar.Clear()
	}
}
