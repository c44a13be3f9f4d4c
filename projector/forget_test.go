package projector_test

import (
	"context"
	"encoding/json"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// leftOf returns the handlers with markers, the parked messages and the tables of projector "p".
func leftOf(t *testing.T, db *memory.DB) (markers, parked, rows int) {
	t.Helper()
	handlers, err := db.MarkedHandlers(t.Context())
	require.NoError(t, err)
	list, err := db.Parked(t.Context(), provider.ParkedFilter{Projector: "p"})
	require.NoError(t, err)
	return len(handlers), len(list), len(noted(db, "notes", "k-1"))
}

func forget(t *testing.T, s provider.ForgetStore, o projector.ForgetOptions) (projector.Forgotten, error) {
	t.Helper()
	return projector.Forget(t.Context(), s, "p", o, projector.Decision{By: "ann", Reason: "nobody reads it"})
}

// doesNotStart fails the test unless a runner does not start, and returns its error.
func doesNotStart(t *testing.T, r *projector.Runner) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	err := r.Run(ctx)
	require.ErrorIs(t, err, projector.ErrForgotten)
	return err
}

// What a projector has left is deleted, and a runner that is rolled back does not begin again. After a release one begins
// anew, with tables of its own. A projector of the log has a checkpoint, one of a broker markers.
// Promise: O5.1
// Promise: O5.2
func TestAForgottenProjectorLeavesNothing(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, f subscription, src projector.Source) {
		opts := projector.Options{Markers: true, Version: 2}
		var isBad atomic.Bool
		isBad.Store(true)
		write(t, db, "k-1", 1, 2)
		stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, sending(opts, &isBad, 4)))
		time.Sleep(5 * time.Minute)
		if f != nil {
			f.deliver(t, keyed("k-2", 9)) // it is not in the log, and leaves a marker
		}
		write(t, db, "k-1", 3, 4, 5)
		time.Sleep(5 * time.Minute)
		require.NoError(t, stop())
		_, err := db.SetPause(t.Context(), provider.Pause{Kind: provider.PauseProjector, Name: "p", Decision: person}, true)
		require.NoError(t, err)
		_, err = db.AddAct(t.Context(), provider.Act{Verb: provider.VerbVerify, Kind: provider.PauseProjector, Name: "p", Decision: person, State: provider.ActRequested})
		require.NoError(t, err)
		at, err := db.Checkpoint(t.Context(), provider.Build{Projector: "p"})
		require.NoError(t, err)
		markers, parkedBefore, _ := leftOf(t, db)
		require.Equal(t, 2, parkedBefore)
		require.Equal(t, f != nil, markers > 0)

		want := projector.Forgotten{
			Checkpoints: map[int]int64{1: at.Place.Position}, Handlers: []string{"p/a"}[:markers], Parked: provider.Count{N: 2},
			Tables: []string{"notes_g1", "notes"},
		}
		preview, err := forget(t, db, projector.ForgetOptions{Preview: true, DropTables: true})
		require.NoError(t, err)
		require.Equal(t, want, preview)
		markersAfter, parkedAfter, _ := leftOf(t, db)
		require.Equal(t, []int{markers, 2}, []int{markersAfter, parkedAfter})

		forgotten, err := forget(t, db, projector.ForgetOptions{})
		require.NoError(t, err)
		require.GreaterOrEqual(t, forgotten.Deleted, 2+markers)
		want.Deleted = forgotten.Deleted
		require.Equal(t, want, forgotten)
		markers, parkedAfter, rows := leftOf(t, db)
		require.Equal(t, []int{0, 0, 3}, []int{markers, parkedAfter, rows}) // the tables are kept
		pauses, err := db.Pauses(t.Context())
		require.NoError(t, err)
		require.Empty(t, pauses)
		acts, err := db.Acts(t.Context(), provider.ActFilter{Verbs: []string{provider.VerbVerify}})
		require.NoError(t, err)
		require.Equal(t, provider.ActCanceled, acts[0].State)

		err = doesNotStart(t, newRunner(t, db, src, projector.RunnerConfig{}, sending(opts, nil)))
		for _, text := range []string{"p, by ann at 2000-01-01", "nobody reads it", "kinora projectors release p "} {
			require.ErrorContains(t, err, text)
		}
		require.ErrorIs(t, applyParked(t, db, projector.RunnerConfig{}, sending(opts, nil)), projector.ErrForgotten)
		_, err = projector.RequestRebuild(t.Context(), db, "p", request(projector.InPlace))
		require.ErrorIs(t, err, projector.ErrForgotten)

		require.NoError(t, projector.Release(t.Context(), db, "p", person))
		require.ErrorIs(t, projector.Release(t.Context(), db, "p", person), projector.ErrGeneration)
		again := sending(projector.Options{Markers: true, Version: 3, From: eventstore.From{Position: at.Place.Position - 1}}, nil)
		stop = start(t, newRunner(t, db, src, projector.RunnerConfig{}, again))
		time.Sleep(5 * time.Minute)
		require.NoError(t, stop())
		require.Equal(t, []int{5}, noted(db, "notes", "k-1"))
		require.Equal(t, []int{5}, noted(db, "notes_g2", "k-1"))
		require.Equal(t, []int{1, 2, 3}, noted(db, "notes_g1", "k-1"))
	})
}

