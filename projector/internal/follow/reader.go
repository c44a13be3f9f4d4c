package follow

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
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
	lacking  model.Lacking
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

// PassesEarlier reports whether segments of an earlier split were ahead of the checkpoint, and it has not passed them.
func (r *Reader) PassesEarlier() bool { return r.cursor.before != nil }

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
	now := r.Host.Clock()
	switch {
	case r.Yield.Left(now, YieldFor):
		return false, false, ErrYields
	case r.shouldRecord(g):
		return false, false, ErrNewHandlers
	}
	if now.Sub(r.cursor.verified) > r.Host.Lease/3 {
		if err := r.verifyLog(ctx, r.Build, r.at); err != nil {
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

// ErrNewHandlers: programs have started with handlers that the checkpoint lacks. The reader is to be attached again.
var ErrNewHandlers = errors.New("programs with new handlers have started")

// shouldRecord reports whether programs have started with handlers that the checkpoint lacks.
func (r *Reader) shouldRecord(g *generation.Row) bool {
	return r.Segment == 0 && slices.ContainsFunc(g.Coming, func(b provider.Began) bool { return !Has(r.at.Handlers, b) })
}

// clearComing says that the reader has recorded the handlers of programs that have started, or has not because this program has
// removed them.
func (r *Reader) clearComing(ctx context.Context, g *generation.Row) error {
	if len(g.Coming) == 0 {
		return nil
	}
	r.Host.Logger.Info("a program with new handlers has started", "projector", r.Projector.Name, "generation", g.Number(), "handlers", Names(g.Coming))
	_, _, err := r.Progress.Change(ctx, g, func(now *generation.Row) {
		now.Coming = slices.DeleteFunc(slices.Clone(now.Coming), func(b provider.Began) bool { return Has(g.Coming, b) })
	})
	return err
}

// completing is the owner of events with markers: the checkpoint does not move.
type completing struct {
	owner
	aside int // events that failed since one was applied
}

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
		r.Missed.Report(d.First)
	}
	return nil
}

// Complete applies events with markers, in their order. It returns the number of those that have
// failed since one was applied.
func (r *Reader) Complete(ctx, hard context.Context, g *generation.Row, events []eventstore.Raw) (aside int, err error) {
	o := &completing{owner: owner{r, g}}
	for msgs := range slices.Chunk(r.taken(events), r.Applier.Batch) {
		if err := cmp.Or(r.apply(ctx, hard, g, msgs, o), ctx.Err()); err != nil {
			return o.aside, err
		}
		r.Progress.Applied += int64(len(msgs))
	}
	return o.aside, nil
}

func (r *Reader) taken(events []eventstore.Raw) []*model.Message {
	return r.Projector.Taken(events, r.Host.LogID.Load().String(), r.lacking)
}

// Accept returns the messages of events, after asking which of them another generation has applied.
func (r *Reader) Accept(ctx context.Context, g *generation.Row, events []eventstore.Raw) ([]*model.Message, error) {
	msgs := r.taken(events)
	return msgs, r.Applier.Turn.Asker.Ask(ctx, g, r.restore.skips, msgs)
}

// Unapplied returns the events that are not applied.
func (r *Reader) Unapplied(ctx context.Context, events []eventstore.Raw) (missing []eventstore.Raw, err error) {
	ctx, cancel := r.Host.Limited(ctx)
	defer cancel()
	return Unapplied(ctx, r.Host.Store, r.Build, r.handlers().Takers(r.lacking), events)
}

