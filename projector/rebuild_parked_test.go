package projector_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

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
