package provider

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/pauses"
)

// Log reads the log of a store in pages. A position is settled if no event at or before it can
// still become visible. Only open appends of this database delay the settled position.
type Log interface {
	// LogPage returns the next events, and does not wait for new ones. It waits some milliseconds for open
	// appends that delay the settled position, then returns the settled events, and those appends.
	//   - eventstore.ErrInvalid: no store can have this input.
	//   - eventstore.ErrUnsafeLog: the database or its settings do not show which positions are settled.
	LogPage(ctx context.Context, q LogQuery) (LogPage, error)

	// LogPosition returns the position after which from begins. From.Now is the last visible event: an open
	// append may still add events before it. A time after that of every event is From.Now. A time may be
	// found by binary search: the store's clock must not have gone back by more than a minute.
	LogPosition(ctx context.Context, from eventstore.From) (int64, error)

	// LogPlaces returns the places of those events that are in the log, by their ids, which may be any text.
	LogPlaces(ctx context.Context, ids []string) (map[string]LogPlace, error)

	// LogEvents returns those events that are in the log, by their ids, which may be any text.
	LogEvents(ctx context.Context, ids []string) (map[string]eventstore.Raw, error)

	// LogStreams returns the visible events of streams up to a version, behind a position, in order and as of one moment.
	LogStreams(ctx context.Context, versions map[string]int64, after int64) ([]eventstore.Raw, error)

	// LogID identifies the log.
	LogID(ctx context.Context) (LogID, error)
}

// LogWaker is a capability of a Log: a hint that events were appended.
type LogWaker interface {
	// Appended returns a channel that is closed when events are next appended through this value.
	Appended() <-chan struct{}
}

// LogCounter is a capability of a Log: it counts events without reading them.
type LogCounter interface {
	// CountLog returns the number of visible events of types (nil: of all) behind after, up to to.
	CountLog(ctx context.Context, types []string, after, to int64) (int64, error)
}

// LogQuery selects a page of a log.
type LogQuery struct {
	After  int64 // only events with a greater position
	Filter eventstore.LogFilter
	Limit  int // the most events; zero means 500. A page also ends after about 8 MiB of data.
	// Age ends the page before the events at the end of the log that are younger, on the store's clock.
	Age       time.Duration
	Unsettled bool // add the visible events behind the settled position, as of one moment, without moving End
	NoData    bool // leave Data and Metadata empty
	// Share and Shares, if Shares is not zero, leave out the events of streams that other shares have:
	// SegmentOf(stream, Shares) is not Share. It is a hint: a log may return them.
	Share, Shares int
}

// LogPage is a page of a log.
type LogPage struct {
	Events []eventstore.Raw // in order of position, settled unless LogQuery.Unsettled
	// End is the place of a settled event: no event at or before it is missing from this page and
	// those before. If nothing new is settled, its Position is LogQuery.After, and the rest zero.
	End  LogPlace
	Full bool // it ends because of a limit: of events, of data, or of the positions that one page covers
	More bool // the log has visible events behind the page, of any type and age
	// Server identifies the server and its history. It changes after a restart, a failover or a restore. May be empty.
	Server  string
	Waiting []OpenAppend // what keeps the settled position behind the last visible one
}

// LogPlace is the place of an event in a log.
type LogPlace struct {
	Position   int64
	ID         string // of the event
	RecordedAt time.Time
}

// OpenAppend is a transaction that has appended events and has not ended.
type OpenAppend struct {
	Backend string // the server's name of it, such as the pid of the backend
	Since   time.Time
}

// String returns the name of the append, and when its transaction began if that is known.
func (o OpenAppend) String() string {
	if o.Since.IsZero() {
		return o.Backend
	}
	return o.Backend + " (since " + o.Since.UTC().Format(time.RFC3339Nano) + ")"
}

// LogID identifies a log.
type LogID struct {
	Lineage string // a copy has the lineage of its original
	Branch  string // differs between a copy and its original, as far as the database shows it
}

