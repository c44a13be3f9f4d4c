package projector_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// emitting defines a projector like built, whose handler also sends a message for each event. It fails
// for the stars of bad.
func emitting(opts projector.Options, bad ...int) *projector.Projector[txn] {
	opts.Tables = []string{"notes"}
	return projector.Define("p", types, opts,
		projector.OnCreate(func(context.Context, txn) error { return nil }),
		projector.OnEmit("a", func(ctx context.Context, tx txn, e eventstore.Event[posted]) ([]outbox.Message, error) {
			if slices.Contains(bad, e.Data.Stars) {
				return nil, errNever
			}
			m := outbox.Message{Topic: "sent", Payload: []byte(fmt.Sprint(e.Data.Stars))}
			return []outbox.Message{m}, note(projector.Table(ctx, "notes"))(ctx, tx, e)
		}))
}

// sent returns how often each number was sent.
func sent(t *testing.T, db *memory.DB) map[string]int {
	t.Helper()
	counts := map[string]int{}
	list, err := db.Entries(t.Context(), outbox.Filter{Topic: "sent", Limit: 10_000})
	require.NoError(t, err)
	for _, e := range list {
		counts[string(e.Payload)]++
	}
	return counts
}

func once(n int) map[string]int {
	counts := map[string]int{}
	for i := range n {
		counts[fmt.Sprint(i+1)] = 1
	}
	return counts
}

// state waits until a generation has a state.
func state(t *testing.T, db *memory.DB, p *projector.Projector[txn], number int, want string) projector.Generation {
	t.Helper()
	for range 1000 {
		all, err := p.Generations(t.Context(), db)
		require.NoError(t, err)
		for _, g := range all {
			if g.Number == number && g.State == want {
				return g
			}
		}
		time.Sleep(100 * time.Millisecond)
	}
	require.Fail(t, "the generation does not become "+want)
	return projector.Generation{}
}

// Output is sent once for each event, whatever generation applies it first: also that of an event
// that the old program could not apply.
// Promise: R8.1
func TestARebuildSendsOutputOnce(t *testing.T) {
	t.Parallel()
	for _, how := range []projector.RebuildHow{projector.InPlace, projector.BlueGreen} {
		t.Run(how.String(), func(t *testing.T) {
			t.Parallel()
			sources(t, func(t *testing.T, db *memory.DB, f subscription, src projector.Source) {
				write(t, db, "k-1", upTo(100)...)
				write(t, db, "k-2", 101)
				opts := projector.Options{Markers: true, Parking: projector.ParkMessage}
				stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, emitting(opts, 7, 101)))
				last := appending(t, db, f, 102)
				time.Sleep(20 * time.Second)
				require.Len(t, parked(t, db), 2)
				opts.Version, opts.RebuildOnChange = 2, how
				two := emitting(opts)
				stopTwo := start(t, newRunner(t, db, src, projector.RunnerConfig{}, two))
				state(t, db, two, 2, "live")
				time.Sleep(5 * time.Second)
				require.NoError(t, stop())
				time.Sleep(5 * time.Second)
				n := last()
				time.Sleep(20 * time.Second)
				require.NoError(t, stopTwo())
				require.Equal(t, once(n), sent(t, db))
				require.Equal(t, append(upTo(100), upTo(n)[101:]...), noted(db, "notes", "k-1"))
			})
		})
	}
}

