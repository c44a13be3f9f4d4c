package task

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/errclass"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/internal/presence"
	"github.com/kinora-go/kinora/internal/pulse"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Worker claims tasks and runs their handlers. Any number of workers may run on one store. Create it
// with NewWorker.
type Worker struct {
	started atomic.Bool
	busy    atomic.Bool // Run or RunOnce is in progress
	running chan struct{}
	run     func(ctx context.Context, running chan<- struct{}) error
	runOnce func(ctx context.Context) (int, error)
	late    func() map[string]time.Duration
}

// NewWorker returns a worker of the tasks and groups of these kinds. *postgres.DB is a
// provider.TaskProvider[pgx.Tx], *sqlite.DB one of *sql.Tx, *memory.DB one of *memory.Model. It
// checks its arguments, and starts nothing.
//
// A worker claims only tasks of its kinds, so an old and a new program may run on one store: a task of another kind stays
// as it is until a worker that defines the kind claims it. Once a minute a worker logs which kinds of its domains, the parts
// before the "/", have tasks that are due and are defined by no worker that is alive (provider.Registry).
//
// The kind of a group is required only for its last task. A worker that does not define it runs the task, and releases it
// for one that does: with the result of a handler of Define, which does not run again. So define the kind of a group in
// each service that defines the kinds of its tasks.
func NewWorker[Tx any](db provider.TaskProvider[Tx], cfg WorkerConfig, definitions ...Kind[Tx]) (*Worker, error) {
	e := &engine[Tx]{
		db: db, cfg: cfg, changes: make(chan *pendingChange, 1024), holds: map[string]*held{},
		freed: pauses.NewSignal(), soon: pauses.NewSignal(), turn: make(chan struct{}, 1),
		passed: map[string]time.Time{}, lacking: map[string]time.Time{},
		kinds: kinds[Tx]{
			handlers: map[string]handler[Tx]{},
			groups:   map[string]func(ctx context.Context, tx Tx, g *provider.TaskGroup) ([]outbox.Message, error){},
		},
	}
	errs := []error{e.cfg.validate()}
	if db == nil {
		errs = append(errs, errors.New("the database is nil: give one"))
	}
	for _, d := range definitions {
		if d == nil {
			errs = append(errs, errors.New("a definition is nil: leave it out"))
			continue
		}
		errs = append(errs, d.define(&e.kinds))
	}
	if len(e.kinds.handlers) == 0 {
		errs = append(errs, errors.New("there are no kinds of tasks: give at least one definition"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("worker: %w", err)
	}
	e.names = slices.Sorted(maps.Keys(e.kinds.handlers))
	e.said = now()
	e.log = e.cfg.Logger.With("worker", e.cfg.Holder)
	return &Worker{running: make(chan struct{}), run: e.run, runOnce: e.runOnce, late: func() map[string]time.Duration { return e.loops.Late(now()) }}, nil
}

// Running returns a channel that is closed once Run has checked the store and started.
func (w *Worker) Running() <-chan struct{} { return w.running }

// Late returns the worker's loops, by name, and for how long each has not moved although it should
// have: zero if it moves. A handler that has not returned after the end of its context is one of them
// until it returns. A Run that has returned an error counts from its end. See kinora.Healthy.
func (w *Worker) Late() map[string]time.Duration { return w.late() }

// Run works until ctx ends. Then it claims no more, begins no new step, and returns nil after the
// handlers have returned. Tasks that are not finished are released without counting an attempt.
//   - outbox.ErrDrain: that took longer than WorkerConfig.Drain. Other workers take over the tasks
//     when their leases end.
//   - It returns an error at once if the store is not ready, for example not migrated, and on a
//     second call.
func (w *Worker) Run(ctx context.Context) error {
	if w.started.Swap(true) {
		return errors.New("worker: Run called twice: create a new worker")
	}
	if !w.busy.CompareAndSwap(false, true) {
		return errBusy
	}
	defer w.busy.Store(false)
	return w.run(ctx, w.running)
}

var errBusy = errors.New("worker: it is running: wait until Run or RunOnce has returned, or create another worker")

// RunOnce claims the tasks that are due, at most WorkerConfig.Concurrency, runs them, and returns their
// number. It is for tests and scheduled jobs, and may be called again.
func (w *Worker) RunOnce(ctx context.Context) (int, error) {
	if !w.busy.CompareAndSwap(false, true) {
		return 0, errBusy
	}
	defer w.busy.Store(false)
	return w.runOnce(ctx)
}

// engine is a worker with the type of its transactions.
type engine[Tx any] struct {
	db      provider.TaskProvider[Tx]
	cfg     WorkerConfig
	kinds   kinds[Tx]
	names   []string // of its kinds of tasks
	log     *slog.Logger
	changes chan *pendingChange
	repeats sync.WaitGroup // changes that continue alone

	hard     context.Context // ends when Run returns; for statements of the database
	work     context.Context // ends before that; for handlers
	stopping atomic.Bool     // no new step may begin

	freed, soon pauses.Signal // a task has ended; a task becomes due
	turn        chan struct{} // of capacity 1: a unit that conflicted runs again

	mu      sync.Mutex
	holds   map[string]*held // by the id of the task; the last one
	active  int              // tasks that were claimed and have not been handled
	ending  int              // those of them whose ends are being recorded
	suspect suspects
	passed  map[string]time.Time // kinds that are left to other workers until then
	lacking map[string]time.Time // kinds of groups that nobody defines, which were met since then and not logged

	said, deleted time.Time // when maintenance did so

	reached atomic.Int64 // when the store last replied
	live    atomic.Int64 // handlers and sinks that have not returned
	loops   pulse.Loops
}

type held struct {
	task     Task // as it was claimed
	lose     context.CancelCauseFunc
	attempts atomic.Int64 // counted since its last progress
	until    atomic.Int64 // end of the lease on this process's clock, not later than in the store
	lease    time.Duration
	misused  atomic.Bool
	ending   bool          // under engine.mu: its end is being recorded
	before   *held         // an earlier claim whose lease ended, by this worker
	done     chan struct{} // closed when its handler has ended
}

// renewed extends the lease from the moment before a claim or a change was sent. Renewals do not: they
// skip rows that are locked.
func (h *held) renewed(began time.Time) { h.until.Store(began.Add(h.lease).UnixNano()) }

func (h *held) isOver() bool { return now().UnixNano() >= h.until.Load() }

// start prepares a run or a call of RunOnce. stop ends it, and interrupt ends the contexts of the
// handlers.
func (e *engine[Tx]) start(ctx context.Context) (stop func(), interrupt context.CancelCauseFunc) {
	hard, end := context.WithCancel(context.WithoutCancel(ctx))
	work, endWork := context.WithCancelCause(hard)
	e.hard, e.work = hard, work
	e.stopping.Store(false)
	var all sync.WaitGroup
	all.Go(e.flush)
	all.Go(e.heartbeat)
	return func() {
		endWork(errStopping)
		end()
		all.Wait()
		e.repeats.Wait()
	}, endWork
}

func (e *engine[Tx]) ready(ctx context.Context) error {
	c, ok := e.db.(provider.ReadyChecker)
	if !ok {
		return nil
	}
	if err := c.ReadyFor(ctx, provider.WorkerService); err != nil && ctx.Err() == nil {
		return fmt.Errorf("worker: %w", err)
	}
	return nil
}

func (e *engine[Tx]) runOnce(ctx context.Context) (int, error) {
	if err := e.ready(ctx); err != nil {
		return 0, err
	}
	stop, interrupt := e.start(ctx)
	defer stop()
	e.maintainOnce(ctx)
	tasks, err := e.claim(ctx, e.cfg.Concurrency, false)
	if err == nil && len(tasks) == 0 {
		tasks, err = e.claim(ctx, 1, true)
	}
	var handlers sync.WaitGroup
	for _, h := range tasks {
		handlers.Go(func() { e.handle(h) })
	}
	done := e.ended(handlers.Wait)
	select {
	case <-done:
		return len(tasks), err
	case <-ctx.Done():
		return len(tasks), errors.Join(err, e.drain(interrupt, done))
	}
}

func (e *engine[Tx]) run(ctx context.Context, running chan<- struct{}) (err error) {
	if err := e.ready(ctx); err != nil {
		return err
	}
	defer func() { e.loops.End(now(), "worker", err) }()
	stop, interrupt := e.start(ctx)
	defer stop()
	var handlers, maintenance sync.WaitGroup
	maintenance.Go(func() {
		e.reportLacking(ctx)
		e.maintain(ctx)
	})
	maintenance.Go(func() {
		presence.New(e.db, now, func(err error) { e.log.Warn("worker not reported", "class", errclass.Of(err)) },
			e.reportSelf).Run(ctx)
	})
	close(running)
	e.loop(ctx, &handlers)
	return e.drain(interrupt, e.ended(handlers.Wait, maintenance.Wait))
}

// ended returns a channel that is closed when all functions have returned.
func (e *engine[Tx]) ended(wait ...func()) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, w := range wait {
			w()
		}
	}()
	return done
}

