package projector

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/purpose"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// RunnerConfig configures a Runner; the zero value is the default.
type RunnerConfig struct {
	Concurrency int              // workers of each projector, so its transactions at once; messages of one key stay in order; zero means 1
	Batch       int              // most messages of a transaction; zero means 32
	Timeout     time.Duration    // of a handler for one message, from its start; also of opening and committing a unit, each; zero means 30s
	Retry       claim.Backoff    // of a message that failed alone; zero means 100ms doubling to 30s, stuck after 5 attempts
	Drain       time.Duration    // how long Run may go on after its ctx ends; zero means 10s
	Lease       time.Duration    // how long a runner counts as alive after its process was killed; at least 1s; zero means 15s
	Record      time.Duration    // how long after a process was killed a broker may redeliver its messages; zero means 1h
	Careful     bool             // name every message before it runs, not only those that a killed process may have had
	Markers     marker.Retention // how long markers, and replayed and skipped messages, are kept; the runner deletes older ones
	Version     string           // of the program, kept with what is parked; empty: what its build info says

	Classify  func(error) Class // may choose the class of an error of ClassUnknown; nil: it stays that
	Observer  Observer          // receives what the runner does
	Clock     func() time.Time  // measures durations; must not be set back; nil: time.Now
	Logger    *slog.Logger      // nil: slog.Default()
	LogErrors bool              // also log the texts of errors, which may hold what users wrote
}

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
	looks       chan struct{}
	started     atomic.Bool
	running     chan struct{}
	end         context.CancelCauseFunc // ends Run with an error
}

// NewRunner makes a runner of ps in units of u over src. It validates all that it is given, and does nothing else yet.
//   - u must be a whole provider (provider.Provider). Units alone, such as those of Redis, are combined with a store
//     for what is parked: provider.Beside(units, db).
//   - If u cannot commit markers with the read model, Options.Markers is a no-op, logged at debug.
func NewRunner[Tx any](u provider.Units[Tx], src Source, cfg *RunnerConfig, ps ...*Projector[Tx]) (*Runner, error) {
	r := &Runner{src: src, id: uuid.NewString(), process: &process, byName: map[string]*projection{}, looks: make(chan struct{}, 1),
		running: make(chan struct{})}
	if cfg != nil {
		r.cfg = *cfg
	}
	if u == nil || len(ps) == 0 {
		return nil, errors.New("runner: give it units and at least one projector")
	}
	if err := errors.Join(src.check(), r.cfg.validate()); err != nil {
		return nil, fmt.Errorf("runner: %w", err)
	}
	whole, ok := any(u).(provider.Provider[Tx])
	if !ok {
		return nil, errors.New("runner: these units keep no parked messages: combine them with a store that does, provider.Beside(units, db)")
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

func (c *RunnerConfig) validate() error {
	c.Timeout, c.Drain = cmp.Or(c.Timeout, 30*time.Second), cmp.Or(c.Drain, 10*time.Second)
	c.Lease, c.Record = cmp.Or(c.Lease, 15*time.Second), cmp.Or(c.Record, time.Hour)
	c.Concurrency, c.Batch = cmp.Or(c.Concurrency, 1), cmp.Or(c.Batch, 32)
	if c.Timeout < 0 || c.Drain < 0 || c.Record < 0 || c.Concurrency < 0 || c.Batch < 0 || c.Batch > maxBatch {
		return fmt.Errorf("timeout %s, drain %s, record %s, concurrency %d, batch %d: give no negative value, and a batch of at most %d",
			c.Timeout, c.Drain, c.Record, c.Concurrency, c.Batch, maxBatch)
	}
	if c.Lease < time.Second {
		return fmt.Errorf("lease %s: give at least 1s", c.Lease)
	}
	if info, ok := debug.ReadBuildInfo(); ok { // the version of the main module has its revision in it
		c.Version = cmp.Or(c.Version, info.Main.Version)
	}
	if c.Clock == nil {
		c.Clock = time.Now //nolint:forbidigo // durations of units, as this process sees them
	}
	c.Logger = cmp.Or(c.Logger, slog.Default())
	c.Retry.Base, c.Retry.Attempts = cmp.Or(c.Retry.Base, 100*time.Millisecond), cmp.Or(c.Retry.Attempts, 5)
	c.Retry.Max = cmp.Or(c.Retry.Max, max(30*time.Second, c.Retry.Base))
	var err error
	if c.Markers, err = c.Markers.WithDefaults(); err != nil {
		return err
	}
	c.Retry, err = c.Retry.WithDefaults()
	return err
}

const maxBatch = 10_000

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
//   - With the zero Source it applies what is parked and due, and what becomes due with that, and returns nil.
//   - Run may be called once.
func (r *Runner) Run(ctx context.Context) error {
	if r.started.Swap(true) {
		return errors.New("runner: Run called twice")
	}
	var err error
	if c, ok := r.store.(outbox.ReadyChecker); ok {
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
