package admin_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
)

// While a projector is paused, nothing is applied to it: no event of the log, no delivery, and no parked
// message. What waits is applied, in order, after it is resumed. Other projectors go on.
// Promise: O1.1
func TestAPausedProjectorAppliesNothing(t *testing.T) {
	t.Parallel()
	for _, from := range []string{"log", "broker", "parked"} {
		t.Run(from, func(t *testing.T) {
			t.Parallel()
			db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
			require.NoError(t, err)
			ops := adminOf(t, db)
			var fixed atomic.Bool
			define := func(name string) *projector.Projector[*memory.Model] {
				return projector.Define(name, types, projector.Options{Markers: true},
					projector.On("priced", func(_ context.Context, tx *memory.Model, e eventstore.Event[Priced]) error {
						if e.Data.Cents == 0 && !fixed.Load() {
							return projector.Permanent(errors.New("nothing is free"))
						}
						tx.Put(name, e.Stream, e.Data.Cents)
						return nil
					}))
			}
			broker := gochannel.NewGoChannel(gochannel.Config{Persistent: true}, watermill.NopLogger{})
			src := projector.Subscribe(broker, "product")
			if from != "broker" {
				src = projector.FromLog(db)
			}
			start := func(src projector.Source, ps ...*projector.Projector[*memory.Model]) kinora.Service {
				r, err := projector.NewRunner(db, src, projector.RunnerConfig{Logger: quiet, Grace: time.Hour}, ps...)
				require.NoError(t, err)
				return r
			}
			relay, err := outbox.NewRelay(db, broker, &outbox.RelayConfig{Logger: quiet, Poll: 20 * time.Millisecond})
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() {
				done <- kinora.Run(ctx, start(src, define("paused")), start(projector.FromLog(db), define("other")), relay)
			}()
			t.Cleanup(func() { cancel(); require.NoError(t, <-done); require.NoError(t, broker.Close()) })
			w := &world{T: t}
			is := func(table string) (cents int) {
				db.View(func(m *memory.Model) {
					if v, ok := m.Get(table, "product-tea"); ok {
						cents = v.(int)
					}
				})
				return cents
			}
			becomes := func(table string, cents int) {
				t.Helper()
				w.eventually(func() error {
					if is(table) != cents {
						return fmt.Errorf("%s is %d", table, is(table))
					}
					return nil
				})
			}
			add := func(cents ...int) {
				_, err := db.Append(t.Context(), "product-tea", eventstore.Any, drafts(t, cents...))
				require.NoError(t, err)
			}
			add(1)
			becomes("paused", 1)
			if from == "parked" {
				add(0, 2)
				w.eventually(func() error {
					if n, err := db.ParkedCount(t.Context(), ""); n != 4 {
						return fmt.Errorf("%d parked: %w", n, err)
					}
					return nil
				})
			}
			_, err = ops.Pause(t.Context(), provider.PauseProjector, "paused", by)
			require.NoError(t, err)
			follow(t, db)
			fixed.Store(true)
			if from == "parked" {
				_, err := ops.Replay(t.Context(), projector.ParkedFilter{}, by)
				require.NoError(t, err)
			} else {
				add(2)
			}
			becomes("other", 2)
			follow(t, db)
			require.Equal(t, 1, is("paused"))
			_, err = ops.Resume(t.Context(), provider.PauseProjector, "paused", by)
			require.NoError(t, err)
			becomes("paused", 2)
		})
	}
}

// follow waits until each service has read what is paused. A service reads it before each of its reports. It may have read
// it before this call, and report afterwards, so follow waits for two reports.
func follow(t *testing.T, db *memory.DB) {
	t.Helper()
	seen := func() map[string]time.Time {
		s, err := db.Survey(t.Context(), 10)
		require.NoError(t, err)
		all := map[string]time.Time{}
		for _, r := range s.Services {
			all[r.ID] = r.SeenAt
		}
		return all
	}
	for range 2 {
		before := seen()
		(&world{T: t}).eventually(func() error {
			for id, at := range seen() {
				if !at.After(before[id]) {
					return fmt.Errorf("%s has not reported again", id)
				}
			}
			return nil
		})
	}
}

