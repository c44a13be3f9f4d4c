package providertest

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

var logPageCases = []testCase{
	{
		// Promise: G7.1
		name: "pages have every event", play: pagesHaveEveryEvent,
		rule: "Pages have each event once, in the order of the positions, as it was appended, even if a reader changes an event; a page has at most Limit events",
	},
	{
		name: "a page has 500 events", play: pageOf500,
		rule: "A Limit of zero means 500; More reports whether there are events behind the page",
	},
	{
		name: "a page ends after 8 MiB", play: pageEndsBySize,
		rule: "A page ends after about 8 MiB of data, and has at least one event",
	},
	{
		name: "the end of the log", play: endOfLog,
		rule: "If nothing new is settled, the Position of End is After, and the rest is zero",
	},
	{
		name: "a filter selects by category and type", play: logFilters,
		rule: "Nil categories or types mean all, empty ones none; a category is the name before the first -",
	},
	{
		// Promise: G7.1
		name: "a filter that selects few events", play: fewSelected,
		rule: "End is the place of a settled event also if the filter selects none: no event at or before it is missing from this page and those before",
	},
	{
		name: "pages without data", play: pagesWithoutData,
		rule: "NoData leaves Data and Metadata empty, and changes nothing else",
	},
	{
		name: "events that are too young", play: youngEvents,
		rule: "Age ends the page before the events at the end of the log that were recorded less than this time ago; More reports those too",
	},
	{
		// Promise: G7.1
		name: "an event of an open transaction", play: openTransaction,
		rule: "An event is in a page after its transaction has committed, and never before",
	},
	{
		// Promise: G7.1
		name: "a transaction that is rolled back", play: logAfterRollback,
		rule: "An append that is rolled back leaves no event, and does not end the log",
	},
	{
		name: "visible events behind the settled position", play: unsettledEvents,
		rule: "Unsettled adds the visible events behind the settled position, in order; Limit and the filter count for them too",
	},
	{
		// Promise: G7.1
		name: "a reader follows many writers", play: readerFollows,
		rule: "Page after page, a reader gets each event once, and those of each stream in order, while others append and roll back",
	},
	{
		name: "a page that is full", play: fullPages,
		rule: "Full reports whether the page ends because of a limit, and not because of Age",
	},
	{
		name: "streams up to a version", play: logStreams,
		rule: "LogStreams returns, of each stream, the events up to a version that are behind a position, in order of position",
	},
	{
		name: "queries that no store can answer", play: badLogQueries,
		rule: "Negative numbers, more than one field of From, and text that cannot be stored are an *InvalidError",
	},
	{
		name: "an event wakes readers", play: appendedWakes,
		rule: "The channel of Appended is closed when events are next appended through this value, also without entries, and not before",
	},
}

// logID returns the lineage of the log.
func (s *stage) logID() string {
	s.Helper()
	id, err := s.db.LogID(s.ctx)
	s.ok(err, "identify the log")
	return id.Lineage
}

// position returns a position of the log.
func (s *stage) position(from eventstore.From) int64 {
	s.Helper()
	position, err := s.db.LogPosition(s.ctx, from)
	s.ok(err, "find a position")
	return position
}

func (s *stage) page(q provider.LogQuery) provider.LogPage {
	s.Helper()
	page, err := s.db.LogPage(s.ctx, q)
	s.ok(err, "read a page")
	page.Server = ""
	if len(page.Events) == 0 {
		page.Events = nil
	}
	page.Server = "" // each provider has its own
	return page
}

// log reads the log page by page to its end, and checks each page.
func (s *stage) log(q provider.LogQuery) []eventstore.Raw {
	s.Helper()
	all := []eventstore.Raw{}
	for {
		page, before := s.page(q), q.After
		same(s, "open appends", len(page.Waiting), 0)
		for _, e := range page.Events {
			s.require(e.Position > q.After, "position %d is greater than %d", e.Position, q.After)
			q.After = e.Position
			all = append(all, e)
		}
		s.require(page.End.Position >= q.After, "the end %d is not before the last event %d", page.End.Position, q.After)
		q.After = page.End.Position
		if !page.More {
			return all
		}
		s.require(page.End.Position > before && page.End.ID != "", "the end of a page with more behind it has moved")
	}
}

