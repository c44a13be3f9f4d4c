package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// event returns a unit of events at these positions.
func event(positions map[string]int64, ids ...string) provider.Unit {
	u := marked(ids...)
	for i := range u.Messages {
		u.Messages[i].Position = positions[u.Messages[i].ID]
	}
	return u
}

// begins creates the checkpoint of projector p.
func begins(t *testing.T, db *postgres.DB, position int64, mode provider.Mode) provider.Checkpoint {
	t.Helper()
	c := provider.Checkpoint{Place: provider.LogPlace{Position: position, ID: "e"}, Lineage: "l", Mode: mode, Token: claim.NewToken()}
	set(t, db, provider.Checkpoint{}, c)
	return c
}

func set(t *testing.T, db *postgres.DB, from, to provider.Checkpoint) {
	t.Helper()
	ok, err := db.SetCheckpoint(t.Context(), provider.Build{Projector: "p"}, from, to)
	require.NoError(t, err)
	require.True(t, ok)
}

// advance returns a unit that moves the checkpoint.
func advance(c provider.Checkpoint, to int64) *provider.Advance {
	return &provider.Advance{From: c.Place.Position, To: provider.LogPlace{Position: to, ID: "e"}, Mode: c.Mode, Token: c.Token}
}

// applies runs a unit whose handlers add 1 under the id of each fresh message, in a form of
// forms. The Found is that of the last call.
func applies(ctx context.Context, db *postgres.DB, form string, u provider.Unit) (found provider.Found, err error) {
	each := func(f provider.Found, write func(id string) error) error {
		found = f
		for i := range u.Messages {
			if f.Begin(i); f.Fresh[i][0] {
				if err := write(u.Messages[i].ID); err != nil {
					return err
				}
			}
		}
		return nil
	}
	if form == "batch" {
		err = db.Batched().Do(ctx, u, func(_ context.Context, b *pgx.Batch, f provider.Found) (provider.Closing, error) {
			return provider.Closing{}, each(f, func(id string) error { b.Queue(addSQL, id, 1); return nil })
		})
		return found, err
	}
	err = db.Do(ctx, u, func(ctx context.Context, tx pgx.Tx, f provider.Found) (provider.Closing, error) {
		return provider.Closing{}, each(f, func(id string) error { return add(ctx, tx, id, 1) })
	})
	return found, err
}

// The marker of an event may be deleted while a unit waits for the marker of another one. Then
// only the checkpoint, read again after the markers, shows that the event is applied.
// Promise: G4.7
func TestTheCheckpointIsReadAfterTheMarkers(t *testing.T) {
	t.Parallel()
	for form := range forms {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, nil, totals)
			positions := map[string]int64{"a": 20, "e": 5}
			c := begins(t, db, 0, provider.ModeLive)
			_, err := applies(t.Context(), db, form, event(positions, "e"))
			require.NoError(t, err)
			inside, resume, gone := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			go func() {
				gone <- db.Do(t.Context(), event(positions, "a"), func(context.Context, pgx.Tx, provider.Found) (provider.Closing, error) {
					close(inside)
					<-resume
					return provider.Closing{}, errBroken
				})
			}()
			<-inside
			var found provider.Found
			done := make(chan error, 1)
			go func() {
				var err error
				found, err = applies(t.Context(), db, form, event(positions, "a", "e"))
				done <- err
			}()
			waiting(t, db, 1)
			require.NoError(t, db.Do(t.Context(), provider.Unit{Projector: "p", Advance: advance(c, 10)},
				func(context.Context, pgx.Tx, provider.Found) (provider.Closing, error) {
					return provider.Closing{}, nil
				}))
			n, err := db.PruneApplied(t.Context(), provider.Build{Projector: "p"}, []string{"p/a"}, 10)
			require.NoError(t, err)
			require.Equal(t, 1, n)
			close(resume)
			require.ErrorIs(t, <-gone, errBroken)
			require.NoError(t, <-done)
			require.Equal(t, [][]bool{{true}, {false}}, found.Fresh)
			require.Equal(t, 2, count(t, db, `select sum(n) from totals`))
		})
	}
}

