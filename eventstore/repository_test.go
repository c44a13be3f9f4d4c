package eventstore_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// tally is an aggregate that adds up stars.
type tally struct {
	id    string
	stars int
}

func (a *tally) Apply(event any) {
	switch e := event.(type) {
	case posted:
		a.stars += e.Stars
	case edited:
		a.stars = e.Stars
	}
}

func newDB(t *testing.T) *memory.DB {
	t.Helper()
	db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
	require.NoError(t, err)
	return db
}

func repository(t *testing.T, store eventstore.Store, cfg *eventstore.RepositoryConfig) *eventstore.Repository[*tally] {
	t.Helper()
	r, err := eventstore.NewRepository(store, types, "tally", func(id string) *tally { return &tally{id: id} }, cfg)
	require.NoError(t, err)
	return r
}

func post(stars int) func(*tally) ([]any, error) {
	return func(*tally) ([]any, error) { return []any{posted{Stars: stars}}, nil }
}

func TestRepositoryUpdateAndLoad(t *testing.T) {
	t.Parallel()
	r := repository(t, newDB(t), nil)
	a, version, err := r.Load(t.Context(), "1")
	require.NoError(t, err)
	require.Equal(t, &tally{id: "1"}, a)
	require.Zero(t, version)

	at, err := r.Update(t.Context(), "1", func(*tally) ([]any, error) { return []any{posted{Stars: 2}, posted{Stars: 3}}, nil })
	require.NoError(t, err)
	require.Equal(t, []any{"tally-1", int64(2), 2}, []any{at.Stream, at.Version, at.Count})

	at, err = r.Update(t.Context(), "1", func(a *tally) ([]any, error) { return nil, nil })
	require.NoError(t, err)
	require.Equal(t, eventstore.Appended{Stream: "tally-1", Version: 2, Position: 2}, at, "without events nothing is written")

	a, version, err = r.Load(t.Context(), "1")
	require.NoError(t, err)
	require.Equal(t, &tally{id: "1", stars: 5}, a)
	require.Equal(t, int64(2), version)
}

func TestRepositoryDecidesAgainOnConflict(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	r := repository(t, db, nil)
	decided := 0
	at, err := r.Update(t.Context(), "1", func(a *tally) ([]any, error) {
		if decided++; decided <= 3 { // another writer is faster, three times
			_, err := repository(t, db, nil).Update(t.Context(), "1", post(1))
			require.NoError(t, err)
		}
		return []any{edited{Stars: a.stars * 10}}, nil
	})
	require.NoError(t, err)
	require.Equal(t, 4, decided)
	require.Equal(t, int64(4), at.Version)
	a, _, err := r.Load(t.Context(), "1")
	require.NoError(t, err)
	require.Equal(t, 30, a.stars, "the last decision used the final state")
}

func TestRepositoryGivesUpAfterItsRetries(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ retries, decided int }{{0, 4}, {1, 2}, {-1, 1}} {
		db := newDB(t)
		decided := 0
		_, err := repository(t, db, &eventstore.RepositoryConfig{Retries: c.retries}).Update(t.Context(), "1", func(*tally) ([]any, error) {
			decided++
			_, err := repository(t, db, nil).Update(t.Context(), "1", post(1))
			require.NoError(t, err)
			return []any{posted{}}, nil
		})
		var conflict *eventstore.ConflictError
		require.ErrorAs(t, err, &conflict)
		require.Equal(t, int64(c.decided), conflict.Actual)
		require.Equal(t, c.decided, decided)
	}
}

func TestRepositoryConcurrentUpdatesLoseNothing(t *testing.T) {
	t.Parallel()
	r := repository(t, newDB(t), &eventstore.RepositoryConfig{Retries: 1 << 20})
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			for range 20 {
				_, err := r.Update(t.Context(), "1", post(1))
				require.NoError(t, err)
			}
		})
	}
	all.Wait()
	a, version, err := r.Load(t.Context(), "1")
	require.NoError(t, err)
	require.Equal(t, 320, a.stars)
	require.Equal(t, int64(320), version)
}