// appendMixed appends n events to several streams, one at a time, and returns them as they are
// read from the streams, in the order of the log.
func (s *stage) appendMixed(n int) []eventstore.Raw {
	s.Helper()
	streams := []string{"review-1", "review-2", "order-1", "order_line-1-a"}
	all := make([]eventstore.Raw, n)
	for i := range all {
		d := draft()
		d.Type = fmt.Sprint("t", i%3)
		d.Data = fmt.Appendf(nil, `{"n": %d}`, i)
		if i%2 == 0 {
			d.Metadata = eventstore.Metadata{Actor: "ann", Extra: map[string]string{"n": fmt.Sprint(i)}}
		}
		stream := streams[i%len(streams)]
		at := s.append(stream, eventstore.Any, d)
		all[i] = s.read(s.db, stream, at.Version-1)[0]
		same(s, "position", all[i].Position, at.Position)
	}
	return all
}

func placeOf(e eventstore.Raw) provider.LogPlace {
	return provider.LogPlace{Position: e.Position, ID: e.ID, RecordedAt: e.RecordedAt}
}

func pagesHaveEveryEvent(s *stage) {
	want := s.appendMixed(50)
	for _, e := range s.log(provider.LogQuery{}) {
		copy(e.Data, "spoilt")
		if e.Metadata.Extra != nil {
			e.Metadata.Extra["n"] = "spoilt"
		}
	}
	for _, limit := range []int{1, 7, 25, 50, 100} {
		same(s, fmt.Sprintf("the log in pages of %d", limit), s.log(provider.LogQuery{Limit: limit}), want)
		page := s.page(provider.LogQuery{Limit: limit})
		n := min(limit, len(want))
		same(s, "events of a page", page.Events, want[:n])
		same(s, "end of a page", page.End, placeOf(want[n-1]))
		same(s, "more", page.More, limit < 50)
	}
	same(s, "the log after an event", s.log(provider.LogQuery{After: want[19].Position}), want[20:])
}

func pageOf500(s *stage) {
	s.append("review-1", eventstore.NoStream, drafts(500)...)
	page := s.page(provider.LogQuery{})
	same(s, "events", len(page.Events), 500)
	same(s, "more behind the last event", page.More, false)
	s.append("review-1", 500, draft())
	page = s.page(provider.LogQuery{})
	same(s, "events", len(page.Events), 500)
	same(s, "more behind the 500th of 501 events", page.More, true)
	same(s, "events of the next page", len(s.page(provider.LogQuery{After: page.End.Position}).Events), 1)
}

func pageEndsBySize(s *stage) {
	big := []byte(`"` + strings.Repeat("x", 1<<20-2) + `"`)
	for range 12 {
		d := draft()
		d.Data = big
		s.append("review-1", eventstore.Any, d)
	}
	s.append("review-1", eventstore.Any, drafts(10)...)
	var q provider.LogQuery
	for n := 0; n < 22; {
		page := s.page(q)
		bytes := 0
		for _, e := range page.Events {
			bytes += len(e.Data)
		}
		s.require(len(page.Events) > 0 && bytes <= provider.LogPageBytes+len(big), "a page of %d events has about 8 MiB: %d", len(page.Events), bytes)
		n, q.After = n+len(page.Events), page.End.Position
		same(s, fmt.Sprintf("more after %d events", n), page.More, n < 22)
	}
	same(s, "events", len(s.log(provider.LogQuery{Limit: 1})), 22)
}

func endOfLog(s *stage) {
	same(s, "a page of the empty log", s.page(provider.LogQuery{}), provider.LogPage{})
	at := s.append("review-1", eventstore.NoStream, drafts(3)...)
	for _, after := range []int64{at.Position, at.Position + 1000, 1<<63 - 1} {
		for _, f := range []eventstore.LogFilter{{}, {Types: []string{"other"}}} {
			page := s.page(provider.LogQuery{After: after, Filter: f})
			same(s, fmt.Sprintf("a page after %d", after), page, provider.LogPage{End: provider.LogPlace{Position: after}})
		}
	}
}

