package projector_test

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// bag is an event that a handler can change.
type bag struct{ Items map[string]int }

func appendBags(t *testing.T, db *memory.DB, n int) {
	t.Helper()
	for i := range n {
		drafts, err := eventstore.NewTypes(eventstore.Type[bag]("bag")).Encode(t.Context(), bag{map[string]int{"first": i}})
		require.NoError(t, err)
		_, err = db.Append(t.Context(), "k-1", eventstore.Any, drafts)
		require.NoError(t, err)
	}
}

// Events are decoded while those before them are applied, and each handler and each attempt gets a
// value of its own.
func TestEventsAreDecodedAhead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		appendBags(t, db, 4)
		var first, fails atomic.Int32
		var decoded sync.Map // data of events
		decode := func(data json.RawMessage) (json.RawMessage, error) {
			decoded.Store(string(data), true)
			return data, nil
		}
		types := eventstore.NewTypes(eventstore.Type[bag]("bag", decode))
		var ahead []int // the number of events that were decoded before each call
		changes := func(_ context.Context, _ txn, e eventstore.Event[bag]) error {
			n := 0
			decoded.Range(func(any, any) bool { n++; return true })
			ahead = append(ahead, n)
			if len(e.Data.Items) == 1 {
				first.Add(1)
			}
			e.Data.Items["more"] = 1
			time.Sleep(time.Millisecond)
			if fails.Add(1) == 3 {
				return errors.New("the handler fails once")
			}
			return nil
		}
		stop := fromLog(t, db, projector.RunnerConfig{Batch: 1}, projector.Define("p", types, projector.Options{},
			projector.On("a", changes), projector.On("b", changes)))
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.EqualValues(t, 9, first.Load(), "every handler and attempt got what is stored")
		require.Equal(t, 2, ahead[1], "the second event was decoded while the first one was applied")
	})
}

// What a decoder does to the goroutine that reads ahead, its handler decides: the event is parked.
func TestDecodersThatFailAhead(t *testing.T) {
	t.Parallel()
	for name, decode := range map[string]func() error{
		"an error": func() error { return errors.New("no") },
		"a panic":  func() error { panic("no") },
		"it hangs": func() error { time.Sleep(time.Hour); return nil }, // on the clock of a bubble
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, n := newDB(t), atomic.Int32{}
				appendBags(t, db, 3)
				types := eventstore.NewTypes(eventstore.Type[bag]("bag", func(data json.RawMessage) (json.RawMessage, error) { return data, decode() }))
				stop := fromLog(t, db, projector.RunnerConfig{Batch: 1, Timeout: time.Second},
					projector.Define("p", types, projector.Options{}, projector.On("a", func(context.Context, txn, eventstore.Event[bag]) error { n.Add(1); return nil })))
				time.Sleep(time.Minute)
				require.NoError(t, stop())
				require.Zero(t, n.Load())
				require.Len(t, parked(t, db), 3)
				time.Sleep(2 * time.Hour) // the handler that hangs returns
			})
		})
	}
}
