package projector_test

import (
	"context"
	"slices"
	"strings"
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

// A new program brings an event type while the old one reads the log. The old one leaves these events to it: also those that
// its own handlers do not make it read.
// Promise: G7.10
func TestANewTypeBesideAnOldReader(t *testing.T) {
	t.Parallel()
	for name, categories := range map[string][]string{"categories": {"k"}, "no categories": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				begin := func(p *projector.Projector[txn]) func() error {
					return start(t, newRunner(t, db, projector.FromLog(db, categories...), projector.RunnerConfig{}, p))
				}
				stopOld := begin(knowing(1, 0, projector.Options{}))
				rate(t, db, "rated", 1, "k-1", 1)
				time.Sleep(time.Second)
				newer := knowing(1, 1, projector.Options{})
				stopNew := begin(newer)
				takesEvents(t, db, newer)
				rate(t, db, "renamed", 1, "k-1", 2)
				rate(t, db, "rated", 1, "k-1", 3)
				time.Sleep(time.Minute)
				require.Equal(t, upTo(3), noted(db, "a", "k-1"))
				require.NoError(t, stopOld())
				rate(t, db, "renamed", 1, "k-1", 4)
				time.Sleep(time.Minute)
				require.NoError(t, stopNew())
				require.Equal(t, upTo(4), noted(db, "a", "k-1"))
				require.Empty(t, parked(t, db))
			})
		})
	}
}

// Over a broker too: an event of a new type that was not delivered is completed while the old program reads the log.
// Promise: G7b.1
func TestANewTypeThatIsNotDeliveredBesideAnOldReader(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		stopOld := run(t, db, make(subscription), projector.RunnerConfig{}, knowing(1, 0, marked))
		time.Sleep(time.Minute)
		newer := knowing(1, 1, marked)
		stopNew := run(t, db, make(subscription), projector.RunnerConfig{}, newer)
		takesEvents(t, db, newer)
		rate(t, db, "renamed", 1, "k-1", 1, 2)
		time.Sleep(time.Hour)
		require.NoError(t, stopNew())
		require.NoError(t, stopOld())
		require.Equal(t, upTo(2), noted(db, "a", "k-1"))
		require.Empty(t, parked(t, db))
	})
}

// takesEvents waits until the new handlers of p take events, and checks that it is within two seconds.
func takesEvents(t *testing.T, db *memory.DB, p *projector.Projector[txn]) {
	t.Helper()
	began := time.Now()
	for first := true; ; first = false {
		lag, err := p.Lag(t.Context(), db)
		require.NoError(t, err)
		if len(lag.NotBegun) == 0 {
			require.False(t, first, "another program reads the log")
			return
		}
		require.Less(t, time.Since(began), 3*time.Second)
		time.Sleep(10 * time.Millisecond)
	}
}

// A program that has removed a handler reads the log when an older one starts, which has it. It does not take it up again, and
// the older one is ready.
// Promise: G7.10
func TestARemovedHandlerIsNotTakenUpAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		older := define(projector.Options{}, note("a"), note("b"))
		stop := fromLog(t, db, projector.RunnerConfig{}, define(projector.Options{Removed: []string{"b"}}, note("a")))
		write(t, db, "k-1", 1)
		time.Sleep(time.Minute)
		stopOlder := fromLog(t, db, projector.RunnerConfig{}, older)
		takesEvents(t, db, older)
		write(t, db, "k-1", 2)
		time.Sleep(time.Minute)
		require.Equal(t, upTo(2), noted(db, "a", "k-1"))
		require.Empty(t, noted(db, "b", "k-1"))
		require.NoError(t, stopOlder())
		require.NoError(t, stop())
	})
}

