package provider

import (
	"context"
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/pauses"
)

// Sizes of a page of a log.
const (
	LogPageEvents = 500     // if LogQuery.Limit is zero
	LogPageBytes  = 8 << 20 // of data and metadata; the event that reaches it ends the page
	// With a filter, a page covers this many positions at most: its End moves although the filter
	// selects few events.
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
	if err := firstError(CheckFrom(from), CheckLogQuery(q)); err != nil {
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
	return firstError(CheckStorable("filter.categories", q.Filter.Categories...), CheckStorable("filter.types", q.Filter.Types...))
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
