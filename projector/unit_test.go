package projector_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// gate is a handler that keeps its first message waiting until open is closed.
type gate struct {
	open chan struct{}
	once sync.Once
	next onEvent
}

func newGate(next onEvent) *gate { return &gate{open: make(chan struct{}), next: next} }

func (g *gate) run(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
	g.once.Do(func() { <-g.open })
	return g.next(ctx, tx, e)
}

// together makes a runner take msgs into one unit, after a message "gate-1" in its own unit. It
// returns the later units once all msgs are acked.
func together(t *testing.T, store *units, cfg projector.RunnerConfig, opts projector.Options, handler onEvent, msgs ...*message.Message) []string {
	t.Helper()
	f, g := make(subscription), newGate(handler)
	stop := run(t, store, f, cfg, define(opts, g.run))
	f.send(keyed("gate", 1))
	synctest.Wait() // its handler runs now
	sent := f.send(msgs...)
	synctest.Wait()
	close(g.open)
	acked(t, sent...)
	require.NoError(t, stop())
	ran := store.list()
	require.Equal(t, "gate-1", ran[0])
	return ran[1:]
}

func TestSingleMessageIsAUnitWithoutDelay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store, f := record(newDB(t), nil), make(subscription)
		stop := run(t, store, f, projector.RunnerConfig{}, define(marked, add))
		began := time.Now()
		f.deliver(t, series("k", 1, 3)...)
		require.Zero(t, time.Since(began))
		require.NoError(t, stop())
		require.Equal(t, []string{"k-1", "k-2", "k-3"}, store.list())
	})
}

// Promise: G4.11
func TestMessagesThatArriveDuringAUnitShareTheNextOne(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		batch, n int
		want     []string
	}{
		"all of them":          {32, 5, []string{"k-1 k-2 k-3 k-4 k-5"}},
		"at most a batch":      {4, 5, []string{"k-1 k-2 k-3 k-4", "k-5"}},
		"one transaction each": {1, 2, []string{"k-1", "k-2"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				ran := together(t, record(db, nil), projector.RunnerConfig{Batch: c.batch}, marked, note("a"), series("k", 1, c.n)...)
				require.Equal(t, c.want, ran)
				require.Equal(t, upTo(c.n), noted(db, "a", "k"))
			})
		})
	}
}

// The backlog stays in the broker.
func TestWorkerTakesOnlyItsNextUnit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f, g := make(subscription), newGate(note("a"))
		stop := run(t, newDB(t), f, projector.RunnerConfig{Batch: 8}, define(marked, g.run))
		f.send(keyed("gate", 1))
		synctest.Wait()
		var taken atomic.Int32
		all := make(chan []*message.Message)
		go func() {
			var sent []*message.Message
			for _, m := range series("k", 1, 40) {
				sent = append(sent, f.send(m)...)
				taken.Add(1)
			}
			all <- sent
		}()
		synctest.Wait()
		require.EqualValues(t, 8+1, taken.Load(), "the next unit, and one message that does not fit")
		close(g.open)
		acked(t, <-all...)
		require.NoError(t, stop())
	})
}

// A redelivered message may be twice in one unit. Markers cannot distinguish the two.
// Promise: G4.1
func TestDuplicateIDInAUnitRunsOnce(t *testing.T) {
	t.Parallel()
	for _, opts := range []projector.Options{marked, {}} {
		t.Run(fmt.Sprint("markers ", opts.Markers), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				msgs := append(series("k", 1, 3), series("k", 2, 4)...)
				// All six are acked.
				ran := together(t, record(db, nil), projector.RunnerConfig{}, opts, note("a"), msgs...)
				require.Equal(t, []string{"k-1 k-2 k-3 k-4"}, ran)
				require.Equal(t, upTo(4), noted(db, "a", "k"))
			})
		})
	}
}

