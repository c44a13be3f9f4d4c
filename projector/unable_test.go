package projector_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// older is a program that does not know the type "posted" yet.
func older() *projector.Projector[txn] {
	return projector.Define("p", eventstore.NewTypes(eventstore.Type[unhandled]("unhandled")), marked,
		projector.On("edited", func(context.Context, txn, eventstore.Event[unhandled]) error { return nil }))
}

type (
	rated   struct{ Stars int }
	renamed struct{ Stars int }
)

// unchanged is an upcaster to a form that does not differ.
func unchanged(old json.RawMessage) (json.RawMessage, error) { return old, nil }

// knowing returns a program of projector "p" that knows the types "rated" and "renamed" up to these schema versions. 0: not at
// all. It notes the stars of their events.
func knowing(rates, renames int, opts projector.Options) *projector.Projector[txn] {
	ups := []func(json.RawMessage) (json.RawMessage, error){unchanged, unchanged, unchanged}
	defs := []eventstore.TypeDef{eventstore.Type[unhandled]("unhandled")}
	handlers := []projector.Handler[txn]{projector.On("other", func(context.Context, txn, eventstore.Event[unhandled]) error { return nil })}
	if rates > 0 {
		defs = append(defs, eventstore.Type[rated]("rated", ups[:rates-1]...))
		handlers = append(handlers, projector.On("rated", func(ctx context.Context, tx txn, e eventstore.Event[rated]) error {
			return noteOf(tx, e.Stream, e.Data.Stars)
		}))
	}
	if renames > 0 {
		defs = append(defs, eventstore.Type[renamed]("renamed", ups[:renames-1]...))
		handlers = append(handlers, projector.On("renamed", func(ctx context.Context, tx txn, e eventstore.Event[renamed]) error {
			return noteOf(tx, e.Stream, e.Data.Stars)
		}))
	}
	return projector.Define("p", eventstore.NewTypes(defs...), opts, handlers...)
}

func noteOf(tx txn, stream string, n int) error { return noteIn(tx, "a", stream, n) }

func noteIn(tx txn, table, stream string, n int) error {
	v, _ := tx.Get(table, stream)
	list, _ := v.([]int)
	tx.Put(table, stream, append(slices.Clone(list), n))
	return nil
}

// rate appends events of "rated" or "renamed" with a schema version to a stream.
func rate(t *testing.T, db *memory.DB, eventType string, schema int, stream string, stars ...int) {
	t.Helper()
	for _, n := range stars {
		draft := eventstore.Draft{ID: uuid.NewString(), Type: eventType, Schema: schema, Data: fmt.Appendf(nil, `{"Stars":%d}`, n)}
		_, err := db.Append(t.Context(), stream, eventstore.Any, []eventstore.Draft{draft})
		require.NoError(t, err)
	}
}

// A producer may be deployed first. A message whose type no program knows waits, without attempts, for one that does.
// Promise: G6.9
func TestUnknownTypesWaitForAProgramThatKnowsThem(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]bool{"that starts": false, "that runs": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				newer := newRunner(t, db, projector.Subscribe(make(subscription), "review"), projector.RunnerConfig{}, define(marked, note("a"), note("b")))
				var stopNewer func() error
				if before {
					stopNewer = start(t, newer)
				}
				stop := run(t, db, f, projector.RunnerConfig{}, older())
				f.deliver(t, keyed("k", 1), keyed("l", 1), keyed("k", 2))
				require.NoError(t, stop())
				if !before { // else the newer program may have applied some
					time.Sleep(time.Hour)
					require.Equal(t, []string{"k-1 waiting unable unregistered 0", "l-1 waiting unable unregistered 0", "k-2 waiting held 0"}, rows(parked(t, db)))
					stopNewer = start(t, newer)
				}
				time.Sleep(2 * time.Second)
				require.NoError(t, stopNewer())
				require.Empty(t, parked(t, db))
				for _, table := range []string{"a", "b"} {
					require.Equal(t, upTo(2), noted(db, table, "k"))
					require.Equal(t, upTo(1), noted(db, table, "l"))
				}
			})
		})
	}
}