// A rebuild tries parked events again in their places. Those that fail again stay parked, and hold
// back their streams. Skipped ones stay skipped.
// Promise: R8.2
func TestARebuildTriesParkedEventsAgain(t *testing.T) {
	t.Parallel()
	for _, how := range []projector.RebuildHow{projector.InPlace, projector.BlueGreen} {
		t.Run(how.String(), func(t *testing.T) {
			t.Parallel()
			sources(t, func(t *testing.T, db *memory.DB, _ subscription, src projector.Source) {
				for _, stream := range []string{"k-1", "k-2", "k-3"} {
					write(t, db, stream, upTo(10)...)
				}
				bad := newFaults(map[string]error{})
				for _, stream := range []string{"k-1", "k-2", "k-3"} {
					bad.set(published(t, db, stream)[4].UUID, errNever)
				}
				bad.handle = func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
					return note(projector.Table(ctx, "notes"))(ctx, tx, e)
				}
				opts := projector.Options{Markers: true, Tables: []string{"notes"}}
				p := projector.Define("p", types, opts, projector.OnCreate(func(context.Context, txn) error { return nil }), projector.On("a", bad.run))
				r := newRunner(t, db, src, projector.RunnerConfig{}, p)
				stop := start(t, r)
				time.Sleep(10 * time.Second)
				require.Len(t, parked(t, db), 18)
				n, err := projector.Skip(t.Context(), db, projector.ParkedFilter{Projector: "p", Key: "k-3", Code: "", States: []projector.ParkedState{projector.StateStuck}}, person)
				require.NoError(t, err)
				require.Equal(t, 1, n)
				time.Sleep(10 * time.Second)
				bad.set(published(t, db, "k-2")[4].UUID, nil) // the program is fixed
				require.NoError(t, rebuild(t, r, request(how)))
				time.Sleep(10 * time.Second)
				require.Equal(t, upTo(4), noted(db, "notes", "k-1"))
				require.Equal(t, upTo(10), noted(db, "notes", "k-2"))
				require.Equal(t, []int{1, 2, 3, 4, 6, 7, 8, 9, 10}, noted(db, "notes", "k-3"))
				list, err := db.Parked(t.Context(), projector.ParkedFilter{Projector: "p", Generation: 2})
				require.NoError(t, err)
				require.Len(t, list, 6)
				bad.fix()
				_, err = projector.Replay(t.Context(), db, projector.ParkedFilter{Projector: "p"}, person)
				require.NoError(t, err)
				time.Sleep(10 * time.Second)
				require.Equal(t, upTo(10), noted(db, "notes", "k-1"))
				require.NoError(t, stop())
			})
		})
	}
}

// A request during a rebuild in place is for that rebuild, and one after it is for another.
// Promise: R4.1
func TestARequestDuringARebuildInPlace(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, _ subscription, src projector.Source) {
		write(t, db, "k-1", upTo(1000)...)
		p := built(projector.Options{Markers: true}, 1)
		stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, p))
		time.Sleep(10 * time.Second)
		ask := func(how projector.RebuildHow) int {
			r := request(how)
			r.Rate = 100
			n, err := projector.RequestRebuild(t.Context(), db, "p", r)
			require.NoError(t, err)
			return n
		}
		require.Equal(t, 2, ask(projector.InPlace))
		state(t, db, p, 2, "live")
		require.Equal(t, 2, ask(projector.InPlace))
		time.Sleep(time.Second)
		require.Equal(t, 3, ask(projector.BlueGreen), "it does not wait for a rebuild in place")
		state(t, db, p, 3, "live")
		require.NoError(t, projector.Control(t.Context(), db, "p", 2, projector.Promote, person))
		state(t, db, p, 2, "live")
		require.Equal(t, 4, ask(projector.InPlace), "after a rollback no rebuild is going on")
		require.NoError(t, stop())
	})
}

// However many programs ask for a rebuild at once, one takes place.
// Promise: R4.1
func TestManyRequestsMakeOneRebuild(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, f subscription, src projector.Source) {
		write(t, db, "k-1", upTo(1000)...)
		var stops []func() error
		var runners []*projector.Runner
		for range 3 {
			r := newRunner(t, db, src, projector.RunnerConfig{}, built(projector.Options{Markers: true}, 1))
			runners, stops = append(runners, r), append(stops, start(t, r))
		}
		time.Sleep(10 * time.Second)
		var all sync.WaitGroup
		for _, r := range runners {
			all.Go(func() { require.NoError(t, rebuild(t, r, request(projector.BlueGreen))) })
		}
		all.Wait()
		rows, err := db.Generations(t.Context(), "p")
		require.NoError(t, err)
		require.Len(t, rows, 2)
		require.Equal(t, upTo(1000), noted(db, "notes", "k-1"))
		for _, stop := range stops {
			require.NoError(t, stop())
		}
	})
}

