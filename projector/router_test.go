package projector_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// handleAll calls r.Handle for each message at once, and returns the results in order of arrival.
func handleAll(r *projector.Runner, msgs ...*message.Message) <-chan error {
	results := make(chan error, len(msgs))
	for _, m := range msgs {
		go func() { results <- r.Handle(m) }()
	}
	return results
}

// Calls share units, and return when the message is applied, parked or skipped.
// Promise: G4.6
func TestHandleAppliesAsASubscriptionDoes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		open := make(chan struct{})
		bad := newFaults(map[string]error{"b-1": errNever})
		store := record(db, func(ctx context.Context, u provider.Unit, run handle) error {
			<-open
			return db.Do(ctx, u, run)
		})
		r := newRunner(t, store, projector.FromRouter(), projector.RunnerConfig{}, define(delivered, bad.run))
		stop := start(t, r)
		first := handleAll(r, keyed("a", 1))
		synctest.Wait()
		rest := handleAll(r, append(series("c", 1, 1), keyed("b", 1), keyed("a", 1))...)
		synctest.Wait()
		require.Empty(t, first)
		close(open)
		require.NoError(t, <-first)
		for range cap(rest) {
			require.NoError(t, <-rest)
		}
		require.NoError(t, r.Handle(keyed("b", 2)))
		require.NoError(t, r.Handle(msg("u-1", "unhandled", `{}`)))
		require.NoError(t, stop())
		require.Equal(t, upTo(1), noted(db, "a", "a"))
		require.Equal(t, upTo(1), noted(db, "a", "c"))
		require.Equal(t, []string{"b-1 stuck permanent 1", "b-2 waiting held 0"}, rows(parked(t, db)))
		ran := store.list()
		require.Equal(t, "a-1", ran[0])
		require.Len(t, ran[1], len("c-1 b-1 a-1 !"), "concurrent calls share a unit: %v", ran)
	})
}

// Two projectors share a message, and a handler sees the values of its context.
func TestHandleSharesAMessage(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	type key struct{}
	var seen atomic.Value
	see := func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
		seen.Store(ctx.Value(key{}))
		return note("b")(ctx, tx, e)
	}
	r := newRunner(t, db, projector.FromRouter(), projector.RunnerConfig{}, named("a", delivered, note("a")), named("b", delivered, see))
	stop := start(t, r)
	m := keyed("k", 1)
	m.SetContext(context.WithValue(t.Context(), key{}, "value"))
	require.NoError(t, r.Handle(m))
	require.False(t, isAcked(m), "the router acks")
	require.NoError(t, stop())
	require.Equal(t, "value", seen.Load())
	require.Equal(t, upTo(1), noted(db, "a", "k"))
	require.Equal(t, upTo(1), noted(db, "b", "k"))
}

// Events that the router does not deliver are read from the log.
func TestHandleIsCompletedByTheLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		counts := map[string]int{}
		r := newRunner(t, db, projector.FromRouter(), completed(counts), define(marked, note("a")))
		stop := start(t, r)
		time.Sleep(time.Second) // it is live
		write(t, db, "k-1", 1, 2)
		time.Sleep(10 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, map[string]int{"not_published": 2}, counts)
		require.Equal(t, upTo(2), noted(db, "a", "k-1"))
	})
}

func requireClass(t *testing.T, want projector.Class, err error) {
	t.Helper()
	require.Error(t, err)
	require.Equal(t, want, projector.ClassOf(err), err)
}

func TestHandleWaitsForTheStart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		r := newRunner(t, db, projector.FromRouter(), projector.RunnerConfig{}, define(delivered, note("a")))
		result := handleAll(r, keyed("k", 1))
		time.Sleep(time.Second)
		require.Empty(t, result)
		stop := start(t, r)
		require.NoError(t, <-result)
		require.NoError(t, stop())

		never := newRunner(t, db, projector.FromRouter(), projector.RunnerConfig{}, define(delivered, note("a")))
		began := time.Now()
		requireClass(t, projector.ClassTransient, never.Handle(keyed("k", 2)))
		require.Equal(t, 30*time.Second, time.Since(began))
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		m := keyed("k", 2)
		m.SetContext(ended)
		err := never.Handle(m)
		requireClass(t, provider.ClassShutdown, err)
		require.ErrorIs(t, err, context.Canceled)

		unready := newRunner(t, unready{db}, projector.FromRouter(), projector.RunnerConfig{}, define(delivered, note("a")))
		result = handleAll(unready, keyed("k", 2))
		synctest.Wait()
		require.ErrorContains(t, unready.Run(t.Context()), "not migrated")
		requireClass(t, provider.ClassShutdown, <-result)

		subscribed := newRunner(t, db, projector.Subscribe(make(subscription), "review"), projector.RunnerConfig{}, define(delivered, note("a")))
		requireClass(t, projector.ClassPermanent, subscribed.Handle(keyed("k", 2)))
	})
}

// The router cancels a message that a worker has taken, and one for which no worker has room.
func TestHandleOfACanceledMessage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, proceed := newDB(t), make(chan struct{})
		r := newRunner(t, db, projector.FromRouter(), projector.RunnerConfig{Batch: 1}, define(delivered, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			<-proceed
			return errors.Join(ctx.Err(), note("a")(ctx, tx, e))
		}))
		stop := start(t, r)
		ctx, cancel := context.WithCancel(t.Context())
		var results []<-chan error
		for _, m := range series("k", 1, 3) { // one runs, one is queued, and there is no room for another
			m.SetContext(ctx)
			results = append(results, handleAll(r, m))
			synctest.Wait()
		}
		cancel()
		requireClass(t, provider.ClassShutdown, <-results[2])
		synctest.Wait()
		require.Empty(t, results[0])
		close(proceed)
		require.NoError(t, <-results[0])
		require.NoError(t, <-results[1])

		canceled := keyed("k", 3) // a worker has room
		canceled.SetContext(ctx)
		require.NoError(t, r.Handle(canceled))
		require.NoError(t, stop())
		require.Equal(t, upTo(3), noted(db, "a", "k"))
	})
}

// A runner that stops finishes the unit in flight, and answers all other messages: they are redelivered.
// Promise: G4.6
func TestHandleWhileTheRunnerStops(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, proceed := newDB(t), make(chan struct{})
		r := newRunner(t, db, projector.FromRouter(), projector.RunnerConfig{Batch: 1}, define(delivered, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			<-proceed
			return note("a")(ctx, tx, e)
		}))
		stop := start(t, r)
		var results []<-chan error
		for _, m := range series("k", 1, 20) {
			results = append(results, handleAll(r, m))
			synctest.Wait()
		}
		done := make(chan error)
		go func() { done <- stop() }()
		synctest.Wait()
		close(proceed)
		require.NoError(t, <-done)
		require.NoError(t, <-results[0])
		for _, result := range results[1:] {
			requireClass(t, provider.ClassShutdown, <-result)
		}
		began := time.Now()
		requireClass(t, provider.ClassShutdown, r.Handle(keyed("k", 21)))
		require.Equal(t, time.Second, time.Since(began), "redeliveries are not a busy loop")
		require.Equal(t, upTo(1), noted(db, "a", "k"))
	})
}