// drain waits for the handlers. After three quarters of Drain it ends their contexts, and their tasks are
// released.
func (e *engine[Tx]) drain(interrupt context.CancelCauseFunc, done <-chan struct{}) error {
	e.stopping.Store(true)
	soon := time.AfterFunc(e.cfg.Drain*3/4, func() { interrupt(errStopping) })
	defer soon.Stop()
	late := time.NewTimer(e.cfg.Drain)
	defer late.Stop()
	select {
	case <-done:
		if e.live.Load() == 0 {
			return nil
		}
	case <-late.C:
	}
	return fmt.Errorf("worker: %w: Drain is %s: raise it, or find the handler that does not return", outbox.ErrDrain, e.cfg.Drain)
}

const (
	pauseMin = 5 * time.Millisecond   // the first pause of an idle worker; it doubles
	gather   = 300 * time.Microsecond // one claim for handlers that return at about the same time
	retryMin = 50 * time.Millisecond
	retryMax = 5 * time.Second
)

// loop claims tasks and starts their handlers until ctx ends. It claims no more than can run: a
// task that waited in this process would use up its lease.
func (e *engine[Tx]) loop(ctx context.Context, handlers *sync.WaitGroup) {
	pause, retry := pauses.Doubling{First: pauseMin, Longest: e.cfg.Poll}, pauses.Doubling{First: retryMin, Longest: retryMax}
	next := false // the last suspect task may not have been the only one
	waker, _ := e.db.(provider.TaskWaker)
	loop := e.loops.Add("worker")
	for ctx.Err() == nil {
		loop.Within(now(), e.cfg.Poll+claimLimit)
		running := e.running()
		var due <-chan struct{}
		if waker != nil { // requested before the claim, so that no task is missed
			due = waker.TasksDue()
		}
		free, alone := e.free(), e.suspectFirst() && !next
		var tasks []*held
		var err error
		switch {
		case alone && running == 0:
			tasks, err = e.claim(ctx, 1, true)
			e.suspectTaken()
			next = len(tasks) > 0
		case free > 0 && !alone:
			tasks, err = e.claim(ctx, free, false)
			if next { // others have had their turn
				next = false
				e.suspectFound()
			}
		}
		for _, t := range tasks {
			handlers.Go(func() {
				defer e.freed.Send()
				e.handle(t)
			})
		}
		if err != nil && ctx.Err() == nil {
			d := retry.Next()
			e.log.Warn("tasks not claimed", "class", errclass.Of(err), "again_in", d)
			pauses.Wait(ctx, d)
			continue
		}
		retry.Reset()
		if alone && running == 0 {
			for e.running() > 0 && ctx.Err() == nil { // it runs alone
				loop.Within(now(), e.cfg.Poll+claimLimit)
				pauses.Wait(ctx, e.cfg.Poll, e.freed)
			}
			continue
		}
		if len(tasks) > 0 {
			pause.Reset()
		}
		if len(tasks) >= free || alone { // full
			pauses.Wait(ctx, e.cfg.Poll, e.freed)
			pauses.Wait(ctx, gather)
			continue
		}
		pauses.Wait(ctx, pause.Next(), due, e.soon)
	}
}