// Promise: R4.2
func TestARebuildIsPausedResumedAndCanceled(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(5000)...)
		p := built(projector.Options{}, 1)
		stop := fromLog(t, db, projector.RunnerConfig{}, p)
		time.Sleep(5 * time.Second)
		ask := request(projector.BlueGreen)
		ask.Rate = 500
		n, err := projector.RequestRebuild(t.Context(), db, "p", ask)
		require.NoError(t, err)
		require.Equal(t, 2, n)
		time.Sleep(5 * time.Second)
		g := state(t, db, p, 2, "building")
		require.InDelta(t, 500, g.PerSecond, 100)
		require.EqualValues(t, 5000, g.Total)
		require.InDelta(t, float64(5*time.Second), float64(g.Left), float64(3*time.Second))
		require.EqualValues(t, 5000-g.Position, g.Behind)
		control := func(a projector.GenerationAction) {
			t.Helper()
			require.NoError(t, projector.Control(t.Context(), db, "p", 2, a, person))
		}
		control(projector.Pause)
		time.Sleep(3 * time.Second)
		at := state(t, db, p, 2, "building").Position
		time.Sleep(time.Minute)
		g = state(t, db, p, 2, "building")
		require.Equal(t, at, g.Position)
		require.True(t, g.Paused)
		control(projector.Resume)
		time.Sleep(3 * time.Second)
		require.Greater(t, state(t, db, p, 2, "building").Position, at)
		control(projector.Cancel)
		time.Sleep(2 * time.Minute)
		all, err := p.Generations(t.Context(), db)
		require.NoError(t, err)
		require.Len(t, all, 1, "it is cleared")
		require.ErrorIs(t, projector.Control(t.Context(), db, "p", 2, projector.Resume, person), projector.ErrGeneration)
		require.Empty(t, noted(db, "notes_g2", "k-1"))
		require.Equal(t, upTo(5000), noted(db, "notes", "k-1"))
		require.NoError(t, stop())
	})
}

// A projector that had tables without OnCreate: the first blue/green rebuild renames them.
// Promise: R2.1
func TestTheFirstBlueGreenRebuildOfOldTables(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, f subscription, src projector.Source) {
		write(t, db, "k-1", upTo(100)...)
		stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, define(marked, note("notes"))))
		last := appending(t, db, f, 101)
		time.Sleep(10 * time.Second)
		p := built(projector.Options{Markers: true, Version: 2, RebuildOnChange: projector.BlueGreen}, 10)
		stopTwo := start(t, newRunner(t, db, src, projector.RunnerConfig{}, p))
		state(t, db, p, 2, "live")
		time.Sleep(10 * time.Second)
		n := last()
		time.Sleep(20 * time.Second)
		same(t, times(10, upTo(n)), noted(db, "notes", "k-1"))
		require.NoError(t, stop())
		require.NoError(t, stopTwo())
		same(t, times(10, upTo(n)), noted(db, "notes", "k-1"))
		was := noted(db, "notes_g1", "k-1")
		require.Equal(t, upTo(len(was)), was, "the old table stays")
		require.NotEmpty(t, was)
	})
}

