package projector

import (
	"context"
	"errors"
	"fmt"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector/internal/feed"
	"github.com/kinora-go/kinora/projector/internal/follow"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/plan"
	"github.com/kinora-go/kinora/provider"
)

// erased returns p in a runner, without its type parameter.
func erased[Tx any](r *Runner, u provider.Provider[Tx], p *Projector[Tx]) *model.Projector {
	keeps, rules := u.Keeps(), p.rules(r)
	one := &model.Projector{
		Name: p.name, Version: max(p.opts.Version, 1), Types: p.types, ByType: p.takers(), Batches: map[string]model.Take{}, Rules: rules,
		Tables: p.opts.Tables, Keeps: keeps, Marks: p.opts.Markers && keeps.Markers,
		Creates: p.hasSetup(model.Created), Resets: p.hasSetup(model.Reset),
	}
	if keeps.Markers {
		one.Marked = p.Handlers()
	}
	one.Logged = r.src.log != nil || r.host.Log != nil && one.Marks && !p.opts.BrokerOnly
	byName := map[string]Handler[Tx]{}
	for _, h := range p.handlers {
		name := h.name
		if !h.setup {
			name = p.full(h).Name
		}
		byName[name], one.Emits = h, one.Emits || h.emits
		if h.take != nil {
			one.Batches[name] = h.take
		}
	}
	if len(rules.Categories) == 0 {
		one.Rules.Filter = eventstore.LogFilter{Types: p.Takes()}
	}
	one.Complete()
	one.Announced = func() { p.announced.Store(true) }
	one.Do = func(ctx context.Context, unit provider.Unit, body model.Body) error {
		return u.Do(ctx, unit, func(ctx context.Context, tx Tx, found provider.Found) (provider.Closing, error) {
			return body(ctx, p.calls(r, byName, tx), found)
		})
	}
	return one
}

func (p *Projector[Tx]) rules(r *Runner) model.Rules {
	return model.Rules{
		From: p.opts.From, Markers: p.opts.Markers, BrokerOnly: p.opts.BrokerOnly, Ordered: p.opts.Ordered,
		Alone: p.opts.Parking == ParkMessage, Halts: p.opts.Parking == Halt, SkipUnknown: p.opts.SkipUnknown,
		Segments: p.opts.Segments, OnChange: generation.How(p.opts.RebuildOnChange), Removed: p.removed(),
		Categories: r.src.categories, Decodes: r.cfg.Decode != nil, OnlyLog: r.src.log != nil,
	}
}

// removed returns the full names of Options.Removed.
func (p *Projector[Tx]) removed() (names []string) {
	for _, name := range p.opts.Removed {
		names = append(names, p.name+"/"+name)
	}
	return names
}

// calls returns how a handler is called in a transaction.
func (p *Projector[Tx]) calls(r *Runner, byName map[string]Handler[Tx], tx Tx) model.Call {
	return func(ctx context.Context, name string, m *model.Message, events []any) (out []outbox.Message, err error) {
		if h := byName[name]; events != nil {
			err = h.batch(ctx, tx, events)
		} else {
			out, err = h.run(ctx, tx, p.types, m)
		}
		if err == nil {
			err = ctx.Err() // a handler may have ignored the errors of its writes
		}
		if err != nil || len(out) == 0 || model.ScopeOf(ctx).Replayed {
			return nil, err
		}
		out = model.Completed(out, name, m.Raw)
		if observe := r.host.Observer.Emitting; observe != nil {
			observe(ctx, name, out)
		}
		return out, nil
	}
}

// feederOf returns the feeder of p in a runner.
func feederOf[Tx any](r *Runner, u provider.Provider[Tx], p *Projector[Tx]) (*feed.Feeder, error) {
	if err := p.check(u.Keeps()); err != nil {
		return nil, err
	}
	if err := p.fits(r, u.Keeps()); err != nil {
		return nil, fmt.Errorf("projector %s: %w", p.name, err)
	}
	one := erased(r, u, p)
	if one.Creates && !one.Logged && !r.src.isZero() {
		return nil, fmt.Errorf("projector %s: OnCreate requires a log: give it Markers, and not BrokerOnly, or a runner FromLog", p.name)
	}
	p.unmarked.Store(p.opts.Markers && !one.Marks)
	if one.Logged {
		p.logged.Store(true)
	}
	p.reportWiring(r, one)
	missed := &follow.Missed{Host: r.host, Projector: p.name, Topics: r.src.topics}
	f := &feed.Feeder{
		Host: r.host, Projector: one, Receiver: r.receiver, Crashes: r.crashes, Brakes: &r.brakes, Missed: missed,
		Me: plan.Program{Version: one.Version, OnChange: one.Rules.OnChange, Reads: one.Logged, Creates: one.Creates, Tool: r.src.isZero()},
	}
	f.Init()
	return f, nil
}

// fits returns an error if the options of p do not fit to a runner.
func (p *Projector[Tx]) fits(r *Runner, keeps provider.Keeps) error {
	if err := p.opts.checkSegments(r.src); err != nil {
		return err
	}
	overBroker := r.src.log == nil && !r.src.isZero()
	if p.opts.BrokerOnly && r.src.log != nil {
		return errors.New("options.BrokerOnly is for brokers, and this runner reads FromLog")
	}
	if p.opts.Ordered && overBroker && (r.host.Log == nil || !p.opts.Markers || !keeps.Markers || p.opts.BrokerOnly) {
		return errors.New("options.Ordered requires Markers, a store that keeps them, and a log")
	}
	return nil
}

// reportWiring logs what the options of p mean in a runner.
func (p *Projector[Tx]) reportWiring(r *Runner, one *model.Projector) {
	log := r.host.Logger
	if p.unmarked.Load() {
		log.Debug("markers are a no-op: the store cannot commit them with the read model", "projector", p.name)
	}
	if !one.Logged && r.host.Log != nil && !one.Marks {
		log.Info("events that are not delivered are not read from the log: the projector has no markers", "projector", p.name)
	}
	if overBroker := r.src.log == nil && !r.src.isZero(); overBroker && !p.opts.Markers && !p.opts.RepeatSafe {
		log.Warn("redelivered messages take effect again: the projector has no markers. Set Options.Markers, or Options.RepeatSafe if the handlers may run again",
			"projector", p.name)
	}
}

// checkSegments returns ErrInput if the projector cannot have the segments that it asks for.
func (o *Options) checkSegments(src Source) error {
	if o.Segments < 0 || o.Segments > feed.MaxSegments {
		return fmt.Errorf("%w: options.Segments is %d: must be 0 to %d", ErrInput, o.Segments, feed.MaxSegments)
	}
	if o.Segments > 1 && src.log == nil && !src.isZero() {
		return fmt.Errorf("%w: options.Segments is %d: only a runner FromLog can split a projector", ErrInput, o.Segments)
	}
	return nil
}
