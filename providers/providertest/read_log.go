package providertest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

var readLogCases = []testCase{
	{
		// Promise: G7.1
		name: "the log is read from a place on", play: readLogFrom,
		rule: "ReadLog yields the events that the filter selects, from a place on, in order",
	},
	{
		// Promise: G7.1
		name: "a place by time", play: positionByTime,
		rule: "From.Time is the first event that was recorded at this time or later; From.Now is after the events that exist now",
	},
	{
		// Promise: G7.1
		name: "appending while reading the log", play: appendingWhileReadingLog,
		rule: "ReadLog ends with the last event that is visible when the loop begins, and holds no cursor, lock or connection while the body of the caller's loop runs",
	},
	{
		name: "leaving a loop over the log early", play: leavingLogEarly,
		rule: "A loop over ReadLog can end at any event, and holds nothing afterwards",
	},
	{
		name: "an error of ReadLog is yielded last", play: logErrorIsLast,
		rule: "An error is yielded last, with a zero Raw; an interrupted read never looks like the end of the log",
	},
	{
		name: "places of events", play: placesOfEvents,
		rule: "LogPlaces has the places of those of the events that are in the log; ids may be any text",
	},
	{
		name: "events by id", play: eventsByID,
		rule: "LogEvents has those of the events that are in the log, as ReadLog yields them; ids may be any text",
	},
	{
		name: "a log has an id", play: logID,
		rule: "LogID identifies the log: the same for every handle on it, whatever is appended",
	},
}

func (s *stage) readLog(from eventstore.From, f eventstore.LogFilter) []eventstore.Raw {
	s.Helper()
	all := []eventstore.Raw{}
	for e, err := range s.db.ReadLog(s.ctx, from, f) {
		s.ok(err, "read the log")
		all = append(all, e)
	}
	return all
}

func readLogFrom(s *stage) {
	same(s, "the empty log", len(s.readLog(eventstore.From{}, eventstore.LogFilter{})), 0)
	all := s.appendMixed(30)
	same(s, "the log", s.readLog(eventstore.From{}, eventstore.LogFilter{}), all)
	same(s, "the log after a position", s.readLog(eventstore.From{Position: all[9].Position}, eventstore.LogFilter{}), all[10:])
	same(s, "the log from now on", len(s.readLog(eventstore.From{Now: true}, eventstore.LogFilter{})), 0)
	same(s, "the log behind its end", len(s.readLog(eventstore.From{Position: 1 << 60}, eventstore.LogFilter{})), 0)
	f := eventstore.LogFilter{Types: []string{"t1"}, Categories: []string{"review"}}
	want := []eventstore.Raw{}
	for _, e := range all {
		if selected(f, e) {
			want = append(want, e)
		}
	}
	same(s, "selected events", s.readLog(eventstore.From{}, f), want)
}

func positionByTime(s *stage) {
	var all []eventstore.Raw
	for range 4 { // four groups, each an hour after the one before
		s.append("review-1", eventstore.Any, drafts(25)...)
		s.advance(time.Hour)
	}
	all = s.log(provider.LogQuery{})
	same(s, "the beginning", s.position(eventstore.From{}), int64(0))
	same(s, "a position", s.position(eventstore.From{Position: 7}), int64(7))
	same(s, "now", s.position(eventstore.From{Now: true}), all[99].Position)
	at := func(t time.Time) []eventstore.Raw {
		return s.log(provider.LogQuery{After: s.position(eventstore.From{Time: t})})
	}
	for i := range 4 {
		first := all[25*i]
		same(s, fmt.Sprintf("events of group %d", i), at(first.RecordedAt), all[25*i:])
		same(s, fmt.Sprintf("events since half an hour before group %d", i), at(first.RecordedAt.Add(-time.Hour/2)), all[25*i:])
		same(s, fmt.Sprintf("events since a nanosecond before group %d", i), at(first.RecordedAt.Add(-1)), all[25*i:])
		same(s, fmt.Sprintf("events since a nanosecond after group %d", i), at(first.RecordedAt.Add(1)), all[25*i+25:])
	}
	same(s, "events since long ago", at(all[0].RecordedAt.Add(-1000*time.Hour)), all)
	same(s, "events since a time to come", len(at(all[99].RecordedAt.Add(1000*time.Hour))), 0)
	same(s, "events read from a time on", s.readLog(eventstore.From{Time: all[50].RecordedAt}, eventstore.LogFilter{}), all[50:])
}

