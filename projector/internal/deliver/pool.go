// Package deliver applies the deliveries of a broker, and the parked messages that are due.
package deliver

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector/internal/apply"
	"github.com/kinora-go/kinora/projector/internal/follow"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/parked"
	"github.com/kinora-go/kinora/projector/internal/unit"
	"github.com/kinora-go/kinora/provider"
)

// Pool has the workers of a projector: messages of one lane are applied by one worker, in order.
type Pool struct {
	Host      *model.Host
	Projector *model.Projector
	Current   *atomic.Pointer[generation.Row] // the generation that deliveries are applied to
	Parked    *parked.Parked
	Missed    *follow.Missed
	workers   []*Worker
}

// Add adds a worker.
func (p *Pool) Add(by *apply.Applier) {
	p.workers = append(p.workers, &Worker{
		Applier: by, pool: p, in: make(chan *model.Message, by.Batch), due: make(chan []*model.Message, 1), seen: map[string]int{},
	})
}

// Start starts the workers. They end when ctx ends.
func (p *Pool) Start(ctx, hard context.Context, all *sync.WaitGroup) {
	for _, w := range p.workers {
		all.Go(func() { w.run(ctx, hard) })
	}
}

func (p *Pool) worker(lane provider.Lane) *Worker {
	return p.workers[(int(lane[0])<<8|int(lane[1]))%len(p.workers)]
}

// IsBusy reports whether a worker applies parked messages.
func (p *Pool) IsBusy() bool {
	return slices.ContainsFunc(p.workers, func(w *Worker) bool { return w.busy.Load() })
}

// GiveDue gives due messages to the workers that have none.
func (p *Pool) GiveDue(msgs []*model.Message) {
	due := map[*Worker][]*model.Message{}
	for _, m := range msgs {
		w := p.worker(m.Lane)
		due[w] = append(due[w], m)
	}
	for w, some := range due {
		if w.busy.CompareAndSwap(false, true) {
			w.due <- some
		}
	}
}

// Dispatch gives a delivery to the workers of its projectors. It returns false if ctx or canceled ends
// while a worker has no room for it.
func Dispatch(ctx context.Context, canceled <-chan struct{}, d *model.Received, pools []*Pool) bool {
	for _, p := range pools {
		m := p.Projector.Accept(d, nil)
		if m == nil {
			d.Done()
			continue
		}
		w := p.worker(m.Lane)
		waits := len(w.in) > 0
		select {
		case w.in <- m:
		default:
			select {
			case <-ctx.Done():
				return false
			case <-canceled:
				return false
			case w.in <- m:
			}
		}
		if waits {
			p.Projector.DecodeAhead(m)
		}
	}
	return true
}

// TakeAhead takes the events of the deliveries that it receives from the log, all that wait with one read, and dispatches
// them. end ends it. See model.Receiver.
func TakeAhead(ctx context.Context, r *model.Receiver, pools []*Pool) (in chan *model.Received, end func()) {
	ctx, cancel := context.WithCancel(ctx)
	in = make(chan *model.Received, min(cmp.Or(r.Host.Batch, model.DeliveryBatch), model.LogBatch))
	var taking sync.WaitGroup
	taking.Go(func() {
		for {
			var all []*model.Received
			select {
			case <-ctx.Done():
				return
			case d := <-in:
				all = append(all, d)
			}
			for range len(in) {
				all = append(all, <-in)
			}
			r.Take(ctx, all)
			for _, d := range all {
				if !Dispatch(ctx, nil, d, pools) {
					return
				}
			}
		}
	})
	return in, func() { cancel(); taking.Wait() }
}

// Worker applies the messages of some lanes.
type Worker struct {
	Applier *apply.Applier
	pool    *Pool
	in      chan *model.Message   // deliveries, at most those of the next unit
	due     chan []*model.Message // parked messages that are due
	busy    atomic.Bool           // it has due messages
	seen    map[string]int        // used by collect
}

// run applies messages until ctx ends. Messages that are not applied by then are not acked, so
// they are redelivered.
func (w *Worker) run(ctx, hard context.Context) {
	defer w.Applier.Begin()()
	for ctx.Err() == nil {
		w.Applier.Worker.Loop.Rest()
		select {
		case <-ctx.Done():
		case msgs := <-w.due:
			if w.pool.Parked.Replay(ctx, hard, w.Applier, w.pool.Current.Load(), msgs) {
				w.pool.Host.Scan.Send() // for the messages behind them
			}
			w.busy.Store(false)
		case m := <-w.in:
			w.Applier.BackOff(ctx)
			w.awaitResume(ctx)
			w.deliver(ctx, hard, w.leave(ctx, w.locate(ctx, w.collect(m))))
		}
	}
}