// A projector without a version and without tables of its own, and one that never applied anything, begin anew too.
// Promise: O5.2
func TestAReleasedNameWithoutTables(t *testing.T) {
	t.Parallel()
	for _, opts := range []projector.Options{marked, {}, delivered} {
		synctest.Test(t, func(t *testing.T) {
			db, f := newDB(t), make(subscription)
			cfg := projector.RunnerConfig{}
			src := projector.Subscribe(f, "review")
			if !opts.Markers {
				src = projector.FromLog(db)
			}
			write(t, db, "k-1", 1, 2)
			stop := start(t, newRunner(t, db, src, cfg, define(opts, note("notes"))))
			if opts.BrokerOnly {
				f.deliver(t, series("k-1", 1, 2)...)
			}
			time.Sleep(30 * time.Second)
			require.NoError(t, stop())
			require.Equal(t, []int{1, 2}, noted(db, "notes", "k-1"))
			_, err := forget(t, db, projector.ForgetOptions{DropTables: true})
			require.NoError(t, err)
			require.Equal(t, []int{1, 2}, noted(db, "notes", "k-1")) // Kinora did not create it
			_ = doesNotStart(t, newRunner(t, db, src, cfg, define(opts, note("notes"))))
			require.NoError(t, projector.Release(t.Context(), db, "p", person))
			stop = start(t, newRunner(t, db, src, cfg, define(opts, note("notes"))))
			if opts.BrokerOnly {
				f.deliver(t, series("k-1", 1, 2)...)
			}
			time.Sleep(30 * time.Second)
			require.NoError(t, stop())
			require.Equal(t, []int{1, 2, 1, 2}, noted(db, "notes", "k-1"))
			_, err = forget(t, db, projector.ForgetOptions{}) // the second one
			require.NoError(t, err)
			_ = doesNotStart(t, newRunner(t, db, src, cfg, define(opts, note("notes"))))
		})
	}
}

// Tables are dropped with DropTables, also by a later call, and their names are free then.
// Promise: O5.3
func TestForgetDropsTablesOnRequest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(5)...)
		run := func(opts projector.Options, until func(*projector.Projector[txn])) {
			p := built(opts, 1)
			stop := start(t, newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, p))
			until(p)
			require.NoError(t, stop())
		}
		run(marked, func(*projector.Projector[txn]) { time.Sleep(10 * time.Second) })
		run(projector.Options{Markers: true, Version: 2, RebuildOnChange: projector.BlueGreen}, func(p *projector.Projector[txn]) { state(t, db, p, 2, "live") })
		tables := []string{"notes_g1", "notes", "notes_g2"}
		for _, drop := range []bool{false, true} {
			require.Equal(t, upTo(5), noted(db, "notes", "k-1"))
			require.Equal(t, upTo(5), noted(db, "notes_g1", "k-1"))
			f, err := forget(t, db, projector.ForgetOptions{DropTables: drop})
			require.NoError(t, err)
			require.Equal(t, tables, f.Tables)
		}
		for _, table := range tables {
			require.Empty(t, noted(db, table, "k-1"))
		}
		f, err := forget(t, db, projector.ForgetOptions{DropTables: true})
		require.NoError(t, err)
		require.Equal(t, projector.Forgotten{Checkpoints: map[int]int64{}, Handlers: []string{}, Tables: []string{}}, f)

		require.NoError(t, projector.Release(t.Context(), db, "p", person)) // the same versions again
		run(marked, func(*projector.Projector[txn]) { time.Sleep(10 * time.Second) })
		require.Equal(t, upTo(5), noted(db, "notes_g3", "k-1"))
		run(projector.Options{Markers: true, Version: 2, RebuildOnChange: projector.BlueGreen}, func(p *projector.Projector[txn]) { state(t, db, p, 4, "live") })
		require.Equal(t, upTo(5), noted(db, "notes_g4", "k-1"))
	})
}

