// Package parked tries the parked messages of a generation again.
package parked

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/kinora-go/kinora/projector/internal/apply"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/sent"
	"github.com/kinora-go/kinora/projector/internal/unit"
	"github.com/kinora-go/kinora/provider"
)

// Parked has the parked messages of a projector.
type Parked struct {
	Host      *model.Host
	Projector *model.Projector
	Receiver  *model.Receiver
	Reads     bool // a reader records where its handlers begin
}

type replaying struct {
	*unit.Worker
	g        *generation.Row
	progress bool // the state of a message has changed
}

func (o *replaying) Unit(msgs []*model.Message) *unit.Unit { return o.Of(o.g.Build, o.g.Suffix, msgs) }

func (o *replaying) Committed(_ context.Context, d *unit.Done) error {
	o.progress = o.progress || slices.ContainsFunc(d.Fates, func(f unit.Fate) bool { return f != unit.Changed })
	return nil
}

func (o *replaying) Waiting(context.Context, context.Context, []provider.Lane) {}

// Leaves reports whether Replay leaves a due message to another program: it may have crashed one, and this one is unable to
// apply it. Who is able tries it alone.
func Leaves(m *model.Message) bool {
	return m.Aside != nil && m.Aside.Needs != "" && m.Parked.Code == model.CodeCrashed &&
		m.Parked.Class != provider.ClassHeld && m.Parked.Class != provider.ClassUnable
}

// Replay applies due parked messages. Those that only wait behind others, or waited for this program, run in units of
// many, all others alone, and their attempts are counted before they run. It reports whether the state
// of any message changed.
func (p *Parked) Replay(ctx, hard context.Context, by *apply.Applier, g *generation.Row, msgs []*model.Message) (progress bool) {
	if !p.can(ctx, g.Build) {
		return false
	}
	msgs = p.begun(ctx, by, g, msgs)
	var waiting, failed []*model.Message
	for _, m := range msgs {
		switch {
		case m.Parked.Class == provider.ClassHeld, m.Parked.Class == provider.ClassUnable:
			waiting = append(waiting, m)
		case !Leaves(m):
			failed = append(failed, m)
		}
	}
	p.findLost(ctx, by, waiting)
	ask := func(ctx context.Context) error { return by.Turn.Asker.AskParked(ctx, g.Build, msgs) }
	err := ask(ctx)
	switch {
	case err != nil:
	case by.Turn.Needs(msgs):
		err = by.Turn.Take(ctx, hard, ask, func(ctx, hard context.Context) error {
			progress = p.apply(ctx, hard, by, g, waiting, failed)
			return nil
		})
	default:
		progress = p.apply(ctx, hard, by, g, waiting, failed)
	}
	if err != nil && !errors.Is(err, sent.ErrTurn) && ctx.Err() == nil {
		p.Host.Report(slog.LevelWarn, "parked messages not applied", err, "projector", p.Projector.Name)
	}
	return progress
}

// apply applies messages that only wait behind others, and then, each alone, those that have failed.
func (p *Parked) apply(ctx, hard context.Context, by *apply.Applier, g *generation.Row, waiting, failed []*model.Message) bool {
	batch := by.Batch
	if k := p.Projector.Keeps; !k.Atomic && !k.Markers {
		batch = 1 // if one fails, the store of parked messages forgets that others were applied
	}
	o := &replaying{Worker: by.Worker, g: g}
	for some := range slices.Chunk(waiting, batch) {
		if _, err := by.Apply(ctx, hard, some, o); errors.Is(err, provider.ErrEnded) {
			p.Host.Follow.Send()
		}
	}
	for _, m := range failed {
		o.progress = ctx.Err() == nil && p.try(ctx, hard, by, g, m) || o.progress
	}
	return o.progress
}

func (p *Parked) can(ctx context.Context, b provider.Build) bool {
	s, ok := p.Host.Store.(provider.Restorer)
	if !ok {
		return true
	}
	limited, cancel := p.Host.Limited(ctx)
	defer cancel()
	can, err := s.CanReplay(limited, b)
	return err == nil && can
}

// begun returns the messages that can be applied now. What was parked for no handler, because its type was unknown, is applied
// by those that do not get the event from the log: it waits until it is recorded where they began. While the projector catches
// up, its reader applies what is behind that, in its place in the stream.
func (p *Parked) begun(ctx context.Context, by *apply.Applier, g *generation.Row, msgs []*model.Message) []*model.Message {
	isNew := func(m *model.Message) bool { return len(m.Parked.Handlers) == 0 && len(m.Handlers) > 0 }
	if !p.Projector.Logged || !slices.ContainsFunc(msgs, isNew) {
		return msgs
	}
	limited, cancel := p.Host.Limited(ctx)
	defer cancel()
	c, err := p.Host.Store.Checkpoint(limited, g.Build)
	if err == nil && c.Mode == 0 {
		return msgs
	}
	if err == nil {
		err = p.Host.FindPlaces(ctx, slices.DeleteFunc(slices.Clone(msgs), func(m *model.Message) bool { return !isNew(m) }))
	}
	if err != nil && ctx.Err() == nil {
		p.Host.Report(slog.LevelWarn, "parked messages not applied", err, "projector", p.Projector.Name)
	}
	return slices.DeleteFunc(slices.Clone(msgs), func(m *model.Message) bool {
		if !isNew(m) {
			return false
		}
		place := m.Position
		m.Position = 0 // it is not compared with the checkpoint
		return err != nil || place > 0 && !p.takes(m, place, &c)
	})
}

