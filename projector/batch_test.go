package projector_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

type (
	credited struct{ N int }
	debited  struct{ N int }
	closed   struct{ N int }
)

var accountTypes = eventstore.NewTypes(eventstore.Type[credited]("credited"), eventstore.Type[debited]("debited"),
	eventstore.Type[closed]("closed"))

func list(tx txn, stream string, n int) {
	v, _ := tx.Get("a", stream)
	l, _ := v.([]int)
	tx.Put("a", stream, append(slices.Clone(l), n))
}

// accounts has two handlers of OnBatch and one of On. Each appends the numbers of its events to the list
// of their stream.
func accounts(opts projector.Options, calls *atomic.Int64, fails func(n int) error) *projector.Projector[txn] {
	check := func(tx txn, stream string, n int) error {
		list(tx, stream, n)
		if fails == nil {
			return nil
		}
		return fails(n)
	}
	return projector.Define("p", accountTypes, opts,
		projector.OnBatch("credited", func(_ context.Context, tx txn, events []eventstore.Event[credited]) error {
			calls.Add(1)
			for _, e := range events {
				if err := check(tx, e.Stream, e.Data.N); err != nil {
					return err
				}
			}
			return nil
		}),
		projector.OnBatch("debited", func(_ context.Context, tx txn, events []eventstore.Event[debited]) error {
			calls.Add(1)
			for _, e := range events {
				if err := check(tx, e.Stream, e.Data.N); err != nil {
					return err
				}
			}
			return nil
		}),
		projector.On("closed", func(_ context.Context, tx txn, e eventstore.Event[closed]) error {
			calls.Add(1)
			return check(tx, e.Stream, e.Data.N)
		}))
}

// fill appends n events of random types to each of some streams, in turns, and returns the last place. The
// numbers of the events of a stream are 1 to n.
func fill(t *testing.T, db *memory.DB, streams, n int, types ...func(n int) any) (at eventstore.Appended) {
	t.Helper()
	for i := range n {
		for s := range streams {
			drafts, err := accountTypes.Encode(t.Context(), types[rand.IntN(len(types))](i+1))
			require.NoError(t, err)
			at, err = db.Append(t.Context(), fmt.Sprint("k-", s), eventstore.Any, drafts)
			require.NoError(t, err)
		}
	}
	return at
}

var (
	creditedN = func(n int) any { return credited{n} }
	debitedN  = func(n int) any { return debited{n} }
	closedN   = func(n int) any { return closed{n} }
)

// TestOnBatchKeepsTheOrderOfEachStream: two batches and a single handler take the events of a stream.
// Promise: G4.10
func TestOnBatchKeepsTheOrderOfEachStream(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	at := fill(t, db, 20, 40, creditedN, creditedN, debitedN, closedN)
	var calls atomic.Int64
	p := accounts(projector.Options{}, &calls, nil)
	stop := fromLog(t, db, projector.RunnerConfig{Batch: 200}, p)
	require.NoError(t, p.Wait(t.Context(), db, at))
	require.NoError(t, stop())
	for s := range 20 {
		require.Equal(t, upTo(40), noted(db, "a", fmt.Sprint("k-", s)))
	}
}

func TestOnBatchGetsManyEventsAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // units shrink when they take long
		db := newDB(t)
		at := fill(t, db, 20, 40, creditedN)
		var calls atomic.Int64
		p := accounts(projector.Options{}, &calls, nil)
		stop := fromLog(t, db, projector.RunnerConfig{Batch: 200}, p)
		require.NoError(t, p.Wait(t.Context(), db, at))
		require.NoError(t, stop())
		require.LessOrEqual(t, calls.Load(), int64(800/200+9), "units grow to the size of a batch")
	})
}

