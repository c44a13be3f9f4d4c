package providertest

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// several is more events than a provider reads in one page.
const several = 2500

var readCases = []testCase{
	{
		name: "events are read as appended", play: whatIsAppendedIsRead,
		rule: "ReadStream yields events as they were appended: id, type, schema, data (every digit of it) and metadata, with RecordedAt in UTC",
	},
	{
		name: "a draft stays the caller's", play: draftStaysTheCallers,
		rule: "A stored event never changes, even if the caller changes its draft, or a reader the event",
	},
	{
		name: "page by page", play: pageByPage,
		rule: "ReadStream yields the events with a version greater than afterVersion, in order, however many they are",
	},
	{
		name: "events of any size", play: eventsOfAnySize,
		rule: "ReadStream yields the events whose version is greater than afterVersion, in order, whatever their sizes",
	},
	{
		name: "appending while reading", play: appendingWhileReading,
		rule: "ReadStream holds no cursor, lock or connection while the body of the caller's loop runs",
	},
	{
		name: "leaving a loop early", play: leavingEarly,
		rule: "A loop over ReadStream can end at any event, and holds nothing afterwards",
	},
	{
		name: "an invalid stream name", play: noStreamsName,
		rule: "ReadStream with an invalid name yields an *InvalidError",
	},
	{
		name: "a stream that does not exist", play: streamNotThere,
		rule: "A stream without events yields nothing",
	},
	{
		name: "an error is yielded last", play: errorIsYieldedLast,
		rule: "An error is yielded last, with a zero Raw; an interrupted read never looks like the end of the stream",
	},
}

// values are event data that a careless store would change.
var values = []string{
	`null`, `true`, `0`, `""`, `[]`, `{}`,
	`{"n": 12345678901234567890.1234567890123456789}`,
	`{"n": [1E5, -0, 1e400, 1e-400, 0.1, 100]}`,
	`"O'Hara said \"\\\" and left; -- %s $1 ?"`,
	`"é e\u0301 \ud83c\udfa5 🎥 \u2028 \u007f"`,
	`{"a": {"b": [1, {"c": null}]}, "": "the empty key", "A": "another key than a"}`,
	strings.Repeat(`[`, provider.MaxJSONDepth) + strings.Repeat(`]`, provider.MaxJSONDepth),
	`"` + strings.Repeat("x", 100_000) + `"`,
}

func whatIsAppendedIsRead(s *stage) {
	ds := drafts(len(values) + 1)
	for i, v := range values {
		ds[i].Data = []byte(v)
	}
	full := &ds[len(values)]
	full.Type, full.Schema = "thing.happened at O'Hara's; --", 32767
	full.Metadata = eventstore.Metadata{
		CorrelationID: "c-1", CausationID: "c'2", Traceparent: "00-abc-def-01", Actor: `"ann" \ 日本`,
		Extra: map[string]string{"tenant": "4'2", "日本": strings.Repeat("x", 1024), "empty": ""},
	}
	at := s.append("review-1", eventstore.NoStream, ds...)
	events := s.read(s.db, "review-1", 0)
	same(s, "events", len(events), len(ds))
	for i, e := range events {
		d := ds[i]
		same(s, "place", []any{e.ID, e.Stream, e.Version}, []any{d.ID, "review-1", int64(i + 1)})
		same(s, "type", []any{e.Type, e.Schema}, []any{d.Type, d.Schema})
		same(s, "metadata", e.Metadata, d.Metadata)
		s.require(sameJSON(e.Data, d.Data), "data %.80s reads back as %.80s", d.Data, e.Data)
		s.require(!e.RecordedAt.IsZero() && e.RecordedAt.Location() == time.UTC, "RecordedAt %v is a time in UTC", e.RecordedAt)
	}
	same(s, "position of the last event", events[len(events)-1].Position, at.Position)
	same(s, "the second reading", s.read(s.db, "review-1", 0), events)
}

