package provider

import (
	"cmp"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/eventstore"
)

// The functions of this file are the rules of events for stores that apply them row by row, in a
// transaction.

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

// PositionIn implements Log.LogPosition for a store that yields its visible events in order. head is the
// position of the last one.
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