// A unit that fails is undone. The messages before the failing one run again, then the failing one
// alone, then the rest: one message at first, then twice as many each time. Only the failing
// message is parked.
// Promise: G6.5
func TestFailingUnitIsSplitAtTheFailingMessage(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		culprit int
		want    []string
	}{
		"the first": {1, []string{"a-1 a-2 a-3 a-4 a-5 a-6 a-7 a-8 !", "a-1 !", "a-1 parked 1", "a-2", "a-3 a-4", "a-5 a-6 a-7 a-8"}},
		"the third": {3, []string{"a-1 a-2 a-3 a-4 a-5 a-6 a-7 a-8 !", "a-1 a-2", "a-3 !", "a-3 parked 1", "a-4", "a-5 a-6", "a-7 a-8"}},
		"the last":  {8, []string{"a-1 a-2 a-3 a-4 a-5 a-6 a-7 a-8 !", "a-1 a-2 a-3 a-4 a-5 a-6 a-7", "a-8 !", "a-8 parked 1"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				bad := newFaults(map[string]error{fmt.Sprint("a-", c.culprit): errNo})
				bad.handle = func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
					return note("a")(ctx, tx, e)
				}
				msgs := series("a", 1, 8)
				for _, m := range msgs { // each has its own key, so that the others continue
					m.Metadata[outbox.HeaderKey] = m.UUID
				}
				ran := together(t, record(db, nil), projector.RunnerConfig{}, marked, bad.run, msgs...)
				require.Equal(t, c.want, ran)
				require.Equal(t, slices.DeleteFunc(upTo(8), func(n int) bool { return n == c.culprit }), noted(db, "a", "a"))
				require.Equal(t, []string{fmt.Sprintf("a-%d waiting unknown 1", c.culprit)}, rows(parked(t, db)))
			})
		})
	}
}

// An event that cannot be decoded is set aside in the unit of the others, which is not undone.
// Promise: G6.6
func TestAnUndecodableEventUndoesNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, msgs := newDB(t), series("a", 1, 4)
		for _, m := range msgs { // each has its own key
			m.Metadata[outbox.HeaderKey] = m.UUID
		}
		msgs[1].Payload = []byte(`{"Stars":"two"}`)
		ran := together(t, record(db, nil), projector.RunnerConfig{}, marked, note("a"), msgs...)
		require.Equal(t, []string{"a-1 a-2 a-3 a-4 parked 1"}, ran)
		require.Equal(t, []int{1, 3, 4}, noted(db, "a", "a"))
		require.Equal(t, []string{"a-2 stuck permanent undecodable 1"}, rows(parked(t, db)))
	})
}

// A message that fails among others but not alone is not parked.
// Promise: G6.5
func TestOnlyFailuresAloneCount(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		handler := func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			if v, _ := tx.Get("a", "k"); e.Data.Stars == 3 && v != nil && len(noted(db, "a", "k")) == 0 {
				return errors.New("fails only after the others")
			}
			return note("a")(ctx, tx, e)
		}
		ran := together(t, record(db, nil), projector.RunnerConfig{}, marked, handler, series("k", 1, 4)...)
		require.Equal(t, []string{"k-1 k-2 k-3 k-4 !", "k-1 k-2", "k-3", "k-4"}, ran)
		require.Equal(t, upTo(4), noted(db, "a", "k"))
		require.Empty(t, parked(t, db))
	})
}

// A statement's error may identify its message, even after all handlers have run.
func TestStatementErrorIdentifiesItsMessage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		inner := failing(db, "k-3", func(at int) error {
			return &projector.Error{Code: "23505", Err: &provider.MessageError{Message: at, Err: errNo}}
		})
		ran := together(t, record(db, inner), projector.RunnerConfig{}, projector.Options{Markers: true, Parking: projector.ParkMessage}, note("a"), series("k", 1, 6)...)
		require.Equal(t, []string{"k-1 k-2 k-3 k-4 k-5 k-6 !", "k-1 k-2", "k-3 !", "k-3 parked 1", "k-4", "k-5 k-6"}, ran)
		require.Equal(t, []int{1, 2, 4, 5, 6}, noted(db, "a", "k"))
		require.Equal(t, []string{"k-3 waiting unknown 23505 1"}, rows(parked(t, db)))
	})
}

// An error of the commit, such as a deferred constraint, does not identify a message.
// Promise: G6.5
func TestUnknownFailingMessageIsFoundByHalves(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		inner := failing(db, "k-3", func(int) error { return &projector.Error{Code: "23503", Err: errNo} })
		ran := together(t, record(db, inner), projector.RunnerConfig{}, projector.Options{Markers: true, Parking: projector.ParkMessage}, note("a"), series("k", 1, 8)...)
		require.Equal(t, []string{
			"k-1 k-2 k-3 k-4 k-5 k-6 k-7 k-8 !", "k-1 k-2 k-3 k-4 !", "k-1 k-2",
			"k-3 k-4 k-5 k-6 !", "k-3 k-4 !", "k-3 !", "k-3 parked 1", "k-4 k-5", "k-6 k-7 k-8",
		}, ran)
		require.Equal(t, []int{1, 2, 4, 5, 6, 7, 8}, noted(db, "a", "k"))
		require.Equal(t, []string{"k-3 waiting unknown 23503 1"}, rows(parked(t, db)))
	})
}