// A handler's earlier name may be that of another projector, which has its own markers under it.
// Promise: O5.1
func TestForgetLeavesTheMarkersOfOthers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		other := projector.Define("q", types, delivered, projector.On("posted", note("q")))
		heir := projector.Define("p", types, projector.Options{Markers: true, Version: 2}, projector.On("a", note("a")).Was("q/posted"))
		stop := run(t, db, f, projector.RunnerConfig{}, other)
		f.deliver(t, keyed("k", 1))
		require.NoError(t, stop())
		stop = run(t, db, f, projector.RunnerConfig{}, heir)
		f.deliver(t, keyed("k", 2))
		require.NoError(t, stop())
		_, err := forget(t, db, projector.ForgetOptions{})
		require.NoError(t, err)
		stop = run(t, db, f, projector.RunnerConfig{}, other)
		f.deliver(t, keyed("k", 1))
		require.NoError(t, stop())
		require.Equal(t, upTo(1), noted(db, "q", "k"))
	})
}

// A store that is not ready for a runner is left as it is: what lacks a right would end in the middle.
// Promise: O5.1
func TestForgetRequiresTheRightsOfARunner(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	write(t, db, "k-1", 1)
	u := provider.Unit{Projector: "p", Messages: []provider.Message{{ID: "m-1", Mark: true, Handlers: []provider.Handler{{Name: "p/a"}}}}}
	require.NoError(t, db.Do(t.Context(), u, func(context.Context, txn, provider.Found) (provider.Closing, error) { return provider.Closing{}, nil }))
	_, err := forget(t, lacksRights{db}, projector.ForgetOptions{})
	require.ErrorIs(t, err, errNo)
	_, err = forget(t, lacksRights{db}, projector.ForgetOptions{Preview: true})
	require.NoError(t, err)
	_, err = forget(t, db, projector.ForgetOptions{})
	require.NoError(t, err, "it was not begun")
}

// lacksRights is a store that is not ready for runners.
type lacksRights struct{ *memory.DB }

func (lacksRights) ReadyFor(_ context.Context, service provider.Service) error {
	if service == provider.RunnerService {
		return errNo
	}
	return nil
}

// A unit that is open when its projector is forgotten ends first, and none commits after it.
// Promise: O5.1
func TestForgetWaitsForAnOpenUnit(t *testing.T) {
	t.Parallel()
	for name, failure := range map[string]error{"kept": nil, "undone": errNo} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				open, goOn := make(chan struct{}), make(chan struct{})
				u := provider.Unit{Projector: "p", Messages: []provider.Message{
					{ID: "m-1", Mark: true, Handlers: []provider.Handler{{Name: "p/a"}}},
				}}
				apply := func(u provider.Unit, wait func() error) error {
					return db.Do(t.Context(), u, func(_ context.Context, tx txn, _ provider.Found) (provider.Closing, error) {
						tx.Put("notes", "k-1", []int{1})
						return provider.Closing{}, wait()
					})
				}
				first := u
				first.Messages = []provider.Message{{ID: "m-0", Mark: true, Handlers: u.Messages[0].Handlers}}
				require.NoError(t, apply(first, func() error { return nil }))
				unit, done := make(chan error, 1), make(chan error, 1)
				go func() {
					unit <- apply(u, func() error { close(open); <-goOn; return failure })
				}()
				<-open
				go func() {
					_, err := forget(t, db, projector.ForgetOptions{})
					done <- err
				}()
				time.Sleep(500 * time.Millisecond)
				require.Empty(t, done, "it waits")
				close(goOn)
				require.ErrorIs(t, <-unit, failure)
				require.NoError(t, <-done)
				u.Messages[0].ID = "m-2"
				require.ErrorIs(t, apply(u, func() error { return nil }), provider.ErrEnded)
				markers, _, _ := leftOf(t, db)
				require.Zero(t, markers)
			})
		})
	}
}

