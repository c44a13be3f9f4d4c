package projector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/internal/mutant"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
)

// RunnerConfig tells how a Runner works; the zero value is the default.
type RunnerConfig struct {
	Concurrency int               // messages in flight at a time, for each subscriber, wherever it leaves several; those of one key one after another; zero means GOMAXPROCS
	Timeout     time.Duration     // a handler's deadline, from its start; and that of waiting for its transaction, and of its commit; zero means 30s
	Retry       claim.Backoff     // after an error; zero means 100ms doubling to 30s, parked after 5 attempts
	Drain       time.Duration     // how long Run may go on after its ctx ends; zero means 10s
	Lease       time.Duration     // how long a runner counts as alive after its process was killed; at least 1s; zero means 15s
	Markers     marker.Retention  // how long its projectors' markers are kept; the runner deletes older ones
	Keep        time.Duration     // how long replayed and skipped messages, and attempts, are kept; at least Markers.Window, which zero means
	Version     string            // of the program, kept with what is parked; empty: what its build info says
	Classify    func(error) Class // may say more about errors of UnknownClass, which wrap what a handler returned; nil: they stay that
	Observer    Observer          // is told what the runner does
	Clock       func() time.Time  // measures durations for Observer, and when to say again that the runner lives, so it must not be set back; nil: time.Now
	Logger      *slog.Logger      // nil: slog.Default()
	LogErrors   bool              // also log the texts of handlers' errors, which may hold what users wrote
}

// Runner runs projectors over a source. It has no type parameter: NewRunner has, and forgets it.
type Runner struct {
	src     Source
	members []member
	cfg     RunnerConfig
	log     *slog.Logger
	journal Journal
	apart   *sync.RWMutex // see Journal.Apart
	names   *names
	once    sync.Once
	running chan struct{}
}

// NewRunner makes a runner of ps, in units of work of u, over src. It validates everything that it is given
// and does nothing else yet. Where u cannot keep markers atomically with the read model, Options.Markers
// resolves to a no-op, logged at debug.
func NewRunner[Tx any](u UnitOfWork[Tx], src Source, cfg *RunnerConfig, ps ...*Projector[Tx]) (*Runner, error) {
	r := &Runner{src: src, running: make(chan struct{})}
	if cfg != nil {
		r.cfg = *cfg
	}
	if u == nil || len(ps) == 0 {
		return nil, errors.New("runner: wants a unit of work and projectors")
	}
	if err := src.check(); err != nil {
		return nil, fmt.Errorf("runner: %w", err)
	}
	if err := r.cfg.validate(); err != nil {
		return nil, fmt.Errorf("runner: %w", err)
	}
	journal, ok := any(u).(Journal)
	if !ok || !u.Records().Park {
		return nil, errors.New("runner: this unit of work cannot keep parked messages, or hides that it is a Journal")
	}
	r.log, r.journal, r.apart = r.cfg.Logger, journal, journal.Apart()
	r.names = &names{
		journal: journal, runner: uuid.NewString(), lease: r.cfg.Lease, timeout: r.cfg.Timeout, clock: r.cfg.Clock,
		turn: make(chan struct{}, 1), lives: make(chan struct{}, 1), under: map[nameKey]int{}, named: map[nameKey]int{}, parking: map[nameKey]bool{},
	}
	seen := map[string]bool{}
	for _, p := range ps {
		if p == nil {
			return nil, errors.New("runner: a projector is nil")
		}
		if err := p.check(u.Records()); err != nil {
			return nil, fmt.Errorf("runner: %w", err)
		}
		if seen[p.name] {
			return nil, fmt.Errorf("runner: projector %s is given twice", p.name)
		}
		seen[p.name] = true
		one, err := newMember(u, p, r.log)
		if err != nil {
			return nil, fmt.Errorf("runner: projector %s: %w", p.name, err)
		}
		r.members = append(r.members, one)
	}
	return r, nil
}

func (c *RunnerConfig) validate() error {
	if c.Timeout == 0 {
		c.Timeout = 30 * time.Second
	}
	if c.Drain == 0 {
		c.Drain = 10 * time.Second
	}
	if c.Concurrency == 0 {
		c.Concurrency = runtime.GOMAXPROCS(0)
	}
	if c.Timeout < 0 || c.Drain < 0 || c.Concurrency < 0 {
		return fmt.Errorf("timeout %s, drain %s, concurrency %d: want nothing negative", c.Timeout, c.Drain, c.Concurrency)
	}
	if c.Lease == 0 {
		c.Lease = 15 * time.Second
	}
	if c.Lease < time.Second {
		return fmt.Errorf("lease %s: want at least 1s", c.Lease)
	}
	var err error
	if c.Markers, err = c.Markers.WithDefaults(); err != nil {
		return err
	}
	if c.Keep == 0 {
		c.Keep = c.Markers.Window
	}
	if c.Keep < c.Markers.Window {
		return fmt.Errorf("%w: replayed and skipped messages kept for %s: want at least the window of markers, %s", marker.ErrUnsafe, c.Keep, c.Markers.Window)
	}
	if c.Version == "" {
		c.Version = buildVersion()
	}
	if c.Clock == nil {
		c.Clock = time.Now //nolint:forbidigo // durations of units, as this process sees them
	}
	if c.Retry.Base == 0 {
		c.Retry.Base = 100 * time.Millisecond
	}
	if c.Retry.Max == 0 {
		c.Retry.Max = max(30*time.Second, c.Retry.Base)
	}
	if c.Retry.Attempts == 0 {
		c.Retry.Attempts = 5
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	c.Retry, err = c.Retry.WithDefaults()
	return err
}

// buildVersion is the revision that the program was built from, or the version of its module.
func buildVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return s.Value
		}
	}
	return info.Main.Version
}