// A request whose runner was killed fails at the end of its lease. It is not begun again: a message that ends its
// process would end each runner in turn.
// Promise: O2.1
func TestARequestOfAKilledRunnerFails(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id, err := w.ops.DryRun(t.Context(), projector.ParkedFilter{Projector: "prices"}, by)
	require.NoError(t, err)
	taken, err := w.db.TakeAct(t.Context(), id, "a runner that was killed", 3*time.Second)
	require.NoError(t, err)
	require.True(t, taken)
	w.start(w.runner(projector.RunnerConfig{}))
	act, err := w.ops.Await(patience.Context(t), id, nil)
	require.NoError(t, err)
	require.Equal(t, provider.ActFailed, act.State)
	require.NotEqual(t, "a runner that was killed", act.Holder)
	require.True(t, act.EndedAt.Sub(act.At) >= 3*time.Second, "not before the end of the lease")
	var report provider.DryRunReport
	require.NoError(t, json.Unmarshal(act.Outcome, &report))
	require.Contains(t, report.Error, "has ended")
}

// A request that is canceled stops: the context of its handlers ends.
// Promise: O2.1
func TestACanceledRequestStops(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var slow atomic.Bool
	began, ended := make(chan struct{}, 1), make(chan struct{}, 1)
	p := projector.Define("slow", types, projector.Options{}, projector.On("priced", func(ctx context.Context, _ pgx.Tx, _ eventstore.Event[Priced]) error {
		if slow.Load() {
			began <- struct{}{}
			<-ctx.Done()
			ended <- struct{}{}
		}
		return projector.Permanent(errors.New("refused"))
	}))
	r, err := projector.NewRunner(w.db, projector.FromLog(w.db), projector.RunnerConfig{Logger: quiet, Timeout: time.Hour}, p)
	require.NoError(t, err)
	w.start(r)
	w.price("tea", 1)
	w.finds(soon, provider.FindingParked, "slow are stuck")
	slow.Store(true)
	id, err := w.ops.DryRun(t.Context(), projector.ParkedFilter{Projector: "slow"}, by)
	require.NoError(t, err)
	<-began
	f := w.facts()
	require.Len(t, f.Requests, 1)
	require.Equal(t, provider.ActRunning, f.Requests[0].State)
	canceled, err := w.ops.Cancel(t.Context(), id, by)
	require.NoError(t, err)
	require.True(t, canceled)
	patience.Receive(t, ended, "the end of the handler")
	act, err := w.ops.Await(t.Context(), id, nil)
	require.NoError(t, err)
	require.Equal(t, provider.ActCanceled, act.State)
	require.Nil(t, act.Outcome)
	require.Empty(t, w.facts().Requests)
}

// Relays claim no entries of a paused topic, and those of others.
// Promise: O1.1
func TestAPausedTopicIsNotPublished(t *testing.T) {
	t.Parallel()
	db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
	require.NoError(t, err)
	ops := adminOf(t, db)
	published := make(chan string, 100)
	relay, err := outbox.NewRelay(db, topics(published), &outbox.RelayConfig{Logger: quiet, Poll: 20 * time.Millisecond})
	require.NoError(t, err)
	_, err = ops.Pause(t.Context(), provider.PauseTopic, "product", by)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- kinora.Run(ctx, relay) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	for _, stream := range []string{"product-tea", "other-1"} {
		_, err := db.Append(t.Context(), stream, eventstore.Any, drafts(t, 1))
		require.NoError(t, err)
	}
	require.Equal(t, "other", <-published, "the topic was paused before the relay started")
	follow(t, db)
	require.Empty(t, published)
	_, err = ops.Resume(t.Context(), provider.PauseTopic, "product", by)
	require.NoError(t, err)
	require.Equal(t, "product", <-published)
}

// topics is a publisher that sends the topic of each message.
type topics chan string

func (p topics) Publish(topic string, ms ...*message.Message) error {
	for range ms {
		p <- topic
	}
	return nil
}

func (topics) Close() error { return nil }
