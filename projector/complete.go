package projector

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

const (
	completePage = 1000    // events per query
	closeLimit   = 100_000 // the most visible events behind the checkpoint with which a projector goes live
)

// goLive applies the last events in ModeClosing, while deliveries wait, and ends it. All visible
// events are read at one moment: in pages, an event could be read without the one before it in its
// stream, if both commit between two pages. With too many events, or if some of them fail, the
// projector goes on catching up.
func (r *reader) goLive(ctx, hard context.Context) error {
	page, err := r.pageOn(ctx, provider.LogQuery{
		After: r.read, Filter: r.filter, Limit: closeLimit, Unsettled: true, NoData: true,
	})
	if err != nil {
		return err
	}
	if page.Full {
		return r.postpone(ctx)
	}
	missing, err := r.unapplied(ctx, page.Events)
	if err != nil {
		return err
	}
	if len(missing) > completePage {
		return r.postpone(ctx)
	}
	for i, e := range missing { // few: their data was not read
		one, err := r.log.LogStreams(ctx, map[string]int64{e.Stream: e.Version}, e.Position-1)
		if err != nil {
			return err
		}
		if len(one) > 0 {
			missing[i] = one[0]
		}
	}
	r.failed = 0
	for msgs := range slices.Chunk(missing, r.batch) {
		if err := r.complete(ctx, hard, msgs); err != nil {
			return err
		}
		if r.failed > 0 {
			return r.postpone(ctx)
		}
	}
	r.closings = 0
	if err := r.setMode(ctx, provider.ModeLive); err != nil {
		return err
	}
	_, err = r.caughtUp(ctx)
	return err
}

// postpone goes on catching up. The next attempt to go live is after a pause that doubles.
func (r *reader) postpone(ctx context.Context) error {
	r.closings++
	r.closeAt = r.runner.cfg.Clock().Add(readMin << min(r.closings, 10))
	return r.setMode(ctx, provider.ModeCatchUp)
}

// completePages applies the events behind the checkpoint that are older than the grace and are not
// applied, and moves the checkpoint.
func (r *reader) completePages(ctx, hard context.Context) (more bool, err error) {
	grace := r.runner.cfg.Grace
	if _, err := r.caughtUp(ctx); err != nil { // goLive may have failed to record it
		return false, err
	}
	page, err := r.pageOn(ctx, provider.LogQuery{After: r.read, Filter: r.filter, Limit: completePage, Age: grace})
	if err != nil {
		return false, err
	}
	r.reportWaiting(page.Waiting)
	r.saw(page.Events)
	missing, err := r.unapplied(ctx, page.Events)
	if err != nil {
		return false, err
	}
	if r.serving.shared || len(missing) > completePage/2 {
		// Deliveries would be applied before earlier events of their streams.
		return true, r.setMode(ctx, provider.ModeCatchUp)
	}
	if err := r.complete(ctx, hard, missing); err != nil {
		return false, err
	}
	if len(page.Events) > 0 || page.End.Position-r.at.Place.Position >= idleAdvance {
		if err := r.advance(hard, page.End); err != nil {
			return false, err
		}
	}
	more = page.Full && page.End.Position > r.read
	r.read = page.End.Position
	if len(page.Waiting) > 0 && !more {
		more, err = r.completeUnsettled(ctx, hard, grace)
	}
	return more, err
}

// completeUnsettled applies the next visible events behind the settled position that are older
// than age and are not applied. The checkpoint does not move. It reports whether there may be more
// of them.
func (r *reader) completeUnsettled(ctx, hard context.Context, age time.Duration) (more bool, err error) {
	r.asked = max(r.asked, r.read)
	page, err := r.pageOn(ctx, provider.LogQuery{
		After: r.asked, Filter: r.filter, Limit: completePage, Age: age, Unsettled: true,
	})
	if err != nil {
		return false, err
	}
	missing, err := r.unapplied(ctx, page.Events)
	if err == nil && len(missing) > 0 {
		missing, err = r.withEarlier(ctx, missing)
	}
	if err != nil {
		return false, err
	}
	if err := r.complete(ctx, hard, missing); err != nil {
		return false, err
	}
	if n := len(page.Events); n > 0 {
		r.asked = page.Events[n-1].Position
		more = page.Full
	}
	return more, nil
}