// What a program is unable to apply is not changed by it again, however long it runs, and is no finding of a person.
// Promise: G6.9
func TestAProgramLeavesAloneWhatItIsUnableToApply(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		program *projector.Projector[txn]
		row     string
		needs   string
	}{
		"a type":           {older(), "k-1 waiting unable unregistered 0", "event posted 9"},
		"a schema version": {define(marked, note("a")), "k-1 waiting unable unregistered 0", "event posted 9"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				stop := run(t, db, f, projector.RunnerConfig{}, c.program)
				m := keyed("k", 1)
				m.Metadata[provider.HeaderSchema] = "9"
				f.deliver(t, m)
				first := parked(t, db)
				require.Equal(t, []string{c.row}, rows(first))
				require.Equal(t, c.needs, first[0].Needs)
				require.Zero(t, first[0].DueAt)
				time.Sleep(time.Hour)
				replayAll(t, db, all)
				time.Sleep(time.Hour)
				require.NoError(t, stop())
				after := parked(t, db)
				after[0].Decision = first[0].Decision
				require.Equal(t, first, after)
			})
		})
	}
}

// The same for a message that waits for a handler: it waits for a program with that handler.
// Promise: G6.9
func TestParkedMessageWaitsForAProgramWithItsHandler(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"k-1": errNever})
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, bad.run))
		f.deliver(t, series("k", 1, 3)...)
		require.NoError(t, stop())
		bad.fix()
		skip(t, db, projector.ParkedFilter{Seqs: []int64{1}})
		other := projector.Define("p", types, marked, projector.On("other", note("other")))
		stop = run(t, db, make(subscription), projector.RunnerConfig{}, other)
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		list := parked(t, db)
		require.Equal(t, []string{"k-2 waiting unable no_handler 0", "k-3 waiting held 0"}, rows(list))
		require.Equal(t, "event posted 1\nhandler p/a of posted", list[0].Needs)
		stop = run(t, db, make(subscription), projector.RunnerConfig{}, define(marked, bad.run))
		time.Sleep(2 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, []int{2, 3}, noted(db, "a", "k"))
		require.Empty(t, noted(db, "other", "k"))
		require.Empty(t, parked(t, db))
	})
}

// The handler may have been renamed meanwhile.
func TestParkedMessageRunsARenamedHandler(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"k-1": errNever})
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, bad.run))
		f.deliver(t, series("k", 1, 2)...)
		require.NoError(t, stop())
		bad.fix()
		replayAll(t, db, all)
		drain(t, db, projector.RunnerConfig{}, projector.Define("p", types, marked, projector.On("renamed", bad.run).Was("a")))
		require.Equal(t, upTo(2), noted(db, "a", "k"))
	})
}

// During a rollout a message that fails is due for both programs. The older one, without its handler, must not reset what
// was counted.
// Promise: G6.9
func TestAttemptsAreCountedBesideAnOlderProgram(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		var mu sync.Mutex
		tries := 0
		stopNew := run(t, db, f, projector.RunnerConfig{}, define(delivered, func(context.Context, txn, eventstore.Event[posted]) error {
			mu.Lock()
			defer mu.Unlock()
			tries++
			return errNo
		}))
		stopOld := run(t, db, make(subscription), projector.RunnerConfig{}, projector.Define("p", types, delivered, projector.On("other", note("other"))))
		f.deliver(t, keyed("k", 1))
		time.Sleep(time.Hour)
		require.NoError(t, stopOld())
		require.NoError(t, stopNew())
		require.Equal(t, 5, tries)
		require.Equal(t, []string{"k-1 stuck unknown 5"}, rows(parked(t, db)))
	})
}

