package follow

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector/internal/apply"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/parked"
	"github.com/kinora-go/kinora/projector/internal/unit"
	"github.com/kinora-go/kinora/provider"
)

// Role is one way to follow the log. Step does one thing. more reports whether the next step can follow at once.
type Role interface {
	Step(ctx, hard context.Context, g *generation.Row) (more bool, err error)
}

// Reader is one tenure of a post: what the roles have in common.
type Reader struct {
	*Post
	Build    provider.Build
	Progress *Progress
	Pace     Pace // nil: the generation is live
	Resting  bool // it has had no work for some time
	at       provider.Checkpoint
	suspects int // number of next events that may have been in flight when another reader crashed
	cursor   cursor
	restore  restore
	end      end
	delay    delay
}

// Pace limits the reader of a generation that is not live.
type Pace interface {
	// Most returns the most events of a page.
	Most(g *generation.Row, most int) int
	// Cut leaves the events in a page up to which the reader may apply.
	Cut(ctx context.Context, g *generation.Row, page *provider.LogPage) error
	// Rest waits after a page that took this time.
	Rest(ctx context.Context, g *generation.Row, took time.Duration)
}

// At returns the checkpoint, as this reader has written it.
func (r *Reader) At() provider.Checkpoint { return r.at }

// Read returns the position up to which every event is applied.
func (r *Reader) Read() int64 { return r.cursor.read }

// set replaces the checkpoint. It returns ErrFenced if another reader has changed it.
func (r *Reader) set(ctx context.Context, to provider.Checkpoint) error {
	ctx, cancel := r.Host.Limited(ctx)
	defer cancel()
	ok, err := r.Host.Store.SetCheckpoint(ctx, r.Build, r.at, to)
	if err == nil && !ok {
		err = provider.ErrFenced
	}
	if err == nil {
		r.at = to
	}
	return err
}

// setMode changes the mode of the checkpoint, after open units have ended.
func (r *Reader) setMode(ctx context.Context, mode provider.Mode) error {
	to := r.at
	to.Mode = mode
	if err := r.set(ctx, to); err != nil {
		return err
	}
	switch {
	case mode == provider.ModeCatchUp && !r.Projector.Rules.OnlyLog:
		r.Host.Logger.Info("the projector catches up with the log", "projector", r.Projector.Name, "position", r.cursor.read)
	case mode == provider.ModeLive && r.cursor.read > 0:
		r.Host.Logger.Info("the projector is live", "projector", r.Projector.Name, "position", r.cursor.read)
	}
	return nil
}

// Ready does what is due before a step: it verifies the log, and records progress. If ready is false, no step follows;
// more says whether the next call can follow at once.
func (r *Reader) Ready(ctx, hard context.Context, g *generation.Row) (ready, more bool, err error) {
	if now := r.Host.Clock(); now.Sub(r.cursor.verified) > r.Host.Lease/3 {
		if err := r.verify(ctx); err != nil {
			return false, false, err
		}
		if err := r.checkModel(ctx, g); err != nil {
			return false, false, err
		}
		r.cursor.verified = now
	}
	if err := r.showLive(ctx, hard, g); err != nil {
		return false, false, err
	}
	if err := r.Progress.Record(ctx, r, g); err != nil {
		return false, false, err
	}
	if r.at.Mode == provider.ModeCatchUp && r.Segment == 0 {
		split, err := r.resplit(ctx, g)
		if err != nil {
			return false, false, err
		}
		if split {
			more, err := r.followSegments(ctx, g)
			return false, more, err
		}
	}
	paused := g.Paused && g.IsReplaying() || r.Host.Paused(r.Projector.Name)
	return !paused, false, nil
}

// Got is what Page has done.
type Got struct {
	Page  provider.LogPage
	Moved bool // the cursor
}

// idleAdvance is how far the checkpoint may be behind a log that has no events for the projector.
const idleAdvance = 1000

