package projector

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync/atomic"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// projection is a projector in a runner, without its type parameter.
type projection struct {
	runner  *Runner
	name    string
	opts    Options
	types   *eventstore.Types
	marks   bool     // it writes markers
	marked  []string // all handler names in its markers
	dryRuns bool
	byType  map[string][]provider.Handler
	workers []*worker
	reader  *reader       // of the log; nil: it reads none
	serial  atomic.Int64  // larger units run one at a time until then; Unix nanoseconds
	revived map[int64]int // by Seq: how often a message that may be revived was seen

	do func(context.Context, provider.Unit, func(context.Context, caller, provider.Found) (provider.Closing, error)) error
}

// storage is a provider without Units.
type storage interface {
	provider.Parking
	provider.Liveness
	provider.Records
	provider.Progress
	claim.Leases
}

// caller runs a handler, by its name, in the transaction of a unit.
type caller func(ctx context.Context, handler string, raw eventstore.Raw) ([]outbox.Message, error)

// newProjection returns a projection whose workers have numbers from first on.
func newProjection[Tx any](r *Runner, u provider.Provider[Tx], p *Projector[Tx], first int) *projection {
	keeps := u.Keeps()
	one := &projection{
		runner: r, name: p.name, opts: p.opts, types: p.types, marks: p.opts.Markers && keeps.Markers,
		dryRuns: keeps.DryRun, byType: p.takers(), revived: map[int64]int{},
	}
	if p.unmarked.Store(p.opts.Markers && !keeps.Markers); p.unmarked.Load() {
		r.cfg.Logger.Debug("markers are a no-op: the store cannot commit them with the read model", "projector", p.name)
	}
	batch := cmp.Or(r.cfg.Batch, deliveryBatch)
	if !keeps.Atomic {
		batch = 1
	}
	if keeps.Markers {
		one.marked = p.Handlers()
	}
	byName := map[string]Handler[Tx]{}
	for _, h := range p.handlers {
		byName[p.full(h).Name] = h
	}
	one.do = func(ctx context.Context, unit provider.Unit, run func(context.Context, caller, provider.Found) (provider.Closing, error)) error {
		return u.Do(ctx, unit, func(ctx context.Context, tx Tx, found provider.Found) (provider.Closing, error) {
			return run(ctx, func(ctx context.Context, name string, raw eventstore.Raw) ([]outbox.Message, error) {
				out, err := byName[name].run(ctx, tx, p.types, raw)
				if err == nil {
					err = ctx.Err() // a handler may have ignored the errors of its writes
				}
				if err != nil || len(out) == 0 {
					return nil, err
				}
				return completed(out, name, raw), nil
			}, found)
		})
	}
	for i := range r.cfg.Concurrency {
		one.workers = append(one.workers, &worker{
			projection: one, number: first + i, batch: batch, size: batch,
			in: make(chan *inbound, batch), due: make(chan []*inbound, 1), seen: map[string]int{},
		})
	}
	if isLog := r.src.log != nil; isLog || r.log != nil && one.marks && !p.opts.BrokerOnly {
		one.reader = newReader(one, keeps, first+r.cfg.Concurrency)
		p.logged.Store(true)
	} else if r.log != nil && !one.marks {
		r.cfg.Logger.Info("events that are not delivered are not read from the log: the projector has no markers", "projector", p.name)
	}
	return one
}

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

// report logs what happened to a message.
func (p *projection) report(level slog.Level, what string, m *inbound, err error, attempts int) {
	p.runner.report(level, what, err, "projector", p.name, "topic", m.topic, "message_id", m.msg.UUID, "type", m.raw.Type,
		"attempts", attempts)
}
