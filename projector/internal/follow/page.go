package follow

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector/internal/apply"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/unit"
	"github.com/kinora-go/kinora/provider"
)

// FromLog follows the log for the live generation of a projector whose only source is the log, or for a segment of any
// generation. The checkpoint stays in ModeCatchUp.
type FromLog struct{ Reader *Reader }

// Step applies a page.
func (l FromLog) Step(ctx, hard context.Context, g *generation.Row) (more bool, err error) {
	r := l.Reader
	if r.rests(ctx, g) {
		return false, nil
	}
	got, err := r.Page(ctx, hard, g)
	switch {
	case err != nil || got.Moved && got.Page.More:
		return err == nil, err
	case r.Segment > 0: // the reader of the checkpoint does the rest
	case r.cursor.before != nil: // until the checkpoint has passed the segments that were ahead
		return got.Moved, nil
	case g.IsReplaying():
		_, recorded, err := r.Progress.CaughtUp(ctx, g)
		return recorded, err
	}
	if got.Moved && len(got.Page.Events) == 0 {
		model.Wait(ctx, model.Soon) // events of others wake this reader too
	}
	return false, nil
}

// rests reports whether a reader that has applied all events only waits for others, and there are none. A segment first
// moves its place to there.
func (r *Reader) rests(ctx context.Context, g *generation.Row) bool {
	if !r.cursor.atHead || !r.Resting || !g.IsLive() || g.IsReplaying() || g.Shared || r.cursor.before != nil || r.isRestored() ||
		r.Segment > 0 && r.at.Place.Position != r.cursor.read {
		return false
	}
	head, err := r.Host.Head.Position(ctx, r.Host)
	return err == nil && head == r.cursor.read
}

// Got is what Page has done.
type Got struct {
	Page  provider.LogPage
	Moved bool // the cursor
}

// Page applies the next page of settled events, and moves the checkpoint to its end.
func (r *Reader) Page(ctx, hard context.Context, g *generation.Row) (Got, error) {
	page, msgs, err := r.nextPage(ctx, g)
	if err != nil {
		return Got{}, err
	}
	began, wasRestored, from := r.Host.Clock(), r.isRestored(), r.at.Place.Position
	r.Progress.Saw(g, page.Events)
	if len(msgs) > 0 {
		err = r.apply(ctx, hard, g, msgs, &moving{owner{r, g}, page.End, msgs[len(msgs)-1]})
	} else if r.isToAdvance(page.End) {
		err = r.advance(hard, page.End)
	}
	if err != nil && r.at.Place.Position > from { // a part of the page is applied, and must not be read again
		err = cmp.Or(ctx.Err(), provider.ErrFenced)
	}
	if err != nil {
		return Got{}, err
	}
	got := Got{page, page.End.Position > r.cursor.read}
	r.cursor.read, r.cursor.atHead = page.End.Position, !page.More && len(page.Waiting) == 0
	r.Progress.Applied += int64(len(msgs))
	r.endRestored(wasRestored)
	if got.Moved && page.More {
		r.rest(ctx, g, len(msgs), r.Host.Clock().Sub(began))
	}
	return got, nil
}

// cursor is how far a reader has read the log.
type cursor struct {
	read     int64                // every event up to it is applied; may be behind the checkpoint
	atHead   bool                 // there were no others when it was read
	server   string               // LogPage.Server of the last page
	verified time.Time            // when the log was last compared with the checkpoint
	before   *provider.Checkpoint // has what the segments of earlier splits have applied; nil: nothing
	late     []provider.Began     // handlers that begin behind the checkpoint
	pushed   time.Time            // when a segment moved past events of others last
	next     *ahead
}

// ahead is a page that is read, and whose events are decoded, while the one before it is applied.
type ahead struct {
	after int64
	read  chan struct{}
	page  provider.LogPage
	msgs  []*model.Message
	err   error
}

func (c *cursor) wait() {
	if c.next != nil {
		<-c.next.read
	}
}

func (c *cursor) back(to int64) {
	c.wait()
	c.next, c.read, c.atHead = nil, to, false
}