// The same if the older program runs alone in between.
// Promise: G6.9
func TestAttemptsGoOnAfterAnOlderProgram(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, tries := newDB(t), make(subscription), 0
		fails := define(delivered, func(context.Context, txn, eventstore.Event[posted]) error {
			tries++
			return errNo
		})
		stop := run(t, db, f, projector.RunnerConfig{}, fails)
		f.deliver(t, keyed("k", 1))
		require.NoError(t, stop())
		stop = run(t, db, make(subscription), projector.RunnerConfig{}, projector.Define("p", types, delivered, projector.On("other", note("other"))))
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Equal(t, []string{"k-1 waiting unable no_handler 1"}, rows(parked(t, db)))
		stop = run(t, db, make(subscription), projector.RunnerConfig{}, fails)
		time.Sleep(time.Hour)
		require.NoError(t, stop())
		require.Equal(t, 5, tries)
		require.Equal(t, []string{"k-1 stuck unknown 5"}, rows(parked(t, db)))
	})
}

// A message that may have crashed a process is tried alone, by a program that is able to apply it. One that is not leaves it
// as it is: it would take away what makes others careful.
// Promise: G6.11
func TestASuspectIsLeftToAProgramThatIsAble(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, cfg := newDB(t), projector.RunnerConfig{Batch: 1} // it looks at four lanes
		park := func(m *message.Message, code string, after time.Duration) {
			row := provider.Parked{
				Projector: "p", Generation: 1, MessageID: m.UUID, Key: m.UUID, Lane: provider.LaneOfKey(m.UUID), Type: m.Metadata[provider.HeaderType],
				Payload: m.Payload, Headers: m.Metadata, Class: provider.ClassUnknown, Code: code, Attempts: 1,
			}
			u := provider.Unit{Projector: "p", Generation: 1, Messages: []provider.Message{{ID: m.UUID, Lane: row.Lane, Handlers: []provider.Handler{{Name: "p/any"}}}}}
			require.NoError(t, db.Do(t.Context(), u, func(context.Context, txn, provider.Found) (provider.Closing, error) {
				return provider.Closing{Park: []provider.Aside{{Parked: row, After: after}}}, nil
			}))
		}
		var suspects []string
		for n := range 10 {
			park(keyed("k", n), "crashed", time.Second)
			suspects = append(suspects, fmt.Sprintf("k-%d waiting unknown crashed 1", n))
		}
		park(msg("z", "unhandled", `{}`), "failed", time.Minute)
		stop := run(t, db, make(subscription), cfg, older())
		time.Sleep(time.Hour)
		require.NoError(t, stop())
		require.Equal(t, suspects, rows(parked(t, db)), "the other one is applied")
		park(msg("z-2", "unhandled", `{}`), "failed", time.Minute)
		time.Sleep(time.Hour)
		err := applyParked(t, db, cfg, older())
		require.Equal(t, provider.ClassUnable, provider.ClassOf(err), "a tool ends too: %v", err)
		require.Equal(t, suspects, rows(parked(t, db)))
		drain(t, db, cfg, define(marked, note("a")))
		require.Len(t, noted(db, "a", "k"), 10)
	})
}

// lags counts how long events take until a projector has applied them.
type lags struct {
	t     *testing.T
	db    *memory.DB
	worst time.Duration
}

// rate appends events of a schema version to ten streams, one each 50 ms, and waits for each of them.
func (l *lags) rate(from, to int, schema func(n int) int) {
	l.t.Helper()
	for n := from; n <= to; n++ {
		stream := fmt.Sprint("review-", n%10)
		rate(l.t, l.db, "rated", schema(n), stream, n)
		began := time.Now()
		for !slices.Contains(noted(l.db, "a", stream), n) {
			time.Sleep(10 * time.Millisecond) // of a bubble, as the caller's
			require.Less(l.t, time.Since(began), time.Hour, "event %d", n)
		}
		l.worst = max(l.worst, time.Since(began))
		time.Sleep(50 * time.Millisecond) // of a bubble
	}
}