// interrupted is a store whose next steps fail after some have succeeded.
type interrupted struct {
	*memory.DB
	left int
}

func (s *interrupted) step() error {
	if s.left--; s.left < 0 {
		return errNo
	}
	return nil
}

func (s *interrupted) SetGeneration(ctx context.Context, all ...provider.Generation) (bool, error) {
	if err := s.step(); err != nil {
		return false, err
	}
	return s.DB.SetGeneration(ctx, all...)
}

func (s *interrupted) ClearGeneration(ctx context.Context, b provider.Build, handlers []string, tables []provider.TablePair, limit int) (int, error) {
	if err := s.step(); err != nil {
		return 0, err
	}
	return s.DB.ClearGeneration(ctx, b, handlers, tables, 2)
}

// Forget is interrupted after each of its steps. From the first one on no runner starts and no name is released, and
// another call continues.
// Promise: O5.1
func TestForgetIsContinued(t *testing.T) {
	t.Parallel()
	for steps, ended := 0, false; !ended; steps++ {
		synctest.Test(t, func(t *testing.T) {
			db, f := newDB(t), make(subscription)
			p := define(delivered, newFaults(map[string]error{"k-1-7": errNever}).run)
			stop := run(t, db, f, projector.RunnerConfig{}, p)
			f.deliver(t, series("k-1", 1, 8)...)
			require.NoError(t, stop())
			for n, state := range []provider.GenerationState{provider.GenerationStandby, provider.GenerationLive} {
				g := provider.Generation{Build: provider.Build{Projector: "p", Generation: n + 1}, State: state, Data: json.RawMessage(`{"oldest":1,"newest":1}`)}
				set, err := db.SetGeneration(t.Context(), g)
				require.NoError(t, err)
				require.True(t, set)
			}
			markersBefore, parkedBefore, _ := leftOf(t, db)
			require.Equal(t, []int{1, 2}, []int{markersBefore, parkedBefore})

			_, err := forget(t, &interrupted{db, steps}, projector.ForgetOptions{})
			ended = err == nil
			if !ended {
				require.ErrorIs(t, err, errNo)
			}
			rows, err := db.Generations(t.Context(), "p")
			require.NoError(t, err)
			for _, g := range rows {
				c, err := db.Checkpoint(t.Context(), g.Build)
				require.NoError(t, err)
				require.Equal(t, steps > 0, g.State == provider.GenerationRetired)
				require.Equal(t, steps > 0, c.Mode == provider.ModeEnded)
			}
			if steps == 0 {
				return
			}
			_ = doesNotStart(t, newRunner(t, db, projector.Subscribe(f, "review"), projector.RunnerConfig{}, p))
			if !ended {
				require.ErrorIs(t, projector.Release(t.Context(), db, "p", person), projector.ErrGeneration)
			}
			_, err = forget(t, db, projector.ForgetOptions{})
			require.NoError(t, err)
			markers, parked, _ := leftOf(t, db)
			require.Equal(t, []int{0, 0}, []int{markers, parked})
			require.NoError(t, projector.Release(t.Context(), db, "p", person))
		})
	}
}