// withEarlier returns events, and those of their streams that are before them and not applied,
// in order of position and as of one moment. An event may have become visible since the page was
// read that should have had it.
func (r *reader) withEarlier(ctx context.Context, events []eventstore.Raw) ([]eventstore.Raw, error) {
	versions := map[string]int64{}
	for _, e := range events {
		versions[e.Stream] = max(versions[e.Stream], e.Version)
	}
	all, err := r.log.LogStreams(ctx, versions, r.read)
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(e eventstore.Raw) bool { return len(r.byType[e.Type]) == 0 })
	return r.unapplied(ctx, all)
}

// unapplied returns the events that are not applied.
func (r *reader) unapplied(ctx context.Context, events []eventstore.Raw) (missing []eventstore.Raw, err error) {
	ctx, cancel := context.WithTimeout(ctx, r.runner.cfg.Timeout)
	defer cancel()
	return unapplied(ctx, r.runner.store, r.build(), r.byType, events)
}

// unapplied returns the events that at least one of the handlers of their types has not applied.
func unapplied(
	ctx context.Context, s provider.Progress, b provider.Build, byType map[string][]provider.Handler, events []eventstore.Raw,
) (missing []eventstore.Raw, err error) {
	for page := range slices.Chunk(events, completePage) {
		asked := make([]provider.Message, len(page))
		for i, e := range page {
			asked[i] = provider.Message{ID: e.ID, Handlers: byType[e.Type], Position: e.Position}
		}
		is, err := s.Unapplied(ctx, b, asked)
		if err != nil {
			return nil, err
		}
		for i, e := range page {
			if is[i] {
				missing = append(missing, e)
			}
		}
	}
	return missing, nil
}

// complete applies events with markers. It returns an error if ctx ends first.
func (r *reader) complete(ctx, hard context.Context, events []eventstore.Raw) error {
	all, err := r.accept(ctx, events)
	if err != nil {
		return err
	}
	for msgs := range slices.Chunk(all, r.batch) {
		r.fenced = false
		err := r.inTurn(ctx, hard, msgs, r.setReplayed, func(ctx, hard context.Context) { r.apply(ctx, hard, msgs) })
		switch {
		case cmp.Or(err, ctx.Err()) != nil:
			return cmp.Or(err, ctx.Err())
		case r.fenced:
			return provider.ErrFenced
		}
		r.applied += int64(len(msgs))
	}
	return nil
}

// reportMissed reports events that the broker has not delivered in time, and why, as far as the
// outbox shows it.
func (r *reader) reportMissed(missed []*inbound) {
	ctx, cancel := context.WithTimeout(context.Background(), r.runner.cfg.Timeout)
	defer cancel()
	counts, reasons := map[string]int{}, r.reasons(ctx, missed)
	for _, reason := range reasons {
		counts[reason]++
		if r.runner.cfg.Observer.Completed != nil {
			r.runner.cfg.Observer.Completed(r.name, reason)
		}
	}
	for reason, n := range counts {
		r.runner.cfg.Logger.Warn("events were not delivered, and were read from the log", "projector", r.name,
			"events", n, "reason", reason, "first", missed[slices.Index(reasons, reason)].id)
	}
}

// Reasons why an event was not delivered.
const (
	reasonNotPublished  = "not_published"  // its outbox entry is open: relays are slow or stopped
	reasonAbandoned     = "abandoned"      // its entry is abandoned, or behind one that is
	reasonNotSubscribed = "not_subscribed" // it was published to other topics only
	reasonNotDelivered  = "not_delivered"  // it was published, and the broker did not deliver it in time
	reasonNoEntry       = "no_entry"       // no route, or published and deleted
)

// reasons returns for each event why it was not delivered.
func (r *reader) reasons(ctx context.Context, missed []*inbound) []string {
	reasons := make([]string, len(missed))
	entries, _ := r.log.(interface {
		Entries(ctx context.Context, f provider.EntryFilter) ([]provider.Entry, error)
	})
	byStream := map[string][]provider.Entry{}
	for i, m := range missed {
		reasons[i] = reasonNoEntry
		list, asked := byStream[m.raw.Stream]
		if !asked && entries != nil && len(byStream) < 100 {
			list, _ = entries.Entries(ctx, provider.EntryFilter{Stream: m.raw.Stream, Limit: 1000})
			byStream[m.raw.Stream] = list
		}
		for _, e := range list {
			if e.ID == m.id {
				reasons[i] = r.reasonOf(e)
			}
		}
	}
	return reasons
}

