package admin_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// shelf returns a program of the projector "shelf", which creates its tables while there is room.
func (w *world) shelf(room *atomic.Bool) kinora.Service {
	w.Helper()
	p := projector.Define("shelf", types, projector.Options{Tables: []string{"shelf"}},
		projector.OnCreate(func(ctx context.Context, tx pgx.Tx) error {
			if !room.Load() {
				return projector.Permanent(errors.New("no room"))
			}
			_, err := tx.Exec(ctx, `create table `+projector.Table(ctx, "shelf")+` (product text primary key, cents int not null)`)
			return err
		}),
		projector.On("priced", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[Priced]) error {
			_, err := tx.Exec(ctx, `insert into `+projector.Table(ctx, "shelf")+` values ($1, $2) on conflict (product) do update set cents = excluded.cents`, e.Stream, e.Data.Cents)
			return err
		}))
	r, err := projector.NewRunner(w.db, projector.FromLog(w.db), projector.RunnerConfig{Logger: quiet, Lease: 3 * time.Second}, p)
	require.NoError(w, err)
	return r
}

// Check 4. A rebuild that was refused, is paused, or has lost its only runner is found, each with what goes on.
// Promise: O3.2
func TestDoctorNamesRebuildsInEveryBadState(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var room atomic.Bool
	room.Store(true)
	stop := w.start(w.shelf(&room))
	w.price("tea", make([]int, 900)...) // the rebuild takes a quarter of an hour
	shelf := func(is func(admin.Projector) bool) func(admin.Projector) bool {
		return func(p admin.Projector) bool { return p.Name == "shelf" && is(p) }
	}
	first := w.generation(1, "live", shelf(func(p admin.Projector) bool { return p.Lag.N == 0 && p.Position >= 900 })).Generation
	room.Store(false)
	slowly := projector.Rebuild{How: projector.BlueGreen, Rate: 1, Decision: by}
	_, err := w.ops.Rebuild(t.Context(), "shelf", slowly)
	require.NoError(t, err)
	f := w.finds(soon, provider.FindingRebuild, "The rebuild of shelf was refused, or could not begin")
	require.Contains(t, f.Meaning, "its begin failed (permanent")
	require.Equal(t, []string{`kinora projectors rebuild shelf --reason "…"`}, f.Remedy)

	room.Store(true)
	number, err := w.ops.Rebuild(t.Context(), "shelf", slowly)
	require.NoError(t, err)
	w.generation(number, "building", shelf(func(p admin.Projector) bool { return p.Runners == 1 }))
	w.quietly(soon, provider.FindingRebuild)
	require.NoError(t, w.ops.Control(t.Context(), "shelf", number, projector.Pause, by))
	f = w.finds(soon, provider.FindingRebuild, "The rebuild of shelf is paused")
	require.Equal(t, []string{`kinora projectors resume shelf --rebuild --reason "…"`}, f.Remedy)
	require.NoError(t, w.ops.Control(t.Context(), "shelf", number, projector.Resume, by))
	w.quietly(soon, provider.FindingRebuild)
	stop()
	f = w.finds(soon, provider.FindingRebuild, "The rebuild of shelf stands still")
	require.Equal(t, []string{"start a runner of shelf in version 1", `kinora projectors cancel shelf --reason "…"`}, f.Remedy)
	require.NoError(t, w.ops.Control(t.Context(), "shelf", number, projector.Cancel, by))
	w.start(w.shelf(&room))
	w.quietly(soon, provider.FindingRebuild)
	w.generation(first, "live", shelf(func(p admin.Projector) bool { return p.Rebuild == nil }))
}