// Running is closed once Run has subscribed to every topic.
func (r *Runner) Running() <-chan struct{} { return r.running }

// Run handles messages until ctx ends; then it takes no more, finishes and acks what is in flight, and returns
// nil; or outbox.ErrDrain if that takes longer than Drain: then what is in flight is broken off, rolled back,
// and not acked. A subscription that ends by itself is an error, and so is the zero Source. It runs once.
func (r *Runner) Run(ctx context.Context) error {
	if r.src.isZero() {
		return errors.New("runner: it has no source")
	}
	started := false
	r.once.Do(func() { started = true })
	if !started {
		return errors.New("runner: it runs once")
	}
	for i := range r.members {
		if err := r.members[i].mayRun(ctx); err != nil {
			return fmt.Errorf("runner: %w", err)
		}
	}
	// Subscriptions, and with them the contexts of messages, end after what is in flight has.
	subscribed, unsubscribe := context.WithCancel(context.WithoutCancel(ctx))
	defer unsubscribe()
	hard, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	work, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	feeds, err := r.src.feeds(r.members)
	stays := context.AfterFunc(ctx, unsubscribe) // nothing is in flight yet, and a broker that is away must not keep Run from its end
	for i := 0; err == nil && i < len(feeds); i++ {
		err = feeds[i].subscribe(subscribed, r.src.topics)
	}
	stays()
	var consumers sync.WaitGroup
	if err != nil {
		cancel(fmt.Errorf("runner: %w", err))
	} else {
		for i := range feeds {
			consumers.Go(func() { r.consume(work, hard, &feeds[i], cancel) })
		}
		r.upkeep(work, hard, &consumers)
		close(r.running)
	}
	quiet := r.names.keepAlive()
	<-work.Done()
	return r.drain(ctx, work, stop, func() error {
		consumers.Wait()
		quiet()
		r.names.stop(hard)
		return closeOwned(feeds)
	})
}

// drain waits for finish, and no longer than it may.
func (r *Runner) drain(ctx, work context.Context, stop func(), finish func() error) error {
	done := make(chan error, 1)
	go func() { done <- finish() }()
	t := time.NewTimer(r.cfg.Drain)
	defer t.Stop()
	var err error
	select {
	case err = <-done:
	case <-t.C:
		stop()
		err = fmt.Errorf("runner: %w: %s", outbox.ErrDrain, r.cfg.Drain)
	}
	if ctx.Err() == nil {
		err = errors.Join(context.Cause(work), err)
	}
	return err
}

// consume reads a feed and lets its messages run in their lanes, until ctx ends or a subscription does, which it tells
// fail. It returns when all that runs is done. A message that is not done with when the runner stops is not acked, so
// it comes again, and so do those behind it in its lane.
func (r *Runner) consume(ctx, hard context.Context, f *feed, fail context.CancelCauseFunc) {
	l := newLanes(r.cfg.Concurrency)
	defer l.all.Wait()
	for l.enter(ctx) {
		topic, m, ok := f.next(ctx)
		if ctx.Err() != nil || !ok {
			l.leave()
			fail(fmt.Errorf("runner: the subscription to %s ended", topic)) // which counts for nothing where ctx has
			return
		}
		if r.cfg.Observer.Queued != nil {
			r.cfg.Observer.Queued(topic, len(l.free), cap(l.free))
		}
		l.run(m, func() {
			if mutant.AckEarly {
				m.Ack()
			}
			if ctx.Err() == nil && r.deliver(ctx, hard, fail, f.members, topic, m) {
				crash.Point("ack: before")
				m.Ack()
				crash.Point("ack: after")
			}
		})
	}
}

// deliver brings one message to every handler of members that takes it. It returns false where it had to leave off
// because the runner stops, or stops for it.
func (r *Runner) deliver(ctx, hard context.Context, halt func(error), members []member, topic string, m *message.Message) bool {
	raw, malformed := outbox.ParseWatermill(m)
	for i := range members {
		one := &members[i]
		d := delivery{Runner: r, ctx: ctx, hard: hard, member: one, topic: topic, msg: m, raw: raw, malformed: malformed, halt: halt}
		switch {
		case malformed != nil:
			if !d.setAside(&Error{Class: PermanentClass, Code: "malformed", Err: malformed}) {
				return false
			}
		case !one.knows(raw.Type):
			if one.strange == ParkUnknown && !d.setAside(undecodable(eventstore.ErrUnregistered)) {
				return false
			}
		default:
			for _, h := range one.takes(raw.Type) {
				if !d.handle(h) {
					return false
				}
			}
		}
	}
	return true
}