// String returns both parts, as HeaderLog has them.
func (l LogID) String() string { return l.Lineage + "/" + l.Branch }

// EventFinder is an eventstore.Store, or a TxStore, that finds events by their ids. Commands with a CommandID require it.
type EventFinder interface {
	// FindEvent returns the place of the event with this id, with Count 1, or a zero Appended.
	FindEvent(ctx context.Context, id string) (eventstore.Appended, error)
}

// Sizes of a page of a log.
const (
	LogPageEvents = 500     // if LogQuery.Limit is zero
	LogPageBytes  = 8 << 20 // of data and metadata; the event that reaches it ends the page
	// With a filter, a page covers this many positions at most: its End moves also if few are selected.
	LogPageScan = 20_000
)

// LogReader reads the log of a store: the events of all its streams, in the order of their positions.
type LogReader interface {
	// ReadLog yields the events that f selects, from a place on, up to the last one that is visible when the loop begins.
	//   - It skips no event and keeps the order of each stream, also while appends are open, are rolled back, or commit
	//     in another order than that of their positions. For this it waits for open appends of this database, and for
	//     nothing else. If ctx ends while it waits, the error names them.
	//   - It reads in pages, and holds no cursor, lock or connection while the body of the caller's loop runs.
	//   - eventstore.ErrUnsafeLog: this database cannot show which events are missing.
	//   - An error is yielded last, with a zero Raw.
	ReadLog(ctx context.Context, from eventstore.From, f eventstore.LogFilter) iter.Seq2[eventstore.Raw, error]
}

// ReadLog implements LogReader with the pages of a log.
func ReadLog(ctx context.Context, log Log, from eventstore.From, f eventstore.LogFilter) iter.Seq2[eventstore.Raw, error] {
	return func(yield func(eventstore.Raw, error) bool) {
		err := readLog(ctx, log, from, f, func(e eventstore.Raw) bool { return yield(e, nil) })
		if err != nil {
			yield(eventstore.Raw{}, fmt.Errorf("read the log: %w", err))
		}
	}
}

// readLog returns nil after yield has returned false.
func readLog(ctx context.Context, log Log, from eventstore.From, f eventstore.LogFilter, yield func(eventstore.Raw) bool) error {
	q := LogQuery{Filter: f}
	if err := cmp.Or(CheckFrom(from), CheckLogQuery(q)); err != nil {
		return err
	}
	head, err := log.LogPosition(ctx, eventstore.From{Now: true})
	if err != nil {
		return err
	}
	if q.After, err = log.LogPosition(ctx, from); err != nil {
		return err
	}
	var wait logWait
	for first := true; first || q.After < head; first = false { // the first page shows that the log can be read
		page, err := log.LogPage(ctx, q)
		if err != nil {
			return wait.explain(ctx, err)
		}
		for _, e := range page.Events {
			if e.Position > head || !yield(e) {
				return nil
			}
		}
		switch {
		case q.After >= head:
			return nil
		case page.End.Position > q.After:
			q.After, wait = page.End.Position, logWait{}
		case !page.More:
			return nil // the rest was deleted
		default:
			if err := wait.pause(ctx, page.Waiting); err != nil {
				return err
			}
		}
	}
	return nil
}

// logWait is the wait of a reader for open appends.
type logWait struct {
	began time.Time
	next  pauses.Doubling
	open  []OpenAppend
}

// pause waits a little longer than the last time, or until ctx ends.
func (w *logWait) pause(ctx context.Context, open []OpenAppend) error {
	if w.began.IsZero() {
		w.began, w.next = time.Now(), pauses.Doubling{First: time.Millisecond, Longest: 100 * time.Millisecond} //nolint:forbidigo // a duration
	}
	w.open = open
	pauses.Wait(ctx, w.next.Next(), nil)
	return w.explain(ctx, ctx.Err())
}

