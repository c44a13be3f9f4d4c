package projectortest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// Event is an event of a test.
type Event struct {
	Stream   string // such as "review-42-ann"
	Data     any    // a value of a registered type
	Metadata eventstore.Metadata
	// RecordedAt is the time that handlers see. Zero means the time when the test called the kit, plus one
	// millisecond for each event before this one. It is the same in every pass.
	RecordedAt time.Time
}

// In returns the event data of a stream.
func In(stream string, data any) Event { return Event{Stream: stream, Data: data} }

func (e *Event) String() string { return fmt.Sprintf("%s  %T%+v", e.Stream, e.Data, e.Data) }

// prepared is an event with its id and its time, which are the same in every pass.
type prepared struct {
	Event
	draft eventstore.Draft
}

// prepare encodes events. It ends the test if one of them is not valid.
func prepare(t testing.TB, types *eventstore.Types, events []Event) []prepared {
	t.Helper()
	if err := types.Err(); err != nil {
		t.Fatalf("types of the projector: %v", err)
	}
	all, began := make([]prepared, len(events)), time.Now().UTC().Truncate(time.Millisecond)
	for i, e := range events {
		drafts, err := types.Encode(eventstore.WithMetadata(context.Background(), e.Metadata), e.Data)
		if err == nil {
			err = provider.CheckAppend(e.Stream, eventstore.Any, drafts, 0)
		}
		if err != nil {
			t.Fatalf("event %d, %s: %v", i+1, e.Stream, err)
		}
		if e.RecordedAt.IsZero() {
			e.RecordedAt = began.Add(time.Duration(i) * time.Millisecond)
		}
		e.RecordedAt = e.RecordedAt.UTC().Truncate(time.Microsecond) // as stores have it
		all[i] = prepared{e, drafts[0]}
	}
	return all
}
