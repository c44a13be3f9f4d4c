package projector

import (
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
	"github.com/kinora-go/kinora/internal/presence"
	"github.com/kinora-go/kinora/internal/pulse"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Runner applies the messages of a Source to projectors. Create it with NewRunner.
type Runner struct {
	src         Source
	projections []*projection // in the given order
	byName      map[string]*projection
	store       storage
	log         provider.Log // of the events; nil: there is none
	events      provider.Log // in which untrusted.go looks; nil: there is none
	logID       atomic.Pointer[provider.LogID]
	cfg         RunnerConfig
	id          string
	process     *sync.RWMutex         // see careful.go; all runners of this process share it
	watch       atomic.Pointer[watch] // nil: the store has not answered yet
	scanSoon    chan struct{}         // requests a scan of parked messages that are due
	started     atomic.Bool
	running     chan struct{}
	ended       chan struct{}           // closed once Run has returned
	taking      context.Context         // ends when Run takes no more messages; set before running is closed
	end         context.CancelCauseFunc // ends Run with an error
	routed      chan *received          // messages of Handle for takeAhead; nil: there is none; as taking
	workers     atomic.Int64            // number of workers that were created
	followSoon  chan struct{}           // requests a look at the generations
	others      sync.Mutex              // protects projection.others
	assigned    bool                    // it keeps the generation that its projector has
	undecoded   atomic.Bool             // a parked message requires a Decoder
	reached     func()                  // called when the reader of a scratch generation has caught up
	presence    *presence.Presence
	operations  provider.Operations // nil: the store has none
	loops       pulse.Loops
	brakes      brakes
	heads       sync.Mutex // protects the next two: see head
	headAt      int64
	headRead    time.Time
}

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
func newRunner[Tx any](u provider.Units[Tx], src Source, cfg RunnerConfig, ps ...*Projector[Tx]) (*Runner, error) {
	r := &Runner{src: src, cfg: cfg, id: uuid.NewString(), process: &process, byName: map[string]*projection{},
		scanSoon: make(chan struct{}, 1), followSoon: make(chan struct{}, 1), running: make(chan struct{}), ended: make(chan struct{})}
	if u == nil || len(ps) == 0 {
		return nil, errors.New("runner: the store is nil, or there are no projectors: give both")
	}
	if err := r.cfg.validate(); err != nil {
		return nil, fmt.Errorf("runner: %w", err)
	}
	whole, ok := any(u).(provider.Provider[Tx])
	if !ok {
		return nil, errors.New("runner: the store keeps no parked messages: combine it with another store, provider.Combine(units, db)")
	}
	r.store, r.events = whole, src.log
	if r.events == nil {
		if r.events = r.cfg.Log; r.events == nil {
			r.events = provider.LogOf(u)
		}
	}
	if !src.isZero() {
		r.log = r.events
	}
	for _, p := range ps {
		if p == nil {
			return nil, errors.New("runner: a projector is nil: leave it out")
		}
		if err := p.check(u.Keeps()); err != nil {
			return nil, fmt.Errorf("runner: %w", err)
		}
		if err := p.opts.checkSegments(src); err != nil {
			return nil, fmt.Errorf("runner: projector %s: %w", p.name, err)
		}
		if p.opts.BrokerOnly && src.log != nil {
			return nil, fmt.Errorf("runner: projector %s: options.BrokerOnly is for brokers, and this runner reads FromLog", p.name)
		}
		if p.opts.Ordered && src.log == nil && (r.log == nil || !p.opts.Markers || !u.Keeps().Markers || p.opts.BrokerOnly) && !src.isZero() {
			return nil, fmt.Errorf("runner: projector %s: options.Ordered requires Markers, a store that keeps them, and a log", p.name)
		}
		if r.byName[p.name] != nil {
			return nil, fmt.Errorf("runner: two projectors have the name %s: use each name once", p.name)
		}
		r.byName[p.name] = newProjection(r, whole, p)
		if one := r.byName[p.name]; one.creates && one.reader == nil && !src.isZero() {
			return nil, fmt.Errorf("runner: projector %s: OnCreate requires a log: give it Markers, and not BrokerOnly, or a runner FromLog", p.name)
		}
		r.projections = append(r.projections, r.byName[p.name])
		answer(r, u, p)
	}
	if err := r.checkUntrusted(); err != nil {
		return nil, fmt.Errorf("runner: %w", err)
	}
	r.operations = provider.OperationsOf(u)
	r.presence = presence.New(u, r.cfg.Clock, func(err error) { r.report(slog.LevelWarn, "runner not reported", err) }, r.reportSelf)
	return r, nil
}

// reportSelf returns what the runner reports about itself.
func (r *Runner) reportSelf() provider.ServiceReport {
	report := provider.ServiceReport{ID: r.id, Kind: "runner", Holder: r.id, Version: r.cfg.Version, Outages: r.brakes.list()}
	for _, p := range r.projections {
		report.Projectors = append(report.Projectors, p.name)
	}
	return report
}

func (r *Runner) nextWorker() int { return int(r.workers.Add(1)) - 1 }

// report logs a message with the class and the code of an error. It logs the error's text only with
// RunnerConfig.LogErrors.
func (r *Runner) report(level slog.Level, what string, err error, attrs ...any) {
	attrs = append(attrs, "class", provider.ClassOf(err).String(), "code", provider.CodeOf(err))
	if r.cfg.LogErrors {
		attrs = append(attrs, "err", err)
	}
	r.cfg.Logger.Log(context.Background(), level, what, attrs...)
}

// Wiring says what r reads and takes. kinora.Start calls it.
func (r *Runner) Wiring() provider.RunnerWiring {
	w := provider.RunnerWiring{
		Log: r.log, FromLog: r.src.log != nil, Topics: r.src.topics, Decodes: r.cfg.Decode != nil, Logger: r.cfg.Logger,
	}
	if r.src.sub != nil {
		w.Subscriber = r.src.sub
	}
	for _, p := range r.projections {
		w.Emits = w.Emits || p.emits
		w.Takes = slices.AppendSeq(w.Takes, maps.Keys(p.byType))
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
func (r *Runner) Late() map[string]time.Duration { return r.loops.Late(r.cfg.Clock()) }

// Run applies messages until ctx ends. Then it takes no more, finishes and acks the messages in
// flight, and returns nil.
//   - outbox.ErrDrain: that took longer than RunnerConfig.Drain. Units in flight are canceled,
//     rolled back, and not acked.
//   - ErrHalted: a projector with Halt has a stuck message, at the start or later.
//   - ErrLogChanged: the log is not the one of a checkpoint, or no longer has its event.
//   - It also returns an error if the store is not ready, for example not migrated, if a
//     subscription fails or ends by itself, and on a second call.
func (r *Runner) Run(ctx context.Context) (err error) {
	if r.started.Swap(true) {
		return errors.New("runner: Run called twice: create a new runner")
	}
	defer close(r.ended)
	defer func() { r.loops.End(r.cfg.Clock(), "runner", err) }()
	if c, ok := r.store.(provider.ReadyChecker); ok {
		err = c.ReadyFor(ctx, provider.RunnerService)
	}
	if err == nil {
		err = r.choose(ctx)
	}
	if err == nil && !r.src.isZero() && !r.assigned {
		r.presence.Follow(ctx)
	}
	if err == nil {
		r.reportRenamed(ctx)
		err = r.halted(ctx)
	}
	if err == nil {
		err = r.beginReading(ctx)
	}
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
	r.end = func(err error) { end(fmt.Errorf("runner: %w", err)) }
	// Until it is subscribed, the end of ctx ends Run at once, also if the broker does not reply.
	keepOpen := context.AfterFunc(ctx, unsubscribe)
	subs, owned, err := r.src.open(subscribed, r.projections)
	keepOpen()
	var all sync.WaitGroup
	alive := func(bool) {}
	if err != nil {
		r.end(err)
	} else {
		alive = r.stayAlive(work)
		r.start(work, hard, subs, &all)
		r.taking = work
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
		err = fmt.Errorf("runner: %w: Drain is %s: raise it, or find the handler that does not return",
			outbox.ErrDrain, r.cfg.Drain)
	}
	if cause := context.Cause(work); ctx.Err() == nil && !errors.Is(cause, errFinished) {
		err = errors.Join(cause, err)
	}
	return err
}

// start starts the goroutines of the runner.
func (r *Runner) start(work, hard context.Context, subs []subscription, all *sync.WaitGroup) {
	for _, p := range r.projections {
		p.start(work, hard, all)
	}
	for _, s := range subs {
		all.Go(func() {
			if err := s.read(work, r); err != nil {
				r.end(err)
			}
		})
	}
	if r.src.router && r.cfg.Untrusted {
		in, end := r.takeAhead(work, r.projections)
		r.routed = in
		all.Go(func() { <-work.Done(); end() })
	}
	if r.src.isZero() {
		all.Go(func() { r.end(r.finish(work)) })
		return
	}
	all.Go(func() { r.poll(work) })
	all.Go(func() { r.followGenerations(work, hard) })
	all.Go(func() { r.maintain(work) })
	if !r.assigned { // not a part of a verification
		all.Go(func() { r.presence.Run(work) })
		all.Go(func() { r.takeRequests(work, hard) })
	}
}

// start starts the workers and the reader.
func (p *projection) start(work, hard context.Context, all *sync.WaitGroup) {
	for _, w := range p.workers {
		all.Go(func() { w.run(work, hard) })
	}
	if p.reader != nil {
		all.Go(func() { p.reader.run(work, hard) })
		if p.opts.Segments > 1 && !p.runner.assigned {
			all.Go(func() { p.share(work, hard) })
		}
	}
}

// reportRenamed warns of markers of handlers that a projector does not have.
func (r *Runner) reportRenamed(ctx context.Context) {
	k, ok := r.store.(provider.MarkerMaintainer)
	if !ok || r.src.isZero() {
		return
	}
	stored, err := k.MarkedHandlers(ctx)
	if err != nil {
		r.report(slog.LevelWarn, "handlers with markers not listed", err)
		return
	}
	for _, p := range r.projections {
		for _, handler := range stored {
			if p.marks && strings.HasPrefix(handler, p.name+"/") && !slices.Contains(p.marked, handler) {
				r.cfg.Logger.Warn("the projector has no handler of this name, but markers of it. If it was renamed, declare the name with Was: "+
					"otherwise redelivered messages take effect again. If it was removed, call marker.Drop", "projector", p.name, "handler", handler)
			}
		}
	}
}

// halted returns ErrHalted if a message of a projector with Halt is stuck.
func (r *Runner) halted(ctx context.Context) error {
	for _, p := range r.projections {
		if p.opts.Parking != Halt || p.build().Generation == 0 {
			continue
		}
		rows, err := r.store.Parked(ctx, ParkedFilter{Projector: p.name, Generation: p.build().Generation, States: []ParkedState{StateStuck}, Limit: 1})
		if err != nil {
			return err
		}
		if len(rows) > 0 {
			return fmt.Errorf("%w: %s", ErrHalted, p.name)
		}
	}
	return nil
}
