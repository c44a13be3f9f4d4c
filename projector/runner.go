package projector

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/internal/presence"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector/internal/apply"
	"github.com/kinora-go/kinora/projector/internal/deliver"
	"github.com/kinora-go/kinora/projector/internal/feed"
	"github.com/kinora-go/kinora/projector/internal/lease"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/unit"
	"github.com/kinora-go/kinora/provider"
)

// Runner applies the messages of a Source to projectors. Create it with NewRunner.
type Runner struct {
	src      Source
	cfg      RunnerConfig
	host     *model.Host
	receiver *model.Receiver
	crashes  *unit.Crashes
	brakes   apply.Brakes
	all      feed.All
	answers  answers
	presence *presence.Presence
	started  atomic.Bool
	running  chan struct{}
	ended    chan struct{}        // closed once Run has returned
	taking   context.Context      // ends when Run takes no more messages; set before running is closed
	routed   chan *model.Received // messages of Handle whose events are read from the log; nil: there is none; as taking
	kept     bool                 // it keeps the generation that its projector has: a verification
}

// process is what an attempt at a message locks that may crash the process; see unit.Crashes.
var process sync.RWMutex

// NewRunner returns a runner that applies the messages of src to ps, in transactions of db. It
// checks its arguments, and starts nothing. RunnerConfig{} is the default.
//   - db must implement provider.Provider. Combine a store that does not, such as Redis, with one
//     that does: provider.Combine(units, db).
//   - If db cannot commit markers with the read model, Options.Markers is a no-op, which is
//     logged at level debug.
func NewRunner[Tx any](db provider.Units[Tx], src Source, cfg RunnerConfig, ps ...*Projector[Tx]) (*Runner, error) {
	if err := src.check(); err != nil {
		return nil, fmt.Errorf("runner: %w", err)
	}
	return newRunner(db, src, cfg, ps...)
}

// newRunner is NewRunner without the check of src. A runner of the zero Source applies due parked
// messages, and ends.
func newRunner[Tx any](u provider.Units[Tx], src Source, cfg RunnerConfig, ps ...*Projector[Tx]) (_ *Runner, err error) {
	defer check.Wrap(&err, "runner")
	if u == nil || len(ps) == 0 {
		return nil, errors.New("store and at least one projector are required")
	}
	r := &Runner{src: src, cfg: cfg, running: make(chan struct{}), ended: make(chan struct{})}
	if err := r.cfg.validate(); err != nil {
		return nil, err
	}
	whole, ok := any(u).(provider.Provider[Tx])
	if !ok {
		return nil, errors.New("the store keeps no parked messages: combine it with another store, provider.Combine(units, db)")
	}
	r.share(whole, provider.LogOf(u))
	r.presence = presence.New(u, r.cfg.Clock, func(err error) { r.host.Report(slog.LevelWarn, "runner not reported", err) }, r.reportSelf)
	r.answers = answers{host: r.host, store: provider.OperationsOf(u), by: map[string]operator{}}
	for _, p := range ps {
		if p == nil {
			return nil, errors.New("a projector is nil: leave it out")
		}
		if r.feeder(p.name) != nil {
			return nil, fmt.Errorf("two projectors have the name %s: use each name once", p.name)
		}
		f, err := feederOf(r, whole, p)
		if err != nil {
			return nil, err
		}
		r.all.Feeders = append(r.all.Feeders, f)
		r.answers.by[p.name] = operatorOf(r, u, p)
	}
	if err := r.checkUntrusted(); err != nil {
		return nil, err
	}
	return r, nil
}

