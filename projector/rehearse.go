package projector

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
)

// Rehearsal is what a replay would do.
type Rehearsal struct {
	Messages int              // that would be replayed
	Changes  []Change         // of the read model, by table and place
	Output   []outbox.Message // that handlers would send
	Failures []RehearsalFailure
	Waiting  int // those behind one that would fail
}

// RehearsalFailure is a message that would fail.
type RehearsalFailure struct {
	Parked Parked
	Err    error
}

// ErrNoRehearsal: the provider cannot tell what a unit changes.
var ErrNoRehearsal = errors.New("this provider has no rehearsals")

// rehearsed is a parked message at one of its handlers.
type rehearsed struct {
	raw    eventstore.Raw
	replay Replay
}

// Rehearse is Replay in one transaction, which is rolled back, of at most f.Limit messages (zero means 100): it shows the rows that would change, and leaves no
// trace. Handlers run, one after another: what they do beside their transaction is done, and a message that ended its
// process may do so again. Messages that f does not pick do not come along.
//   - ErrNoRehearsal; f.State must be StillParked, f.Projector one of the runner's. Errors are as those of Replay.
func (r *Runner) Rehearse(ctx context.Context, f ParkedFilter, force bool) (*Rehearsal, error) {
	m := r.member(f.Projector)
	if m == nil {
		return nil, fmt.Errorf("rehearse: %w: %q", ErrNoHandler, f.Projector)
	}
	if m.rehearse == nil {
		return nil, fmt.Errorf("rehearse: %w", ErrNoRehearsal)
	}
	if err := f.check(); err != nil {
		return nil, fmt.Errorf("rehearse: %w", err)
	}
	if f.Limit == 0 {
		f.Limit = 100
	}
	result, parked, units := &Rehearsal{}, map[int64]Parked{}, []rehearsed(nil)
	err := r.eachParked(ctx, f, func(m *member, p Parked) error {
		d := r.again(ctx, ctx, m, p)
		hs, err := d.handlersOf(p)
		if err != nil {
			result.Failures = append(result.Failures, RehearsalFailure{p, err})
			return nil
		}
		parked[p.Seq] = p
		for i, h := range hs {
			if h.name == "" {
				continue // nothing to see
			}
			units = append(units, rehearsed{d.raw, Replay{d.againAt(h, p), i < len(hs)-1, force, rolledBack}})
		}
		return nil
	})
	for err == nil && len(units) > 0 {
		var once *Rehearsal
		var bad int64
		if once, bad, err = m.rehearse(ctx, r, units); err == nil {
			result.Changes, result.Output = once.Changes, once.Output
			break
		}
		if bad == 0 || isAway(err) || ctx.Err() != nil {
			break
		}
		// Without it, and so without what waits behind it, another time.
		if errors.Is(err, ErrHeld) {
			result.Waiting++
		} else if !errors.Is(err, ErrNotParked) {
			result.Failures = append(result.Failures, RehearsalFailure{parked[bad], err})
		}
		delete(parked, bad)
		units, err = slices.DeleteFunc(units, func(u rehearsed) bool { return u.replay.Seq == bad }), nil
	}
	if err != nil {
		return nil, fmt.Errorf("rehearse: %w", err)
	}
	result.Messages = len(parked)
	return result, nil
}

var rolledBack = Decision{By: "rehearsal", Reason: "rolled back"}

// rehearsal runs units in one that is undone, in a goroutine of its own, as tries.run does. Where one of them fails, it returns
// the Seq of its message; else zero.
func rehearsal[Tx any](u UnitOfWork[Tx], name string, marks bool, runs map[string]runFunc[Tx]) func(context.Context, *Runner, []rehearsed) (*Rehearsal, int64, error) {
	if !u.Records().Rehearse {
		return nil
	}
	return func(stops context.Context, r *Runner, units []rehearsed) (*Rehearsal, int64, error) {
		ctx, cancel := context.WithCancel(stops)
		defer cancel()
		limit, result := newDeadline(r.cfg.Timeout, cancel), &Rehearsal{}
		w := Work{Projector: name, Rehearse: func(c []Change) { result.Changes = c }}
		for _, one := range units {
			w.Replay = append(w.Replay, one.replay)
			if marks {
				w.Marks = append(w.Marks, marker.Key{Handler: one.replay.Handler, Was: one.replay.Was, MessageID: one.raw.ID})
			}
		}
		var at atomic.Int64 // whose handler runs
		err, over := error(errGoexit), make(chan struct{})
		go func() {
			defer close(over)
			defer limit.stop()
			err = u.Do(ctx, w, func(ctx context.Context, tx Tx, fresh []int) (sent []outbox.Message, err error) {
				for i, one := range units {
					run := runs[one.replay.Handler]
					if run == nil || marks && !slices.Contains(fresh, i) {
						continue
					}
					at.Store(one.replay.Seq)
					ms, err := guarded(func() ([]outbox.Message, error) {
						ctx, done := limit.handler(ctx)
						defer done()
						return run(ctx, tx, one.raw)
					})
					if err != nil {
						return nil, err
					}
					sent = append(sent, ms...)
				}
				at.Store(0)
				result.Output = sent
				return sent, nil
			})
		}()
		if !returns(ctx, over) {
			return nil, at.Load(), errStuck
		}
		if stays, ok := errors.AsType[*ReplayError](err); ok {
			at.Store(stays.Seq)
		}
		return result, at.Load(), late(stops, err)
	}
}

// guarded makes a panic an error.
func guarded(run func() ([]outbox.Message, error)) (out []outbox.Message, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &Error{Class: UnknownClass, Code: "panic", Err: fmt.Errorf("panic: %v", p)}
		}
	}()
	return run()
}