// A new version without a policy feeds the same generation. An old program that is started again after
// a rebuild by a newer one changes nothing.
// Promise: R5.1
func TestVersions(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, f subscription, src projector.Source) {
		write(t, db, "k-1", upTo(10)...)
		opts := projector.Options{Markers: true}
		stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, built(opts, 1)))
		last := appending(t, db, f, 11)
		time.Sleep(5 * time.Second)
		opts.Version = 2
		stopTwo := start(t, newRunner(t, db, src, projector.RunnerConfig{}, built(opts, 1)))
		time.Sleep(5 * time.Second)
		rows, err := db.Generations(t.Context(), "p")
		require.NoError(t, err)
		require.Len(t, rows, 1)
		opts.Version, opts.RebuildOnChange = 3, projector.InPlace
		stopThree := start(t, newRunner(t, db, src, projector.RunnerConfig{}, built(opts, 10)))
		time.Sleep(10 * time.Second)
		n := last()
		time.Sleep(10 * time.Second)
		same(t, times(10, upTo(n)), noted(db, "notes", "k-1"))
		require.NoError(t, stopThree())
		if f != nil {
			f.deliver(t, publishedAfter(t, db, "k-1", int64(n)-1)[0])
		}
		same(t, times(10, upTo(n)), noted(db, "notes", "k-1"))
		require.NoError(t, stop())
		require.NoError(t, stopTwo())
	})
}

// With Check, a read model that differs from the live one waits for a person.
// Promise: R4.2
func TestACheckedRebuildWaitsForAPerson(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, f subscription, src projector.Source) {
		write(t, db, "k-1", upTo(100)...)
		write(t, db, "k-2", upTo(100)...)
		p := built(projector.Options{Markers: true}, 1)
		r := newRunner(t, db, src, projector.RunnerConfig{}, p)
		stop := start(t, r)
		last := appending(t, db, f, 101)
		time.Sleep(10 * time.Second)
		ask := request(projector.BlueGreen)
		ask.Check = true
		require.NoError(t, rebuild(t, r, ask))
		state(t, db, p, 2, "live")
		require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx txn) error {
			tx.Put("notes", "k-2", []int{1})
			return nil
		}))
		require.ErrorIs(t, rebuild(t, r, ask), projector.ErrGeneration)
		g := state(t, db, p, 3, "building")
		require.Contains(t, g.Failed, "1 rows differ")
		require.NoError(t, projector.Control(t.Context(), db, "p", 3, projector.Promote, person))
		state(t, db, p, 3, "live")
		n := last()
		time.Sleep(10 * time.Second)
		same(t, upTo(n), noted(db, "notes", "k-1"))
		require.Equal(t, upTo(100), noted(db, "notes", "k-2"))
		require.NoError(t, stop())
	})
}

// Promise: R4.2
func TestPlanChangesNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(1000)...)
		p := built(projector.Options{}, 1)
		stop := fromLog(t, db, projector.RunnerConfig{}, p)
		time.Sleep(5 * time.Second)
		before, err := db.Generations(t.Context(), "p")
		require.NoError(t, err)
		plan, err := p.Plan(t.Context(), db, projector.InPlace, nil)
		require.NoError(t, err)
		require.EqualValues(t, 1000, plan.Events)
		require.Equal(t, []string{"notes_g1"}, plan.Reset)
		require.Positive(t, plan.PerSecond)
		after, err := db.Generations(t.Context(), "p")
		require.NoError(t, err)
		require.Equal(t, before, after)
		require.Empty(t, noted(db, "notes_g2", "k-1"))
		require.NoError(t, stop())
	})
}

