package projector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/internal/purpose"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Runner runs projectors over a source.
type Runner struct {
	src         Source
	projections []*projection // as given
	byName      map[string]*projection
	store       storage
	cfg         RunnerConfig
	id          string
	process     *sync.RWMutex         // see careful.go; all runners of this process share it
	watch       atomic.Pointer[watch] // nil: the store has not answered yet
	scanSoon    chan struct{}         // requests a scan of parked messages that are due
	started     atomic.Bool
	running     chan struct{}
	end         context.CancelCauseFunc // ends Run with an error
}

// NewRunner returns a runner that applies the messages of src to ps, in transactions of db. It validates its arguments and
// does nothing else.
//   - db must be a whole provider (provider.Provider). A store without parked messages, such as Redis, is combined with
//     one that keeps them: provider.Combine(units, db).
//   - If db cannot commit markers with the read model, Options.Markers is a no-op, logged at debug.
func NewRunner[Tx any](db provider.Units[Tx], src Source, cfg RunnerConfig, ps ...*Projector[Tx]) (*Runner, error) {
	if err := src.check(); err != nil {
		return nil, fmt.Errorf("runner: %w", err)
	}
	return newRunner(db, src, cfg, ps...)
}

// newRunner is NewRunner without the check of src. A runner of the zero Source applies parked messages that are due, and ends.
func newRunner[Tx any](u provider.Units[Tx], src Source, cfg RunnerConfig, ps ...*Projector[Tx]) (*Runner, error) {
	r := &Runner{src: src, cfg: cfg, id: uuid.NewString(), process: &process, byName: map[string]*projection{},
		scanSoon: make(chan struct{}, 1), running: make(chan struct{})}
	if u == nil || len(ps) == 0 {
		return nil, errors.New("runner: give it a store and at least one projector")
	}
	if err := r.cfg.validate(); err != nil {
		return nil, fmt.Errorf("runner: %w", err)
	}
	whole, ok := any(u).(provider.Provider[Tx])
	if !ok {
		return nil, errors.New("runner: the store keeps no parked messages: combine it with one that does, provider.Combine(units, db)")
	}
	r.store = whole
	for _, p := range ps {
		if p == nil {
			return nil, errors.New("runner: a projector is nil")
		}
		if err := p.check(u.Keeps()); err != nil {
			return nil, fmt.Errorf("runner: %w", err)
		}
		if r.byName[p.name] != nil {
			return nil, fmt.Errorf("runner: projector %s is given twice", p.name)
		}
		r.byName[p.name] = newProjection(r, whole, p, len(r.projections)*r.cfg.Concurrency)
		r.projections = append(r.projections, r.byName[p.name])
	}
	return r, nil
}

// log logs what happened with the class and the code of its error, and its text only if RunnerConfig.LogErrors is set.
func (r *Runner) log(level slog.Level, what string, err error, attrs ...any) {
	attrs = append(attrs, "class", provider.ClassOf(err).String(), "code", provider.CodeOf(err))
	if r.cfg.LogErrors {
		attrs = append(attrs, "err", err)
	}
	r.cfg.Logger.Log(context.Background(), level, what, attrs...)
}

// Running is closed once Run has subscribed to every topic.
func (r *Runner) Running() <-chan struct{} { return r.running }

// Run applies messages until ctx ends; then it takes no more, finishes and acks what is in flight, and returns nil; or
// outbox.ErrDrain if that takes longer than Drain: then what is in flight is broken off, rolled back, and not acked.
//   - A subscription that ends by itself is an error.
//   - A projector with Halt that has a stuck message is ErrHalted, at the start and later.
//   - Run may be called once.
func (r *Runner) Run(ctx context.Context) error {
	if r.started.Swap(true) {
		return errors.New("runner: Run called twice")
	}
	var err error
	if c, ok := r.store.(provider.ReadyChecker); ok {
		err = c.Ready(purpose.With(ctx, purpose.Runner))
	}
	if err == nil {
		err = r.halted(ctx)
	}
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return fmt.Errorf("runner: %w", err)
	}
	// Subscriptions, and with them the contexts of messages, end after what is in flight.
	subscribed, unsubscribe := context.WithCancel(context.WithoutCancel(ctx))
	defer unsubscribe()
	hard, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	work, end := context.WithCancelCause(ctx)
	defer end(nil)
	r.end = func(err error) { end(fmt.Errorf("runner: %w", err)) }
	stays := context.AfterFunc(ctx, unsubscribe) // nothing is in flight yet, and a broker that is away must not keep Run from its end
	subs, owned, err := r.src.open(subscribed, r.projections)
	stays()
	var all sync.WaitGroup
	alive := func(bool) {}
	if err != nil {
		r.end(err)
	} else {
		alive = r.stayAlive(work)
		r.start(work, hard, subs, &all)
		close(r.running)
	}
	<-work.Done()
	done := make(chan error, 1)
	go func() {
		all.Wait()
		alive(hard.Err() == nil)
		done <- closeAll(owned)
	}()
	select {
	case err = <-done:
	case <-time.After(r.cfg.Drain):
		stop()
		err = fmt.Errorf("runner: %w: %s", outbox.ErrDrain, r.cfg.Drain)
	}
	if cause := context.Cause(work); ctx.Err() == nil && !errors.Is(cause, errFinished) {
		err = errors.Join(cause, err)
	}
	return err
}

// start starts all that a runner does.
func (r *Runner) start(work, hard context.Context, subs []subscription, all *sync.WaitGroup) {
	for _, p := range r.projections {
		for _, w := range p.workers {
			all.Go(func() { w.run(work, hard) })
		}
	}
	for _, s := range subs {
		all.Go(func() {
			if err := s.read(work); err != nil {
				r.end(err)
			}
		})
	}
	if r.src.isZero() {
		all.Go(func() { r.end(r.finish(work)) })
		return
	}
	all.Go(func() { r.poll(work) })
	all.Go(func() { r.maintain(work) })
}

// halted returns ErrHalted if a message of a projector with Halt is stuck.
func (r *Runner) halted(ctx context.Context) error {
	for _, p := range r.projections {
		if p.opts.Parking != Halt {
			continue
		}
		rows, err := r.store.Parked(ctx, ParkedFilter{Projector: p.name, States: []ParkedState{StateStuck}, Limit: 1})
		if err != nil {
			return err
		}
		if len(rows) > 0 {
			return fmt.Errorf("%w: %s", ErrHalted, p.name)
		}
	}
	return nil
}