// Page applies the next page of settled events, and moves the checkpoint to its end.
func (r *Reader) Page(ctx, hard context.Context, g *generation.Row) (Got, error) {
	page, msgs, err := r.nextPage(ctx, r.most(g))
	if err == nil {
		err = r.check(ctx, &page)
	}
	if err == nil && r.Pace != nil {
		err = r.Pace.Cut(ctx, g, &page)
	}
	if err != nil {
		return Got{}, err
	}
	r.delay.report(r, page.Waiting)
	began, wasRestored := r.Host.Clock(), r.isRestored()
	r.Progress.Saw(g, page.Events)
	msgs = slices.DeleteFunc(msgs, func(m *model.Message) bool { return m.Position > page.End.Position })
	if err := r.ask(ctx, g, msgs); err != nil {
		return Got{}, err
	}
	from := r.at.Place.Position
	if len(msgs) > 0 {
		err = r.apply(ctx, hard, g, msgs, &moving{r, g, page.End, msgs[len(msgs)-1]})
	} else if r.isToAdvance(page.End) {
		err = r.advance(hard, page.End)
	}
	switch {
	case err != nil && r.at.Place.Position > from: // a part of the page is applied, and must not be read again
		return Got{}, cmp.Or(ctx.Err(), provider.ErrFenced)
	case err != nil:
		return Got{}, err
	}
	got := Got{page, page.End.Position > r.cursor.read}
	r.cursor.read, r.cursor.atHead = page.End.Position, !page.More && len(page.Waiting) == 0
	r.Progress.applied += int64(len(msgs))
	r.endRestored(wasRestored)
	if got.Moved && page.More {
		r.rest(ctx, g, len(msgs), r.Host.Clock().Sub(began))
	}
	return got, nil
}

// most returns the most events of a page. With a rate, rest waits for at most a second.
func (r *Reader) most(g *generation.Row) int {
	most := r.Applier.Batch
	if r.Pace != nil {
		most = r.Pace.Most(g, most)
	}
	if g.Rate > 0 && g.IsReplaying() {
		most = min(most, g.Rate)
	}
	return most
}

// rest waits after a page of a rebuild, which took this time.
func (r *Reader) rest(ctx context.Context, g *generation.Row, events int, took time.Duration) {
	switch {
	case g.Rate > 0 && g.IsReplaying():
		model.Wait(ctx, time.Duration(float64(events)/float64(g.Rate)*float64(time.Second))-took)
	case r.Pace != nil:
		r.Pace.Rest(ctx, g, took)
	}
}

// ask sets Replayed, Skipped and Contested of messages. It is called for each page, also of a live generation.
func (r *Reader) ask(ctx context.Context, g *generation.Row, msgs []*model.Message) error {
	return r.Turn.Asker.Ask(ctx, g, r.restore.skips, msgs)
}

// apply applies messages that ask has asked about.
func (r *Reader) apply(ctx, hard context.Context, g *generation.Row, msgs []*model.Message, o apply.Owner) error {
	r.Applier.BackOff(ctx) // the messages before these may have been a page of their own
	ask := func(ctx context.Context) error { return r.ask(ctx, g, msgs) }
	return r.Turn.For(ctx, hard, msgs, ask, func(ctx, hard context.Context) error {
		_, err := r.Applier.Apply(ctx, hard, msgs, o)
		return err
	})
}

// isToAdvance reports whether the checkpoint moves to the end of a page without messages. A segment
// moves soon, because the checkpoint waits for all of them.
func (r *Reader) isToAdvance(end provider.LogPlace) bool {
	distance := end.Position - r.at.Place.Position
	if r.Segment == 0 {
		return distance >= idleAdvance || distance > 0 && r.cursor.before != nil
	}
	now := r.Host.Clock()
	if distance < idleAdvance && (distance <= 0 || now.Sub(r.cursor.pushed) < time.Second) {
		return false
	}
	r.cursor.pushed = now
	return true
}