func draftStaysTheCallers(s *stage) {
	d := draft()
	d.Metadata.Extra = map[string]string{"k": "v"}
	s.append("review-1", eventstore.NoStream, d)
	spoil := func(data []byte, extra map[string]string) {
		copy(data, bytes.Repeat([]byte("x"), len(data)))
		extra["k"] = "spoilt"
	}
	spoil(d.Data, d.Metadata.Extra)
	for range 2 {
		e := s.read(s.db, "review-1", 0)[0]
		s.require(sameJSON(e.Data, []byte(`{"n":1}`)), "data reads back as %s", e.Data)
		same(s, "extra metadata", e.Metadata.Extra, map[string]string{"k": "v"})
		spoil(e.Data, e.Metadata.Extra)
	}
}

func (s *stage) appendSeveral(stream string) []string {
	s.Helper()
	ds := drafts(several)
	for i := 0; i < several; i += 500 {
		s.append(stream, eventstore.Expected(i), ds[i:i+500]...)
	}
	return idsOf(ds)
}

func pageByPage(s *stage) {
	ids := s.appendSeveral("review-1")
	s.append("review-10", eventstore.NoStream, drafts(3)...) // a name with the same beginning
	for _, after := range []int64{0, 1, several / 2, several - 1, several, several + 10} {
		got := s.read(s.db, "review-1", after)
		same(s, fmt.Sprintf("events after version %d", after), len(got), max(0, several-int(after)))
		for i, e := range got {
			same(s, "version", e.Version, after+int64(i)+1)
			same(s, "id", e.ID, ids[e.Version-1])
		}
	}
}

// appendingWhileReading does not require that the loop sees the events that it appends; those
// that it sees are in order.
func appendingWhileReading(s *stage) {
	s.appendSeveral("review-1")
	seen := int64(0)
	for e, err := range s.db.ReadStream(s.ctx, "review-1", 0) {
		s.ok(err, "read review-1")
		seen++
		same(s, "version", e.Version, seen)
		if seen <= several && seen%250 == 1 {
			s.append("review-1", eventstore.Any, draft())
			s.append("review-2", eventstore.Any, draft())
			for _, err := range s.db.ReadStream(s.ctx, "review-2", 0) {
				s.ok(err, "read review-2")
			}
		}
	}
	s.require(seen >= several, "%d events are at least those at the start", seen)
	same(s, "events in review-1", len(s.readIDs("review-1")), several+several/250)
	same(s, "events in review-2", len(s.readIDs("review-2")), several/250)
}

func leavingEarly(s *stage) {
	s.appendSeveral("review-1")
	for range 50 { // more often than a provider has connections
		seen := 0
		for _, err := range s.db.ReadStream(s.ctx, "review-1", 0) {
			s.ok(err, "read review-1")
			if seen++; seen == 3 {
				break
			}
		}
		same(s, "events seen", seen, 3)
	}
	s.append("review-1", several, draft())
	again := s.db.ReadStream(s.ctx, "review-1", 0)
	for range 2 { // a sequence starts from its beginning each time
		seen := 0
		for _, err := range again {
			s.ok(err, "read review-1")
			seen++
		}
		same(s, "events seen", seen, several+1)
	}
}

func streamNotThere(s *stage) {
	s.append("review-1", eventstore.NoStream, draft())
	same(s, "events in review-2", len(s.read(s.db, "review-2", 0)), 0)
	same(s, "events in review-2 after 7", len(s.read(s.db, "review-2", 7)), 0)
}

func errorIsYieldedLast(s *stage) {
	s.appendSeveral("review-1")
	for _, cancelAt := range []int{0, 1, several / 2} {
		ctx, cancel := context.WithCancel(s.ctx)
		if cancelAt == 0 {
			cancel()
		}
		var failed error
		seen := 0
		for e, err := range s.db.ReadStream(ctx, "review-1", 0) {
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
		s.require(failed != nil || seen == several, "a read that was interrupted after %d of %d events yields an error", seen, several)
		s.require(failed != nil || cancelAt > 0, "a read whose context had ended yields an error")
	}
}

func noStreamsName(s *stage) {
	for _, name := range []string{"", "nodash", "Bad-1", "a-\x00", "-1", "a-"} {
		n := 0
		for raw, err := range s.db.ReadStream(s.ctx, name, 0) {
			n++
			s.invalid(err, fmt.Sprintf("read %q", name))
			same(s, "event with the error", raw.ID, "")
		}
		same(s, fmt.Sprintf("yields of reading %q", name), n, 1)
	}
}