// share makes what the parts of the runner share. own is the log of its store, or nil.
func (r *Runner) share(store model.Store, own provider.Log) {
	h := &model.Host{
		Config: r.cfg.model(), ID: uuid.NewString(), Store: store, Follow: pauses.NewSignal(), Scan: pauses.NewSignal(), Halt: r.halt,
		Paused: func(projector string) bool { return r.presence.IsPaused(provider.PauseProjector, projector) },
	}
	if registry := provider.OperationsOf(store); registry != nil {
		h.Others = registry.Services
	}
	h.Leases = lease.Keeper{Leases: store, Holder: h.ID, Length: h.Lease, Timeout: h.Timeout, Clock: h.Clock}
	events := cmp.Or(r.src.log, r.cfg.Log, own)
	if !r.src.isZero() {
		h.Log = events
	}
	r.host, r.all.Host = h, h
	r.receiver = &model.Receiver{Host: h, Decode: model.Decode(r.cfg.Decode), Untrusted: r.cfg.Untrusted, Events: events}
	r.crashes = &unit.Crashes{Host: h, Process: &process}
}

// checkUntrusted returns an error if the runner cannot take its messages from the log.
func (r *Runner) checkUntrusted() error {
	switch {
	case !r.cfg.Untrusted || r.src.log != nil:
		return nil
	case r.receiver.Events == nil:
		return errors.New("option Untrusted requires a log: set RunnerConfig.Log")
	case r.cfg.Decode != nil:
		return errors.New("option Untrusted takes events of the log only: give the topics that need Decode to another runner")
	}
	for _, f := range r.all.Feeders {
		if f.Projector.Rules.Halts {
			return fmt.Errorf("projector %s: with Untrusted, every program that may publish could halt it: use ParkKey", f.Projector.Name)
		}
	}
	return nil
}

func (r *Runner) feeder(projector string) *feed.Feeder {
	i := slices.IndexFunc(r.all.Feeders, func(f *feed.Feeder) bool { return f.Projector.Name == projector })
	if i < 0 {
		return nil
	}
	return r.all.Feeders[i]
}

func (r *Runner) reportSelf() provider.ServiceReport {
	report := provider.ServiceReport{ID: r.host.ID, Kind: "runner", Holder: r.host.ID, Version: r.cfg.Version, Outages: r.brakes.List()}
	for _, f := range r.all.Feeders {
		report.Can = append(report.Can, provider.Capability{Projector: f.Projector.Name, Version: f.Projector.Version, Has: f.Projector.Has})
	}
	return report
}

// Wiring says what r reads and takes. kinora.Start calls it.
func (r *Runner) Wiring() provider.RunnerWiring {
	w := provider.RunnerWiring{
		Log: r.host.Log, FromLog: r.src.log != nil, Topics: r.src.topics, Decodes: r.cfg.Decode != nil, Logger: r.cfg.Logger,
	}
	if r.src.sub != nil {
		w.Subscriber = r.src.sub
	}
	for _, f := range r.all.Feeders {
		w.Emits = w.Emits || f.Projector.Emits
		w.Takes = slices.AppendSeq(w.Takes, maps.Keys(f.Projector.ByType))
	}
	slices.Sort(w.Takes)
	w.Takes = slices.Compact(w.Takes)
	return w
}

// Running returns a channel that is closed once Run has subscribed to every topic.
func (r *Runner) Running() <-chan struct{} { return r.running }

// Late returns the runner's loops, by name, and for how long each has not moved although it should
// have: zero if it moves. A handler that has not returned after the end of its context is one of them
// until it returns. A Run that has returned an error counts from its end. See kinora.Healthy.
func (r *Runner) Late() map[string]time.Duration { return r.host.Loops.Late(r.cfg.Clock()) }