// With Ordered, a delivery also waits for an earlier event that only another program is able to apply.
// Promise: G7b.4
func TestOrderedWaitsForWhatAnotherProgramIsAbleToApply(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, ordered := newDB(t), projector.Options{Markers: true, Ordered: true}
		f, fNew := make(subscription), make(subscription)
		stopNew := run(t, db, fNew, projector.RunnerConfig{}, knowing(1, 1, ordered))
		time.Sleep(time.Minute)
		require.NoError(t, stopNew())
		stop := run(t, db, f, projector.RunnerConfig{}, knowing(1, 0, ordered))
		time.Sleep(time.Minute)
		rate(t, db, "renamed", 1, "k-1", 1) // its message is late
		rate(t, db, "rated", 1, "k-1", 2)
		f.deliver(t, published(t, db, "k-1")[1])
		require.Empty(t, noted(db, "a", "k-1"))
		stopNew = run(t, db, fNew, projector.RunnerConfig{}, knowing(1, 1, ordered))
		time.Sleep(time.Minute)
		require.NoError(t, stopNew())
		require.NoError(t, stop())
		require.Equal(t, upTo(2), noted(db, "a", "k-1"))
	})
}

// A rolling deployment loses no deliveries: that an old program has applied an event without the new handler does not count as
// an event that was not delivered.
// Promise: G7b.1
func TestEventsThatAnOldProgramGotWereDelivered(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, counts := newDB(t), make(subscription), map[string]int{}
		stopNew := run(t, db, make(subscription), completed(counts), define(marked, note("a"), note("b"))) // reads the log
		time.Sleep(time.Minute)
		stopOld := run(t, db, f, projector.RunnerConfig{}, define(marked, note("a")))
		time.Sleep(time.Minute)
		write(t, db, "k-1", upTo(5)...)
		f.deliver(t, published(t, db, "k-1")...)
		time.Sleep(time.Hour)
		require.NoError(t, stopOld())
		require.NoError(t, stopNew())
		require.Equal(t, upTo(5), noted(db, "a", "k-1"))
		require.Equal(t, upTo(5), noted(db, "b", "k-1"))
		require.Empty(t, counts)
	})
}

// A handler that did two things is split in two, one with its name. Over the log, and with nothing parked, each thing is done
// once for each event, also across a rollback. What was parked before is only for the handler that has its name.
func TestASplitHandler(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, failing := newDB(t), true
		both := func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			if e.Stream == "k-2" && failing {
				return projector.Permanent(errNever)
			}
			if err := note("a")(ctx, tx, e); err != nil {
				return err
			}
			return note("b")(ctx, tx, e)
		}
		before, after := define(projector.Options{}, both), define(projector.Options{}, note("a"), note("b"))
		write(t, db, "k-2", 1)
		n := 0
		next := func() {
			time.Sleep(time.Minute)
			n++
			write(t, db, "k-1", n)
			time.Sleep(time.Minute)
		}
		stopOld := fromLog(t, db, projector.RunnerConfig{}, before)
		next()
		stopNew := fromLog(t, db, projector.RunnerConfig{}, after)
		next()
		require.NoError(t, stopOld())
		next()
		stopOld = fromLog(t, db, projector.RunnerConfig{}, before)
		next()
		require.NoError(t, stopNew())
		next()
		require.Equal(t, upTo(4), noted(db, "a", "k-1"), "the program before waits for the one that has both")
		stopNew = fromLog(t, db, projector.RunnerConfig{}, after)
		next()
		require.NoError(t, stopOld())
		failing = false
		replayAll(t, db, all)
		time.Sleep(time.Minute)
		require.NoError(t, stopNew())
		require.Equal(t, upTo(n), noted(db, "a", "k-1"))
		require.Equal(t, upTo(n), noted(db, "b", "k-1"))
		require.Equal(t, upTo(1), noted(db, "a", "k-2"))
		require.Empty(t, noted(db, "b", "k-2"))
		require.Empty(t, parked(t, db))
	})
}