// An old program has the lease when the first event comes that it cannot decode. The new one applies it at once, and takes
// over. When the new one is killed, the old one goes on with what it can; the new one catches up when it is back.
// Promise: G6.9
func TestTheProgramThatCanTakesOver(t *testing.T) {
	t.Parallel()
	for _, segments := range []int{1, 4} {
		t.Run(fmt.Sprint(segments, " segments"), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				cfg := projector.RunnerConfig{Lease: 4 * time.Second}
				opts := projector.Options{Segments: segments}
				stopOld := start(t, newRunner(t, db, projector.FromLog(db), cfg, knowing(1, 0, opts)))
				first := func(int) int { return 1 }
				l := &lags{t: t, db: db}
				l.rate(1, 50, first)
				stopNew := start(t, newRunner(t, db, projector.FromLog(db), cfg, knowing(2, 0, opts)))
				time.Sleep(2 * time.Second) // it is known now
				l.rate(51, 400, func(n int) int { return 1 + n%2 })
				require.Less(t, l.worst, 2*time.Second, "both run")
				require.Empty(t, parked(t, db))
				rate(t, db, "rated", 2, "review-0", 1000)
				rate(t, db, "rated", 2, "review-1", 1001)
				time.Sleep(50 * time.Millisecond)
				require.Contains(t, noted(db, "a", "review-0"), 1000, "the new program reads")
				require.Contains(t, noted(db, "a", "review-1"), 1001)

				require.NoError(t, stopNew())
				time.Sleep(10 * time.Second)
				l.worst = 0
				rate(t, db, "rated", 2, "review-0", 2000)
				rate(t, db, "rated", 1, "review-0", 2001)
				for n := 401; n <= 500; n++ {
					if n%10 != 0 {
						l.rate(n, n, first)
					}
				}
				require.Less(t, l.worst, 2*time.Second, "other streams go on")
				require.Len(t, parked(t, db), 2)

				stopNew = start(t, newRunner(t, db, projector.FromLog(db), cfg, knowing(2, 0, opts)))
				time.Sleep(2 * time.Second)
				require.Empty(t, parked(t, db))
				require.Equal(t, []int{2000, 2001}, noted(db, "a", "review-0")[len(noted(db, "a", "review-0"))-2:])
				l.worst = 0
				l.rate(501, 600, func(int) int { return 2 })
				require.Less(t, l.worst, 2*time.Second, "both run again")
				require.NoError(t, stopOld())
				require.NoError(t, stopNew())
			})
		})
	}
}

// Whoever may append can park messages of more types than a program looks at in one go. They hide none of another one.
// Promise: G6.9
func TestAFloodOfNeedsHidesNone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		const flood = 2*provider.MaxNeeds + 100
		for n := range flood {
			rate(t, db, fmt.Sprint("of another ", n), 1, fmt.Sprint("review-", n), n)
		}
		rate(t, db, "rated", 2, "review-last", 1)
		stopOld := start(t, newRunner(t, db, projector.FromLog(db, "review"), projector.RunnerConfig{}, knowing(1, 0, projector.Options{})))
		time.Sleep(time.Minute)
		require.Equal(t, flood+1, len(parked(t, db)))
		stopNew := start(t, newRunner(t, db, projector.FromLog(db, "review"), projector.RunnerConfig{}, knowing(2, 0, projector.Options{})))
		time.Sleep(5 * time.Second)
		require.Equal(t, flood, len(parked(t, db)))
		require.Equal(t, []int{1}, noted(db, "a", "review-last"))
		require.NoError(t, stopOld())
		require.NoError(t, stopNew())
	})
}