func appendingWhileReadingLog(s *stage) {
	s.appendSeveral("review-1")
	seen := 0
	for e, err := range s.db.ReadLog(s.ctx, eventstore.From{}, eventstore.LogFilter{}) {
		s.ok(err, "read the log")
		seen++
		same(s, "version", e.Version, int64(seen))
		if seen%250 == 1 {
			s.append("review-1", eventstore.Any, draft())
			same(s, "the first event of another loop", s.page(provider.LogQuery{Limit: 1}).Events[0].Version, int64(1))
		}
	}
	same(s, "events", seen, several)
}

func leavingLogEarly(s *stage) {
	s.appendSeveral("review-1")
	for range 50 { // more often than a provider has connections
		seen := 0
		for _, err := range s.db.ReadLog(s.ctx, eventstore.From{}, eventstore.LogFilter{}) {
			s.ok(err, "read the log")
			if seen++; seen == 3 {
				break
			}
		}
		same(s, "events seen", seen, 3)
	}
	s.append("review-1", several, draft())
	again := s.db.ReadLog(s.ctx, eventstore.From{Position: s.position(eventstore.From{Now: true}) - 1}, eventstore.LogFilter{})
	for range 2 { // a sequence starts from its beginning each time
		seen := 0
		for _, err := range again {
			s.ok(err, "read the log")
			seen++
		}
		same(s, "events seen", seen, 1)
	}
}

func logErrorIsLast(s *stage) {
	s.appendSeveral("review-1")
	for _, cancelAt := range []int{0, 1, several / 2} {
		ctx, cancel := context.WithCancel(s.ctx)
		if cancelAt == 0 {
			cancel()
		}
		var failed error
		seen := 0
		for e, err := range s.db.ReadLog(ctx, eventstore.From{}, eventstore.LogFilter{}) {
			s.require(failed == nil, "no event follows the error %v", failed)
			if failed = err; err != nil {
				same(s, "event with the error", e, eventstore.Raw{})
				continue
			}
			if seen++; seen == cancelAt {
				cancel()
			}
		}
		cancel()
		s.require(errors.Is(failed, context.Canceled), "a read that was interrupted after %d events yields the context's error, not %v", seen, failed)
	}
}

func placesOfEvents(s *stage) {
	all := s.appendMixed(5)
	ids := []string{newID(), "", "7", "a\x00", replacement, `"`}
	want := map[string]provider.LogPlace{}
	for _, e := range all[1:] {
		ids = append(ids, e.ID, e.ID)
		want[e.ID] = placeOf(e)
	}
	got, err := s.db.LogPlaces(s.ctx, ids)
	s.ok(err, "find events")
	same(s, "places", got, want)
	got, err = s.db.LogPlaces(s.ctx, nil)
	s.ok(err, "find no events")
	same(s, "places of no events", len(got), 0)
}

func eventsByID(s *stage) {
	all := s.appendMixed(5)
	ids := []string{newID(), "", "7", "a\x00", replacement, `"`}
	want := map[string]eventstore.Raw{}
	for _, e := range all[1:] {
		ids = append(ids, e.ID, e.ID)
		want[e.ID] = e
	}
	got, err := s.db.LogEvents(s.ctx, ids)
	s.ok(err, "read events by id")
	same(s, "events", got, want)
	got, err = s.db.LogEvents(s.ctx, nil)
	s.ok(err, "read no events")
	same(s, "no events", len(got), 0)
}

func logID(s *stage) {
	id, err := s.db.LogID(s.ctx)
	s.ok(err, "identify the log")
	s.require(id.Lineage != "", "a log has a lineage")
	s.appendMixed(3)
	again, err := s.db.LogID(s.ctx)
	s.ok(err, "identify the log")
	same(s, "id after an append", again, id)
	if s.reopen != nil {
		other, err := s.reopen().db.LogID(s.ctx)
		s.ok(err, "identify the log")
		same(s, "id through another handle", other, id)
	}
}
