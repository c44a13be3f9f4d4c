package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

const (
	exactName = "exact"
	// Without markers: a control that shows the effect of faults on an unprotected projector.
	controlName = "control"
)

// started holds the messages whose handler has started and that are not acked.
type started struct {
	status *status
	mu     sync.Mutex
	ids    map[string]bool
}

func (s *started) start(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ids[id] = true
	s.status.set(wordOpen, int64(len(s.ids)))
}

func (s *started) acking(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.ids, id)
	s.status.set(wordOpen, int64(len(s.ids)))
}

// traced is a provider that records the begin and end of each unit, its messages, and the parked
// ones.
type traced[Tx any] struct {
	provider.Provider[Tx]
	provider.ReadyChecker
	provider.Operations
	w *work
	s *started
}

// Do implements provider.Units.
func (p traced[Tx]) Do(ctx context.Context, u provider.Unit, run func(context.Context, Tx, provider.Found) (provider.Closing, error)) error {
	if u.Projector != exactName {
		return p.Provider.Do(ctx, u, run)
	}
	defer p.w.unit(p.s, u)()
	return p.Provider.Do(ctx, u, func(ctx context.Context, tx Tx, found provider.Found) (provider.Closing, error) {
		c, err := run(ctx, tx, found)
		for _, a := range c.Park {
			p.w.trace.printf("park %s %s %s %s attempts %d after %s", a.Parked.MessageID, a.Parked.Handler, a.Parked.Class, a.Parked.Code, a.Parked.Attempts, a.After)
		}
		return c, err
	})
}

// unit records the begin of a unit. end records its end; messages that are parked, or were read
// from the log, get no ack afterwards.
func (w *work) unit(s *started, u provider.Unit) (end func()) {
	var ids strings.Builder
	for _, m := range u.Messages {
		ids.WriteString(" " + m.ID)
	}
	of := [2]int{wordUnits, wordUnitOpen}
	if len(u.Messages) > 1 {
		of = [2]int{wordMany, wordManyOpen}
	}
	w.status.add(of[0], 1)
	w.status.add(of[1], 1)
	w.trace.printf("begin%s", ids.String())
	return func() {
		w.trace.printf("end%s", ids.String())
		w.status.add(of[1], -1)
		for _, m := range u.Messages {
			if m.Parked != nil || u.Reader != nil { // it gets no ack
				s.acking(m.ID)
			}
		}
	}
}

func (w *work) project(ctx context.Context) error {
	s := &started{status: w.status, ids: map[string]bool{}}
	var runners []*projector.Runner
	var err error
	if w.Batched {
		runners, err = newArms(w, s, traced[*pgx.Batch]{w.db.Batched(), w.db, w.db, w, s}, func(_ context.Context, b *pgx.Batch, sql string, args ...any) error {
			b.Queue(sql, args...)
			return nil
		}).runners()
	} else {
		runners, err = newTxArms(w, s).runners()
	}
	if err != nil {
		return err
	}
	services := make([]kinora.Service, len(runners))
	for i, r := range runners {
		services[i] = r
	}
	w.ready(runners[len(runners)-1].Running()) // the last one starts when the others are running
	defer w.replay(ctx)()
	if name := w.More["replay"]; name != "" {
		go w.replayStuck(ctx, runners[0], name)
	}
	return kinora.Run(ctx, services...)
}

// arms are the projectors of a process: the exact one or those of settings.Arms, and the control
// without markers.
type arms[Tx any] struct {
	w          *work
	s          *started
	units      provider.Units[Tx]
	cfg        projector.RunnerConfig
	projectors []*projector.Projector[Tx]
	unheard    []*projector.Projector[Tx] // those of a topic without publishers
}

// runners returns a runner of all arms over the same deliveries, and one of the unheard arms.
func (a *arms[Tx]) runners() (all []*projector.Runner, err error) {
	add := func(src projector.Source, ps []*projector.Projector[Tx]) {
		if len(ps) == 0 || err != nil {
			return
		}
		var r *projector.Runner
		r, err = projector.NewRunner(a.units, src, a.cfg, ps...)
		all = append(all, r)
	}
	sub := &subscriber{socket: a.w.Socket, name: a.w.Name, group: a.w.Group, acking: a.s.acking}
	switch {
	case a.w.Log:
		// With a checkpoint, the control could not be moved back to the broker: it has no markers.
		isControl := func(p *projector.Projector[Tx]) bool { return p.Name() == controlName }
		add(projector.FromLog(a.w.db), slices.DeleteFunc(slices.Clone(a.projectors), isControl))
	case a.w.Lossy:
		add(projector.Subscribe(newLossy(a.w, sub), category), a.projectors)
	default:
		add(projector.Subscribe(sub, category), a.projectors)
	}
	// The broker does not know the group: nothing is delivered.
	add(projector.Subscribe(&subscriber{socket: a.w.Socket, name: a.w.Name, group: unheardName, acking: func(string) {}}, unheardName), a.unheard)
	return all, err
}