// Run applies messages until ctx ends. Then it takes no more, finishes and acks the messages in
// flight, and returns nil.
//   - outbox.ErrDrain: that took longer than RunnerConfig.Drain. Units in flight are canceled,
//     rolled back, and not acked.
//   - ErrHalted: a projector with Halt has a message that is stuck or that this program is unable to apply.
//   - ErrLogChanged: the log is not the one of a checkpoint, or no longer has its event.
//   - It also returns an error if the store is not ready, for example not migrated, if a
//     subscription fails or ends by itself, and on a second call.
func (r *Runner) Run(ctx context.Context) (err error) {
	if r.started.Swap(true) {
		return errors.New("runner: Run called twice: create a new runner")
	}
	defer close(r.ended)
	defer func() { r.host.Loops.End(r.cfg.Clock(), "runner", err) }()
	err = r.begin(ctx)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return fmt.Errorf("runner: %w", err)
	}
	// Subscriptions, and with them the contexts of messages, end after the messages in flight.
	subscribed, unsubscribe := context.WithCancel(context.WithoutCancel(ctx))
	defer unsubscribe()
	hard, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	work, end := context.WithCancelCause(ctx)
	defer end(nil)
	r.host.End = func(err error) { end(fmt.Errorf("runner: %w", err)) }
	// Until it is subscribed, the end of ctx ends Run at once, also if the broker does not reply.
	keepOpen := context.AfterFunc(ctx, unsubscribe)
	subs, owned, err := r.src.open(subscribed, r.all.Feeders)
	keepOpen()
	var all sync.WaitGroup
	alive := func(bool) {}
	if err != nil {
		r.host.End(err)
	} else {
		alive = r.crashes.StayAlive(work)
		r.start(work, hard, subs, &all)
		r.taking = work
		close(r.running)
	}
	<-work.Done()
	err = r.drain(hard, stop, &all, func() error {
		alive(hard.Err() == nil)
		return closeAll(owned)
	})
	if cause := context.Cause(work); ctx.Err() == nil && !errors.Is(cause, feed.ErrFinished) {
		err = errors.Join(cause, err)
	}
	return err
}

func (r *Runner) begin(ctx context.Context) error {
	if c, ok := r.host.Store.(provider.ReadyChecker); ok {
		if err := c.ReadyFor(ctx, provider.RunnerService); err != nil {
			return err
		}
	}
	if !r.kept {
		if err := r.all.Choose(ctx); err != nil {
			return err
		}
		if !r.src.isZero() {
			r.presence.Follow(ctx)
			r.reportLacking(ctx)
		}
	}
	r.reportRenamed(ctx)
	if err := r.halted(ctx); err != nil {
		return err
	}
	if c, ok := r.host.Log.(provider.ReadyChecker); ok {
		if err := c.ReadyFor(ctx, provider.AnyService); err != nil {
			return err
		}
	}
	return r.all.Begin(ctx)
}

// drain waits for the goroutines, and then calls last. If that takes longer than Drain, it stops them.
func (r *Runner) drain(hard context.Context, stop func(), all *sync.WaitGroup, last func() error) error {
	done := make(chan error, 1)
	go func() {
		all.Wait()
		done <- last()
	}()
	select {
	case err := <-done:
		return err
	case <-time.After(r.cfg.Drain):
		stop()
		return fmt.Errorf("runner: %w: Drain is %s: raise it, or find the handler that does not return",
			outbox.ErrDrain, r.cfg.Drain)
	}
}

func (r *Runner) start(work, hard context.Context, subs []subscription, all *sync.WaitGroup) {
	for _, f := range r.all.Feeders {
		f.Start(work, hard, all)
	}
	for _, s := range subs {
		all.Go(func() {
			if err := s.read(work, r); err != nil {
				r.host.End(err)
			}
		})
	}
	if r.src.router && r.cfg.Untrusted {
		in, end := deliver.TakeAhead(work, r.receiver, poolsOf(r.all.Feeders))
		r.routed = in
		all.Go(func() { <-work.Done(); end() })
	}
	if r.src.isZero() {
		all.Go(func() { r.host.End(r.all.Finish(work)) })
		return
	}
	all.Go(func() { r.poll(work) })
	all.Go(func() { r.all.Follow(work, hard) })
	all.Go(func() { r.all.Maintain(work, r.cfg.Markers.Window) })
	if !r.kept {
		all.Go(func() { r.presence.Run(work) })
		all.Go(func() { r.answers.take(work, hard) })
	}
}

