package follow

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// closeLimit is the most visible events behind the checkpoint with which a projector goes live.
const closeLimit = 100_000

// Complete follows the log for the live generation of a projector over a broker: it catches up, goes live, and then
// applies the events that were not delivered in time.
type Complete struct {
	Reader *Reader
	asked  int64 // unsettled events up to it were completed
}

// closings are the attempts of a post to go live that were broken off.
type closings struct {
	n    int
	next time.Time // when the next one may begin
}

// Step does what the mode of the checkpoint says.
func (c *Complete) Step(ctx, hard context.Context, g *generation.Row) (more bool, err error) {
	switch c.Reader.at.Mode {
	case provider.ModeCatchUp:
		more, err = c.catchUp(ctx, hard, g)
	case provider.ModeClosing:
		more, err = true, c.goLive(ctx, hard, g)
	default:
		more, err = c.completePages(ctx, hard, g)
	}
	if errors.Is(err, ErrServer) {
		c.asked = 0
	}
	return more, err
}

// catchUp applies a page. At the end of the log, the projector begins to go live.
func (c *Complete) catchUp(ctx, hard context.Context, g *generation.Row) (more bool, err error) {
	r := c.Reader
	got, err := r.Page(ctx, hard, g)
	switch {
	case err != nil || got.Moved && got.Page.More:
		return err == nil, err
	case r.cursor.before != nil: // until the checkpoint has passed the segments that were ahead
		return got.Moved, nil
	case len(got.Page.Waiting) > 0:
		full, err := c.completeUnsettled(ctx, hard, g, 0)
		if full || err != nil {
			return full, err
		}
	case g.Shared:
		if _, _, err := r.Progress.CaughtUp(ctx, g); err != nil { // it does not go live: see package deliver
			return false, err
		}
	}
	if g.Shared || r.Host.Clock().Before(r.closings.next) {
		return false, nil
	}
	return true, r.setMode(ctx, provider.ModeClosing)
}

// goLive applies the last events in ModeClosing, while deliveries wait, and ends it. All visible
// events are read at one moment: in pages, an event could be read without the one before it in its
// stream, if both commit between two pages. With too many events, or if some of them fail, the
// projector goes on catching up.
func (c *Complete) goLive(ctx, hard context.Context, g *generation.Row) error {
	r := c.Reader
	page, err := r.checkedPage(ctx, provider.LogQuery{
		After: r.cursor.read, Filter: r.Filter(), Limit: closeLimit, Unsettled: true, NoData: true,
	})
	if err != nil {
		return err
	}
	if page.Full {
		return c.postpone(ctx)
	}
	missing, err := r.Unapplied(ctx, page.Events)
	if err != nil {
		return err
	}
	if len(missing) > pageSize {
		return c.postpone(ctx)
	}
	for i, e := range missing { // few: their data was not read
		one, err := r.Host.Log.LogStreams(ctx, map[string]int64{e.Stream: e.Version}, e.Position-1)
		if err != nil {
			return err
		}
		if len(one) > 0 {
			missing[i] = one[0]
		}
	}
	for some := range slices.Chunk(missing, r.Applier.Batch) {
		aside, err := r.Complete(ctx, hard, g, some)
		if err != nil {
			return err
		}
		if aside > 0 {
			return c.postpone(ctx)
		}
	}
	r.closings = closings{}
	if err := r.setMode(ctx, provider.ModeLive); err != nil {
		return err
	}
	_, _, err = r.Progress.CaughtUp(ctx, g)
	return err
}

// postpone goes on catching up. The next attempt to go live is after a pause that doubles.
func (c *Complete) postpone(ctx context.Context) error {
	r := c.Reader
	r.closings.n++
	r.closings.next = r.Host.Clock().Add(model.Soon << min(r.closings.n, 10))
	return r.setMode(ctx, provider.ModeCatchUp)
}

// completePages applies the events behind the checkpoint that are older than the grace and are not
// applied, and moves the checkpoint.
func (c *Complete) completePages(ctx, hard context.Context, g *generation.Row) (more bool, err error) {
	r, grace := c.Reader, c.Reader.Host.Grace
	if _, _, err := r.Progress.CaughtUp(ctx, g); err != nil { // goLive may have failed to record it
		return false, err
	}
	page, err := r.checkedPage(ctx, provider.LogQuery{After: r.cursor.read, Filter: r.Filter(), Limit: pageSize, Age: grace})
	if err != nil {
		return false, err
	}
	r.delay.report(r, page.Waiting)
	r.Progress.Saw(g, page.Events)
	missing, err := r.Unapplied(ctx, page.Events)
	if err != nil {
		return false, err
	}
	if g.Shared || len(missing) > pageSize/2 {
		// Deliveries would be applied before earlier events of their streams.
		return true, r.setMode(ctx, provider.ModeCatchUp)
	}
	if _, err := r.Complete(ctx, hard, g, missing); err != nil {
		return false, err
	}
	if len(page.Events) > 0 || page.End.Position-r.at.Place.Position >= idleAdvance {
		if err := r.advance(hard, page.End); err != nil {
			return false, err
		}
	}
	more = page.Full && page.End.Position > r.cursor.read
	r.cursor.read = page.End.Position
	if len(page.Waiting) > 0 && !more {
		more, err = c.completeUnsettled(ctx, hard, g, grace)
	}
	return more, err
}