func logFilters(s *stage) {
	all := s.appendMixed(60)
	for _, f := range []eventstore.LogFilter{
		{Categories: []string{"review"}}, {Categories: []string{"order"}}, {Categories: []string{"order_line", "review"}},
		{Categories: []string{"orde", "review-1", "%", ""}}, {Categories: []string{}}, {Types: []string{}},
		{Types: []string{"t1"}}, {Types: []string{"t0", "t2", "O'Hara"}},
		{Categories: []string{"order"}, Types: []string{"t1"}}, {Categories: []string{"order"}, Types: []string{}},
	} {
		want := []eventstore.Raw{}
		for _, e := range all {
			if selected(f, e) {
				want = append(want, e)
			}
		}
		for _, limit := range []int{2, 100} {
			same(s, fmt.Sprintf("events of %+v", f), s.log(provider.LogQuery{Filter: f, Limit: limit}), want)
		}
		if f.Categories == nil {
			s.logCounts(f.Types, want)
		}
	}
}

// logCounts compares provider.LogCounter with the events of some types.
func (s *stage) logCounts(types []string, events []eventstore.Raw) {
	counter, ok := s.store.(provider.LogCounter)
	if !ok || len(events) < 2 {
		return
	}
	second := events[1].Position
	for _, c := range []struct {
		after, to int64
		want      int
	}{
		{0, math.MaxInt64, len(events)}, {second, math.MaxInt64, len(events) - 2}, {0, second - 1, 1}, {0, second, 2},
	} {
		n, err := counter.CountLog(s.ctx, types, c.after, c.to)
		s.ok(err, "count events")
		same(s, fmt.Sprintf("number of events of types %q behind %d up to %d", types, c.after, c.to), int(n), c.want)
	}
}

func selected(f eventstore.LogFilter, e eventstore.Raw) bool {
	has := func(of []string, t string) bool {
		for _, o := range of {
			if o == t {
				return true
			}
		}
		return of == nil
	}
	return has(f.Categories, strings.SplitN(e.Stream, "-", 2)[0]) && has(f.Types, e.Type)
}

func fewSelected(s *stage) {
	all := s.appendMixed(30)
	last := all[len(all)-1]
	for _, f := range []eventstore.LogFilter{{Types: []string{}}, {Types: []string{"none"}}, {Categories: []string{"none"}}} {
		page := s.page(provider.LogQuery{Filter: f})
		same(s, "selected", len(page.Events), 0)
		same(s, "end", page.End, placeOf(last))
		same(s, "more", page.More, false)
	}
	page := s.page(provider.LogQuery{Filter: eventstore.LogFilter{Types: []string{"t1"}}, Limit: 2})
	same(s, "events of a full page", page.Events, []eventstore.Raw{all[1], all[4]})
	same(s, "end of a full page", page.End, placeOf(all[4]))
	same(s, "more behind a full page", page.More, true)
}

func pagesWithoutData(s *stage) {
	all := s.appendMixed(6)
	for i := range all {
		all[i].Data, all[i].Metadata = nil, eventstore.Metadata{}
	}
	for _, f := range []eventstore.LogFilter{{}, {Types: []string{"t0", "t1", "t2"}}} {
		got := s.log(provider.LogQuery{NoData: true, Filter: f})
		for i := range got {
			same(s, "length of the data", len(got[i].Data), 0)
			got[i].Data = nil
		}
		same(s, "events", got, all)
	}
}

func youngEvents(s *stage) {
	const age = time.Hour
	s.appendMixed(4)
	for _, q := range []provider.LogQuery{{Age: age}, {Age: age, Unsettled: true}, {Age: age, Limit: 2}, {Age: age, Filter: eventstore.LogFilter{Types: []string{"t1"}}}} {
		same(s, "a page of young events", s.page(q), provider.LogPage{More: true})
	}
	s.advance(2 * age)
	young := s.appendMixed(3)
	all := s.log(provider.LogQuery{})
	same(s, "events", len(all), 7)
	for _, unsettled := range []bool{false, true} {
		page := s.page(provider.LogQuery{Age: age, Unsettled: unsettled})
		same(s, "old events", page.Events, all[:4])
		same(s, "end", page.End, placeOf(all[3]))
		same(s, "more", page.More, true)
	}
	page := s.page(provider.LogQuery{Age: age, Filter: eventstore.LogFilter{Types: []string{"t1"}}})
	same(s, "selected old events", page.Events, all[1:2])
	same(s, "end", page.End, placeOf(all[3]))
	same(s, "after the old events", s.page(provider.LogQuery{Age: age, After: all[3].Position}),
		provider.LogPage{End: provider.LogPlace{Position: all[3].Position}, More: true})
	s.advance(2 * age)
	page = s.page(provider.LogQuery{Age: age})
	same(s, "events when all are old", len(page.Events), 7)
	same(s, "end when all are old", page.End.ID, young[2].ID)
	same(s, "more when all are old", page.More, false)
}

