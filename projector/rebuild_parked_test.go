package projector_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// A message that is parked in the live read model, and would be applied now, is no difference that a
// repair may mend: it would be applied again later.
// Promise: R7.1
func TestVerifyWaitsForParkedMessages(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(9)...)
		var fails atomic.Bool
		fails.Store(true)
		p := projector.Define("p", types, projector.Options{Tables: []string{"notes"}},
			projector.OnCreate(func(context.Context, txn) error { return nil }),
			projector.On("a", func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
				if e.Data.Stars == 5 && fails.Load() {
					return &projector.Error{Class: projector.ClassPermanent, Code: "five", Err: errors.New("five")}
				}
				return note(projector.Table(ctx, "notes"))(ctx, tx, e)
			}))
		stop := start(t, newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, p))
		time.Sleep(time.Second)
		require.Equal(t, upTo(4), noted(db, "notes", "k-1"))
		result, err := p.Verify(t.Context(), db, projector.Verification{Repair: person}, nil)
		require.NoError(t, err, "it is parked in both")
		require.Empty(t, result.Differences)
		fails.Store(false)
		_, err = p.Verify(t.Context(), db, projector.Verification{Repair: person}, nil)
		require.ErrorIs(t, err, projector.ErrGeneration)
		_, err = projector.Replay(t.Context(), db, projector.ParkedFilter{Projector: "p"}, person)
		require.NoError(t, err)
		result, err = p.Verify(t.Context(), db, projector.Verification{Repair: person}, nil)
		require.NoError(t, err)
		require.Empty(t, result.Differences)
		require.Equal(t, upTo(9), noted(db, "notes", "k-1"))
		require.NoError(t, stop())
	})
}

// Events that the live read model has not applied yet are no differences.
// Promise: R7.1
func TestVerifyComparesAtTheLivePosition(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(100)...)
		p := built(projector.Options{}, 1)
		stop := start(t, newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, p))
		time.Sleep(time.Second)
		require.NoError(t, stop())
		write(t, db, "k-1", 101, 102)
		result, err := p.Verify(t.Context(), db, projector.Verification{}, nil)
		require.NoError(t, err)
		require.Empty(t, result.Differences)
		require.Equal(t, int64(100), result.Events)
	})
}

// lostTurn is a store that extends no lease for contested messages until one was lost.
type lostTurn struct {
	unit
	first claim.Token
	lost  atomic.Bool
}

func (l *lostTurn) AcquireLease(ctx context.Context, name string, t claim.Terms) (bool, error) {
	if strings.HasPrefix(name, "output/") && !l.lost.Load() {
		if l.first == t.Token {
			l.lost.Store(true)
			return false, nil
		}
		l.first = t.Token
	}
	return l.unit.AcquireLease(ctx, name, t)
}

// A reader that loses its turn within a page goes on behind what it has applied.
// Promise: R8.1
func TestATurnThatIsLostWithinAPage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		const n = 8
		for i := range n {
			write(t, db, fmt.Sprint("k-", i), i)
		}
		var rebuilt atomic.Bool
		var calls atomic.Int64 // of the handler for event 4, in the rebuild
		store := &lostTurn{unit: db}
		p := projector.Define("p", types, projector.Options{Tables: []string{"notes"}},
			projector.OnCreate(func(context.Context, txn) error { return nil }),
			projector.On("a", func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
				switch {
				case !rebuilt.Load() && e.Data.Stars == n-1: // so that it is contested later
					return errNever
				case !rebuilt.Load() || e.Data.Stars != 4:
				case calls.Add(1) < 4: // so that the units become small
					return &projector.Error{Class: projector.ClassTransient, Err: errNo}
				case !store.lost.Load():
					<-ctx.Done()
					return ctx.Err()
				}
				return note(projector.Table(ctx, "notes"))(ctx, tx, e)
			}))
		r := newRunner(t, store, projector.FromLog(db), projector.RunnerConfig{Batch: n}, p)
		stop := start(t, r)
		time.Sleep(time.Second)
		require.Len(t, parked(t, db), 1)
		rebuilt.Store(true)
		require.NoError(t, rebuild(t, r, request(projector.InPlace)))
		time.Sleep(time.Minute)
		require.True(t, store.lost.Load())
		for i := range n {
			require.Equal(t, []int{i}, noted(db, "notes", fmt.Sprint("k-", i)))
		}
		require.NoError(t, stop())
	})
}

// Each event has output once, whichever generation is live when it is applied.
// Promise: R8.1
func TestGenerationsThatTakeTurnsHaveOutputOnce(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, f subscription, src projector.Source) {
		write(t, db, "k-1", upTo(100)...)
		p := projector.Define("p", types, projector.Options{Markers: true, Tables: []string{"notes"}},
			projector.OnCreate(func(context.Context, txn) error { return nil }),
			projector.OnEmit("a", func(ctx context.Context, tx txn, e eventstore.Event[posted]) ([]outbox.Message, error) {
				err := note(projector.Table(ctx, "notes"))(ctx, tx, e)
				if !projector.Replaying(ctx) {
					err = errors.Join(err, note("calls")(ctx, tx, e))
				}
				return nil, err
			}))
		one := newRunner(t, db, src, projector.RunnerConfig{}, p)
		stopOne, stopTwo := start(t, one), start(t, newRunner(t, db, src, projector.RunnerConfig{}, p))
		last := appending(t, db, f, 101)
		time.Sleep(time.Second)
		require.NoError(t, rebuild(t, one, request(projector.BlueGreen)))
		for i := range 20 {
			time.Sleep(777 * time.Millisecond)
			require.NoError(t, projector.Control(t.Context(), db, "p", 1+i%2, projector.Promote, person))
			for {
				all, err := p.Generations(t.Context(), db)
				require.NoError(t, err)
				if all[i%2].State == string(provider.GenerationLive) {
					break
				}
				time.Sleep(time.Millisecond)
			}
		}
		n := last()
		time.Sleep(20 * time.Second)
		require.Equal(t, upTo(n), noted(db, "calls", "k-1"))
		require.Equal(t, upTo(n), noted(db, "notes_g1", "k-1"))
		require.Equal(t, upTo(n), noted(db, "notes_g2", "k-1"))
		require.NoError(t, stopOne())
		require.NoError(t, stopTwo())
	})
}
