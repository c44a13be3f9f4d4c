package projector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
)

// RunnerConfig tells how a Runner works; the zero value is the default.
type RunnerConfig struct {
	Timeout   time.Duration // a handler's deadline, from its start; and that of waiting for its transaction, and of its commit; zero means 30s
	Retry     claim.Backoff // after an error; zero means 100ms doubling to 30s, parked after 5 attempts
	Drain     time.Duration // how long Run may go on after its ctx ends; zero means 10s
	Logger    *slog.Logger  // nil: slog.Default()
	LogErrors bool          // also log the texts of handlers' errors, which may hold what users wrote
}

// Runner runs projectors over a source. It has no type parameter: NewRunner has, and forgets it.
type Runner struct {
	src     Source
	members []member
	cfg     RunnerConfig
	log     *slog.Logger
	once    sync.Once
	running chan struct{}
}

// member is one projector, its transaction type forgotten.
type member struct {
	name     string
	unknown  Unknown
	knows    func(eventType string) bool
	handlers []bound
	park     func(context.Context, Parked) error
	ready    func(context.Context) error
}

// bound is one handler of a member.
type bound struct {
	name  string // in full
	types []string
	unit  func(context.Context, eventstore.Raw, *deadline) error
}

// NewRunner makes a runner of ps, in units of work of u, over src. It validates everything that it is given
// and does nothing else yet. Where u cannot keep markers atomically with the read model, Options.Markers
// resolves to a no-op, logged at debug.
func NewRunner[Tx any](u UnitOfWork[Tx], src Source, cfg *RunnerConfig, ps ...*Projector[Tx]) (*Runner, error) {
	r := &Runner{src: src, running: make(chan struct{})}
	if cfg != nil {
		r.cfg = *cfg
	}
	if u == nil || src.sub == nil || len(src.topics) == 0 || len(ps) == 0 {
		return nil, errors.New("runner: wants a unit of work, a source with topics, and projectors")
	}
	for i, topic := range src.topics {
		if topic == "" || slices.Contains(src.topics[:i], topic) {
			return nil, fmt.Errorf("runner: topic %q is empty, or given twice", topic)
		}
	}
	if !u.Records().Park {
		return nil, errors.New("runner: this unit of work cannot keep parked messages")
	}
	if err := r.cfg.validate(); err != nil {
		return nil, fmt.Errorf("runner: %w", err)
	}
	r.log = r.cfg.Logger
	names := map[string]bool{}
	for _, p := range ps {
		if p == nil {
			return nil, errors.New("runner: a projector is nil")
		}
		if err := p.check(u.Records()); err != nil {
			return nil, fmt.Errorf("runner: %w", err)
		}
		if names[p.name] {
			return nil, fmt.Errorf("runner: projector %s is given twice", p.name)
		}
		names[p.name] = true
		r.members = append(r.members, newMember(u, p, r.log))
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
	if c.Timeout < 0 || c.Drain < 0 {
		return fmt.Errorf("timeout %s, drain %s: want no negative duration", c.Timeout, c.Drain)
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
	var err error
	c.Retry, err = c.Retry.WithDefaults()
	return err
}

func newMember[Tx any](u UnitOfWork[Tx], p *Projector[Tx], log *slog.Logger) member {
	marks := p.opts.Markers
	if marks && !u.Records().Marks {
		marks = false
		log.Debug("markers are a no-op: the provider cannot write them together with the read model", "projector", p.name)
	}
	one := member{
		name: p.name, unknown: p.opts.Unknown, knows: p.types.Has,
		ready: func(ctx context.Context) error {
			if c, ok := any(u).(outbox.ReadyChecker); ok {
				return c.Ready(ctx)
			}
			return nil
		},
		park: func(ctx context.Context, m Parked) error {
			return u.Do(ctx, Work{Projector: p.name, Park: []Parked{m}}, nil)
		},
	}
	for _, h := range p.handlers {
		name, was := p.full(h.name), p.fulls(h.was)
		one.handlers = append(one.handlers, bound{
			name: name, types: h.match(p.types),
			unit: func(ctx context.Context, raw eventstore.Raw, limit *deadline) error {
				w := Work{Projector: p.name}
				if marks {
					w.Marks = []marker.Key{{Handler: name, Was: was, MessageID: raw.ID}}
				}
				return u.Do(ctx, w, func(ctx context.Context, tx Tx, _ []int) ([]outbox.Message, error) {
					ctx, done := limit.handler(ctx)
					defer done()
					out, err := h.run(ctx, tx, p.types, raw)
					if err == nil {
						err = ctx.Err() // a handler that was interrupted may not have noticed what it could not write
					}
					if err != nil {
						return nil, err
					}
					return caused(out, name, raw), nil
				})
			},
		})
	}
	return one
}

// Running is closed once Run has subscribed to every topic.
func (r *Runner) Running() <-chan struct{} { return r.running }

// Run handles messages until ctx ends; then it takes no more, finishes and acks what is in flight, and returns
// nil; or outbox.ErrDrain if that takes longer than Drain: then what is in flight is broken off, rolled back,
// and not acked. A subscription that ends by itself is an error. It runs once.
func (r *Runner) Run(ctx context.Context) error {
	started := false
	r.once.Do(func() { started = true })
	if !started {
		return errors.New("runner: it runs once")
	}
	for i := range r.members {
		if err := r.members[i].ready(ctx); err != nil {
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
	var topics sync.WaitGroup
	for _, topic := range r.src.topics {
		messages, err := r.src.sub.Subscribe(subscribed, topic)
		if err != nil {
			cancel(nil)
			topics.Wait()
			return fmt.Errorf("runner: subscribe to %s: %w", topic, err)
		}
		topics.Go(func() {
			if !r.consume(work, hard, topic, messages) {
				cancel(fmt.Errorf("runner: the subscription to %s ended", topic))
			}
		})
	}
	close(r.running)
	<-work.Done()
	return r.drain(ctx, work, &topics, stop)
}

func (r *Runner) drain(ctx, work context.Context, topics *sync.WaitGroup, stop func()) error {
	done := make(chan struct{})
	go func() { topics.Wait(); close(done) }()
	t := time.NewTimer(r.cfg.Drain)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
		stop()
		return fmt.Errorf("runner: %w: %s", outbox.ErrDrain, r.cfg.Drain)
	}
	if ctx.Err() != nil {
		return nil
	}
	return context.Cause(work)
}

// consume handles a topic's messages one after another. It returns false if the subscription ended by itself.
func (r *Runner) consume(ctx, hard context.Context, topic string, messages <-chan *message.Message) bool {
	for {
		select {
		case <-ctx.Done():
			return true
		case m, ok := <-messages:
			if !ok {
				return ctx.Err() != nil
			}
			if ctx.Err() != nil || !r.deliver(ctx, hard, topic, m) {
				return true // the drain is on: not acked, so it comes again
			}
			m.Ack()
		}
	}
}

// deliver brings one message to every handler that takes it. It returns false where it had to leave off
// because the runner stops.
func (r *Runner) deliver(ctx, hard context.Context, topic string, m *message.Message) bool {
	raw, malformed := outbox.ParseWatermill(m)
	for i := range r.members {
		one := &r.members[i]
		d := delivery{Runner: r, ctx: ctx, hard: hard, member: one, topic: topic, msg: m, raw: raw}
		switch {
		case malformed != nil:
			if !d.park("", 1, &Error{Class: PermanentClass, Code: "malformed", Err: malformed}) {
				return false
			}
		case !one.knows(raw.Type):
			if one.unknown == ParkUnknown && !d.park("", 1, undecodable(eventstore.ErrUnregistered)) {
				return false
			}
		default:
			for _, h := range one.handlers {
				if slices.Contains(h.types, raw.Type) && !d.handle(h) {
					return false
				}
			}
		}
	}
	return true
}
