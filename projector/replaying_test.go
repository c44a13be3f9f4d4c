package projector_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// Handlers can see that an event was applied before, also without output: exactly for those events.
// Promise: G4.10
func TestReplaying(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		how     projector.RebuildHow
		batched bool
	}{{projector.InPlace, false}, {projector.BlueGreen, false}, {projector.InPlace, true}, {projector.BlueGreen, true}} {
		how := c.how
		t.Run(fmt.Sprint(how, ", batched ", c.batched), func(t *testing.T) {
			t.Parallel()
			sources(t, func(t *testing.T, db *memory.DB, f subscription, src projector.Source) {
				write(t, db, "k-1", upTo(300)...)
				var mu sync.Mutex
				first := map[int]string{} // when it was called without a replay
				phase := "before"
				bad := true
				one := func(ctx context.Context, _ txn, e eventstore.Event[posted]) error {
					mu.Lock()
					defer mu.Unlock()
					if e.Data.Stars == 7 && bad {
						return errNever
					}
					if was := first[e.Data.Stars]; !projector.Replaying(ctx) && was != phase { // it may be called again after a rollback
						first[e.Data.Stars] = was + phase
					}
					return nil
				}
				handler := projector.On("a", one)
				if c.batched {
					handler = projector.OnBatch("a", func(ctx context.Context, tx txn, events []eventstore.Event[posted]) (err error) {
						for i := 0; i < len(events) && err == nil; i++ {
							err = one(ctx, tx, events[i])
						}
						return err
					})
				}
				p := projector.Define("p", types, projector.Options{Markers: true, Tables: []string{"notes"}, Parking: projector.ParkMessage},
					projector.OnCreate(func(context.Context, txn) error { return nil }), handler)
				r := newRunner(t, db, src, projector.RunnerConfig{Batch: 20}, p)
				stop := start(t, r)
				last := appending(t, db, f, 301)
				time.Sleep(10 * time.Second)
				mu.Lock()
				bad, phase = false, "after"
				mu.Unlock()
				require.NoError(t, rebuild(t, r, request(how)))
				time.Sleep(time.Second)
				n := last()
				time.Sleep(10 * time.Second)
				require.NoError(t, stop())
				require.Len(t, first, n)
				require.Equal(t, "before", first[1])
				require.Equal(t, "after", first[7])
				require.Equal(t, "after", first[n])
				require.NotContains(t, slices.Collect(maps.Values(first)), "beforeafter")
			})
		})
	}
}