func (r *reader) reasonOf(e provider.Entry) string {
	switch {
	case !r.runner.src.router && !slices.Contains(r.runner.src.topics, e.Topic):
		return reasonNotSubscribed
	case e.Status == outbox.Abandoned, e.Status == outbox.Held:
		return reasonAbandoned
	case e.Status.Open():
		return reasonNotPublished
	}
	return reasonNotDelivered
}

// locate sets the positions of deliveries. Events of another log have none. For an event that was
// published without a position, or before this log was restored or moved, the log is asked.
// With Options.Ordered it adds the earlier events of their streams that are not applied.
func (w *worker) locate(ctx context.Context, msgs []*inbound) []*inbound {
	r := w.reader
	if r == nil || r.isSource {
		return msgs
	}
	for tries := 1; ctx.Err() == nil; tries++ {
		err := w.findPositions(ctx, msgs)
		if err == nil && w.opts.Ordered {
			var earlier []*inbound
			if earlier, err = w.earlier(ctx, msgs); err == nil {
				all := append(earlier, msgs...)
				slices.SortStableFunc(all, func(a, b *inbound) int { return cmp.Compare(a.position, b.position) })
				return all
			}
		}
		if err == nil {
			break
		}
		w.backOffUnit(ctx, len(msgs), tries, err)
	}
	return msgs
}

func (w *worker) findPositions(ctx context.Context, msgs []*inbound) error {
	own := *w.runner.logID.Load()
	named := own.String()
	var unknown []*inbound
	var ids []string
	for _, m := range msgs {
		switch log := m.msg.Metadata[outbox.HeaderLog]; {
		case m.malformed != nil, m.isForeign, m.isUnknown:
		case log == named:
			m.position = m.raw.Position
		default:
			if lineage, _, of := strings.Cut(log, "/"); !of || lineage == own.Lineage {
				unknown, ids = append(unknown, m), append(ids, m.id)
			}
		}
	}
	if len(ids) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, w.runner.cfg.Timeout)
	defer cancel()
	places, err := w.reader.log.LogPlaces(ctx, ids)
	if err != nil {
		return err
	}
	for _, m := range unknown {
		place, ok := places[m.id]
		m.position = place.Position
		if !ok && m.msg.Metadata[outbox.HeaderLog] != "" && m.aside == nil {
			m.aside = &aside{cause: errNoEvent, attempts: 1}
		}
	}
	return nil
}

// findLost sets parked messages aside whose events the log no longer has. They were parked behind
// others before their events were looked up.
func (w *worker) findLost(ctx context.Context, msgs []*inbound) {
	if w.reader == nil {
		return
	}
	own := *w.runner.logID.Load()
	others := slices.DeleteFunc(slices.Clone(msgs), func(m *inbound) bool {
		lineage, _, named := strings.Cut(m.msg.Metadata[outbox.HeaderLog], "/")
		return m.isForeign || m.isUnknown || !named || lineage != own.Lineage || m.msg.Metadata[outbox.HeaderLog] == own.String()
	})
	for tries := 1; ctx.Err() == nil; tries++ {
		err := w.findPositions(ctx, others)
		if err == nil {
			break
		}
		w.backOffUnit(ctx, len(others), tries, err)
	}
	for _, m := range others {
		m.position = 0 // it is not compared with the checkpoint
	}
}

// earlier returns the events of the messages' streams that are before them and not applied, in
// order of position.
func (w *worker) earlier(ctx context.Context, msgs []*inbound) ([]*inbound, error) {
	ctx, cancel := context.WithTimeout(ctx, w.runner.cfg.Timeout)
	defer cancel()
	versions := map[string]int64{}
	for _, m := range msgs {
		if m.position > 0 {
			versions[m.raw.Stream] = max(versions[m.raw.Stream], m.raw.Version)
		}
	}
	c, err := w.runner.store.Checkpoint(ctx, w.build())
	if err != nil || len(versions) == 0 || c.Mode == provider.ModeCatchUp {
		return nil, err
	}
	events, err := w.reader.log.LogStreams(ctx, versions, c.Place.Position)
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, m := range msgs {
		seen[m.id] = true
	}
	before := slices.DeleteFunc(events, func(e eventstore.Raw) bool { return seen[e.ID] || len(w.byType[e.Type]) == 0 })
	missing, err := unapplied(ctx, w.runner.store, w.build(), w.byType, before)
	if err != nil {
		return nil, err
	}
	return w.reader.accept(ctx, missing)
}