// Units that wait for the fence behind a change of the mode see the new mode.
// Promise: G4.7
func TestUnitsThatWaitForAChangeOfTheModeSeeIt(t *testing.T) {
	t.Parallel()
	for form := range forms {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, nil, totals)
			positions := map[string]int64{"first": 1, "second": 2}
			c := begins(t, db, 0, provider.ModeLive)
			end := paused(t, db, event(positions, "first"), nothing)
			next := c
			next.Mode = provider.ModeCatchUp
			changed, done := make(chan error, 1), make(chan error, 1)
			go func() {
				ok, err := db.SetCheckpoint(t.Context(), provider.Build{Projector: "p"}, c, next)
				if !ok {
					err = errors.Join(err, errors.New("not set"))
				}
				changed <- err
			}()
			waiting(t, db, 1)
			var found provider.Found
			go func() {
				var err error
				found, err = applies(t.Context(), db, form, event(positions, "second"))
				done <- err
			}()
			waiting(t, db, 2)
			require.NoError(t, end())
			require.NoError(t, <-changed)
			require.NoError(t, <-done)
			require.Equal(t, []bool{true}, found.Left)
			require.Equal(t, [][]bool{{false}}, found.Fresh)
			require.Equal(t, 1, count(t, db, `select count(*) from kinora.markers`))
			require.Zero(t, count(t, db, `select count(*) from totals`))
		})
	}
}

// At REPEATABLE READ, a unit in one round trip would see the markers and the checkpoint as they
// were before its wait for the fence.
// Promise: G4.7
func TestUnitsWaitForTheFenceWhateverTheRolesIsolation(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"repeatable%20read", "serializable"} {
		for form := range forms {
			t.Run(level+" "+form, func(t *testing.T) {
				t.Parallel()
				admin := postgrestest.OpenBusy(t, nil, totals)
				db := borrowed(t, nil, admin.Pool().Config().ConnString()+"&default_transaction_isolation="+level)
				c := begins(t, admin, 0, provider.ModeLive)
				u := event(map[string]int64{"e": 5}, "e")
				_, err := applies(t.Context(), db, form, u)
				require.NoError(t, err)
				tx, err := admin.Pool().Begin(t.Context())
				require.NoError(t, err)
				defer func() { _ = tx.Rollback(context.Background()) }()
				exec := func(sql string, args ...any) {
					_, err := tx.Exec(t.Context(), sql, args...)
					require.NoError(t, err)
				}
				exec(`select pg_advisory_xact_lock($1::int, $2::int)`, 1802661488, postgres.LockKey("kinora/p"))
				done := make(chan error, 1)
				go func() {
					_, err := applies(t.Context(), db, form, u)
					done <- err
				}()
				waiting(t, admin, 1)
				exec(`update kinora.checkpoints set position = 10`)
				exec(`delete from kinora.markers`)
				require.NoError(t, tx.Commit(t.Context()))
				require.NoError(t, <-done)
				require.Equal(t, 1, count(t, admin, `select n from totals`))

				c.Place.Position = 10
				u = event(map[string]int64{"f": 11}, "f")
				u.Advance = advance(c, 12)
				_, err = applies(t.Context(), db, form, u)
				require.NoError(t, err)
				require.Equal(t, 1, count(t, admin, `select n from totals where key = 'f'`))
			})
		}
	}
}