func openTransaction(s *stage) {
	before := s.appendMixed(3)
	d := draft()
	s.ok(s.inTx(s.ctx, func(view TxView, _ Add) error {
		_, err := view.Append(s.ctx, "review-open", eventstore.NoStream, []eventstore.Draft{d})
		s.ok(err, "append")
		for _, unsettled := range []bool{false, true} {
			page := s.page(provider.LogQuery{Unsettled: unsettled})
			same(s, "events while a transaction is open", page.Events, before)
		}
		places, err := s.db.LogPlaces(s.ctx, []string{d.ID})
		s.ok(err, "find events")
		same(s, "places of the open transaction", len(places), 0)
		return nil
	}), "commit")
	page := s.page(provider.LogQuery{})
	same(s, "events after the commit", len(page.Events), 4)
	same(s, "the last event", page.Events[3].ID, d.ID)
}

func logAfterRollback(s *stage) {
	undo := errors.New("undo")
	want := s.appendMixed(2)
	err := s.inTx(s.ctx, func(view TxView, _ Add) error {
		_, err := view.Append(s.ctx, "review-1", eventstore.Any, drafts(10))
		s.ok(err, "append")
		return undo
	})
	s.require(errors.Is(err, undo), "the error %v is that of the function", err)
	same(s, "events after a rollback", s.log(provider.LogQuery{}), want)
	want = append(want, s.appendMixed(2)...)
	same(s, "events after the next append", s.log(provider.LogQuery{}), want)
}

func unsettledEvents(s *stage) {
	want := s.appendMixed(10)
	for _, limit := range []int{3, 10, 0} {
		page := s.page(provider.LogQuery{Unsettled: true, Limit: limit})
		n := limit
		if n == 0 {
			n = len(want)
		}
		same(s, "events", page.Events, want[:n])
		same(s, "more", page.More, n < len(want))
	}
	f := eventstore.LogFilter{Types: []string{"t2"}}
	same(s, "selected events", s.page(provider.LogQuery{Unsettled: true, Filter: f}).Events, []eventstore.Raw{want[2], want[5], want[8]})
}

// year returns the first moment of a year.
func year(n int) time.Time { return time.Date(n, 1, 1, 0, 0, 0, 0, time.UTC) }

func badLogQueries(s *stage) {
	for _, q := range []provider.LogQuery{
		{After: -1}, {Limit: -1}, {Age: -1},
		{Filter: eventstore.LogFilter{Types: []string{"ok", "a\x00"}}}, {Filter: eventstore.LogFilter{Categories: []string{replacement}}},
		{Filter: eventstore.LogFilter{Types: []string{strings.Repeat("x", 256)}}},
	} {
		_, err := s.db.LogPage(s.ctx, q)
		s.invalid(err, fmt.Sprintf("read %+v", q))
	}
	for _, from := range []eventstore.From{
		{Position: -1}, {Position: 1, Now: true}, {Time: time.Unix(1, 0), Now: true}, {Position: 1, Time: time.Unix(1, 0)},
		{Time: year(300_000)}, {Time: year(-5000)}, {Time: year(10_000)}, {Time: year(0)},
	} {
		_, err := s.db.LogPosition(s.ctx, from)
		s.invalid(err, fmt.Sprintf("find %+v", from))
		for _, err := range s.db.ReadLog(s.ctx, from, eventstore.LogFilter{}) {
			s.invalid(err, fmt.Sprintf("read from %+v", from))
		}
	}
	for _, err := range s.db.ReadLog(s.ctx, eventstore.From{}, eventstore.LogFilter{Types: []string{"a\x00"}}) {
		s.invalid(err, "read with a bad filter")
	}
}