// Many concurrent updates of one stream with slow decisions queue up for the stream. Without the
// queue they take 575 tries instead of 475.
func TestRepositoryQueuesManyUpdatesOfOneStream(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const users, each = 30, 10
		r := repository(t, newDB(t), &eventstore.RepositoryConfig{Retries: 50})
		var tries atomic.Int64
		var all sync.WaitGroup
		for range users {
			all.Go(func() {
				for range each {
					_, err := r.Update(t.Context(), "1", func(*tally) ([]any, error) {
						tries.Add(1)
						time.Sleep(time.Millisecond)
						return []any{posted{Stars: 1}}, nil
					})
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		all.Wait()
		a, _, err := r.Load(t.Context(), "1")
		require.NoError(t, err)
		require.Equal(t, users*each, a.stars)
		require.Less(t, tries.Load(), int64(525))
	})
}

// The observer receives each update's outcome and its number of conflicts.
func TestRepositoryReportsToItsObserver(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	type update struct {
		category  string
		version   int64
		count     int
		conflicts int
		failed    bool
	}
	var all []update
	r := repository(t, db, &eventstore.RepositoryConfig{
		OnUpdate: func(ctx context.Context, category string) (context.Context, func(eventstore.Appended, int, error)) {
			ctx = eventstore.WithMetadata(ctx, eventstore.Metadata{Traceparent: "00-1"})
			return ctx, func(at eventstore.Appended, conflicts int, err error) {
				all = append(all, update{category, at.Version, at.Count, conflicts, err != nil})
			}
		},
	})
	other := repository(t, db, nil)
	_, err := r.Update(t.Context(), "1", post(1))
	require.NoError(t, err)
	_, err = r.Update(t.Context(), "1", func(*tally) ([]any, error) { return nil, nil })
	require.NoError(t, err)
	slower := 2
	_, err = r.Update(t.Context(), "1", func(*tally) ([]any, error) {
		if slower--; slower >= 0 {
			if _, err := other.Update(t.Context(), "1", post(1)); err != nil {
				return nil, err
			}
		}
		return []any{posted{Stars: 1}}, nil
	})
	require.NoError(t, err)
	_, err = r.Update(t.Context(), "1", func(*tally) ([]any, error) { return nil, errors.New("refused") })
	require.Error(t, err)
	require.Equal(t, []update{{"tally", 1, 1, 0, false}, {"tally", 1, 0, 0, false}, {"tally", 4, 1, 2, false}, {"tally", 0, 0, 0, true}}, all)
	var traces []string
	for raw, err := range db.ReadStream(t.Context(), "tally-1", 0) {
		require.NoError(t, err)
		traces = append(traces, raw.Metadata.Traceparent)
	}
	require.Equal(t, []string{"00-1", "", "", "00-1"}, traces, "the events of observed updates have the metadata of the observer")
}

// A waiting update leaves the stream's queue when its context ends.
func TestRepositoryLeavesTheQueueWhenItsContextEnds(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	r := repository(t, db, &eventstore.RepositoryConfig{Retries: 1})
	conflict := func(wait func()) func(*tally) ([]any, error) {
		tries := 0
		return func(*tally) ([]any, error) {
			if tries++; tries == 1 { // another writer is faster
				other := repository(t, db, nil)
				if _, err := other.Update(t.Context(), "1", post(1)); err != nil {
					return nil, err
				}
			} else {
				wait()
			}
			return []any{posted{Stars: 1}}, nil
		}
	}
	first, leave := make(chan struct{}), make(chan struct{})
	done := make(chan error)
	go func() {
		_, err := r.Update(t.Context(), "1", conflict(func() { close(first); <-leave }))
		done <- err
	}()
	<-first
	ctx, cancel := context.WithCancel(t.Context())
	tried, decide := make(chan struct{}), conflict(func() { t.Error("decided out of turn") })
	go func() {
		_, err := r.Update(ctx, "1", func(a *tally) ([]any, error) {
			defer close(tried)
			return decide(a)
		})
		done <- err
	}()
	<-tried
	cancel()
	require.Error(t, <-done, "a conflict, or the end of the context")
	close(leave)
	require.ErrorIs(t, <-done, eventstore.ErrConflict, "others continued meanwhile")
	_, err := r.Update(t.Context(), "1", conflict(func() {}))
	require.NoError(t, err, "the queue is free")
}

func TestRepositoryUpdateTxReturnsTheConflictAndLeavesTheTransactionUsable(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	r := repository(t, db, nil)
	err := db.Transact(t.Context(), func(_ context.Context, tx *memory.Model) error {
		view := db.InTx(tx)
		_, err := r.UpdateTx(t.Context(), view, "1", func(*tally) ([]any, error) {
			// In the same transaction, without the first update's knowledge.
			_, err := r.UpdateTx(t.Context(), view, "1", post(1))
			require.NoError(t, err)
			return []any{posted{}}, nil
		})
		require.ErrorIs(t, err, eventstore.ErrConflict)
		_, err = r.UpdateTx(t.Context(), view, "2", post(7))
		require.NoError(t, err)
		tx.Put("mine", "k", "v")
		return nil
	})
	require.NoError(t, err)
	a, _, err := r.Load(t.Context(), "2")
	require.NoError(t, err)
	require.Equal(t, 7, a.stars)
	db.View(func(m *memory.Model) {
		v, _ := m.Get("mine", "k")
		require.Equal(t, "v", v)
	})
}

func TestRepositoryErrors(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	r := repository(t, db, nil)
	mine := errors.New("rejected")
	_, err := r.Update(t.Context(), "1", func(*tally) ([]any, error) { return nil, mine })
	require.Equal(t, mine, err, "decide's error is returned unchanged")
	decided := 0
	theirs := fmt.Errorf("another aggregate: %w", &eventstore.ConflictError{Stream: "other-1"})
	_, err = r.Update(t.Context(), "1", func(*tally) ([]any, error) { decided++; return nil, theirs })
	require.Equal(t, theirs, err)
	require.Equal(t, 1, decided, "a conflict that decide returns is not retried")
	_, err = r.Update(t.Context(), "1", func(*tally) ([]any, error) { return []any{&posted{}}, nil })
	require.ErrorIs(t, err, eventstore.ErrUnregistered)
	for _, id := range []string{"", "a\x00"} {
		_, err = r.Update(t.Context(), id, post(1))
		require.ErrorIs(t, err, eventstore.ErrInvalid)
		_, _, err = r.Load(t.Context(), id)
		require.ErrorIs(t, err, eventstore.ErrInvalid)
	}

	_, err = db.Append(t.Context(), "tally-9", eventstore.NoStream, []eventstore.Draft{{ID: "0198c1f0-0000-7000-8000-000000000001", Type: "t", Schema: 1, Data: []byte(`{}`)}})
	require.NoError(t, err)
	_, _, err = r.Load(t.Context(), "9")
	require.ErrorIs(t, err, eventstore.ErrUnregistered, "the stream has an event of an unregistered type")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = r.Update(ctx, "1", post(1))
	require.ErrorIs(t, err, context.Canceled)
}

func TestNewRepositoryRefuses(t *testing.T) {
	t.Parallel()
	fresh := func(string) *tally { return &tally{} }
	db := newDB(t)
	_, err := eventstore.NewRepository(nil, types, "tally", fresh, nil)
	require.ErrorIs(t, err, eventstore.ErrInvalid)
	_, err = eventstore.NewRepository[*tally](db, types, "tally", nil, nil)
	require.ErrorIs(t, err, eventstore.ErrInvalid)
	_, err = eventstore.NewRepository(db, types, "Tally-1", fresh, nil)
	require.ErrorIs(t, err, eventstore.ErrInvalid)
	_, err = eventstore.NewRepository(db, nil, "tally", fresh, nil)
	require.Error(t, err)
	_, err = eventstore.NewRepository(db, eventstore.NewTypes(eventstore.Type[*posted]("p")), "tally", fresh, nil)
	require.ErrorContains(t, err, "value type")
}