// Messages that are not in the log cannot be applied again.
// Promise: R9.1
func TestARebuildIsRefusedIfItWouldLoseMessages(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		p := built(projector.Options{Markers: true}, 1)
		r := newRunner(t, db, projector.Subscribe(f, "review"), projector.RunnerConfig{}, p)
		stop := start(t, r)
		time.Sleep(10 * time.Second)
		f.deliver(t, keyed("k-1", 1))
		require.ErrorIs(t, rebuild(t, r, request(projector.InPlace)), projector.ErrNoRebuild)
		require.Equal(t, []int{1}, noted(db, "notes", "k-1"))
		ask := request(projector.InPlace)
		ask.Anyway = true
		require.NoError(t, rebuild(t, r, ask))
		require.Empty(t, noted(db, "notes", "k-1"))
		require.NoError(t, stop())
	})
	for name, p := range map[string]*projector.Projector[txn]{
		"no log":      define(projector.Options{Markers: true, BrokerOnly: true}, note("notes")),
		"no OnCreate": define(projector.Options{Markers: true, Tables: []string{"notes"}}, note("notes")),
	} {
		db := newDB(t)
		r := newRunner(t, db, projector.Subscribe(make(subscription), "review"), projector.RunnerConfig{}, p)
		require.ErrorIs(t, rebuild(t, r, request(projector.BlueGreen)), projector.ErrNoRebuild, name)
	}
	_, err := projector.NewRunner(newDB(t), projector.Subscribe(make(subscription), "review"), projector.RunnerConfig{},
		built(projector.Options{Markers: true, BrokerOnly: true}, 1))
	require.ErrorContains(t, err, "OnCreate requires a log")
	_, err = projector.RequestRebuild(t.Context(), newDB(t), "misspelled", request(projector.BlueGreen))
	require.ErrorIs(t, err, projector.ErrNoCheckpoint)
}

// The tables of a verification whose process was killed are dropped, and do not block a rebuild.
// Promise: R7.2
func TestAnAbandonedVerificationEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(100)...)
		p := built(projector.Options{}, 1)
		stop := fromLog(t, db, projector.RunnerConfig{}, p)
		time.Sleep(5 * time.Second)
		_, err := db.SetGeneration(t.Context(), provider.Generation{
			Build: provider.Build{Projector: "p", Generation: 2}, State: provider.GenerationBuilding, Data: []byte(`{"how":3,"beat":7}`),
		})
		require.NoError(t, err)
		_, err = projector.RequestRebuild(t.Context(), db, "p", request(projector.BlueGreen))
		require.ErrorIs(t, err, projector.ErrGeneration)
		time.Sleep(5 * time.Minute)
		n, err := projector.RequestRebuild(t.Context(), db, "p", request(projector.BlueGreen))
		require.NoError(t, err)
		state(t, db, p, n, "live")
		require.NoError(t, stop())
	})
}

// A newer version of the program replaces the rebuild of an older one.
// Promise: R5.1
func TestANewerVersionReplacesARebuild(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, f subscription, src projector.Source) {
		write(t, db, "k-1", upTo(1000)...)
		opts := projector.Options{Markers: true}
		stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, built(opts, 1)))
		last := appending(t, db, f, 1001)
		time.Sleep(5 * time.Second)
		opts.Version, opts.RebuildOnChange = 2, projector.BlueGreen
		slow := projector.RunnerConfig{Batch: 1}
		stopTwo := start(t, newRunner(t, db, src, slow, built(opts, 10)))
		require.NoError(t, stopTwo())
		rows, err := db.Generations(t.Context(), "p")
		require.NoError(t, err)
		require.Len(t, rows, 2)
		opts.Version = 3
		p := built(opts, 100)
		stopThree := start(t, newRunner(t, db, src, projector.RunnerConfig{}, p))
		state(t, db, p, 3, "live")
		n := last()
		time.Sleep(20 * time.Second)
		same(t, times(100, upTo(n)), noted(db, "notes", "k-1"))
		require.NoError(t, stop())
		require.NoError(t, stopThree())
	})
}

// switching is a store whose units with Switch fail with fail, if it returns an error.
type switching struct {
	unit
	provider.Log
	fail func(provider.Unit) error
}

func (s switching) Do(
	ctx context.Context, u provider.Unit, run func(context.Context, txn, provider.Found) (provider.Closing, error),
) error {
	if u.Switch != nil {
		if err := s.fail(u); err != nil {
			return err
		}
	}
	return s.unit.Do(ctx, u, run)
}