// awaitResume waits while an operator has paused the projector, or until ctx ends.
func (w *Worker) awaitResume(ctx context.Context) {
	for w.pool.Host.Paused(w.pool.Projector.Name) && ctx.Err() == nil {
		w.Applier.Worker.Loop.Rest()
		model.Wait(ctx, apply.PausedLook)
	}
}

// collect returns m and the messages that have arrived since. So a unit has one message under a
// low load, and many messages share a commit under a high load. A message that was delivered
// twice is in the unit once.
func (w *Worker) collect(m *model.Message) []*model.Message {
	clear(w.seen)
	most := w.Applier.Batch
	msgs := make([]*model.Message, 0, min(most, 1+len(w.in)))
	for {
		if i, twice := w.seen[m.ID]; twice && m.ID != "" {
			msgs[i].Duplicates = append(msgs[i].Duplicates, m.Received)
		} else {
			w.seen[m.ID] = len(msgs)
			msgs = append(msgs, m)
		}
		if len(msgs) == most {
			return msgs
		}
		select {
		case m = <-w.in:
		default:
			return msgs
		}
	}
}

// endedPause is the shortest pause of a delivery whose generation is no longer fed, until this program knows another one.
const endedPause = 10 * time.Millisecond

func (w *Worker) deliver(ctx, hard context.Context, msgs []*model.Message) {
	for pause := endedPause; len(msgs) > 0 && ctx.Err() == nil; {
		rest, err := w.Applier.Apply(ctx, hard, msgs, w)
		if len(rest) < len(msgs) {
			pause = endedPause
		}
		msgs = rest
		switch {
		case errors.Is(err, apply.ErrLeft):
			model.Wait(ctx, endedPause)
			msgs = w.leave(ctx, msgs)
		case errors.Is(err, provider.ErrEnded):
			w.pool.Host.Follow.Send()
			model.Wait(ctx, pause)
			pause = min(2*pause, 20*endedPause)
			msgs = w.leave(ctx, msgs)
		case err != nil:
			return
		}
	}
}

// Unit implements apply.Owner.
func (w *Worker) Unit(msgs []*model.Message) *unit.Unit {
	g := w.pool.Current.Load()
	return w.Applier.Worker.Of(g.Build, g.Suffix, msgs)
}

// Committed implements apply.Owner.
func (w *Worker) Committed(ctx context.Context, d *unit.Done) error {
	if d.Left && !w.mayLeave(ctx, d) {
		w.pool.Host.Follow.Send()
		return apply.ErrLeft
	}
	if w.pool.Projector.Logged {
		w.pool.Missed.Report(d.First)
	}
	return nil
}

// Waiting implements apply.Owner.
func (w *Worker) Waiting(ctx, hard context.Context, lanes []provider.Lane) {
	w.pool.Parked.CatchUp(ctx, hard, w.Applier, w.pool.Current.Load(), lanes)
}

// locate sets the positions of deliveries. With Options.Ordered it adds the earlier events of their streams that are
// not applied.
func (w *Worker) locate(ctx context.Context, msgs []*model.Message) []*model.Message {
	p := w.pool.Projector
	if !p.Logged || p.Rules.OnlyLog {
		return msgs
	}
	for tries := 1; ctx.Err() == nil; tries++ {
		err := w.pool.Host.FindPlaces(ctx, msgs)
		if err == nil {
			err = w.findHandlers(ctx, msgs)
		}
		if err == nil && p.Rules.Ordered {
			var earlier []*model.Message
			if earlier, err = w.earlier(ctx, msgs); err == nil {
				all := append(earlier, msgs...)
				slices.SortStableFunc(all, func(a, b *model.Message) int { return cmp.Compare(a.Position, b.Position) })
				return all
			}
		}
		if err == nil {
			break
		}
		w.Applier.PauseUnit(ctx, len(msgs), tries, err)
	}
	return msgs
}

// findHandlers finds the handlers of other programs for deliveries for which this program has none. Such an event may have been
// applied before. And while the projector catches up, it is left to the reader of the log, which parks it in its place in the
// stream: parked alone, it would be applied before earlier events of its stream.
func (w *Worker) findHandlers(ctx context.Context, msgs []*model.Message) error {
	without := func(m *model.Message) bool { return m.Aside != nil && len(m.Handlers) == 0 && m.Position > 0 }
	if !slices.ContainsFunc(msgs, without) {
		return nil
	}
	ctx, cancel := w.pool.Host.Limited(ctx)
	defer cancel()
	c, err := w.pool.Host.Store.Checkpoint(ctx, w.pool.Current.Load().Build)
	if err != nil {
		return err
	}
	lacking := follow.HandlersOf(w.pool.Projector).Lacking(c.Handlers)
	for _, m := range msgs {
		if without(m) {
			w.pool.Projector.Await(m, lacking.Of(m.Raw.Type, m.Position))
		}
	}
	return nil
}

