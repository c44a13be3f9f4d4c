package providertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
)

var appendCases = []testCase{
	{
		name: "versions are contiguous", play: versionsAreContiguous,
		rule: "Append adds events with the versions 1, 2, 3 and so on; Appended has the version and position of the last one",
	},
	{
		name: "positions follow the appends", play: positionsFollow,
		rule: "Event.Position is distinct, and greater in a later append",
	},
	{
		name: "expected versions", play: expectedVersions,
		rule: "Any accepts every version, NoStream only a stream that does not exist, a value ≥ 0 only that version; otherwise the error is a *ConflictError",
	},
	{
		// Promise: G1.2
		name: "a conflict writes nothing", play: conflictWritesNothing, options: Options{Route: outbox.ByCategory},
		rule: "A *ConflictError has the stream, the expected and the actual version; nothing commits: no event, no entry, no version",
	},
	{
		// Promise: G1.2
		name: "one of many wins a version", play: oneWinsAVersion, options: Options{Route: outbox.ByCategory},
		rule: "Of concurrent appends at one version, one commits with its entries, and the others are conflicts",
	},
	{
		name: "appends at any version all succeed", play: anyVersionAllWin,
		rule: "With Any, all concurrent appends commit, each with contiguous versions",
	},
	{
		// Promise: G1.1
		name: "an event is not seen without its entries", play: noEventWithoutEntries, options: Options{Route: outbox.ByCategory},
		rule: "Append adds events with the outbox entries of the route: all of it commits, or nothing does",
	},
	{
		name: "an ended context writes nothing", play: endedContextWritesNothing, options: Options{Route: outbox.ByCategory},
		rule: "An append whose context has ended returns the context's error, and nothing commits",
	},
}

func versionsAreContiguous(s *stage) {
	var wants []string
	version := int64(0)
	for _, n := range []int{1, 3, 1, 7} {
		ds := drafts(n)
		at := s.append("review-1", eventstore.Expected(version), ds...)
		s.append("review-2", eventstore.Any, draft()) // another stream has its own versions
		version += int64(n)
		wants = append(wants, idsOf(ds)...)
		s.require(at.Position > 0, "position %d is positive", at.Position)
		same(s, "log", at.Log, s.logID())
		at.Position, at.Log = 0, ""
		same(s, "appended", at, eventstore.Appended{Stream: "review-1", Version: version, Count: n})
	}
	same(s, "ids in review-1", s.readIDs("review-1"), wants)
	same(s, "events in review-2", len(s.readIDs("review-2")), 4)
}

func positionsFollow(s *stage) {
	last := int64(0)
	for i := range 6 {
		stream := fmt.Sprintf("review-%d", i%2)
		at := s.append(stream, eventstore.Any, drafts(3)...)
		events := s.read(s.db, stream, at.Version-3)
		same(s, "events of the append", len(events), 3)
		for _, e := range events {
			s.require(e.Position > last, "position %d is greater than %d", e.Position, last)
			last = e.Position
		}
		same(s, "Appended.Position", at.Position, last)
	}
}

func expectedVersions(s *stage) {
	for i, c := range []struct {
		// events in the stream before the append
		has      int
		expected eventstore.Expected
		conflict bool
	}{
		{0, eventstore.NoStream, false},
		{0, eventstore.Any, false},
		{0, 1, true},
		{0, 7, true},
		{3, 3, false},
		{3, eventstore.Any, false},
		{3, eventstore.NoStream, true},
		{3, 2, true},
		{3, 4, true},
		{1, eventstore.NoStream, true},
	} {
		stream := fmt.Sprintf("review-%d", i)
		if c.has > 0 {
			s.append(stream, eventstore.NoStream, drafts(c.has)...)
		}
		at, err := s.db.Append(s.ctx, stream, c.expected, drafts(2))
		if what := fmt.Sprintf("append at %d to a stream at %d", c.expected, c.has); c.conflict {
			s.conflict(err, what, eventstore.ConflictError{Stream: stream, Expected: c.expected, Actual: int64(c.has)})
			same(s, what+": result", at, eventstore.Appended{})
			same(s, what+": events", len(s.readIDs(stream)), c.has)
		} else {
			s.ok(err, what)
			same(s, what+": events", len(s.readIDs(stream)), c.has+2)
		}
	}
}

// conflict ends the case if err is not this *eventstore.ConflictError.
func (s *stage) conflict(err error, doing string, want eventstore.ConflictError) {
	s.Helper()
	got, ok := errors.AsType[*eventstore.ConflictError](err)
	if !ok || !errors.Is(err, eventstore.ErrConflict) {
		s.Fatalf("%s: got error %v, want an *eventstore.ConflictError", doing, err)
	}
	same(s, doing, *got, want)
}