// Filter selects the events that the generation takes, also those of handlers that this program lacks.
func (r *Reader) Filter() eventstore.LogFilter {
	f := r.Projector.Rules.Filter
	if f.Types == nil || len(r.lacking) == 0 {
		return f
	}
	f.Types = slices.AppendSeq(slices.Clone(f.Types), maps.Keys(r.lacking))
	slices.Sort(f.Types)
	f.Types = slices.Compact(f.Types)
	return f
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

// Progress records with a generation what its reader has applied.
type Progress struct {
	host      *model.Host
	projector *model.Projector
	current   *atomic.Pointer[generation.Row]
	Applied   int64     // events since the build began
	Chases    bool      // it has applied the events that existed when the build began
	recorded  time.Time // when it was stored last
	seen      map[version]bool
	unseen    []version // not stored yet
}

// version is a schema version of an event type.
type version struct {
	eventType string
	schema    int
}

// Saw notes the schema versions of events.
func (p *Progress) Saw(g *generation.Row, events []eventstore.Raw) {
	for i := range events {
		v := version{events[i].Type, events[i].Schema}
		if len(p.projector.ByType[v.eventType]) == 0 || p.seen[v] {
			continue
		}
		p.seen[v] = true
		if !slices.Contains(g.Seen[v.eventType], v.schema) {
			p.unseen = append(p.unseen, v)
		}
	}
}

// Record stores the progress of a rebuild each second, and shows other programs that this one
// feeds the generation. It also stores new schema versions: those alone for a segment.
func (p *Progress) Record(ctx context.Context, r *Reader, g *generation.Row) error {
	now, every := p.host.Clock(), time.Second
	if (r.Segment > 0 || g.IsLive() && !g.IsReplaying()) && len(p.unseen) == 0 {
		return nil
	}
	if r.Segment == 0 && g.State == provider.GenerationStandby {
		every = p.host.Lease / 3
	}
	if now.Sub(p.recorded) < every {
		return nil
	}
	change := p.addSeen
	if r.Segment == 0 {
		total := g.Total
		if p.Applied >= total && g.How != 0 && !g.Done {
			left, err := Count(ctx, p.host.Log, p.projector.Rules.Filter.Types, r.at.Place.Position, math.MaxInt64)
			if err != nil {
				return err
			}
			p.Chases, total = total > 0, p.Applied+left
		}
		perSecond := g.PerSecond
		if took := now.Sub(p.recorded); !p.recorded.IsZero() && p.Applied > g.Applied {
			perSecond = float64(p.Applied-g.Applied) / took.Seconds()
		}
		change = func(g *generation.Row) {
			g.Beat++
			g.Total, g.PerSecond, g.Applied = total, perSecond, p.Applied
			p.addSeen(g)
		}
	}
	p.recorded = now
	_, changed, err := p.Change(ctx, g, change)
	if changed {
		p.unseen = nil
	}
	return err
}

// flush stores new schema versions at the end of a tenure.
func (p *Progress) flush(ctx context.Context, of provider.Build) {
	if g := p.current.Load(); g.Build == of && len(p.unseen) > 0 {
		_, _, _ = p.Change(context.WithoutCancel(ctx), g, p.addSeen)
	}
}

func (p *Progress) addSeen(g *generation.Row) {
	for _, v := range p.unseen {
		g.AddSeen(v.eventType, v.schema)
	}
}

// CaughtUp records that the generation has reached the end of the log, or the live generation. It returns the generation
// as it is then. recorded is false if another program has changed it: then call CaughtUp again.
func (p *Progress) CaughtUp(ctx context.Context, g *generation.Row) (now *generation.Row, recorded bool, err error) {
	if g.Done || g.Source == 0 && g.IsLive() {
		return g, true, nil
	}
	return p.Change(ctx, g, func(g *generation.Row) { g.Done, g.Applied = true, p.Applied })
}

// Change stores a change of the generation that the reader serves, and returns the generation as it is then. If another
// program has changed it, the change is lost, and its state is read again. The error is ErrFenced if this program feeds
// another generation now.
func (p *Progress) Change(ctx context.Context, g *generation.Row, fn func(*generation.Row)) (now *generation.Row, changed bool, err error) {
	ctx, cancel := p.host.Limited(ctx)
	defer cancel()
	was := p.current.Load()
	if was.Build != g.Build {
		return g, false, provider.ErrFenced
	}
	to := *was
	changed, err = generation.Change(ctx, p.host.Store, &to, fn)
	switch {
	case changed:
		p.current.CompareAndSwap(was, &to)
		return &to, true, nil
	case err == nil:
		p.host.Follow.Send()
	}
	return g, false, err
}