// A batch that moves the checkpoint skips what a delivery has applied, also under an earlier name
// of the handler, and whether its marker has a position or not.
// Promise: G7b.1
func TestABatchSkipsWhatHasAMarker(t *testing.T) {
	t.Parallel()
	for form := range forms {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.Open(t, nil, totals)
			positions := map[string]int64{"a": 1, "b": 2, "c": 3, "d": 4}
			_, err := applies(t.Context(), db, form, marked("a")) // before the projector read the log
			require.NoError(t, err)
			c := begins(t, db, 0, provider.ModeLive)
			old := event(positions, "c")
			old.Messages[0].Handlers[0].Name = "p/old"
			for _, u := range []provider.Unit{event(positions, "b"), old} {
				_, err = applies(t.Context(), db, form, u)
				require.NoError(t, err)
			}
			next := c
			next.Mode = provider.ModeCatchUp
			set(t, db, c, next)
			u := event(positions, "a", "b", "c", "d")
			for i := range u.Messages {
				u.Messages[i].Handlers[0].Was = []string{"p/old"}
			}
			u.Advance = advance(next, 4)
			found, err := applies(t.Context(), db, form, u)
			require.NoError(t, err)
			require.Equal(t, [][]bool{{false}, {false}, {false}, {true}}, found.Fresh)
			require.Equal(t, 4, count(t, db, `select sum(n) from totals`))
			require.Equal(t, 3, count(t, db, `select count(*) from kinora.markers`), "the batch inserts none")
			_, err = applies(t.Context(), db, form, u)
			require.ErrorIs(t, err, provider.ErrFenced)
			require.Equal(t, provider.CodeFenced, provider.CodeOf(err))
			require.Equal(t, provider.ClassTransient, provider.ClassOf(err))
			require.Equal(t, 4, count(t, db, `select sum(n) from totals`))
		})
	}
}

// Units of events take one round trip, and batches that move the checkpoint too. Two more are
// taken if a marker exists, or an event is not behind the checkpoint: nothing of the first was
// committed.
func TestTheRoundTripsOfUnitsWithACheckpoint(t *testing.T) {
	t.Parallel()
	proxy, db, direct := throughProxy(t)
	c := begins(t, direct, 0, provider.ModeLive)
	at := int64(0)
	unit := func(n int) provider.Unit {
		u := provider.Unit{Projector: "p"}
		for range n {
			at++
			m := delivery(fmt.Sprint("e", at))
			m.Position = at
			u.Messages = append(u.Messages, m)
		}
		return u
	}
	moves := func(u provider.Unit) provider.Unit {
		u.Advance = advance(c, at)
		c.Place.Position = at
		return u
	}
	for _, step := range []struct {
		name  string
		unit  func() provider.Unit
		runs  int
		fresh int
	}{
		{"events", func() provider.Unit { return unit(3) }, 1, 3},
		{"no events", func() provider.Unit { return moves(unit(0)) }, 1, 0},
		{"a batch", func() provider.Unit { return moves(unit(500)) }, 1, 500},
		{"a marker exists", func() provider.Unit {
			u := unit(3)
			_, err := applies(t.Context(), direct, "tx", provider.Unit{Projector: "p", Messages: u.Messages[1:2]})
			require.NoError(t, err)
			return moves(u)
		}, 2, 2},
		{"not behind the checkpoint", func() provider.Unit {
			u := unit(1)
			_, err := applies(t.Context(), direct, "tx", moves(provider.Unit{Projector: "p"}))
			require.NoError(t, err)
			return u
		}, 2, 0},
	} {
		for prepared := range 3 {
			u, runs, fresh := step.unit(), 0, 0
			before := proxy.RoundTrips()
			require.NoError(t, db.Batched().Do(t.Context(), u, func(_ context.Context, _ *pgx.Batch, found provider.Found) (provider.Closing, error) {
				runs, fresh = runs+1, 0
				for i := range found.Fresh {
					if found.Fresh[i][0] {
						fresh++
					}
				}
				return provider.Closing{}, nil
			}), step.name)
			require.Equal(t, []int{step.runs, step.fresh}, []int{runs, fresh}, step.name)
			if prepared == 2 && step.runs == 1 {
				require.Equal(t, 1, proxy.RoundTrips()-before, step.name)
			}
		}
	}
}