func conflictWritesNothing(s *stage) {
	s.append("review-1", eventstore.NoStream, drafts(2)...)
	before := s.dump("review-1", "review-2")
	for _, expected := range []eventstore.Expected{eventstore.NoStream, 1, 3} {
		_, err := s.db.Append(s.ctx, "review-1", expected, drafts(3))
		s.conflict(err, "append", eventstore.ConflictError{Stream: "review-1", Expected: expected, Actual: 2})
	}
	_, err := s.db.Append(s.ctx, "review-2", 1, drafts(3))
	s.conflict(err, "append", eventstore.ConflictError{Stream: "review-2", Expected: 1})
	s.unchanged(before, "conflicts")
	same(s, "version after the conflicts", s.append("review-1", 2, draft()).Version, int64(3))
	same(s, "version of a stream after a conflict on it", s.append("review-2", eventstore.NoStream, draft()).Version, int64(1))
}

func oneWinsAVersion(s *stage) {
	const appenders, rounds = 16, 12
	version := int64(0)
	for round := range rounds {
		ats, errs := make([]eventstore.Appended, appenders), make([]error, appenders)
		together(appenders, func(i int) {
			ats[i], errs[i] = s.db.Append(s.ctx, "review-1", eventstore.Expected(version), drafts(1+i%3))
		})
		won := 0
		for i, err := range errs {
			if err == nil {
				won++
				version = ats[i].Version
				same(s, "events of the winner", ats[i].Count, 1+i%3)
				continue
			}
			s.require(errors.Is(err, eventstore.ErrConflict), "the error %v is a conflict", err)
		}
		same(s, fmt.Sprintf("winners in round %d", round), won, 1)
	}
	same(s, "events", int64(len(s.readIDs("review-1"))), version)
	same(s, "entries", int64(len(s.entries(outbox.Filter{}))), version)
}

func anyVersionAllWin(s *stage) {
	const appenders, each = 16, 8
	batches, errs := make([][]eventstore.Draft, appenders*each), make([]error, appenders)
	together(appenders, func(i int) {
		for j := range each {
			ds := drafts(1 + i%3)
			batches[i*each+j] = ds
			_, err := s.db.Append(s.ctx, "review-1", eventstore.Any, ds)
			errs[i] = errors.Join(errs[i], err)
		}
	})
	s.ok(errors.Join(errs...), "append at any version")
	ids, all := s.readIDs("review-1"), 0
	for _, ds := range batches {
		all += len(ds)
		first := slices.Index(ids, ds[0].ID)
		s.require(first >= 0 && slices.Equal(ids[first:first+len(ds)], idsOf(ds)), "the events of an append are contiguous")
	}
	same(s, "events", len(ids), all)
}

// noEventWithoutEntries reads first the events and then the entries while another goroutine
// appends. It may find more entries than events, but never fewer.
func noEventWithoutEntries(s *stage) {
	const scans, events = 200, 1000 // at least
	ctx, stop := context.WithCancel(s.ctx)
	defer stop()
	done := make(chan error, 1)
	go func() {
		var err error
		for ctx.Err() == nil && err == nil {
			_, err = s.db.Append(s.ctx, "review-1", eventstore.Any, drafts(2))
		}
		done <- err
	}()
	last := int64(0)
	for scan := 0; scan < scans || last < events; scan++ {
		for _, e := range s.read(s.db, "review-1", last) {
			last = e.Version
		}
		pending := s.counts()[outbox.Pending]
		s.require(pending >= last, "%d events have at least as many entries, not %d", last, pending)
	}
	stop()
	s.ok(<-done, "append")
	same(s, "entries at the end", int(s.counts()[outbox.Pending]), len(s.readIDs("review-1")))
}

func endedContextWritesNothing(s *stage) {
	s.append("review-1", eventstore.NoStream, draft())
	before := s.dump("review-1")
	canceled, cancel := context.WithCancel(s.ctx)
	cancel()
	_, err := s.db.Append(canceled, "review-1", 1, drafts(2))
	s.require(errors.Is(err, context.Canceled), "the error %v is context.Canceled", err)
	late, cancel := context.WithDeadline(s.ctx, time.Unix(0, 0))
	defer cancel()
	_, err = s.db.Append(late, "review-1", eventstore.Any, drafts(2))
	s.require(errors.Is(err, context.DeadlineExceeded), "the error %v is context.DeadlineExceeded", err)
	s.unchanged(before, "appends whose context had ended")
}