// A projector with a new name has no checkpoint: it begins at Options.From, whatever its handlers were named.
func TestAProjectorWithANewNameBeginsAnew(t *testing.T) {
	t.Parallel()
	for name, fromLog := range map[string]bool{"from the log": true, "from a broker": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				apply := func(p *projector.Projector[txn]) {
					src := projector.Subscribe(make(subscription), "k")
					if fromLog {
						src = projector.FromLog(db)
					}
					stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, p))
					time.Sleep(time.Minute)
					require.NoError(t, stop())
				}
				of := func(name string, from int64, was ...string) *projector.Projector[txn] {
					opts := projector.Options{Markers: true, From: eventstore.From{Position: from}}
					return projector.Define(name, types, opts, projector.On("a", note(name)).Was(was...))
				}
				write(t, db, "k-1", 1, 2, 3)
				apply(of("p", 0))
				write(t, db, "k-1", 4)
				apply(of("anew", 0, "p/a"))
				require.Equal(t, upTo(4), noted(db, "anew", "k-1"))
				apply(of("behind", checkpoint(t, db).Place.Position, "p/a"))
				require.Equal(t, []int{4}, noted(db, "behind", "k-1"))
			})
		})
	}
}

// What an old program did not know, and a new one has applied, is in the log: the read model can be rebuilt.
// Promise: R9.1
func TestARebuildAfterATypeThatWasUnknown(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		of := func(version int, handlers ...projector.Handler[txn]) *projector.Projector[txn] {
			opts := projector.Options{Markers: true, Version: version, RebuildOnChange: projector.BlueGreen, Tables: []string{"notes"}}
			known := eventstore.NewTypes(eventstore.Type[unhandled]("unhandled"))
			if len(handlers) > 0 {
				known = eventstore.NewTypes(eventstore.Type[unhandled]("unhandled"), eventstore.Type[renamed]("renamed"))
			}
			return projector.Define("p", known, opts, append(handlers, projector.OnCreate(func(context.Context, txn) error { return nil }),
				projector.On("other", func(context.Context, txn, eventstore.Event[unhandled]) error { return nil }))...)
		}
		taking := projector.On("renamed", func(ctx context.Context, tx txn, e eventstore.Event[renamed]) error {
			return noteIn(tx, projector.Table(ctx, "notes"), e.Stream, e.Data.Stars)
		})
		stop := run(t, db, f, projector.RunnerConfig{}, of(1))
		rate(t, db, "renamed", 1, "k-1", 1, 2)
		f.deliver(t, published(t, db, "k-1")...)
		time.Sleep(time.Second)
		require.NoError(t, stop())
		require.Len(t, parked(t, db), 2)
		stop = run(t, db, f, projector.RunnerConfig{}, of(1, taking))
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Empty(t, parked(t, db))
		second := of(2, taking)
		stop = run(t, db, f, projector.RunnerConfig{}, second)
		state(t, db, second, 2, "live")
		require.NoError(t, stop())
		require.Equal(t, upTo(2), noted(db, "notes_g2", "k-1"))
	})
}

// While a projector catches up, a delivery of a type that no program knows is not applied before what the reader of the log has
// still to read of its stream. Nor is it applied twice, or lost.
// Promise: G7b.2, G7.10
func TestAnUnknownTypeDeliveredBeforeItsStreamIsRead(t *testing.T) {
	t.Parallel()
	for name, read := range map[string]bool{"the new handler reads it": false, "the old reader has passed it": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				cfg := projector.RunnerConfig{}
				require.NoError(t, fromLog(t, db, cfg, knowing(1, 0, marked))())
				terms := claim.Terms{Holder: "x", Token: claim.NewToken(), Lease: 24 * time.Hour}
				has, err := db.AcquireLease(t.Context(), "reader/p", terms)
				require.NoError(t, err)
				require.True(t, has)
				stop := run(t, db, f, cfg, knowing(1, 0, marked))
				rate(t, db, "rated", 1, "k-1", 1)
				rate(t, db, "renamed", 1, "k-1", 2)
				f.deliver(t, published(t, db, "k-1")[1])
				require.Len(t, parked(t, db), 1)
				release := func() { require.NoError(t, db.ReleaseLease(t.Context(), "reader/p", terms.Token)) }
				if read {
					release()
					time.Sleep(time.Minute)
				}
				require.NoError(t, stop())
				stop = run(t, db, f, cfg, knowing(1, 1, marked))
				if !read {
					time.Sleep(time.Minute)
					require.Empty(t, noted(db, "a", "k-1"))
					release()
				}
				time.Sleep(time.Minute)
				require.Equal(t, upTo(2), noted(db, "a", "k-1"))
				require.Empty(t, parked(t, db))
				f.deliver(t, published(t, db, "k-1")...)
				time.Sleep(time.Minute)
				require.NoError(t, stop())
				require.Equal(t, upTo(2), noted(db, "a", "k-1"))
			})
		})
	}
}