// completeUnsettled applies the next visible events behind the settled position that are older
// than age and are not applied. The checkpoint does not move. It reports whether there may be more
// of them.
func (c *Complete) completeUnsettled(ctx, hard context.Context, g *generation.Row, age time.Duration) (more bool, err error) {
	r := c.Reader
	c.asked = max(c.asked, r.cursor.read)
	page, err := r.checkedPage(ctx, provider.LogQuery{
		After: c.asked, Filter: r.Filter(), Limit: pageSize, Age: age, Unsettled: true,
	})
	if err != nil {
		return false, err
	}
	missing, err := r.Unapplied(ctx, page.Events)
	if err == nil && len(missing) > 0 {
		missing, err = r.withEarlier(ctx, missing)
	}
	if err != nil {
		return false, err
	}
	if _, err := r.Complete(ctx, hard, g, missing); err != nil {
		return false, err
	}
	if n := len(page.Events); n > 0 {
		c.asked = page.Events[n-1].Position
		more = page.Full
	}
	return more, nil
}

// withEarlier returns events, and those of their streams that are before them and not applied,
// in order of position and as of one moment. An event may have become visible since the page was
// read that should have had it.
func (r *Reader) withEarlier(ctx context.Context, events []eventstore.Raw) ([]eventstore.Raw, error) {
	versions := map[string]int64{}
	for _, e := range events {
		versions[e.Stream] = max(versions[e.Stream], e.Version)
	}
	all, err := r.Host.Log.LogStreams(ctx, versions, r.cursor.read)
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(e eventstore.Raw) bool { return len(r.Projector.ByType[e.Type])+len(r.lacking[e.Type]) == 0 })
	return r.Unapplied(ctx, all)
}

// Missed reports events that a broker has not delivered in time.
type Missed struct {
	Host      *model.Host
	Projector string
	Topics    []string // of the subscriptions; nil: they are not known
}

// Report reports those of applied messages that were read from the log, and why, as far as the
// outbox shows it. Those that another handler had applied were delivered, to a program without the new one.
func (o *Missed) Report(applied []*model.Message) {
	missed := slices.DeleteFunc(slices.Clone(applied), func(m *model.Message) bool { return !m.IsLogged() })
	if len(missed) == 0 {
		return
	}
	ctx, cancel := o.Host.Limited(context.Background())
	defer cancel()
	counts, reasons := map[string]int{}, o.reasons(ctx, missed)
	for _, reason := range reasons {
		counts[reason]++
		if o.Host.Observer.Completed != nil {
			o.Host.Observer.Completed(o.Projector, reason)
		}
	}
	for reason, n := range counts {
		o.Host.Logger.Warn("events were not delivered, and were read from the log", "projector", o.Projector,
			"events", n, "reason", reason, "first", missed[slices.Index(reasons, reason)].ID)
	}
}

func (o *Missed) reasons(ctx context.Context, missed []*model.Message) []string {
	reasons := make([]string, len(missed))
	entries, _ := o.Host.Log.(interface {
		Entries(ctx context.Context, f provider.EntryFilter) ([]provider.Entry, error)
	})
	byStream := map[string][]provider.Entry{}
	for i, m := range missed {
		reasons[i] = "no_entry" // no route, or published and deleted
		list, asked := byStream[m.Raw.Stream]
		if !asked && entries != nil && len(byStream) < 100 {
			list, _ = entries.Entries(ctx, provider.EntryFilter{Stream: m.Raw.Stream, Limit: 1000})
			byStream[m.Raw.Stream] = list
		}
		for _, e := range list {
			if e.ID == m.ID {
				reasons[i] = o.reasonOf(e)
			}
		}
	}
	return reasons
}

func (o *Missed) reasonOf(e provider.Entry) string {
	switch {
	case o.Topics != nil && !slices.Contains(o.Topics, e.Topic):
		return "not_subscribed" // it was published to other topics only
	case e.Status == outbox.Abandoned, e.Status == outbox.Held:
		return "abandoned" // its entry is abandoned, or behind one that is
	case e.Status.Open():
		return "not_published" // its outbox entry is open: relays are slow or stopped
	}
	return "not_delivered" // it was published, and the broker did not deliver it in time
}