// A rebuild that cannot begin or end says so, and does not run again by itself.
// Promise: R4.2
func TestARebuildThatFails(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(100)...)
		var refused func(provider.Unit) bool
		store := switching{db, db, func(u provider.Unit) error {
			if refused != nil && refused(u) {
				return &projector.Error{Class: projector.ClassUnknown, Code: "2BP01", Err: errNo}
			}
			return nil
		}}
		p := built(projector.Options{}, 1)
		r := newRunner(t, store, projector.FromLog(db), projector.RunnerConfig{}, p)
		stop := start(t, r)
		time.Sleep(5 * time.Second)
		refused = func(u provider.Unit) bool { return len(u.Switch.Show) == 0 }
		require.ErrorContains(t, rebuild(t, r, request(projector.BlueGreen)), "its begin failed (unknown 2BP01)")
		require.Contains(t, state(t, db, p, 2, "retired").Failed, "its begin failed")
		refused = func(u provider.Unit) bool { return len(u.Switch.Show) > 0 }
		err := rebuild(t, r, request(projector.BlueGreen))
		require.ErrorIs(t, err, projector.ErrGeneration)
		require.ErrorContains(t, err, "the switch failed (unknown 2BP01)")
		write(t, db, "k-1", 101)
		time.Sleep(time.Minute)
		require.Equal(t, upTo(101), noted(db, "notes_g3", "k-1"), "it is kept up to date")
		refused = nil
		require.NoError(t, projector.Control(t.Context(), db, "p", 3, projector.Promote, person))
		state(t, db, p, 3, "live")
		require.NoError(t, stop())
	})
}

// Promise: R5.2
func TestGenerationsListTheSchemaVersionsOfEvents(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, _ subscription, src projector.Source) {
		same := func(data json.RawMessage) (json.RawMessage, error) { return data, nil }
		versioned := eventstore.NewTypes(eventstore.Type[posted]("posted", same, same))
		p := projector.Define("p", versioned, marked, projector.On("a", note("notes")))
		stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, p))
		for _, schema := range []int{1, 3, 1} {
			_, err := db.Append(t.Context(), "k-1", eventstore.Any, []eventstore.Draft{{ID: uuid.NewString(), Type: "posted", Schema: schema, Data: []byte(`{"Stars":1}`)}})
			require.NoError(t, err)
			time.Sleep(10 * time.Second)
		}
		all, err := p.Generations(t.Context(), db)
		require.NoError(t, err)
		require.Equal(t, map[string][]int{"posted": {1, 3}}, all[0].Seen)
		require.NoError(t, stop())
	})
}

// A rebuild begins where the read model began, also if that was the end of the log at that time.
// Promise: R1.2
func TestARebuildBeginsWhereTheReadModelBegan(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, _ subscription, src projector.Source) {
		write(t, db, "k-1", 1, 2, 3)
		p := built(projector.Options{Markers: true, From: eventstore.From{Now: true}}, 1)
		r := newRunner(t, db, src, projector.RunnerConfig{}, p)
		stop := start(t, r)
		write(t, db, "k-1", 4, 5)
		time.Sleep(10 * time.Second)
		for _, how := range []projector.RebuildHow{projector.InPlace, projector.BlueGreen, projector.InPlace} {
			require.NoError(t, rebuild(t, r, request(how)))
			time.Sleep(10 * time.Second)
			require.Equal(t, []int{4, 5}, noted(db, "notes", "k-1"), how)
		}
		plan, err := p.Plan(t.Context(), db, projector.InPlace, nil)
		require.NoError(t, err)
		require.EqualValues(t, 2, plan.Events)
		require.NoError(t, stop())
	})
}