// applyParked applies the parked messages that are due.
func (a *arms[Tx]) applyParked(ctx context.Context) error {
	for _, p := range a.projectors {
		if err := p.ApplyParked(ctx, a.units, &a.cfg); err != nil {
			return err
		}
	}
	return nil
}

// newTxArms returns arms whose handlers execute their statements one by one.
func newTxArms(w *work, s *started) *arms[pgx.Tx] {
	return newArms(w, s, traced[pgx.Tx]{w.db, w.db, w.db, w, s}, func(ctx context.Context, tx pgx.Tx, sql string, args ...any) error {
		_, err := tx.Exec(ctx, sql, args...)
		return err
	})
}

func newArms[Tx any](w *work, s *started, u provider.Units[Tx], exec func(context.Context, Tx, string, ...any) error) *arms[Tx] {
	arm := func(name, prefix string, opts projector.Options) *projector.Projector[Tx] {
		sql, exact := fmt.Sprintf(applySQL, prefix), name == exactName
		opts.From.Position = w.From
		return defined(w, name, opts,
			func(ctx context.Context, tx Tx, e eventstore.Event[moved]) ([]outbox.Message, error) {
				if exact {
					s.start(e.ID)
					w.status.add(wordDone, 1)
					w.trace.printf("start %s %s %d", e.ID, e.Data.Stream, e.Data.N)
				}
				if w.isSlow(e) {
					pause(ctx, w.Least+rand.N(w.Slow-w.Least))
				}
				if exact {
					if err := w.fails(e.Data); err != nil {
						return nil, err
					}
					if err := w.harm(ctx, e.Data, func(sql string, args ...any) error { return exec(ctx, tx, sql, args...) }); err != nil {
						return nil, err
					}
				}
				if exact {
					if err := w.transfers(ctx, tx, e); err != nil {
						return nil, err
					}
				}
				out, err := w.output(ctx, tx, exact, e)
				if err != nil {
					return nil, err
				}
				if err := exec(ctx, tx, sql, e.Data.Stream, e.Data.N, e.Data.Amount); err != nil {
					return nil, err
				}
				return out, recordLag(ctx, w, tx, exec, name, e)
			})
	}
	both := &arms[Tx]{w: w, s: s, units: u}
	for _, name := range w.Arms {
		if kind := armKinds[name]; name == unheardName {
			both.unheard = append(both.unheard, arm(kind.name, kind.prefix, kind.opts))
		} else {
			both.projectors = append(both.projectors, arm(kind.name, kind.prefix, kind.opts))
		}
	}
	if len(w.Arms) == 0 && w.More["arm"] != controlName {
		both.projectors = append(both.projectors, arm(exactName, "", projector.Options{Markers: true}))
	}
	if w.Control {
		both.projectors = append(both.projectors, arm(controlName, "control_", projector.Options{}))
	}
	both.cfg = projector.RunnerConfig{
		Concurrency: w.Concurrency, Batch: w.Unit, Careful: w.Careful, Lease: w.Lease, Timeout: w.Timeout, Drain: w.Patience, LogErrors: true,
		Retry: claim.Backoff{Base: 50 * time.Millisecond, Max: time.Second, Attempts: w.Attempts}, Grace: w.Grace,
		Observer: projector.RunnerObserver{Completed: w.completed},
	}
	if len(w.Arms) > 0 { // the other cells judge what the broker alone delivers
		both.cfg.Log = w.db
	}
	if w.More["log"] != "" { // what the broker does not deliver is read from the log
		both.cfg.Log, both.cfg.Grace = w.db, time.Second
	}
	return both
}

// isSlow reports whether the handlers of an event are slow: of every event, or of a fixed one in as
// many as the cell sets.
func (w *work) isSlow(e eventstore.Event[moved]) bool {
	return w.Slow > 0 && (w.SlowOneIn <= 1 || e.Data.Amount%int64(w.SlowOneIn) == 0)
}
