package projector_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/stretchr/testify/require"
)

// OnCreate and OnReset may take longer than RunnerConfig.Timeout. If one fails after that, the request
// ends.
func TestSlowSetup(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(10)...)
		fails := false
		slow := func(ctx context.Context, _ txn) error {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(5 * time.Minute):
			}
			if fails {
				return errNo
			}
			return nil
		}
		p := projector.Define("p", types, projector.Options{Tables: []string{"notes"}},
			projector.OnCreate(slow), projector.OnReset(slow),
			projector.On("a", func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
				return note(projector.Table(ctx, "notes"))(ctx, tx, e)
			}))
		r := newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{Timeout: 10 * time.Second}, p)
		stop := start(t, r)
		for n, how := range []projector.RebuildHow{projector.BlueGreen, projector.InPlace} {
			require.NoError(t, rebuild(t, r, request(how)))
			state(t, db, p, n+2, "live")
		}
		fails = true
		for _, how := range []projector.RebuildHow{projector.BlueGreen, projector.InPlace} {
			require.ErrorIs(t, rebuild(t, r, request(how)), projector.ErrNoRebuild)
		}
		require.NoError(t, stop())
	})
}