func appendedWakes(s *stage) {
	waker, ok := s.store.(provider.LogWaker)
	if !ok {
		s.Log("this provider is not a provider.LogWaker")
		return
	}
	for i := range 3 {
		hint := waker.Appended()
		select {
		case <-hint:
			s.Fatalf("hint %d came before an event was appended", i)
		default:
		}
		s.append("review-1", eventstore.Any, draft())
		select {
		case <-hint:
		case <-s.ctx.Done():
			s.Fatalf("hint %d did not come", i)
		}
		same(s, "events when the hint comes", len(s.log(provider.LogQuery{})), i+1)
	}
}

// readerFollows reads with three readers while writers append and roll back.
func readerFollows(s *stage) {
	const writers, each = 4, 40
	done := make(chan struct{})
	failed := make(chan error, writers)
	go func() {
		defer close(done)
		together(writers, func(w int) { failed <- s.write(fmt.Sprint("review-", w), each) })
	}()
	versions := map[string]int64{}
	var q provider.LogQuery
	for last := false; ; {
		select {
		case <-done:
			last = true // this page and the following ones have everything
		default:
		}
		page := s.page(q)
		for _, e := range page.Events {
			s.require(e.Position > q.After, "position %d is behind %d", e.Position, q.After)
			versions[e.Stream]++
			same(s, "version in "+e.Stream, e.Version, versions[e.Stream])
			q.After = e.Position
		}
		q.After = page.End.Position
		if last && !page.More {
			break
		}
	}
	for range writers {
		s.ok(<-failed, "write")
	}
	for w := range writers {
		same(s, "events that were read", versions[fmt.Sprint("review-", w)], each)
	}
}

// write appends n events to a stream. After every third one it rolls an append back.
func (s *stage) write(stream string, n int) error {
	undo := errors.New("undo")
	for i := range n {
		if _, err := s.db.Append(s.ctx, stream, eventstore.Any, drafts(1)); err != nil {
			return err
		}
		if i%3 > 0 {
			continue
		}
		err := s.inTx(s.ctx, func(view TxView, _ Add) error {
			_, err := view.Append(s.ctx, stream, eventstore.Any, drafts(2))
			return errors.Join(undo, err)
		})
		if !errors.Is(err, undo) {
			return fmt.Errorf("roll back: %w", err)
		}
	}
	return nil
}

func fullPages(s *stage) {
	s.append("review-1", eventstore.Any, drafts(5)...)
	same(s, "five of five", s.page(provider.LogQuery{Limit: 6}).Full, false)
	same(s, "four of five", s.page(provider.LogQuery{Limit: 4}).Full, true)
	s.advance(time.Hour)
	s.append("review-1", eventstore.Any, drafts(5)...)
	page := s.page(provider.LogQuery{Limit: 6, Age: 30 * time.Minute})
	same(s, "events that are old enough", len(page.Events), 5)
	same(s, "a page that Age ends", page.Full, false)
}

func logStreams(s *stage) {
	var ids []string
	var third int64
	for n := range 5 {
		one, two := draft(), draft()
		at := s.append("review-1", eventstore.Any, one)
		s.append("review-2", eventstore.Any, two)
		s.append("review-3", eventstore.Any, draft())
		if n == 2 {
			third = at.Position
		}
		ids = append(ids, one.ID, two.ID)
	}
	of := func(versions map[string]int64, after int64) (found []string) {
		events, err := s.db.LogStreams(s.ctx, versions, after)
		s.ok(err, "read streams")
		for _, e := range events {
			s.require(len(e.Data) > 0, "event %d has data", e.Position)
			found = append(found, e.ID)
		}
		return found
	}
	same(s, "all of two streams", of(map[string]int64{"review-1": 5, "review-2": 5}, 0), ids)
	same(s, "up to a version", of(map[string]int64{"review-1": 3, "review-2": 1}, 0), []string{ids[0], ids[1], ids[2], ids[4]})
	same(s, "behind a position", of(map[string]int64{"review-1": 5, "review-2": 3}, third), []string{ids[5], ids[6], ids[8]})
	same(s, "no such version, no such stream", of(map[string]int64{"review-1": 6, "review-9": 1}, 0), nil)
}