// explain adds the open appends to an error if ctx has ended during the wait.
func (w *logWait) explain(ctx context.Context, err error) error {
	if ctx.Err() == nil || len(w.open) == 0 {
		return err
	}
	waited := time.Since(w.began) //nolint:forbidigo // a duration
	names := make([]string, len(w.open))
	for i, o := range w.open {
		names[i] = o.String()
	}
	return fmt.Errorf("waited %s for the open appends of %s: %w", waited.Round(time.Millisecond), strings.Join(names, ", "), err)
}

// CheckFrom refuses a negative position, a time outside the years 1 to 9999, and more than one field.
func CheckFrom(from eventstore.From) error {
	set := 0
	for _, is := range []bool{from.Position != 0, !from.Time.IsZero(), from.Now} {
		if is {
			set++
		}
	}
	switch {
	case set > 1:
		return invalidf("from", "has %d fields: set Position, Time or Now", set)
	case from.Position < 0:
		return invalidf("from.position", "%d: must not be negative; zero is the beginning", from.Position)
	}
	return checkTime("from.time", from.Time)
}

// CheckLogQuery checks the numbers and the filter of a query.
func CheckLogQuery(q LogQuery) error {
	switch {
	case q.After < 0:
		return invalidf("after", "%d: must not be negative; zero is the beginning", q.After)
	case q.Limit < 0:
		return invalidf("limit", "%d: must not be negative; zero means %d", q.Limit, LogPageEvents)
	case q.Age < 0:
		return invalidf("age", "%s: must not be negative", q.Age)
	}
	return cmp.Or(CheckStorable("filter.categories", q.Filter.Categories...), CheckStorable("filter.types", q.Filter.Types...))
}

// EventIDs returns those of the texts that can be the id of an event, each once.
func EventIDs(texts []string) []string {
	var ids []string
	seen := make(map[string]bool, len(texts))
	for _, t := range texts {
		id, err := uuid.Parse(t)
		if err == nil && id.String() == t && !seen[t] {
			seen[t], ids = true, append(ids, t)
		}
	}
	return ids
}

// LogIndex finds visible events of a log. FindPosition calls it.
type LogIndex interface {
	// Head returns the position of the last event, or zero.
	Head(ctx context.Context) (int64, error)
	// Next returns the first event after a position, or a zero LogPlace.
	Next(ctx context.Context, after int64) (LogPlace, error)
	// Since finds the first event after a position that was recorded at t or later, and returns the position of the
	// event before it, or zero; false if there is none. A store whose clock has less than nanoseconds rounds t up.
	Since(ctx context.Context, after int64, t time.Time) (int64, bool, error)
}

// FindPosition implements Log.LogPosition.
func FindPosition(ctx context.Context, log LogIndex, from eventstore.From) (int64, error) {
	if err := CheckFrom(from); err != nil || !from.Now && from.Time.IsZero() {
		return from.Position, err
	}
	head, err := log.Head(ctx)
	if err != nil || from.Now {
		return head, err
	}
	// Every event up to lo was recorded before from.Time, if the clock went back by less than a
	// minute: the event at lo was recorded more than a minute before.
	lo, hi := int64(0), head
	for lo < hi {
		mid := lo + (hi-lo)/2
		next, err := log.Next(ctx, mid)
		switch {
		case err != nil:
			return 0, err
		case next.Position == 0 || !next.RecordedAt.Before(from.Time.Add(-time.Minute)):
			hi = mid
		default:
			lo = next.Position
		}
	}
	before, found, err := log.Since(ctx, lo, from.Time)
	if err != nil || found {
		return before, err
	}
	return head, nil
}

// The functions below are the rules of events for stores that apply them row by row, in a transaction.

