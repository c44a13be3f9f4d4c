package projector_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// Attempts that end with their runner delay the lane: the next ones come 1, 8 and 64 leases later,
// and the message is stuck one lease after the last (docs/adr/0014).
func TestSuspectIsDelayedByLeases(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const lease = time.Minute
		db := newDB(t)
		require.NoError(t, db.InFlight(t.Context(), provider.Build{Projector: "p"}, provider.Worker{Runner: "dead"}, []string{"suspect"}))
		var began time.Time
		var after []time.Duration
		attempt := make(chan struct{}, 1)
		p := projector.Define("p", types, marked, projector.On("h", func(ctx context.Context, _ txn, _ eventstore.Event[posted]) error {
			if began.IsZero() {
				began = time.Now()
			}
			after = append(after, time.Since(began).Round(lease/2))
			attempt <- struct{}{}
			<-ctx.Done()
			return ctx.Err()
		}))
		// So short a drain cancels the attempt.
		cfg := projector.RunnerConfig{Lease: lease, Timeout: time.Second, Drain: time.Nanosecond}
		f := make(subscription)
		stop := run(t, db, f, cfg, p)
		f.deliver(t, msg("suspect", "posted", `{"Stars":1}`))
		for range 4 {
			<-attempt
			require.ErrorIs(t, stop(), outbox.ErrDrain)
			stop = run(t, db, make(subscription), cfg, p)
		}
		time.Sleep(2 * lease)
		require.NoError(t, stop())
		require.Equal(t, []time.Duration{0, lease, 9 * lease, 73 * lease}, after)
		rows, err := db.Parked(t.Context(), projector.ParkedFilter{})
		require.NoError(t, err)
		require.Len(t, rows, 1)
		require.Equal(t, projector.StateStuck, rows[0].State)
		require.Equal(t, 5, rows[0].Attempts)
	})
}

// While an attempt at a suspect runs, other runners leave it alone for longer than the attempt may
// take. Otherwise another runner could count its own attempt as soon as this one fails, and the
// reason of the failure would be lost.
func TestOthersLeaveARunningAttemptAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		require.NoError(t, db.InFlight(t.Context(), provider.Build{Projector: "p"}, provider.Worker{Runner: "dead"}, []string{"suspect"}))
		done := make(chan struct{})
		p := projector.Define("p", types, marked, projector.On("h", func(ctx context.Context, _ txn, _ eventstore.Event[posted]) error {
			<-ctx.Done()
			close(done)
			return errors.New("slow")
		}))
		f := make(subscription)
		stop := run(t, db, f, projector.RunnerConfig{Timeout: time.Minute, Lease: time.Second}, p)
		f.deliver(t, msg("suspect", "posted", `{"Stars":1}`))
		time.Sleep(10 * time.Second)
		due, err := db.Due(t.Context(), provider.DueFilter{Builds: []provider.Build{{Projector: "p"}}, Keys: 1, Each: 1})
		<-done
		require.NoError(t, stop())
		require.NoError(t, err)
		require.Empty(t, due)
	})
}