// A person's Cancel or Drop stands: programs of that version do not begin again by themselves.
func TestACanceledVersionIsNotBuiltAgain(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, f subscription, src projector.Source) {
		write(t, db, "k-1", upTo(100)...)
		opts := projector.Options{Markers: true}
		stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, built(opts, 1)))
		last := appending(t, db, f, 101)
		time.Sleep(5 * time.Second)
		opts.Version, opts.RebuildOnChange = 2, projector.BlueGreen
		p := built(opts, 10)
		stopTwo := start(t, newRunner(t, db, src, projector.RunnerConfig{}, p))
		state(t, db, p, 2, "live")
		control := func(n int, a projector.GenerationAction) {
			t.Helper()
			require.NoError(t, projector.Control(t.Context(), db, "p", n, a, person))
		}
		control(1, projector.Promote)
		state(t, db, p, 1, "live")
		control(2, projector.Drop)
		time.Sleep(30 * time.Second)
		require.EqualValues(t, 1, state(t, db, p, 1, "live").Number)
		n, err := projector.RequestRebuild(t.Context(), db, "p", request(projector.BlueGreen))
		require.NoError(t, err)
		state(t, db, p, n, "live")
		n = last()
		time.Sleep(20 * time.Second)
		require.NoError(t, stop())
		require.NoError(t, stopTwo())
		list := noted(db, "notes", "k-1")
		require.Contains(t, [][]int{upTo(n), times(10, upTo(n))}, list)
	})
}

// A rebuild leaves half of the time to a live generation that applies events, from its first unit on.
// Otherwise it takes all of it, but for the first second.
func TestARebuildLeavesTimeToALiveGeneration(t *testing.T) {
	t.Parallel()
	for name, isBusy := range map[string]bool{"busy": true, "idle": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				const events, each = 4000, 2 * time.Millisecond
				db := newDB(t)
				write(t, db, "k-1", upTo(events)...)
				p := projector.Define("p", types, projector.Options{Tables: []string{"notes"}},
					projector.OnCreate(func(context.Context, txn) error { return nil }),
					projector.On("a", func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
						if projector.Replaying(ctx) {
							time.Sleep(each)
						}
						return note(projector.Table(ctx, "notes"))(ctx, tx, e)
					}))
				var mu sync.Mutex
				largest := 0
				observer := projector.RunnerObserver{Unit: func(_ string, n int, _ time.Duration, _ error) {
					mu.Lock()
					defer mu.Unlock()
					largest = max(largest, n)
				}}
				r := newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{Observer: observer}, p)
				stop := start(t, r)
				time.Sleep(time.Minute)
				last := func() int { return events }
				if isBusy {
					last = appending(t, db, nil, events+1)
				}
				time.Sleep(time.Second)
				mu.Lock()
				largest = 0
				mu.Unlock()
				began := time.Now()
				require.NoError(t, rebuild(t, r, request(projector.BlueGreen)))
				took := time.Since(began)
				n := last()
				mu.Lock()
				defer mu.Unlock()
				if isBusy {
					require.LessOrEqual(t, largest, 50)
					require.GreaterOrEqual(t, took, 2*events*each)
				} else {
					require.Greater(t, largest, 100)
					require.Less(t, took, 5*events*each/4)
				}
				require.GreaterOrEqual(t, n, len(noted(db, "notes_g2", "k-1")))
				require.NoError(t, stop())
			})
		})
	}
}

// A rebuild in place ends although programs of another version share the subscription: the projector
// does not go live then.
func TestARebuildInPlaceEndsNextToAnotherVersion(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, f subscription, src projector.Source) {
		write(t, db, "k-1", upTo(100)...)
		opts := projector.Options{Markers: true}
		stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, built(opts, 1)))
		last := appending(t, db, f, 101)
		time.Sleep(5 * time.Second)
		opts.Version, opts.RebuildOnChange = 2, projector.BlueGreen
		p := built(opts, 10)
		two := newRunner(t, db, src, projector.RunnerConfig{}, p)
		stopTwo := start(t, two)
		state(t, db, p, 2, "live")
		require.NoError(t, rebuild(t, two, request(projector.InPlace)))
		n := last()
		time.Sleep(10 * time.Second)
		same(t, times(10, upTo(n)), noted(db, "notes", "k-1"))
		require.NoError(t, stop())
		require.NoError(t, stopTwo())
	})
}