func (e *engine[Tx]) running() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.active
}

// free returns the number of tasks that may be claimed now. Other tasks run while the ends of done
// ones are recorded, at most as many.
func (e *engine[Tx]) free() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return min(e.cfg.Concurrency-(e.active-e.ending), 2*e.cfg.Concurrency-e.active)
}

// recording records whether the handler of a task has returned and the end of the task is being
// recorded.
func (e *engine[Tx]) recording(h *held, is bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case is == h.ending:
	case is:
		e.ending++
		e.freed.Send()
	default:
		e.ending--
	}
	h.ending = is
}

// claimLimit is the limit of one claim. A claim in progress at the end of ctx may finish, because
// its tasks would be unknown otherwise.
const claimLimit = 30 * time.Second

func (e *engine[Tx]) claim(ctx context.Context, limit int, alone bool) ([]*held, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	limited, cancel := context.WithTimeout(e.hard, claimLimit)
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(e.cfg.Drain/2, cancel) })()
	began := now()
	tasks, err := provider.ClaimTasks(limited, e.db, e.query(alone), claim.Terms{Holder: e.cfg.Holder, Lease: e.cfg.Lease, Limit: limit})
	if observe := e.cfg.Observer.Claimed; observe != nil {
		observe(tasks, now().Sub(began), err)
	}
	e.replied(err)
	e.mu.Lock()
	defer e.mu.Unlock()
	holds := make([]*held, len(tasks))
	for i, t := range tasks {
		h := &held{task: t, lease: e.cfg.Lease, lose: func(error) {}, before: e.holds[t.ID], done: make(chan struct{})}
		h.attempts.Store(int64(t.Attempts))
		h.renewed(began)
		if h.before != nil {
			h.before.lose(errLost)
		}
		holds[i], e.holds[t.ID] = h, h
	}
	e.active += len(holds)
	return holds, err
}