// pollEvery is the longest interval between scans of due parked messages.
const pollEvery = time.Second

// poll dispatches due parked messages to their workers until ctx ends.
func (r *Runner) poll(ctx context.Context) {
	loop := r.host.Loops.Add("runner")
	for ctx.Err() == nil {
		loop.Within(r.cfg.Clock(), unit.Sum(r.cfg.Timeout, pollEvery))
		if _, err := r.all.DispatchDue(ctx); err != nil && ctx.Err() == nil {
			r.host.Report(slog.LevelWarn, "parked messages not scanned", err)
		}
		if err := r.halted(ctx); errors.Is(err, ErrHalted) {
			r.host.End(err)
		}
		select {
		case <-ctx.Done():
		case <-r.host.Scan:
			model.Wait(ctx, model.Soon) // more messages may become due at the same time
		case <-time.After(pollEvery):
		}
	}
}

// reportRenamed warns of markers of handlers that a projector does not have.
func (r *Runner) reportRenamed(ctx context.Context) {
	k, ok := r.host.Store.(provider.MarkerMaintainer)
	if !ok || r.src.isZero() {
		return
	}
	stored, err := k.MarkedHandlers(ctx)
	if err != nil {
		r.host.Report(slog.LevelWarn, "handlers with markers not listed", err)
		return
	}
	for _, f := range r.all.Feeders {
		p := f.Projector
		for _, handler := range stored {
			if p.Marks && strings.HasPrefix(handler, p.Name+"/") && !slices.Contains(p.Marked, handler) {
				r.cfg.Logger.Warn("the projector has no handler of this name, but markers of it. If it was renamed, declare the name with Was: "+
					"otherwise redelivered messages take effect again. If it was removed, and no newer program has it, call marker.Drop", "projector", p.Name, "handler", handler)
			}
		}
	}
}

// reportLacking warns of handlers of a read model, and of schema versions that it has seen, that this program does not have: it
// may be older than the one that ran before.
func (r *Runner) reportLacking(ctx context.Context) {
	for _, f := range r.all.Feeders {
		g := f.Current()
		if g.Generation == 0 { // it feeds none
			continue
		}
		lacks, err := f.Maker.LacksOf(ctx, g.Build, g.Seen)
		if err != nil {
			r.host.Report(slog.LevelWarn, "what the program lacks is not known", err, "projector", f.Projector.Name)
		} else if len(lacks) > 0 {
			r.cfg.Logger.Warn("the read model has what this program does not have: it may be older than the program before. "+
				"Such messages wait for a program that has it", "projector", f.Projector.Name, "generation", g.Generation, "lacks", lacks)
		}
	}
}

// halt ends the runner, unless an operator has already skipped the message that is stuck.
func (r *Runner) halt(ctx context.Context) {
	if err := r.halted(ctx); err != nil {
		r.host.End(err)
	}
}

// halted returns ErrHalted if a message of a projector with Halt is stuck, or this program is unable to apply it.
func (r *Runner) halted(ctx context.Context) error {
	for _, f := range r.all.Feeders {
		b := f.Current().Build
		if !f.Projector.Rules.Halts || b.Generation == 0 {
			continue
		}
		rows, err := r.host.Store.Parked(ctx, ParkedFilter{Projector: b.Projector, Generation: b.Generation, States: []ParkedState{StateStuck}, Limit: 1})
		if err != nil {
			return err
		}
		if len(rows) > 0 {
			return fmt.Errorf("%w: %s", ErrHalted, b.Projector)
		}
		needs, err := r.host.Store.Needs(ctx, []provider.Need{{Build: b}})
		if err != nil {
			return err
		}
		for _, n := range needs {
			if lacks := f.Projector.Lacks(n.Needs); lacks != nil {
				return fmt.Errorf("%w: %s: %w", ErrHalted, b.Projector, lacks)
			}
		}
	}
	return nil
}