// nextPage returns the page behind the cursor, as far as the reader may apply it, and its messages. It begins to read the one
// after it.
func (r *Reader) nextPage(ctx context.Context, g *generation.Row) (page provider.LogPage, msgs []*model.Message, err error) {
	c, most, got := &r.cursor, r.most(g), r.cursor.next
	if got == nil || got.after != c.read {
		got = r.readAhead(ctx, c.read, most)
	}
	c.next = nil
	<-got.read
	page, err = got.page, got.err
	if err == nil && page.More && page.End.Position > got.after {
		c.next = r.readAhead(ctx, page.End.Position, most)
	}
	if err == nil {
		err = r.check(ctx, &page)
	}
	if err == nil && r.Pace != nil {
		err = r.Pace.Cut(ctx, g, &page)
	}
	if err != nil {
		return page, nil, err
	}
	r.delay.report(r, page.Waiting)
	return page, slices.DeleteFunc(got.msgs, func(m *model.Message) bool { return m.Position > page.End.Position }), nil
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

func (r *Reader) readAhead(ctx context.Context, after int64, most int) *ahead {
	a, own := &ahead{after: after, read: make(chan struct{})}, r.own()
	q := provider.LogQuery{After: after, Filter: r.Filter(), Limit: most}
	if own.segment > 0 {
		q.Share, q.Shares = own.segment-own.split.First, own.split.Count
	}
	log := r.Host.LogID.Load().String()
	go func() {
		if a.page, a.err = r.Host.Page(ctx, q); a.err == nil {
			a.msgs = own.taken(r.Projector.Taken(own.of(a.page.Events), log, own.lacking))
		}
		msgs := a.msgs
		close(a.read)
		r.Projector.DecodeAhead(msgs...)
	}()
	return a
}

// own are the events that a reader is to apply, as of the moment when it begins to read a page.
type own struct {
	segment int // 0: all
	split   provider.Split
	before  *provider.Checkpoint
	late    []provider.Began
	lacking model.Lacking
}

func (r *Reader) own() own {
	return own{r.Segment, r.at.Split(), r.cursor.before, r.cursor.late, r.lacking}
}

// of returns those of the events that the reader is to apply: not applied yet, and of its segment.
func (o *own) of(events []eventstore.Raw) []eventstore.Raw {
	if o.segment == 0 && o.before == nil {
		return events
	}
	return slices.DeleteFunc(slices.Clone(events), func(e eventstore.Raw) bool {
		return o.segment > 0 && o.split.Of(e.Stream) != o.segment || o.before != nil && o.before.Applied(e.Stream, e.Position)
	})
}

// taken removes the handlers of messages that begin behind them: handlers that were added while some
// segments were ahead of the checkpoint. Messages without another handler are left out.
func (o *own) taken(msgs []*model.Message) []*model.Message {
	if len(o.late) == 0 {
		return msgs
	}
	return slices.DeleteFunc(msgs, func(m *model.Message) bool {
		had := len(m.Handlers)
		m.Handlers = slices.DeleteFunc(slices.Clone(m.Handlers), func(h provider.Handler) bool {
			return slices.ContainsFunc(o.late, func(b provider.Began) bool {
				return b.Type == m.Raw.Type && b.Is(h) && m.Position <= b.Position
			})
		})
		return had > 0 && len(m.Handlers) == 0
	})
}

func lateOf(c *provider.Checkpoint) (late []provider.Began) {
	for _, b := range c.Handlers {
		if b.Position > c.Place.Position {
			late = append(late, b)
		}
	}
	return late
}

// ErrServer: the page was read from another server than the one before it.
var ErrServer = errors.New("the server of the log was restarted or replaced")

// check is called with each page before it is applied. If the server has changed, the log may be an
// older one: the reader compares its checkpoint with the log, and begins there again.
func (r *Reader) check(ctx context.Context, page *provider.LogPage) error {
	if page.Server == r.cursor.server {
		return nil
	}
	if err := r.verifyLog(ctx, r.Build, r.at); err != nil {
		return err
	}
	first := r.cursor.server == ""
	if r.cursor.server = page.Server; first {
		return nil
	}
	r.cursor.next, r.cursor.read, r.cursor.atHead = nil, r.at.Place.Position, false
	return ErrServer
}

func (r *Reader) checkedPage(ctx context.Context, q provider.LogQuery) (provider.LogPage, error) {
	page, err := r.Host.Page(ctx, q)
	if err == nil {
		err = r.check(ctx, &page)
	}
	return page, err
}

// Forget forgets the page that is read ahead.
func (r *Reader) Forget() { r.cursor.next = nil }

// apply asks which messages another generation has applied, and applies messages. If one of them is contested, it takes the
// turn meanwhile, and asks again.
func (r *Reader) apply(ctx, hard context.Context, g *generation.Row, msgs []*model.Message, o apply.Owner) error {
	r.Applier.BackOff(ctx) // the messages before these may have been a page of their own
	r.Yield.consider(ctx, r.Host, r.Projector, g, msgs)
	ask := func(ctx context.Context) error { return r.Applier.Turn.Asker.Ask(ctx, g, r.restore.skips, msgs) }
	apply := func(ctx, hard context.Context) error {
		_, err := r.Applier.Apply(ctx, hard, msgs, o)
		return err
	}
	if err := ask(ctx); err != nil {
		return err
	}
	if r.Applier.Turn.Needs(msgs) {
		return r.Applier.Turn.Take(ctx, hard, ask, apply)
	}
	return apply(ctx, hard)
}

// owner is what all owners of the messages of a reader have in common.
type owner struct {
	r *Reader
	g *generation.Row
}

// Unit implements apply.Owner.
func (o owner) Unit(msgs []*model.Message) *unit.Unit { return o.r.Unit(o.g, msgs) }

// Waiting implements apply.Owner: it applies parked messages behind which events were just parked.
func (o owner) Waiting(ctx, hard context.Context, lanes []provider.Lane) {
	o.r.Parked.CatchUp(ctx, hard, o.r.Applier, o.g, lanes)
}

// Unit returns a unit of this reader.
func (r *Reader) Unit(g *generation.Row, msgs []*model.Message) *unit.Unit {
	u := r.Applier.Worker.Of(r.Build, g.Suffix, msgs)
	u.Intent.Reader, u.Intent.Restore, u.Intent.Segment = &provider.Reader{Mode: r.at.Mode, Token: r.at.Token}, r.restore.running, r.Segment
	u.Intent.Once = u.Intent.Once || r.isRestored() // so that events that are still applied are not counted
	return u
}

// moving is the owner of the messages of a page: each unit moves the checkpoint to its last event.
type moving struct {
	owner
	end  provider.LogPlace
	last *model.Message // its unit moves the checkpoint to end
}

// suspectBatch is the most events of a unit that may have been in flight when a reader crashed. If
// this one crashes too, each of them is a suspect: it runs alone, and its stream waits for it.
const suspectBatch = 100

func (o *moving) Unit(msgs []*model.Message) *unit.Unit {
	r, to := o.r, o.end
	if r.suspects > 0 {
		msgs = msgs[:min(len(msgs), suspectBatch)]
	}
	u := r.Unit(o.g, msgs)
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

// idleAdvance is how far the checkpoint may be behind a log that has no events for the projector.
const idleAdvance = 1000

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

func (r *Reader) advance(hard context.Context, to provider.LogPlace) error {
	ctx, cancel := r.Host.Limited(hard)
	defer cancel()
	u := provider.Unit{
		Projector: r.Build.Projector, Generation: r.Build.Generation, Segment: r.Segment,
		Reader: &provider.Reader{Mode: r.at.Mode, Token: r.at.Token}, Advance: r.advanceTo(to),
	}
	err := r.Projector.Do(ctx, u, func(context.Context, model.Call, provider.Found) (provider.Closing, error) {
		return provider.Closing{}, nil
	})
	if err == nil {
		r.at.Place = to
	}
	return err
}

func (r *Reader) advanceTo(to provider.LogPlace) *provider.Advance {
	return &provider.Advance{From: r.at.Place.Position, To: to, Mode: r.at.Mode, Token: r.at.Token}
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