// A projector that may be in use is not forgotten, nor one that does not exist.
// Promise: O5.4
func TestForgetIsRefused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		arrange func(t *testing.T, db *memory.DB)
		want    string // in the text of the error; empty: there is none
	}{
		"a runner":  {func(t *testing.T, db *memory.DB) { reports(t, db, "p") }, "alive: host/1"},
		"a reader":  {func(t *testing.T, db *memory.DB) { leases(t, db, "reader/p") }, "the lease reader/p"},
		"a standby": {func(t *testing.T, db *memory.DB) { leases(t, db, "reader/p@2") }, "the lease reader/p@2"},
		"a segment": {func(t *testing.T, db *memory.DB) { leases(t, db, "segments/p/3") }, "the lease segments/p/3"},
		"verified":  {func(t *testing.T, db *memory.DB) { leases(t, db, "verify/p") }, "being verified"},
		"rebuilt": {func(t *testing.T, db *memory.DB) {
			_, err := projector.RequestRebuild(t.Context(), db, "p", request(projector.BlueGreen))
			require.NoError(t, err)
		}, "generation 2 is requested (blue-green): cancel that first"},
		"others": {func(t *testing.T, db *memory.DB) {
			reports(t, db, "p2")
			leases(t, db, "reader/p2", "segments/p2/1", "verify/p2", "prune-markers/p")
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				write(t, db, "k-1", 1, 2)
				stop := start(t, newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, built(marked, 1)))
				time.Sleep(10 * time.Second)
				require.NoError(t, stop())
				c.arrange(t, db)
				before, err := db.Generations(t.Context(), "p")
				require.NoError(t, err)
				for _, preview := range []bool{true, false} {
					_, err = forget(t, db, projector.ForgetOptions{Preview: preview})
					if c.want == "" {
						require.NoError(t, err)
						continue
					}
					require.ErrorIs(t, err, projector.ErrGeneration)
					require.ErrorContains(t, err, c.want)
				}
				after, err := db.Generations(t.Context(), "p")
				require.NoError(t, err)
				require.Equal(t, c.want != "", len(before) == len(after) && before[0].Revision == after[0].Revision)
			})
		})
	}
	db := newDB(t)
	for _, name := range []string{"", "none"} {
		_, err := projector.Forget(t.Context(), db, name, projector.ForgetOptions{}, person)
		require.ErrorIs(t, err, projector.ErrInput)
	}
	_, err := projector.Forget(t.Context(), db, "p", projector.ForgetOptions{}, projector.Decision{By: "ann"})
	require.ErrorIs(t, err, projector.ErrInput)
	require.ErrorIs(t, projector.Release(t.Context(), db, "p", projector.Decision{}), projector.ErrInput)
	require.ErrorIs(t, projector.Release(t.Context(), db, "none", person), projector.ErrGeneration)
	all, err := db.Generations(t.Context(), "")
	require.NoError(t, err)
	require.Empty(t, all)
}

func reports(t *testing.T, db *memory.DB, name string) {
	t.Helper()
	r := provider.ServiceReport{ID: "r", Kind: "runner", Holder: "r", Process: "host/1", Can: []provider.Capability{{Projector: name, Version: 1}}}
	require.NoError(t, db.Report(t.Context(), r, time.Hour))
}

func leases(t *testing.T, db *memory.DB, names ...string) {
	t.Helper()
	for _, name := range names {
		has, err := db.AcquireLease(t.Context(), name, claim.Terms{Holder: "r", Token: claim.NewToken(), Lease: time.Hour})
		require.NoError(t, err)
		require.True(t, has)
	}
}

// unreported is a store that does not show that runners are alive.
type unreported struct{ *memory.DB }

func (u unreported) LeaseNames(context.Context, string) ([]string, error) { return nil, nil }

func (u unreported) Services(context.Context) ([]provider.ServiceReport, error) { return nil, nil }

// A runner that Forget did not see ends, and commits nothing more.
// Promise: O5.1
func TestARunnerOfAForgottenProjectorEnds(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, f subscription, src projector.Source) {
		write(t, db, "k-1", 1, 2)
		r := newRunner(t, db, src, projector.RunnerConfig{}, built(marked, 1))
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx) }()
		<-r.Running()
		time.Sleep(30 * time.Second)
		_, err := forget(t, db, projector.ForgetOptions{})
		require.ErrorIs(t, err, projector.ErrGeneration)
		_, err = forget(t, unreported{db}, projector.ForgetOptions{})
		require.NoError(t, err)
		write(t, db, "k-1", 3)
		err = <-done
		require.ErrorIs(t, err, projector.ErrForgotten)
		require.False(t, errors.Is(err, context.Canceled))
		require.Equal(t, []int{1, 2}, noted(db, "notes", "k-1"))
	})
}

// A runner that had begun to start when its projector was forgotten ends too.
// Promise: O5.2
func TestAProjectorIsForgottenWhileARunnerStarts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", 1, 2)
		stop := start(t, newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, define(marked, note("notes"))))
		time.Sleep(10 * time.Second)
		require.NoError(t, stop())
		slow := &stalled{unit: db, checkpoint: func() {
			_, err := forget(t, db, projector.ForgetOptions{})
			require.NoError(t, err)
		}}
		_ = doesNotStart(t, newRunner(t, slow, projector.FromLog(db), projector.RunnerConfig{}, define(marked, note("notes"))))
	})
}