// TestABatchIsSplitAtWhatFails: only the event that fails is parked, and what follows in its stream waits.
// Promise: G4.10
func TestABatchIsSplitAtWhatFails(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	fill(t, db, 5, 10, creditedN)
	write := func(stream string, e any) eventstore.Appended {
		drafts, err := accountTypes.Encode(t.Context(), e)
		require.NoError(t, err)
		at, err := db.Append(t.Context(), stream, eventstore.Any, drafts)
		require.NoError(t, err)
		return at
	}
	write("k-2", credited{666})
	bad := eventstore.Draft{ID: "8f0e0f6c-0f57-4a5e-9c53-2d7e0a4b9a11", Type: "credited", Schema: 1, Data: []byte(`{"N":"no number"}`)}
	_, err := db.Append(t.Context(), "k-3", eventstore.Any, []eventstore.Draft{bad})
	require.NoError(t, err)
	write("k-2", credited{11})
	at := write("k-4", credited{11})
	var calls atomic.Int64
	p := accounts(projector.Options{}, &calls, func(n int) error {
		if n == 666 {
			return errNever
		}
		return nil
	})
	stop := fromLog(t, db, projector.RunnerConfig{}, p)
	require.NoError(t, p.Wait(t.Context(), db, at))
	require.NoError(t, stop())
	for s, want := range [][]int{upTo(10), upTo(10), upTo(10), upTo(10), upTo(11)} {
		require.Equal(t, want, noted(db, "a", fmt.Sprint("k-", s)))
	}
	var codes []string
	for _, row := range parked(t, db) {
		codes = append(codes, fmt.Sprint(row.Key, " ", row.Class, " ", row.Code, " ", row.Handler))
	}
	require.ElementsMatch(t, []string{"k-2 permanent  p/credited", "k-3 permanent undecodable p/credited", "k-2 held  "}, codes)
}

// Promise: G4.10
func TestOnBatchLeavesOutWhatIsApplied(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	f := make(subscription)
	stop := run(t, db, f, projector.RunnerConfig{}, projector.Define("p", types, delivered,
		projector.OnBatch("a", func(ctx context.Context, tx txn, events []eventstore.Event[posted]) error {
			for _, e := range events {
				if err := note("a")(ctx, tx, e); err != nil {
					return err
				}
			}
			return nil
		})))
	for from := 1; from < 30; from += 3 { // each overlaps the ones before
		acked(t, f.send(series("k-1", max(from-5, 1), from)...)...)
	}
	require.NoError(t, stop())
	require.Equal(t, upTo(28), noted(db, "a", "k-1"))
}

// notAtomic is a store that cannot undo a unit as a whole.
type notAtomic struct{ unit }

func (n notAtomic) Keeps() provider.Keeps {
	k := n.unit.Keeps()
	k.Atomic = false
	return k
}

func TestOnBatchRequiresAnAtomicStore(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	db := newDB(t)
	_, err := projector.NewRunner(notAtomic{db}, projector.FromLog(db), projector.RunnerConfig{}, accounts(projector.Options{}, &calls, nil))
	require.ErrorContains(t, err, "OnBatch requires a store")
	_, err = projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{}, projector.Define("p", types, projector.Options{},
		projector.OnBatch[txn, posted]("a", nil)))
	require.ErrorContains(t, err, "not nil")
}

// TestOnBatchKeepsTheOrderOfHandlers: also for a message without a key, which decoders of other software may
// return.
// Promise: G4.10
func TestOnBatchKeepsTheOrderOfHandlers(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"", "k"} {
		db := newDB(t)
		f := make(subscription)
		step := func(name string) func(txn) {
			return func(tx txn) {
				v, _ := tx.Get("a", "steps")
				steps, _ := v.(string)
				tx.Put("a", "steps", steps+name)
			}
		}
		p := projector.Define("p", types, delivered,
			projector.OnBatch("insert", func(_ context.Context, tx txn, events []eventstore.Event[posted]) error {
				for range events {
					step("i")(tx)
				}
				return nil
			}),
			projector.On("update", func(_ context.Context, tx txn, _ eventstore.Event[posted]) error { step("u")(tx); return nil }))
		stop := run(t, db, f, projector.RunnerConfig{}, p)
		m := keyed(key, 1)
		m.Metadata[outbox.HeaderKey], m.Metadata[provider.HeaderStream] = key, key
		f.deliver(t, m)
		require.NoError(t, stop())
		db.View(func(m *memory.Model) {
			v, _ := m.Get("a", "steps")
			require.Equal(t, "iu", v)
		})
	}
}