// query selects the tasks that this worker claims.
func (e *engine[Tx]) query(alone bool) provider.TaskQuery {
	e.mu.Lock()
	defer e.mu.Unlock()
	at := now()
	maps.DeleteFunc(e.passed, func(_ string, until time.Time) bool { return !until.After(at) })
	kinds := e.names
	if len(e.passed) > 0 {
		kinds = slices.DeleteFunc(slices.Clone(kinds), func(kind string) bool { return !e.passed[kind].IsZero() })
	}
	return provider.TaskQuery{Kinds: kinds, Attempts: e.cfg.Backoff.Attempts, Alone: alone}
}

func (e *engine[Tx]) letGo(h *held) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.active--
	if h.ending {
		e.ending--
	}
	if e.holds[h.task.ID] == h {
		delete(e.holds, h.task.ID)
	}
	close(h.done)
}

func (e *engine[Tx]) replied(err error) {
	if err == nil {
		e.reached.Store(now().UnixNano())
	}
}

// heartbeat renews the leases of tasks three times per lease. If another worker has taken a task
// over, the context of its handler ends.
func (e *engine[Tx]) heartbeat() {
	tick := time.NewTicker(e.cfg.Lease / 3)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-e.hard.Done():
			return
		}
		began := now()
		var renew []Task
		e.mu.Lock()
		for _, h := range e.holds {
			if began.Add(e.cfg.Lease*5/6).UnixNano() >= h.until.Load() { // not one that was just claimed
				renew = append(renew, h.task)
			}
		}
		e.mu.Unlock()
		if len(renew) == 0 {
			continue
		}
		ctx, cancel := context.WithTimeout(e.hard, max(e.cfg.Lease/3, time.Second))
		late, err := e.db.RenewTasks(ctx, renew, e.cfg.Lease)
		cancel()
		e.replied(err)
		if err != nil {
			if e.hard.Err() == nil {
				e.log.Warn("leases not renewed", "tasks", len(renew), "class", errclass.Of(err))
			}
			continue
		}
		e.mu.Lock()
		for _, t := range renew {
			// else the claim has ended meanwhile
			if h := e.holds[t.ID]; h != nil && h.task.Token == t.Token && slices.Contains(late, t.ID) {
				h.lose(errLost)
			}
		}
		e.mu.Unlock()
	}
}
