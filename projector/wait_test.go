package projector_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// appended appends n events to stream "k-1", numbered after the existing ones, and returns the
// messages that a broker delivers for them.
func appended(t *testing.T, db *memory.DB, stars ...int) (at eventstore.Appended, msgs []*message.Message) {
	t.Helper()
	var events []any
	for _, n := range stars {
		events = append(events, posted{n})
	}
	drafts, err := types.Encode(t.Context(), events...)
	require.NoError(t, err)
	at, err = db.Append(t.Context(), "k-1", eventstore.Any, drafts)
	require.NoError(t, err)
	for i, d := range drafts {
		m := keyed("k-1", stars[i])
		m.UUID = d.ID
		msgs = append(msgs, recorded(m, time.Now()))
	}
	return at, msgs
}

// within waits for an append for at most a second.
func within(t *testing.T, p *projector.Projector[txn], s projector.State, at eventstore.Appended) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	return p.Wait(ctx, s, at)
}

// An event that the store does not show yet may be applied later, so Wait must not return nil.
// Promise: G7b.7
func TestWaitWaitsForEventsThatAreNotVisibleYet(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		p := define(marked, newFaults(nil).run)
		stop := run(t, db, f, projector.RunnerConfig{}, p)
		at, msgs := appended(t, db, 1)
		f.deliver(t, msgs...)
		require.NoError(t, within(t, p, db, at))
		for name, unseen := range map[string]eventstore.Appended{
			"a later event":    {Stream: "k-1", Version: 2, Count: 1},
			"two later events": {Stream: "k-1", Version: 2, Count: 2},
			"another stream":   {Stream: "k-2", Version: 1, Count: 1},
		} {
			require.ErrorIs(t, within(t, p, db, unseen), context.DeadlineExceeded, name)
		}
		next := eventstore.Appended{Stream: "k-1", Version: 2, Count: 1}
		done := make(chan error, 1)
		go func() { done <- p.Wait(t.Context(), db, next) }()
		time.Sleep(100 * time.Millisecond)
		_, msgs = appended(t, db, 2)
		f.deliver(t, msgs...)
		require.NoError(t, <-done)
		require.NoError(t, stop())
	})
}

// Promise: G7b.7
func TestWaitReportsTheOutcomeOfAnEvent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{})
		p := define(delivered, bad.run)
		at, msgs := appended(t, db, 1, 2)
		later, more := appended(t, db, 3)
		require.ErrorIs(t, within(t, p, db, at), context.DeadlineExceeded, "the message has not been delivered")
		stop := run(t, db, f, projector.RunnerConfig{}, p)

		bad.set(msgs[0].UUID, errNo)
		f.deliver(t, msgs...)
		require.ErrorIs(t, within(t, p, db, at), context.DeadlineExceeded, "the message is retried automatically")
		bad.set(msgs[0].UUID, nil)
		require.NoError(t, p.Wait(t.Context(), db, at))
		require.Equal(t, upTo(2), noted(db, "a", "k-1"))

		bad.set(more[0].UUID, errNever)
		f.deliver(t, more...)
		require.ErrorIs(t, within(t, p, db, later), projector.ErrParked)
		require.NoError(t, within(t, p, db, at), "only its own append matters")
		behind, last := appended(t, db, 4)
		f.deliver(t, last...)
		require.ErrorIs(t, within(t, p, db, behind), projector.ErrParked, "the message waits behind a stuck one")

		skip(t, db, projector.ParkedFilter{States: []projector.ParkedState{projector.StateStuck}})
		require.ErrorIs(t, within(t, p, db, later), projector.ErrSkipped)
		require.NoError(t, p.Wait(t.Context(), db, behind))
		require.NoError(t, stop())
		require.Equal(t, []int{1, 2, 4}, noted(db, "a", "k-1"))
	})
}

// If markers as old as the event have been deleted, the event may or may not have been applied.
// Promise: G7b.7
func TestWaitReportsThatMarkersArePruned(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		p := define(delivered, note("a"))
		at, msgs := appended(t, db, 1)
		stop := run(t, db, f, projector.RunnerConfig{}, p)
		f.deliver(t, msgs...)
		require.NoError(t, within(t, p, db, at))
		require.NoError(t, stop())
		time.Sleep(9 * 24 * time.Hour)
		n, err := db.Prune(t.Context(), "p", p.Handlers(), 8*24*time.Hour, 100)
		require.NoError(t, err)
		require.Equal(t, 1, n)
		require.ErrorIs(t, within(t, p, db, at), projector.ErrPruned)
	})
}

// Promise: G7b.7
func TestWaitRefuses(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	at, _ := appended(t, db, 1)
	require.ErrorIs(t, define(projector.Options{}, add).Wait(t.Context(), db, at), projector.ErrNoMarkers)
	faulty := projector.Define("p", eventstore.NewTypes(eventstore.Type[*posted]("x")), marked, projector.On("a", add))
	require.Error(t, faulty.Wait(t.Context(), db, at))
}

// long is a stream of n events that are applied one after another.
type long struct {
	projector.State // its other methods are not called

	n         int
	applied   func() int
	questions int
	pages     int
	most      int // questions in the largest page
	err       error
}

func (l *long) ReadStream(_ context.Context, stream string, after int64) iter.Seq2[eventstore.Raw, error] {
	return func(yield func(eventstore.Raw, error) bool) {
		for v := after + 1; v <= int64(l.n); v++ {
			if !yield(eventstore.Raw{ID: fmt.Sprint(v), Stream: stream, Version: v, Type: "posted"}, nil) {
				return
			}
		}
	}
}

func (*long) Checkpoint(context.Context, provider.Build) (provider.Checkpoint, error) {
	return provider.Checkpoint{}, nil
}

func (l *long) Outcomes(_ context.Context, questions []provider.Question) ([]provider.Outcome, error) {
	l.pages++
	l.questions += len(questions)
	l.most = max(l.most, len(questions))
	out, applied := make([]provider.Outcome, len(questions)), l.applied()
	for i, q := range questions {
		var n int
		if _, err := fmt.Sscan(q.MessageID, &n); err == nil && n <= applied {
			out[i] = provider.OutcomeApplied
		}
	}
	return out, l.err
}

func TestWaitForManyEventsAsksInPages(t *testing.T) {
	t.Parallel()
	const n = 10_000
	at := eventstore.Appended{Stream: "k-1", Version: n, Count: n}
	p := define(marked, add)
	t.Run("that are applied", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			l := &long{n: n, applied: func() int { return n }}
			began := time.Now()
			require.NoError(t, p.Wait(t.Context(), l, at))
			require.Zero(t, time.Since(began), "no waiting is needed")
			require.Equal(t, []int{20, n, 500}, []int{l.pages, l.questions, l.most}, "each question is asked once")
		})
	})
	t.Run("that are applied one after another", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			// 1,000 per second.
			l := &long{n: n, applied: func() int { return int(time.Since(began) / time.Millisecond) }}
			require.NoError(t, p.Wait(t.Context(), l, at))
			require.GreaterOrEqual(t, time.Since(began), n*time.Millisecond)
			require.Less(t, time.Since(began), n*time.Millisecond+50*time.Millisecond, "as soon as they are applied")
			require.Equal(t, 500, l.most)
			require.Less(t, l.questions, 20*n, "it asks only about the next events")
		})
	})
	t.Run("of a store that fails", func(t *testing.T) {
		t.Parallel()
		l := &long{n: n, applied: func() int { return 0 }, err: errors.New("no database")}
		require.ErrorContains(t, p.Wait(t.Context(), l, at), "no database")
		require.Equal(t, 1, l.pages)
	})
}