// advance moves the checkpoint without applying anything.
func (r *Reader) advance(hard context.Context, to provider.LogPlace) error {
	ctx, cancel := r.Host.Limited(hard)
	defer cancel()
	u := provider.Unit{
		Projector: r.Build.Projector, Generation: r.Build.Generation, Segment: r.Segment,
		Reader: r.identity(), Advance: r.advanceTo(to),
	}
	err := r.Projector.Do(ctx, u, func(context.Context, model.Call, provider.Found) (provider.Closing, error) {
		return provider.Closing{}, nil
	})
	if err == nil {
		r.at.Place = to
	}
	return err
}

func (r *Reader) identity() *provider.Reader {
	return &provider.Reader{Mode: r.at.Mode, Token: r.at.Token}
}

func (r *Reader) advanceTo(to provider.LogPlace) *provider.Advance {
	return &provider.Advance{From: r.at.Place.Position, To: to, Mode: r.at.Mode, Token: r.at.Token}
}

// Sign makes a unit one of this reader.
func (r *Reader) Sign(u *unit.Unit) {
	u.Intent.Reader, u.Intent.Restore, u.Intent.Segment = r.identity(), r.restore.running, r.Segment
	u.Intent.Once = u.Intent.Once || r.isRestored() // so that events that are still applied are not counted
}

// moving is the owner of the messages of a page: each unit moves the checkpoint to its last event.
type moving struct {
	r    *Reader
	g    *generation.Row
	end  provider.LogPlace
	last *model.Message // its unit moves the checkpoint to end
}

// suspectBatch is the most events of a unit that may have been in flight when a reader crashed. If
// this one crashes too, each of them is a suspect: it runs alone, and its stream waits for it.
const suspectBatch = 100

func (o *moving) Unit(msgs []*model.Message) *unit.Unit {
	r := o.r
	if r.suspects > 0 {
		msgs = msgs[:min(len(msgs), suspectBatch)]
	}
	u := r.unit(o.g, msgs)
	to := o.end
	if m := msgs[len(msgs)-1]; m != o.last {
		to = logPlace(m.Raw)
	}
	u.Intent.Advance, u.Suspect = r.advanceTo(to), r.suspects > 0
	return u
}

func (o *moving) Committed(_ context.Context, d *unit.Done) error {
	if to := d.Unit.Intent.Advance; to != nil {
		o.r.at.Place = to.To
		o.r.suspects = max(o.r.suspects-len(d.Unit.Messages), 0)
	}
	o.r.countAgain(d.Applied)
	return nil
}

func (o *moving) Waiting(ctx, hard context.Context, lanes []provider.Lane) {
	o.r.replay(ctx, hard, o.g, lanes)
}

// completing is the owner of events with markers: the checkpoint does not move.
type completing struct {
	r     *Reader
	g     *generation.Row
	aside int // events that failed since one was applied
}

func (o *completing) Unit(msgs []*model.Message) *unit.Unit { return o.r.unit(o.g, msgs) }

func (o *completing) Committed(_ context.Context, d *unit.Done) error {
	if d.Ran {
		o.aside = 0
	}
	for i, row := range d.Rows {
		if row != nil && d.Unit.Messages[i].Aside != nil { // the others wait behind it
			o.aside++
		}
	}
	switch r := o.r; {
	case r.isRestored() || r.restore.running:
		r.countAgain(d.Applied)
	case r.at.Mode == provider.ModeLive: // else the projector catches up: its events were left to the reader
		r.Missed.Report(d.Applied)
	}
	return nil
}

func (o *completing) Waiting(ctx, hard context.Context, lanes []provider.Lane) {
	o.r.replay(ctx, hard, o.g, lanes)
}

// unit returns a unit of this reader.
func (r *Reader) unit(g *generation.Row, msgs []*model.Message) *unit.Unit {
	u := r.Applier.Worker.Of(r.Build, g.Suffix, msgs)
	r.Sign(u)
	return u
}