// What a new program has parked under the new name of a handler is applied by an old one after a rollback.
// Promise: G7.10
func TestWhatIsParkedUnderANewNameIsAppliedAfterARollback(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		fails := func(context.Context, txn, eventstore.Event[posted]) error { return projector.Permanent(errNever) }
		newer := projector.Define("p", types, marked, projector.On("edited", fails).Was("q/other", "changed"))
		stop := run(t, db, f, projector.RunnerConfig{}, newer)
		f.deliver(t, keyed("k", 1), keyed("k", 2))
		require.NoError(t, stop())
		require.Len(t, parked(t, db), 2)
		stop = run(t, db, f, projector.RunnerConfig{}, projector.Define("p", types, marked, projector.On("changed", note("a"))))
		replayAll(t, db, all)
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Equal(t, upTo(2), noted(db, "a", "k"))
		require.Empty(t, parked(t, db))
	})
}

// inOrder fails the test if the live generation, 2, gets a handler before the standby one has it.
type inOrder struct {
	*memory.DB
	t *testing.T
	n atomic.Int64
}

func (o *inOrder) SetGeneration(ctx context.Context, all ...provider.Generation) (bool, error) {
	for _, g := range all {
		if g.Generation == 2 && g.State == provider.GenerationLive && strings.Contains(string(g.Data), "p/renamed") {
			c, err := o.Checkpoint(ctx, provider.Build{Projector: "p", Generation: 1})
			require.NoError(o.t, err)
			require.True(o.t, slices.ContainsFunc(c.Handlers, func(b provider.Began) bool { return b.Handler == "p/renamed" }), "%s", g.Data)
			o.n.Add(1)
		}
	}
	return o.DB.SetGeneration(ctx, all...)
}

// A new handler does not begin later in a generation that is kept for a rollback: it would miss what comes between.
// Promise: G7.10
func TestANewHandlerBeginsInTheStandbyGenerationFirst(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := &inOrder{DB: newDB(t), t: t}
		of := func(renames int) *projector.Projector[txn] {
			defs, handlers := []eventstore.TypeDef{eventstore.Type[rated]("rated")}, []projector.Handler[txn]{
				projector.OnCreate(func(context.Context, txn) error { return nil }),
				projector.On("rated", func(ctx context.Context, tx txn, e eventstore.Event[rated]) error {
					return noteIn(tx, projector.Table(ctx, "notes"), e.Stream, e.Data.Stars)
				}),
			}
			if renames > 0 {
				defs = append(defs, eventstore.Type[renamed]("renamed"))
				handlers = append(handlers, projector.On("renamed", func(ctx context.Context, tx txn, e eventstore.Event[renamed]) error {
					return noteIn(tx, projector.Table(ctx, "notes"), e.Stream, e.Data.Stars)
				}))
			}
			return projector.Define("p", eventstore.NewTypes(defs...), projector.Options{Tables: []string{"notes"}}, handlers...)
		}
		older := newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, of(0))
		stopOld := start(t, older)
		rate(t, db.DB, "rated", 1, "k-1", 1)
		require.NoError(t, rebuild(t, older, request(projector.BlueGreen)))
		newer := of(1)
		stopNew := start(t, newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, newer))
		takesEvents(t, db.DB, newer)
		rate(t, db.DB, "renamed", 1, "k-1", 2)
		time.Sleep(time.Minute)
		require.Positive(t, db.n.Load())
		for _, table := range []string{"notes_g1", "notes_g2"} {
			require.Equal(t, upTo(2), noted(db.DB, table, "k-1"), table)
		}
		require.NoError(t, stopOld())
		require.NoError(t, stopNew())
	})
}
