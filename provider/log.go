package provider

import (
	"context"
	"time"

	"github.com/kinora-go/kinora/eventstore"
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

	// LogStreams returns the visible events of each stream up to a version that are behind a position, in order
	// of position and as of one moment.
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
	// CountLog returns the number of visible events of types (nil: of all) behind the position after,
	// up to the position to.
	CountLog(ctx context.Context, types []string, after, to int64) (int64, error)
}

// LogQuery selects a page of a log.
type LogQuery struct {
	After  int64 // only events with a greater position
	Filter eventstore.LogFilter
	Limit  int // the most events; zero means 500. A page also ends after about 8 MiB of data.
	// Age ends the page before the events at the end of the log that were recorded less than this time ago,
	// on the store's clock.
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
	// Server identifies the server and the history that were read. It changes after a restart, a failover or a
	// restore. Empty if the store does not know.
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

// EventFinder is an eventstore.Store that finds events by their ids. Commands with a
// CommandID require it, also of the TxStore.
type EventFinder interface {
	// FindEvent returns the place of the event with this id, with Count 1, or a zero Appended.
	FindEvent(ctx context.Context, id string) (eventstore.Appended, error)
}