// replay applies parked messages behind which events were just parked.
func (r *Reader) replay(ctx, hard context.Context, g *generation.Row, lanes []provider.Lane) {
	r.Parked.CatchUp(ctx, hard, parked.Hands{Applier: r.Applier, Turn: r.Turn}, g, lanes)
}

// Complete applies events with markers, in their order. It returns the number of those that have
// failed since one was applied.
func (r *Reader) Complete(ctx, hard context.Context, g *generation.Row, events []eventstore.Raw) (aside int, err error) {
	all := r.taken(events)
	if err := r.ask(ctx, g, all); err != nil {
		return 0, err
	}
	o := &completing{r: r, g: g}
	for msgs := range slices.Chunk(all, r.Applier.Batch) {
		if err := cmp.Or(r.apply(ctx, hard, g, msgs, o), ctx.Err()); err != nil {
			return o.aside, err
		}
		r.Progress.applied += int64(len(msgs))
	}
	return o.aside, nil
}

// taken returns the messages of the events that the projector takes.
func (r *Reader) taken(events []eventstore.Raw) []*model.Message {
	return r.Projector.Taken(events, r.Host.LogID.Load().String())
}

// Accept returns the messages of events, after asking which of them another generation has applied.
func (r *Reader) Accept(ctx context.Context, g *generation.Row, events []eventstore.Raw) ([]*model.Message, error) {
	msgs := r.taken(events)
	return msgs, r.ask(ctx, g, msgs)
}

// Unapplied returns the events that are not applied.
func (r *Reader) Unapplied(ctx context.Context, events []eventstore.Raw) (missing []eventstore.Raw, err error) {
	ctx, cancel := r.Host.Limited(ctx)
	defer cancel()
	return Unapplied(ctx, r.Host.Store, r.Build, r.Projector.ByType, events)
}

// pageSize is the most events of a query that needs no data, or whose events are probably applied.
const pageSize = 1000

// Unapplied returns the events that at least one of the handlers of their types has not applied.
func Unapplied(
	ctx context.Context, s provider.Progress, b provider.Build, byType map[string][]provider.Handler, events []eventstore.Raw,
) (missing []eventstore.Raw, err error) {
	for page := range slices.Chunk(events, pageSize) {
		asked := make([]provider.Message, len(page))
		for i, e := range page {
			asked[i] = provider.Message{ID: e.ID, Handlers: byType[e.Type], Position: e.Position}
		}
		open, err := s.Unapplied(ctx, b, asked)
		if err != nil {
			return nil, err
		}
		for i, e := range page {
			if open[i] {
				missing = append(missing, e)
			}
		}
	}
	return missing, nil
}

// ReportError logs an error of a reader.
func (p *Post) ReportError(err error) {
	if provider.ClassOf(err) == provider.ClassShutdown {
		return
	}
	attrs := []any{"projector", p.Projector.Name}
	if errors.Is(err, eventstore.ErrUnsafeLog) { // its text has no data of users
		attrs = append(attrs, "reason", err.Error())
	}
	p.Host.Report(slog.LevelWarn, "log not read", err, attrs...)
}

// delay is an open append that delays a reader.
type delay struct {
	by       provider.OpenAppend
	reported time.Time
}

const reportEvery = 10 * time.Second

// report logs an open append that delays the reader for more than a second, every ten seconds.
func (d *delay) report(r *Reader, open []provider.OpenAppend) {
	if r.Segment > 0 && r.Segment != r.at.Split().First {
		return // one of the segments does it
	}
	now := r.Host.Clock()
	if !slices.Contains(open, d.by) {
		if d.by = (provider.OpenAppend{}); len(open) > 0 {
			d.by = open[0]
		}
		d.reported = now.Add(time.Second - reportEvery)
	}
	if d.by != (provider.OpenAppend{}) && now.Sub(d.reported) >= reportEvery {
		d.reported = now
		r.Host.Logger.Warn("an open append delays the reading of the log",
			"projector", r.Projector.Name, "backend", d.by.Backend, "since", d.by.Since)
	}
}
