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

// Attempts that end with their runner put the lane off: the next ones come a lease, 8 and 64 leases later, and the message
// is stuck a lease after the last one (docs/adr/0014).
func TestAttemptsAtASuspectAreFurtherAndFurtherApart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const lease = time.Minute
		db := newDB(t)
		require.NoError(t, db.InFlight(t.Context(), "p", provider.Worker{Runner: "dead"}, []string{"suspect"}))
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
		cfg := projector.RunnerConfig{Lease: lease, Timeout: time.Second, Drain: time.Nanosecond} // such a short drain breaks the attempt off
		f := make(feed)
		stop := run(t, db, f, cfg, p)
		f.deliver(t, msg("suspect", "posted", `{"Stars":1}`))
		for range 4 {
			<-attempt
			require.ErrorIs(t, stop(), outbox.ErrDrain)
			stop = run(t, db, make(feed), cfg, p)
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

// An attempt at a suspect keeps others away for longer than it may take: else another runner may count one of its own as soon
// as this one fails, and why it failed is lost.
func TestOthersLeaveARunningAttemptAtASuspectAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		require.NoError(t, db.InFlight(t.Context(), "p", provider.Worker{Runner: "dead"}, []string{"suspect"}))
		done := make(chan struct{})
		p := projector.Define("p", types, marked, projector.On("h", func(ctx context.Context, _ txn, _ eventstore.Event[posted]) error {
			<-ctx.Done()
			close(done)
			return errors.New("slow")
		}))
		f := make(feed)
		stop := run(t, db, f, projector.RunnerConfig{Timeout: time.Minute, Lease: time.Second}, p)
		f.deliver(t, msg("suspect", "posted", `{"Stars":1}`))
		time.Sleep(10 * time.Second)
		due, err := db.Due(t.Context(), provider.DueFilter{Projectors: []string{"p"}, Keys: 1, Each: 1})
		<-done
		require.NoError(t, stop())
		require.NoError(t, err)
		require.Empty(t, due)
	})
}
