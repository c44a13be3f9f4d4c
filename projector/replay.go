package projector

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// The times between two scanSoon at what is due.
const (
	pollEvery = time.Second
	scanPause = 5 * time.Millisecond // the least
)

// poll gives parked messages whose time has come to their workers, until ctx ends.
func (r *Runner) poll(ctx context.Context) {
	for ctx.Err() == nil {
		if _, err := r.giveDue(ctx); err != nil && ctx.Err() == nil {
			r.log(slog.LevelWarn, "parked messages were not looked up", err)
		}
		if err := r.halted(ctx); errors.Is(err, ErrHalted) {
			r.end(err)
		}
		select {
		case <-ctx.Done():
		case <-r.scanSoon:
			wait(ctx, scanPause) // for what becomes due at the same time
		case <-time.After(pollEvery):
		}
	}
}

// scanNow makes poll scan at once.
func (r *Runner) scanNow() {
	select {
	case r.scanSoon <- struct{}{}:
	default:
	}
}

// giveDue gives what is due to the workers that have nothing of it yet. It is false if there is nothing, and no worker has
// any.
func (r *Runner) giveDue(ctx context.Context) (some bool, err error) {
	f := provider.DueFilter{Keys: 4 * r.cfg.Batch, Each: r.cfg.Batch}
	for _, p := range r.projections {
		f.Projectors = append(f.Projectors, p.name)
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
	due := map[*worker][]*inbound{}
	for _, row := range rows {
		if p := r.byName[row.Projector]; p != nil {
			w := p.worker(row.Lane)
			due[w] = append(due[w], p.acceptParked(row))
		}
	}
	return due, err
}

// replay applies parked messages that are due: those that only wait behind others in units of many, all others alone,
// each attempt counted before it runs. It reports whether any is no longer parked as it was.
func (w *worker) replay(ctx, hard context.Context, rows []*inbound) (progress bool) {
	var waiting, failed []*inbound
	for _, m := range rows {
		if m.parked.Class == ClassHeld {
			waiting = append(waiting, m)
		} else {
			failed = append(failed, m)
		}
	}
	for msgs := range slices.Chunk(waiting, w.batch) {
		progress = w.apply(ctx, hard, msgs) || progress
	}
	for _, m := range failed {
		progress = ctx.Err() == nil && w.try(ctx, hard, m) || progress
	}
	return progress
}

// catchUp applies what waits in lanes behind which this worker has just parked deliveries, twice as much as it may have
// parked. So a lane that is due becomes empty under a constant load. A lane that is not due costs one question.
func (w *worker) catchUp(ctx, hard context.Context, lanes []provider.Lane) {
	progress := len(lanes) > 0
	for turn := 0; turn < 2 && progress && ctx.Err() == nil; turn++ {
		f := provider.DueFilter{Projectors: []string{w.name}, Lanes: lanes, Keys: len(lanes), Each: w.batch}
		due, _ := w.runner.due(hard, f) // poll reports errors
		progress = w.replay(ctx, hard, due[w])
	}
}

// try is one attempt at a parked message that has failed before, or may have ended a process. It is counted before it
// runs, and keeps others away from the message for longer than it may take.
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
		w.report(slog.LevelWarn, "attempt at a parked message was not counted", m, err, row.Attempts)
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
			w.settle(u)
			return true
		case hard.Err() != nil:
			return false
		case class == ClassAmbiguous || m.aside != nil:
			w.troubled(ctx, 1, tries, err)
		case class == ClassTransient:
			m.setAside(u, err, row.Attempts-1)
		default:
			m.setAside(u, err, row.Attempts)
		}
	}
	return false
}

// isExhausted says whether a message that may not be tried has no attempt left, so that it is stuck now.
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