// The pauses between two looks at the lease are longer than an old program leaves its post. A new program that messages wait
// for looks at once, and often.
// Promise: G6.9
func TestAProgramThatIsWantedLooksAtTheLease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, cfg := newDB(t), projector.RunnerConfig{Lease: 30 * time.Second}
		stopOld := start(t, newRunner(t, db, projector.FromLog(db), cfg, knowing(1, 0, projector.Options{})))
		time.Sleep(time.Second)
		stopNew := start(t, newRunner(t, db, projector.FromLog(db), cfg, knowing(2, 0, projector.Options{})))
		time.Sleep(2 * time.Second)
		rate(t, db, "rated", 2, "review-0", 1)
		time.Sleep(3 * time.Second)
		rate(t, db, "rated", 2, "review-0", 2)
		time.Sleep(50 * time.Millisecond)
		require.Equal(t, upTo(2), noted(db, "a", "review-0"), "the new program reads")
		require.NoError(t, stopOld())
		require.NoError(t, stopNew())
	})
}

// Two programs that each know one of two types do not push the lease to and fro: each applies what the other parks.
// Promise: G6.9
func TestProgramsThatEachLackSomethingShareTheWork(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		one := projector.Options{}
		stop1 := start(t, newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, knowing(1, 2, one)))
		stop2 := start(t, newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, knowing(2, 1, one)))
		time.Sleep(time.Second)
		for n := range 200 {
			rate(t, db, []string{"rated", "renamed"}[n%2], 1+n/2%2, fmt.Sprint("review-", n%7), n)
			time.Sleep(20 * time.Millisecond)
		}
		time.Sleep(time.Minute)
		require.Empty(t, parked(t, db))
		total := 0
		for i := range 7 {
			list := noted(db, "a", fmt.Sprint("review-", i))
			require.True(t, slices.IsSorted(list), "%v", list)
			total += len(list)
		}
		require.Equal(t, 200, total)
		require.NoError(t, stop1())
		require.NoError(t, stop2())
	})
}

// A renamed handler is known by its earlier names too. So a program that is rolled back goes on with it, and the next
// deployment as well.
// Promise: G7.10
func TestAnOlderProgramKnowsARenamedHandler(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		of := func(name string, was ...string) *projector.Projector[txn] {
			return projector.Define("p", types, projector.Options{}, projector.On(name, note("a")).Was(was...))
		}
		n := 0
		for _, p := range []*projector.Projector[txn]{of("old"), of("new", "old"), of("old"), of("new", "old"), of("new"), of("newest", "new"), of("new")} {
			stop := fromLog(t, db, projector.RunnerConfig{}, p)
			n++
			write(t, db, "k-1", n)
			time.Sleep(time.Second)
			require.NoError(t, stop())
			require.Equal(t, upTo(n), noted(db, "a", "k-1"), "with %s", p.Handlers())
			require.Empty(t, parked(t, db))
		}
		stop := fromLog(t, db, projector.RunnerConfig{}, of("old")) // two renames ago: its program says nothing of "new"
		write(t, db, "k-1", n+1)
		time.Sleep(time.Second)
		require.NoError(t, stop())
		require.Len(t, parked(t, db), 1)
	})
}

// While a projector catches up, an older program leaves a delivery that it is unable to apply to the reader of the log, if
// that reads its type: parked alone, the event would be applied before earlier ones of its stream, or after later ones.
// Promise: G6.9
func TestADeliveryOfAnotherProgramsTypeIsLeftToTheReader(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		cfg := projector.RunnerConfig{}
		require.NoError(t, fromLog(t, db, cfg, knowing(1, 1, marked))()) // its handlers are recorded
		stopLog := fromLog(t, db, cfg, knowing(1, 0, marked))
		stop := run(t, db, f, cfg, knowing(1, 0, marked))
		rate(t, db, "rated", 1, "k-1", 1)
		rate(t, db, "renamed", 1, "k-1", 2)
		rate(t, db, "rated", 1, "k-1", 3)
		for _, m := range published(t, db, "k-1") {
			f.deliver(t, m)
		}
		time.Sleep(time.Second)
		list := parked(t, db)
		require.Len(t, list, 2)
		require.Equal(t, "no_handler", list[0].Code, "the reader has parked it")
		require.Equal(t, provider.LaneOfKey("k-1"), list[0].Lane)
		require.Equal(t, provider.ClassHeld, list[1].Class)
		stopNew := fromLog(t, db, cfg, knowing(1, 1, marked))
		time.Sleep(3 * time.Second)
		require.Empty(t, parked(t, db))
		require.Equal(t, upTo(3), noted(db, "a", "k-1"))
		for _, stop := range []func() error{stop, stopLog, stopNew} {
			require.NoError(t, stop())
		}
	})
}

