package projector_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/stretchr/testify/require"
)

// named is define with another projector name.
func named(name string, opts projector.Options, fn onEvent) *projector.Projector[txn] {
	return projector.Define(name, types, opts, projector.On("a", fn))
}

// With Subscribe, a delivery is acked when all projectors of the runner have applied or parked it.
func TestSubscribeSharesAnAck(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"k-1": errBusy, "k-2": errNever})
		bad.handle = note("slow")
		stop := run(t, db, f, projector.RunnerConfig{}, named("quick", marked, note("quick")), named("slow", marked, bad.run))
		m := f.send(keyed("k", 1))[0]
		time.Sleep(10 * time.Second)
		require.Equal(t, upTo(1), noted(db, "quick", "k"), "it does not wait for the other projector")
		require.False(t, isAcked(m))
		bad.set("k-1", nil)
		<-m.Acked()
		require.Equal(t, upTo(1), noted(db, "slow", "k"))
		f.deliver(t, keyed("k", 2))
		require.NoError(t, stop())
		require.Equal(t, upTo(2), noted(db, "quick", "k"))
		require.Equal(t, upTo(1), noted(db, "slow", "k"))
		list, err := db.Parked(t.Context(), all)
		require.NoError(t, err)
		require.Len(t, list, 1)
		require.Equal(t, "slow", list[0].Projector)
	})
}

// A projector without a handler for a delivery does not delay its ack.
func TestProjectorWithoutHandlerDoesNotDelayTheAck(t *testing.T) {
	t.Parallel()
	db, f := newDB(t), make(subscription)
	other := projector.Define("other", types, marked, projector.On("a",
		func(context.Context, txn, eventstore.Event[unhandled]) error { return errNo }))
	stop := run(t, db, f, projector.RunnerConfig{}, define(marked, note("a")), other)
	f.deliver(t, keyed("k", 1))
	require.NoError(t, stop())
	require.Equal(t, upTo(1), noted(db, "a", "k"))
}

// topics is a subscriber with a subscription per topic.
type topics map[string]subscription

func (s topics) Subscribe(_ context.Context, topic string) (<-chan *message.Message, error) {
	return s[topic], nil
}
func (topics) Close() error { return nil }

func TestIdleTopicDelaysNoOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		src := topics{"idle": make(subscription), "silent": make(subscription), "busy": make(subscription)}
		stop := start(t, newRunner(t, db, projector.Subscribe(src, "idle", "silent", "busy"), projector.RunnerConfig{Batch: 1}, define(marked, note("a"))))
		src["busy"].deliver(t, series("k", 1, 3)...)
		src["idle"].deliver(t, keyed("k", 4))
		require.NoError(t, stop())
		require.Equal(t, upTo(4), noted(db, "a", "k"))
	})
}

// each is a source with a subscription per projector. It records which subscriptions were closed.
type each struct {
	subscriptions map[string]subscription
	closed        []string
	fail          error // returned by Close
}

type closing struct {
	subscription
	close func() error
}

func (c closing) Close() error { return c.close() }

func (e *each) of(name string) (message.Subscriber, error) {
	f, ok := e.subscriptions[name]
	if !ok {
		return nil, errors.New("no such group")
	}
	return closing{f, func() error { e.closed = append(e.closed, name); return e.fail }}, nil
}

// With SubscribeEach, a projector that cannot continue delays no other. The runner closes the
// subscribers that it requested, after the units in flight.
// Promise: G4.12
func TestSubscribeEachGivesEachProjectorItsOwnSubscription(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		bad := newFaults(map[string]error{"k-1": errBusy})
		waits, works := named("waits", marked, bad.run), named("works", marked, note("works"))
		src := &each{subscriptions: map[string]subscription{"waits": make(subscription), "works": make(subscription)}}
		stop := start(t, newRunner(t, db, projector.SubscribeEach(src.of, "review"), projector.RunnerConfig{}, waits, works))
		held := src.subscriptions["waits"].send(keyed("k", 1))[0]
		src.subscriptions["works"].deliver(t, series("k", 1, 5)...)
		require.False(t, isAcked(held))
		require.Equal(t, upTo(5), noted(db, "works", "k"))
		require.Empty(t, src.closed)
		require.NoError(t, stop())
		require.ElementsMatch(t, []string{"waits", "works"}, src.closed)
	})
}

func TestSubscribersAreClosedIfTheRunnerCannotStart(t *testing.T) {
	t.Parallel()
	src := &each{subscriptions: map[string]subscription{"one": make(subscription)}, fail: errors.New("not closed")}
	one, other := named("one", marked, note("a")), named("other", marked, note("a"))
	err := newRunner(t, newDB(t), projector.SubscribeEach(src.of, "review"), projector.RunnerConfig{}, one, other).Run(t.Context())
	require.ErrorContains(t, err, "subscriber of projector other: no such group")
	require.ErrorContains(t, err, "not closed")
	require.Equal(t, []string{"one"}, src.closed)

	none := func(string) (message.Subscriber, error) { return nil, nil }
	err = newRunner(t, newDB(t), projector.SubscribeEach(none, "review"), projector.RunnerConfig{}, one).Run(t.Context())
	require.ErrorContains(t, err, "subscriber of projector one")
}

// Run returns an error of Close.
func TestRunReturnsErrorOfClose(t *testing.T) {
	t.Parallel()
	src := &each{subscriptions: map[string]subscription{"p": make(subscription)}, fail: errors.New("not closed")}
	stop := start(t, newRunner(t, newDB(t), projector.SubscribeEach(src.of, "review"), projector.RunnerConfig{}, define(marked, note("a"))))
	require.ErrorContains(t, stop(), "not closed")
}