// takes limits the handlers of a message to those that begin behind its place in the log, and those that the log will not give
// the event before. It returns false if the message must wait.
func (p *Parked) takes(m *model.Message, place int64, c *provider.Checkpoint) bool {
	var own []provider.Handler
	for _, h := range m.Handlers {
		switch i := slices.IndexFunc(c.Handlers, func(b provider.Began) bool { return b.Type == m.Raw.Type && b.Is(h) }); {
		case i < 0 && p.Reads, c.Mode == provider.ModeClosing:
			return false
		case i < 0, c.Handlers[i].Position >= place, c.Mode == provider.ModeLive && c.Place.Position < place:
			own = append(own, h)
		}
	}
	m.Handlers = own
	return true
}

// findLost sets parked messages aside whose events the log no longer has. They were parked behind
// others before their events were looked up.
func (p *Parked) findLost(ctx context.Context, by *apply.Applier, msgs []*model.Message) {
	if !p.Projector.Logged {
		return
	}
	others := slices.DeleteFunc(slices.Clone(msgs), func(m *model.Message) bool { return !p.Host.OfEarlierLog(m) })
	for tries := 1; ctx.Err() == nil; tries++ {
		err := p.Host.FindPlaces(ctx, others)
		if err == nil {
			break
		}
		by.PauseUnit(ctx, len(others), tries, err)
	}
	for _, m := range others {
		m.Position = 0 // it is not compared with the checkpoint
	}
}

// CatchUp applies due messages of lanes behind which deliveries were just parked, at
// most twice as many as may have been parked. So a due lane becomes empty also under a constant
// load. A lane that is not due costs one query.
func (p *Parked) CatchUp(ctx, hard context.Context, by *apply.Applier, g *generation.Row, lanes []provider.Lane) {
	progress := len(lanes) > 0
	for round := 0; round < 2 && progress && ctx.Err() == nil; round++ {
		f := provider.DueFilter{Builds: []provider.Build{g.Build}, Lanes: lanes, Keys: len(lanes), Each: by.Batch}
		due, _ := p.due(hard, f) // the runner's own scan reports errors
		progress = len(due) > 0 && p.Replay(ctx, hard, by, g, due)
	}
}

func (p *Parked) due(ctx context.Context, f provider.DueFilter) ([]*model.Message, error) {
	ctx, cancel := p.Host.Limited(ctx)
	defer cancel()
	rows, err := p.Host.Store.Due(ctx, f)
	if err != nil {
		return nil, err
	}
	return p.Messages(ctx, rows)
}

// Messages returns the messages of rows of the projector.
func (p *Parked) Messages(ctx context.Context, rows []provider.Parked) ([]*model.Message, error) {
	received, err := p.Receiver.Parked(ctx, rows)
	if err != nil {
		return nil, err
	}
	msgs := make([]*model.Message, len(rows))
	for i, row := range rows {
		d := received[i]
		if d.IsForeign && d.Key == "" { // the decoder took it from the context of the delivery
			d.Key, d.Raw.Stream = row.Key, row.Key
		}
		msgs[i] = p.Projector.Accept(d, &row)
	}
	return msgs, nil
}

// try is one attempt at a parked message that has failed before, or may have crashed a process.
// It is counted before it runs. No other runner tries the message for longer than the attempt may
// take.
func (p *Parked) try(ctx, hard context.Context, by *apply.Applier, g *generation.Row, m *model.Message) (progress bool) {
	row, w := m.Parked, by.Worker
	alone, again := row.Code == model.CodeCrashed, unit.Sum(p.Host.Timeout, p.Host.Lease)
	if alone {
		again = max(again, p.spacing(row.Attempts))
		w.Crashes.Process.Lock() // before it is counted: waiting is no attempt
		defer w.Crashes.Process.Unlock()
	}
	inner, cancel := p.Host.Limited(hard)
	begun, err := p.Host.Store.Try(inner, *row, p.Host.Retry.Attempts, again)
	cancel()
	if err != nil {
		by.Report(slog.LevelWarn, "attempt not counted", m, err, row.Attempts)
		return false
	}
	if !begun {
		return p.isExhausted(by, m)
	}
	row.Attempts++
	for tries := 1; ctx.Err() == nil; tries++ {
		u := w.Of(g.Build, g.Suffix, []*model.Message{m})
		u.Alone = alone
		d, err := w.Run(hard, u)
		switch class := provider.ClassOf(err); {
		case err == nil:
			by.Finish(d)
			return true
		case hard.Err() != nil:
			return false
		case class == provider.ClassAmbiguous || m.Aside != nil:
			by.PauseUnit(ctx, 1, tries, err)
		case class == provider.ClassTransient:
			apply.SetAside(m, d, err, row.Attempts-1)
		default:
			apply.SetAside(m, d, err, row.Attempts)
		}
	}
	return false
}

// spacing is how long no other runner tries a message that may have crashed processes, after an
// attempt that follows this number of earlier ones: a lease, then eight times as long each time,
// at most a day. So the message is stuck only if its process ended during each of its attempts,
// over at least a quarter of an hour. After the last attempt it is a lease.
func (p *Parked) spacing(before int) time.Duration {
	d := p.Host.Lease
	if p.Host.Retry.Exhausted(before + 1) {
		return d
	}
	for range max(before-1, 0) {
		d = max(p.Host.Lease, 8*min(d, 3*time.Hour))
	}
	return d
}

// isExhausted reports whether a message that may not be tried has no attempt left, so that it is
// stuck now.
func (p *Parked) isExhausted(by *apply.Applier, m *model.Message) bool {
	row := m.Parked
	if !p.Host.Retry.Exhausted(row.Attempts) {
		return false
	}
	if p.Host.Observer.Parked != nil {
		p.Host.Observer.Parked(p.Projector.Name, row.Handler, row.Class, row.Code)
	}
	by.Report(slog.LevelWarn, "stuck", m, &provider.Error{Class: row.Class, Code: row.Code}, row.Attempts)
	return true
}
