package projector

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// Intervals between scans of due parked messages.
const (
	pollEvery = time.Second          // the longest
	scanPause = 5 * time.Millisecond // the shortest
)

// poll dispatches due parked messages to their workers until ctx ends.
func (r *Runner) poll(ctx context.Context) {
	loop := r.loops.Add("runner")
	for ctx.Err() == nil {
		loop.Within(r.cfg.Clock(), sum(r.cfg.Timeout, pollEvery))
		if _, err := r.dispatchDue(ctx); err != nil && ctx.Err() == nil {
			r.report(slog.LevelWarn, "parked messages not scanned", err)
		}
		if err := r.halted(ctx); errors.Is(err, ErrHalted) {
			r.end(err)
		}
		select {
		case <-ctx.Done():
		case <-r.scanSoon:
			wait(ctx, scanPause) // more messages may become due at the same time
		case <-time.After(pollEvery):
		}
	}
}

// scanNow requests a scan of due messages at once.
func (r *Runner) scanNow() {
	select {
	case r.scanSoon <- struct{}{}:
	default:
	}
}

// dispatchDue dispatches due messages to the workers that have no due messages yet. It returns
// false if no message is due, and no worker has due messages.
func (r *Runner) dispatchDue(ctx context.Context) (some bool, err error) {
	batch := cmp.Or(r.cfg.Batch, deliveryBatch)
	f := provider.DueFilter{Keys: 4 * batch, Each: batch}
	for _, p := range r.feeding() {
		if p.isPaused() {
			continue
		}
		f.Builds = append(f.Builds, p.build())
		some = some || slices.ContainsFunc(p.workers, func(w *worker) bool { return w.busy.Load() })
	}
	due, err := r.due(ctx, f)
	for w, msgs := range due {
		if w.busy.CompareAndSwap(false, true) {
			w.due <- msgs
		}
	}
	return some || len(due) > 0, err
}

// due lists the parked messages that are due, by worker.
func (r *Runner) due(ctx context.Context, f provider.DueFilter) (map[*worker][]*inbound, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	rows, err := r.store.Due(ctx, f)
	if err != nil {
		return nil, err
	}
	received, err := r.receiveParked(ctx, rows)
	if err != nil {
		return nil, err
	}
	due, feeding := map[*worker][]*inbound{}, r.feeding()
	for n, row := range rows {
		of := provider.Build{Projector: row.Projector, Generation: row.Generation}
		i := slices.IndexFunc(feeding, func(p *projection) bool { return p.build() == of })
		if i >= 0 {
			w := feeding[i].worker(row.Lane)
			due[w] = append(due[w], feeding[i].acceptParked(received[n], row))
		}
	}
	return due, nil
}

// replay applies due parked messages. Those that only wait behind others run in units of many,
// all others alone, and their attempts are counted before they run. It reports whether the state
// of any message changed.
func (w *worker) replay(ctx, hard context.Context, rows []*inbound) (progress bool) {
	if !w.canReplay(ctx) {
		return false
	}
	if err := w.setSent(ctx, rows); err != nil {
		if ctx.Err() == nil {
			w.runner.report(slog.LevelWarn, "generations not asked", err, "projector", w.name)
		}
		return false
	}
	var waiting, failed []*inbound
	for _, m := range rows {
		if m.parked.Class == ClassHeld {
			waiting = append(waiting, m)
		} else {
			failed = append(failed, m)
		}
	}
	w.findLost(ctx, waiting)
	err := w.inTurn(ctx, hard, rows, w.setSent, func(ctx, hard context.Context) {
		batch := w.batch
		if !w.keeps.Atomic && !w.keeps.Markers {
			batch = 1 // if one fails, the store of parked messages forgets that others were applied
		}
		for msgs := range slices.Chunk(waiting, batch) {
			progress = w.apply(ctx, hard, msgs) || progress
		}
		for _, m := range failed {
			progress = ctx.Err() == nil && w.try(ctx, hard, m) || progress
		}
	})
	if err != nil && !errors.Is(err, errTurn) && ctx.Err() == nil {
		w.runner.report(slog.LevelWarn, "parked messages not applied", err, "projector", w.name)
	}
	return progress
}

// catchUp applies due messages of lanes behind which this worker has just parked deliveries, at
// most twice as many as it may have parked. So a due lane becomes empty also under a constant
// load. A lane that is not due costs one query.
func (w *worker) catchUp(ctx, hard context.Context, lanes []provider.Lane) {
	progress := len(lanes) > 0
	for round := 0; round < 2 && progress && ctx.Err() == nil; round++ {
		f := provider.DueFilter{Builds: []provider.Build{w.build()}, Lanes: lanes, Keys: len(lanes), Each: w.batch}
		due, _ := w.runner.due(hard, f) // poll reports errors
		progress = false
		for _, msgs := range due { // those of w, or of several workers if w reads the log
			progress = w.replay(ctx, hard, msgs) || progress
		}
	}
}

// try is one attempt at a parked message that has failed before, or may have crashed a process.
// It is counted before it runs. No other runner tries the message for longer than the attempt may
// take.
func (w *worker) try(ctx, hard context.Context, m *inbound) (progress bool) {
	cfg, row := &w.runner.cfg, m.parked
	alone, again := row.Code == codeCrashed, sum(cfg.Timeout, cfg.Lease)
	if alone {
		again = max(again, cfg.spacing(row.Attempts))
		w.runner.process.Lock() // before it is counted: waiting is no attempt
		defer w.runner.process.Unlock()
	}
	inner, cancel := context.WithTimeout(hard, cfg.Timeout)
	begun, err := w.runner.store.Try(inner, *row, cfg.Retry.Attempts, again)
	cancel()
	if err != nil {
		w.report(slog.LevelWarn, "attempt not counted", m, err, row.Attempts)
		return false
	}
	if !begun {
		return w.isExhausted(m)
	}
	row.Attempts++
	for tries := 1; ctx.Err() == nil; tries++ {
		u := w.newUnit([]*inbound{m})
		err := u.attempt(hard, alone)
		switch class := provider.ClassOf(err); {
		case err == nil:
			w.finish(u)
			return true
		case hard.Err() != nil:
			return false
		case class == ClassAmbiguous || m.aside != nil:
			w.backOffUnit(ctx, 1, tries, err)
		case class == ClassTransient:
			m.setAside(u, err, row.Attempts-1)
		default:
			m.setAside(u, err, row.Attempts)
		}
	}
	return false
}

// isExhausted reports whether a message that may not be tried has no attempt left, so that it is
// stuck now.
func (w *worker) isExhausted(m *inbound) bool {
	row := m.parked
	if !w.runner.cfg.Retry.Exhausted(row.Attempts) {
		return false
	}
	if w.runner.cfg.Observer.Parked != nil {
		w.runner.cfg.Observer.Parked(w.name, row.Handler, row.Class, row.Code)
	}
	w.report(slog.LevelWarn, "stuck", m, &Error{Class: row.Class, Code: row.Code}, row.Attempts)
	return true
}