// failing is db, except that units with this message fail at their commit.
func failing(db unit, id string, err func(at int) error) do {
	return func(ctx context.Context, u provider.Unit, run handle) error {
		return db.Do(ctx, u, func(ctx context.Context, tx txn, found provider.Found) (provider.Closing, error) {
			c, failed := run(ctx, tx, found)
			at := slices.IndexFunc(u.Messages, func(m provider.Message) bool { return m.ID == id })
			if failed == nil && at >= 0 && u.Messages[at].Parked == nil && len(c.Park) == 0 {
				failed = err(at)
			}
			return c, failed
		})
	}
}

// Promise: G4.2
func TestNoMessageIsAckedBeforeItsCommit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		var msgs []*message.Message
		for i := range 4 {
			msgs = append(msgs, keyed("k", i+1))
		}
		msgs = append(msgs, msg("malformed", "", "{}"))
		check := func() { // an acked message must be in the store
			synctest.Wait()
			for _, m := range msgs {
				n, _ := strconv.Atoi(m.UUID[2:])
				stored := slices.Contains(noted(db, "a", "k"), n) || n == 0 && len(parked(t, db)) > 0
				if isAcked(m) && !stored {
					t.Errorf("%s was acked before its commit", m.UUID)
				}
			}
		}
		failures := 1
		store := &faulty{unit: db}
		store.do = func(ctx context.Context, u provider.Unit, run handle) error {
			err := db.Do(ctx, u, func(ctx context.Context, tx txn, found provider.Found) (provider.Closing, error) {
				c, err := run(ctx, tx, found)
				check()
				if failures--; err == nil && failures >= 0 {
					err = errBusy // the commit fails
				}
				return c, err
			})
			check()
			return err
		}
		g := newGate(note("a"))
		stop := run(t, store, f, projector.RunnerConfig{Batch: 8}, define(marked, g.run))
		f <- msgs[0]
		synctest.Wait()
		for _, m := range msgs[1:] {
			f <- m
		}
		close(g.open)
		acked(t, msgs...)
		require.NoError(t, stop())
		require.Equal(t, upTo(4), noted(db, "a", "k"))
	})
}

// Messages of a key stay in order, even if one fails and is retried. Different keys run
// concurrently, as many as there are workers.
// Promise: G4.11
func TestConcurrencyKeepsTheOrderOfEachKey(t *testing.T) {
	t.Parallel()
	for _, workers := range []int{1, 8} {
		t.Run(fmt.Sprint(workers, " workers"), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				const keys, each = 16, 20
				db, f := newDB(t), make(subscription)
				var now atomic.Int64
				var mu sync.Mutex
				most := int64(0)
				store := &faulty{unit: db}
				store.do = func(ctx context.Context, u provider.Unit, run handle) error {
					n := now.Add(1)
					defer now.Add(-1)
					mu.Lock()
					most = max(most, n)
					mu.Unlock()
					return db.Do(ctx, u, run)
				}
				errs := map[string]error{}
				for k := range keys {
					for n := 5; n <= each; n += 5 {
						errs[fmt.Sprint("k", k, "-", n)] = errNo
					}
				}
				bad := newFaults(errs)
				handler := func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
					time.Sleep(time.Millisecond)
					err := bad.run(ctx, tx, e)
					bad.set(e.ID, nil) // each fails once
					return err
				}
				cfg := projector.RunnerConfig{Concurrency: workers, Batch: 4}
				if workers == 1 {
					cfg.Concurrency = 0 // the default
				}
				stop := run(t, store, f, cfg, define(marked, handler))
				for n := range each {
					for k := range keys {
						f.send(keyed(fmt.Sprint("k", k), n+1))
					}
				}
				time.Sleep(2 * time.Minute)
				require.NoError(t, stop())
				require.LessOrEqual(t, most, int64(workers))
				// A worker without keys in flight waits while another one's queue is full.
				require.Greater(t, most, int64(workers/2))
				require.Empty(t, parked(t, db))
				for k := range keys {
					require.Equal(t, upTo(each), noted(db, "a", fmt.Sprint("k", k)))
				}
			})
		})
	}
}