// A delivery that an older program is unable to apply may have been applied by a newer one. Then it is not parked, or it would be
// applied again.
// Promise: G4.1, G6.9
func TestADeliveryThatAnotherProgramHasAppliedIsNotParked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		cfg := projector.RunnerConfig{}
		stop := fromLog(t, db, cfg, knowing(1, 1, marked)) // its handlers are recorded
		rate(t, db, "renamed", 1, "k-1", 1)
		time.Sleep(time.Second)
		require.NoError(t, stop())
		stop = run(t, db, f, cfg, knowing(1, 0, marked))
		f.deliver(t, published(t, db, "k-1")...)
		time.Sleep(time.Second)
		require.Empty(t, parked(t, db))
		require.NoError(t, stop())
		stop = fromLog(t, db, cfg, knowing(1, 1, marked))
		time.Sleep(3 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, upTo(1), noted(db, "a", "k-1"))
	})
}

// lookups counts the questions for parked messages, and the rows of the replies.
type lookups struct {
	*memory.DB
	n, rows atomic.Int64
}

func (a *lookups) Parked(ctx context.Context, f provider.ParkedFilter) ([]provider.Parked, error) {
	rows, err := a.DB.Parked(ctx, f)
	a.n.Add(1)
	a.rows.Add(int64(len(rows)))
	return rows, err
}

// A program with another version of the read model finds many messages in the live one that wait for it. It asks neither for each, nor
// again and again for all.
func TestARebuildAppliesWhatTheLiveReadModelWaitsFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const messages = 6000
		db := newDB(t)
		of := func(version int) *projector.Projector[txn] {
			ups := []func(json.RawMessage) (json.RawMessage, error){unchanged}
			opts := projector.Options{Version: version, RebuildOnChange: projector.BlueGreen, Tables: []string{"notes"}}
			return projector.Define("p", eventstore.NewTypes(eventstore.Type[rated]("rated", ups[:version-1]...)), opts,
				projector.OnCreate(func(context.Context, txn) error { return nil }),
				projector.On("rated", func(ctx context.Context, tx txn, e eventstore.Event[rated]) error {
					return noteOf(tx, e.Stream, e.Data.Stars)
				}))
		}
		stopOld := start(t, newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, of(1)))
		for n := range messages {
			rate(t, db, "rated", 2, fmt.Sprint("review-", n%7), n)
		}
		time.Sleep(time.Minute)
		list, err := db.Parked(t.Context(), projector.ParkedFilter{Limit: 2 * messages})
		require.NoError(t, err)
		require.Len(t, list, messages)
		u, two := &lookups{DB: db}, of(2)
		stopNew := start(t, newRunner(t, u, projector.FromLog(db), projector.RunnerConfig{}, two))
		state(t, db, two, 2, "live")
		total := 0
		for i := range 7 {
			list := noted(db, "a", fmt.Sprint("review-", i))
			require.True(t, slices.IsSorted(list), "%v", list)
			total += len(list)
		}
		require.Equal(t, messages, total)
		require.Less(t, u.n.Load(), int64(messages/3))
		require.Less(t, u.rows.Load(), int64(6*messages))
		require.NoError(t, stopOld())
		require.NoError(t, stopNew())
	})
}
