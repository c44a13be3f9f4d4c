package projector

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// projection is a projector in a runner, without its type parameter.
type projection struct {
	runner       *Runner
	name         string
	opts         Options
	keeps        provider.Keeps
	types        *eventstore.Types
	marks        bool     // it writes markers
	marked       []string // all handler names in its markers
	dryRuns      bool
	byType       map[string][]provider.Handler
	takes        map[string]taker // the handlers of OnBatch, by name
	workers      []*worker
	reader       *reader                    // of the log; nil: it reads none
	emits        bool                       // one of its handlers has output
	creates      bool                       // it has OnCreate
	resets       bool                       // it has OnReset
	current      atomic.Pointer[generation] // that deliveries are applied to
	others       map[int]*other             // generations that it also feeds
	fed          map[int]beat               // by generation: when its Beat changed last
	visits       beat                       // when generationData.Visits changed last
	visited      time.Time                  // when this program called visit last
	reportedIdle time.Time                  // when reportIdle logged last
	tries        int                        // of a look at the generations that fails
	retryAt      time.Time                  // of the next one
	looked       time.Time                  // when retireAbandoned asked for the lease last
	applied      atomic.Int64               // committed units in which a handler ran
	serial       atomic.Int64               // larger units run one at a time until then; Unix nanoseconds
	resplits     chan struct{}              // receives when the segments change
	revived      map[int64]int              // by Seq: how often a message that may be revived was seen

	// For requests of operators: as the methods of the Projector.
	dryRun func(context.Context, ParkedFilter) (*DryRun, error)
	verify func(context.Context, Verification) (*Verified, error)

	do func(context.Context, provider.Unit, func(context.Context, caller, provider.Found) (provider.Closing, error)) error
}

// taker decodes the event of a message for a handler of OnBatch.
type taker = func(*eventstore.Types, *inbound) (any, error)

// storage is a provider without Units.
type storage interface {
	provider.Parking
	provider.Liveness
	provider.Records
	provider.Progress
	provider.Builds
	claim.Leases
}

// caller runs a handler, by its name, in the transaction of a unit: for a message, or for the events of
// a handler of OnBatch.
type caller func(ctx context.Context, handler string, m *inbound, events []any) ([]outbox.Message, error)

// newProjection returns a projection of the first generation.
func newProjection[Tx any](r *Runner, u provider.Provider[Tx], p *Projector[Tx]) *projection {
	keeps := u.Keeps()
	one := &projection{
		runner: r, name: p.name, opts: p.opts, types: p.types, marks: p.opts.Markers && keeps.Markers,
		dryRuns: keeps.DryRun, byType: p.takers(), keeps: keeps,
		creates: p.setupOf(created) != nil, resets: p.setupOf(reset) != nil,
	}
	one.opts.Version = max(p.opts.Version, 1)
	for _, h := range p.handlers {
		one.emits = one.emits || h.emits
	}
	if p.unmarked.Store(p.opts.Markers && !keeps.Markers); p.unmarked.Load() {
		r.cfg.Logger.Debug("markers are a no-op: the store cannot commit them with the read model", "projector", p.name)
	}
	if keeps.Markers {
		one.marked = p.Handlers()
	}
	byName, takes := map[string]Handler[Tx]{}, map[string]taker{}
	for _, h := range p.handlers {
		if h.setup {
			byName[h.name] = h
		} else {
			byName[p.full(h).Name] = h
			if h.take != nil {
				takes[p.full(h).Name] = h.take
			}
		}
	}
	one.takes = takes
	one.do = func(ctx context.Context, unit provider.Unit, run func(context.Context, caller, provider.Found) (provider.Closing, error)) error {
		return u.Do(ctx, unit, func(ctx context.Context, tx Tx, found provider.Found) (provider.Closing, error) {
			return run(ctx, func(ctx context.Context, name string, m *inbound, events []any) (out []outbox.Message, err error) {
				if h := byName[name]; events != nil {
					err = h.batch(ctx, tx, events)
				} else {
					out, err = h.run(ctx, tx, p.types, m)
				}
				if err == nil {
					err = ctx.Err() // a handler may have ignored the errors of its writes
				}
				if err != nil || len(out) == 0 || scopeOf(ctx).replayed {
					return nil, err
				}
				out = completed(out, name, m.raw)
				if observe := r.cfg.Observer.Emitting; observe != nil {
					observe(ctx, name, out)
				}
				return out, nil
			}, found)
		})
	}
	isLogged := r.src.log != nil || r.log != nil && one.marks && !p.opts.BrokerOnly
	if isLogged {
		p.logged.Store(true)
	} else if r.log != nil && !one.marks {
		r.cfg.Logger.Info("events that are not delivered are not read from the log: the projector has no markers", "projector", p.name)
	}
	if overBroker := r.src.log == nil && !r.src.isZero(); overBroker && !p.opts.Markers && !p.opts.RepeatSafe {
		r.cfg.Logger.Warn("redelivered messages take effect again: the projector has no markers. Set Options.Markers, or Options.RepeatSafe if the handlers may run again",
			"projector", p.name)
	}
	return one.in(&generation{Build: provider.Build{Projector: p.name, Generation: 1}, state: provider.GenerationLive}, isLogged)
}

// in returns a copy of the projection for a generation, with workers and a reader of its own.
func (p *projection) in(g *generation, isLogged bool) *projection {
	r := p.runner
	batch := cmp.Or(r.cfg.Batch, deliveryBatch)
	one := &projection{
		runner: r, name: p.name, opts: p.opts, types: p.types, keeps: p.keeps, marks: p.marks, marked: p.marked, dryRuns: p.dryRuns,
		byType: p.byType, takes: p.takes, emits: p.emits, creates: p.creates, resets: p.resets, do: p.do,
		resplits: make(chan struct{}, 1), revived: map[int64]int{}, others: map[int]*other{}, fed: map[int]beat{},
	}
	one.current.Store(g)
	for range r.cfg.Concurrency {
		one.workers = append(one.workers, &worker{
			projection: one, number: r.nextWorker(), batch: batch, size: batch,
			in: make(chan *inbound, batch), due: make(chan []*inbound, 1), seen: map[string]int{},
		})
	}
	if isLogged {
		one.reader = newReader(one, r.nextWorker())
	}
	return one
}

// build returns the generation that deliveries are applied to.
func (p *projection) build() provider.Build { return p.current.Load().Build }

// handlersFor returns the handlers of an event type: all, or those with one of names if there are
// names. ok is false if this program does not have a handler of names.
func (p *projection) handlersFor(eventType string, names []string) (found []provider.Handler, ok bool) {
	all, missing := p.byType[eventType], slices.Clone(names)
	if len(names) == 0 {
		return all, true
	}
	for _, h := range all {
		before := len(missing)
		missing = slices.DeleteFunc(missing, func(name string) bool { return slices.Contains(h.Names(), name) })
		if len(missing) < before {
			found = append(found, h)
		}
	}
	return found, len(missing) == 0
}

// worker returns the worker of a lane.
func (p *projection) worker(lane provider.Lane) *worker {
	return p.workers[(int(lane[0])<<8|int(lane[1]))%len(p.workers)]
}

// isPaused reports whether an operator has paused the projector.
func (p *projection) isPaused() bool {
	return p.runner.presence.IsPaused(provider.PauseProjector, p.name)
}

// report logs what happened to a message.
func (p *projection) report(level slog.Level, what string, m *inbound, err error, attempts int) {
	p.runner.report(level, what, err, "projector", p.name, "topic", m.topic, "message_id", m.id, "type", m.raw.Type,
		"attempts", attempts)
}