// earlier returns the events of the messages' streams that are before them and not applied, in
// order of position. Those for handlers of other programs too: they are parked, and what comes behind them waits.
func (w *Worker) earlier(ctx context.Context, msgs []*model.Message) ([]*model.Message, error) {
	h, p, g := w.pool.Host, w.pool.Projector, w.pool.Current.Load()
	ctx, cancel := h.Limited(ctx)
	defer cancel()
	versions := map[string]int64{}
	for _, m := range msgs {
		if m.Position > 0 {
			versions[m.Raw.Stream] = max(versions[m.Raw.Stream], m.Raw.Version)
		}
	}
	c, err := h.Store.Checkpoint(ctx, g.Build)
	if err != nil || len(versions) == 0 || c.Mode == provider.ModeCatchUp {
		return nil, err
	}
	events, err := h.Log.LogStreams(ctx, versions, c.Place.Position)
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, m := range msgs {
		seen[m.ID] = true
	}
	lacking := follow.HandlersOf(w.pool.Projector).Lacking(c.Handlers)
	takers := follow.HandlersOf(w.pool.Projector).Takers(lacking)
	before := slices.DeleteFunc(events, func(e eventstore.Raw) bool { return seen[e.ID] || len(takers[e.Type]) == 0 })
	missing, err := follow.Unapplied(ctx, h.Store, g.Build, takers, before)
	if err != nil {
		return nil, err
	}
	all := p.Taken(missing, h.LogID.Load().String(), lacking)
	return all, w.Applier.Turn.Asker.Ask(ctx, g, nil, all)
}

// Several programs may share a subscription, and only some of them feed the live generation. A
// delivery to another one is left to the reader of the live generation. That generation must catch
// up with the log then: if it were live, later events of the stream could be delivered to it, and
// applied, before its reader finds this one.

// leave acks deliveries of events if this program does not feed the live generation, and returns the
// others. A message that is not in the log waits until the program does, and those behind it.
func (w *Worker) leave(ctx context.Context, msgs []*model.Message) []*model.Message {
	h := w.pool.Host
	for pause, warned := endedPause, false; ctx.Err() == nil && len(msgs) > 0 && !w.pool.Current.Load().IsLive(); {
		can, err := w.leaveToReader(ctx)
		if err != nil {
			h.Report(slog.LevelWarn, "deliveries not left to the reader of the log", err, "projector", w.pool.Projector.Name)
		}
		var rest []*model.Message
		for _, m := range msgs {
			if !can || m.Position == 0 && !m.IsUnknown { // who forges a message must not stop the others
				rest = append(rest, m)
			} else {
				m.Done()
			}
		}
		if msgs = rest; can && len(msgs) > 0 && !warned {
			h.Logger.Warn("a message that is not in the log waits until this program feeds the live read model",
				"projector", w.pool.Projector.Name, "message_id", msgs[0].ID)
			warned = true
		}
		if len(msgs) > 0 {
			model.Wait(ctx, pause)
			pause = min(2*pause, 20*endedPause)
		}
	}
	return msgs
}

// leaveToReader makes the live generation catch up with the log, and reports whether it does.
func (w *Worker) leaveToReader(ctx context.Context) (bool, error) {
	ctx, cancel := w.pool.Host.Limited(ctx)
	defer cancel()
	store, live := w.pool.Host.Store, provider.Build{Projector: w.pool.Projector.Name}
	c, err := store.Checkpoint(ctx, live)
	if err != nil || c.Mode != provider.ModeLive {
		return c.Mode == provider.ModeCatchUp, err
	}
	to := c
	to.Mode = provider.ModeCatchUp
	live.Generation = c.Generation
	return store.SetCheckpoint(ctx, live, c, to)
}

// mayLeave reports whether the generation of a unit is live, so that deliveries that were left to its
// reader will not be missing in the read model.
func (w *Worker) mayLeave(ctx context.Context, d *unit.Done) bool {
	ctx, cancel := w.pool.Host.Limited(ctx)
	defer cancel()
	c, err := w.pool.Host.Store.Checkpoint(ctx, provider.Build{Projector: w.pool.Projector.Name})
	return err == nil && c.Generation == d.Unit.Intent.Generation
}