// Repeated reports whether the same append is stored already: the same ids in the same order in this
// stream, at the version that expected asks for. Then the result is that of the append, without its Log.
// Any other use of a stored id is ErrEventIDReused. find returns the place of a stored event.
func Repeated(
	stream string, expected eventstore.Expected, drafts []eventstore.Draft, find func(id string) (eventstore.Appended, bool),
) (eventstore.Appended, bool, error) {
	first, stored := find(drafts[0].ID)
	last := first
	for i, d := range drafts {
		at, ok := find(d.ID)
		if ok != stored || ok && (at.Stream != stream || at.Version != first.Version+int64(i)) {
			return eventstore.Appended{}, false, eventstore.ErrEventIDReused
		}
		last = at
	}
	if !stored {
		return eventstore.Appended{}, false, nil
	}
	if expected != eventstore.Any && first.Version != int64(expected)+1 {
		return eventstore.Appended{}, false, eventstore.ErrEventIDReused
	}
	last.Count, last.Replayed = len(drafts), true
	return last, true, nil
}

// Page returns a page of a log in which every visible event is settled. events yields the visible events
// behind q.After in order of position, and head is the position of the last one. now is the store's time.
func (q *LogQuery) Page(events iter.Seq[eventstore.Raw], head int64, now time.Time) LogPage {
	page := LogPage{End: LogPlace{Position: q.After}}
	limit, bytes := cmp.Or(q.Limit, LogPageEvents), 0
	for e := range events {
		if page.Full = len(page.Events) == limit || bytes >= LogPageBytes; page.Full {
			break
		}
		page.End = placeOf(e)
		if f := q.Filter; f.Categories != nil && !slices.Contains(f.Categories, Category(e.Stream)) || f.Types != nil && !slices.Contains(f.Types, e.Type) {
			continue
		}
		if q.NoData {
			e.Data, e.Metadata = nil, eventstore.Metadata{}
		}
		page.Events, bytes = append(page.Events, e), bytes+len(e.Data)
	}
	if q.Age > 0 {
		q.dropYoung(&page, events, now)
	}
	page.More = page.End.Position < head
	return page
}

// dropYoung ends the page at the last event of the log that is old enough, if that is within the page.
func (q *LogQuery) dropYoung(page *LogPage, events iter.Seq[eventstore.Raw], now time.Time) {
	end := LogPlace{Position: q.After}
	for e := range events {
		if e.RecordedAt.After(now.Add(-q.Age)) {
			continue
		}
		if end = placeOf(e); end.Position >= page.End.Position {
			return
		}
	}
	page.End, page.Full = end, false
	page.Events = slices.DeleteFunc(page.Events, func(e eventstore.Raw) bool { return e.Position > end.Position })
}

func placeOf(e eventstore.Raw) LogPlace {
	return LogPlace{Position: e.Position, ID: e.ID, RecordedAt: e.RecordedAt}
}

// PositionIn implements Log.LogPosition with the visible events in order, the last one at head.
func PositionIn(from eventstore.From, head int64, events iter.Seq[eventstore.Raw]) (int64, error) {
	if err := CheckFrom(from); err != nil || !from.Now && from.Time.IsZero() {
		return from.Position, err
	}
	if from.Now {
		return head, nil
	}
	for e := range events {
		if !e.RecordedAt.Before(from.Time) {
			return e.Position - 1, nil
		}
	}
	return head, nil
}

// Passed is the check of Archive in a store. behind has the projectors that take an event of the stream
// that is to be deleted, and whose checkpoint is before it, except those of retired generations. If
// ArchiveOptions.Ignore does not have all of them, the error is eventstore.ErrNotPassed with their names.
func Passed(behind []string, o eventstore.ArchiveOptions) error {
	behind = slices.DeleteFunc(slices.Clone(behind), func(name string) bool { return slices.Contains(o.Ignore, name) })
	if len(behind) == 0 {
		return nil
	}
	slices.Sort(behind)
	return fmt.Errorf("%w: %s. Wait for them, or name those that no longer run in Ignore",
		eventstore.ErrNotPassed, strings.Join(slices.Compact(behind), ", "))
}
