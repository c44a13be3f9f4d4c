package projector_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// parkFirst parks the first message of each key, which is then stuck, and two messages behind it.
func parkFirst(t *testing.T, db *memory.DB, bad *faults, keys ...string) {
	t.Helper()
	f := make(subscription)
	stop := run(t, db, f, projector.RunnerConfig{Version: "v1"}, define(marked, bad.run))
	for n := 1; n <= 3; n++ {
		for _, key := range keys {
			f.deliver(t, keyed(key, n))
		}
	}
	require.NoError(t, stop())
}

// Promise: G6.14
func TestReplayByFilter(t *testing.T) {
	t.Parallel()
	permanent := projector.ClassPermanent
	for name, c := range map[string]struct {
		filter projector.ParkedFilter
		done   []string // keys that are replayed
	}{
		"one":                       {projector.ParkedFilter{Seqs: []int64{1}}, []string{"x"}},
		"a key":                     {projector.ParkedFilter{Key: "y"}, []string{"y"}},
		"a projector":               {projector.ParkedFilter{Projector: "p"}, []string{"x", "y", "z"}},
		"another projector":         {projector.ParkedFilter{Projector: "q"}, nil},
		"a class":                   {projector.ParkedFilter{Class: &permanent}, []string{"x", "y", "z"}},
		"a code":                    {projector.ParkedFilter{Code: "no"}, []string{"z"}},
		"a handler":                 {projector.ParkedFilter{Handler: "p/a", Limit: 2}, []string{"x", "y"}},
		"a type":                    {projector.ParkedFilter{Types: []string{"posted"}}, []string{"x", "y", "z"}},
		"another type":              {projector.ParkedFilter{Types: []string{"unhandled"}}, nil},
		"only one behind the first": {projector.ParkedFilter{Seqs: []int64{4}}, nil},
		"resolved messages":         {projector.ParkedFilter{States: []projector.ParkedState{projector.StateSkipped, projector.StateReplayed}}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				bad := newFaults(map[string]error{"x-1": errNever, "y-1": errNever,
					"z-1": &projector.Error{Class: projector.ClassPermanent, Code: "no", Err: errNo}})
				parkFirst(t, db, bad, "x", "y", "z")
				require.Len(t, parked(t, db), 9)
				bad.fix()
				replayAll(t, db, c.filter)
				drain(t, db, projector.RunnerConfig{}, define(marked, bad.run))
				for _, key := range []string{"x", "y", "z"} {
					if slices.Contains(c.done, key) {
						require.Equal(t, upTo(3), noted(db, "a", key))
					} else {
						require.Empty(t, noted(db, "a", key))
					}
				}
				require.Len(t, parked(t, db), 9-3*len(c.done))
				for _, one := range resolved(t, db, projector.StateReplayed) {
					require.Equal(t, person, one.Decision, "the person's decision is kept")
					require.False(t, one.ResolvedAt.IsZero())
				}
			})
		})
	}
}

func resolved(t *testing.T, db provider.Parking, state projector.ParkedState) []projector.Parked {
	t.Helper()
	list, err := db.Parked(t.Context(), projector.ParkedFilter{States: []projector.ParkedState{state}})
	require.NoError(t, err)
	return list
}

// Promise: G6.14
func TestDecisionRequiresNameAndReason(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		d  projector.Decision
		ok bool
	}{
		"who and why":       {projector.Decision{By: "ann", Reason: "fixed in v2"}, true},
		"both at the limit": {projector.Decision{By: strings.Repeat("x", 255), Reason: strings.Repeat("x", 1000)}, true},
		"neither":           {projector.Decision{}, false},
		"no name":           {projector.Decision{Reason: "fixed in v2"}, false},
		"no reason":         {projector.Decision{By: "ann"}, false},
		"a blank name":      {projector.Decision{By: " ", Reason: "why"}, false},
		"a blank reason":    {projector.Decision{By: "ann", Reason: " \t\n"}, false},
		"a long name":       {projector.Decision{By: strings.Repeat("x", 256), Reason: "why"}, false},
		"a long reason":     {projector.Decision{By: "ann", Reason: strings.Repeat("x", 1001)}, false},
		"bytes, not runes":  {projector.Decision{By: strings.Repeat("é", 128), Reason: "why"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				parkFirst(t, db, newFaults(map[string]error{"x-1": errNever}), "x")
				before := parked(t, db)
				n, replayErr := projector.Replay(t.Context(), db, all, c.d)
				if c.ok {
					require.NoError(t, replayErr)
					require.Equal(t, 3, n)
					return
				}
				_, skipErr := projector.Skip(t.Context(), db, all, c.d)
				for _, err := range []error{c.d.Validate(), replayErr, skipErr} {
					require.ErrorIs(t, err, projector.ErrInput)
					if len(c.d.Reason) > 100 {
						require.NotContains(t, err.Error(), c.d.Reason, "the error does not contain the person's text")
					}
				}
				require.Equal(t, before, parked(t, db), "nothing has changed")
			})
		})
	}
}

// The projector's runners also replay the held messages: in order, and several per unit.
// Promise: G4.11
func TestHeldMessagesAreReplayedInBatchesInOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const n = 100
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"k-1": errNever})
		store := record(db, nil)
		stop := run(t, store, f, projector.RunnerConfig{Batch: 32}, define(marked, bad.run))
		f.deliver(t, series("k", 1, n)...)
		time.Sleep(time.Minute)
		store.list()
		bad.fix()
		replayAll(t, db, projector.ParkedFilter{Seqs: []int64{1}})
		time.Sleep(2 * time.Second)
		f.deliver(t, keyed("k", n+1))
		require.NoError(t, stop())
		require.Equal(t, upTo(n+1), noted(db, "a", "k"))
		var sizes []int
		for _, ids := range store.list() {
			sizes = append(sizes, len(strings.Fields(ids)))
		}
		require.Equal(t, []int{1, 32, 32, 32, 3, 1}, sizes)
	})
}

// A held message fails: those before it are applied, and those behind it still wait.
func TestHeldMessageThatFailsHoldsTheRest(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]error{"permanently": errNever, "temporarily": errNo} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				bad := newFaults(map[string]error{"k-1": errNever, "k-5": fault})
				stop := run(t, db, f, projector.RunnerConfig{}, define(marked, bad.run))
				for n := 1; n <= 8; n++ {
					f.deliver(t, keyed("k", n), keyed("other", n))
				}
				bad.set("k-1", nil)
				began := time.Now()
				replayAll(t, db, all)
				for len(noted(db, "a", "k")) < 4 && time.Since(began) < time.Minute {
					time.Sleep(time.Millisecond)
				}
				synctest.Wait()
				require.Equal(t, upTo(4), noted(db, "a", "k"))
				list := rows(parked(t, db))
				require.Equal(t, fmt.Sprint("k-5 ", map[bool]string{true: "stuck permanent", false: "waiting unknown"}[errors.Is(fault, errNever)], " 1"), list[0])
				require.Equal(t, []string{"k-6 waiting held 0", "k-7 waiting held 0", "k-8 waiting held 0"}, list[1:])
				bad.fix()
				replayAll(t, db, all)
				time.Sleep(5 * time.Second)
				require.NoError(t, stop())
				require.Equal(t, upTo(8), noted(db, "a", "k"))
				require.Equal(t, upTo(8), noted(db, "a", "other"))
			})
		})
	}
}

// Promise: G6.14
func TestMessageThatFailsAgainStaysParked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		bad := newFaults(map[string]error{"x-1": errNever, "y-1": errNever})
		parkFirst(t, db, bad, "x", "y")
		bad.set("x-1", projector.Permanent(&projector.Error{Code: "other", Err: errNo}))
		bad.set("y-1", nil)
		replayAll(t, db, all)
		drain(t, db, projector.RunnerConfig{Version: "v2"}, define(marked, bad.run))
		require.Equal(t, []string{"x-1 stuck permanent 1", "x-2 waiting held 0", "x-3 waiting held 0"}, rows(parked(t, db)))
		first := parked(t, db)[0]
		require.Equal(t, "v2", first.Version)
		require.Equal(t, person, first.Decision)
		require.Equal(t, upTo(3), noted(db, "a", "y"))
		require.Empty(t, noted(db, "a", "x"))
	})
}

// A shutdown error of a runner that has not stopped fails only its message.
func TestReplayContinuesAfterAShutdownError(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		says := &projector.Error{Class: provider.ClassShutdown, Err: context.Canceled}
		db := newDB(t)
		bad := newFaults(map[string]error{"x-1": says, "y-1": says})
		parkFirst(t, db, bad, "x", "y")
		require.Equal(t, "x-1 waiting unknown deadline 1", rows(parked(t, db))[0])
		bad.set("y-1", nil)
		replayAll(t, db, all)
		drain(t, db, projector.RunnerConfig{}, define(marked, bad.run))
		require.Equal(t, upTo(3), noted(db, "a", "y"))
		require.Equal(t, []string{"x-1 waiting unknown deadline 1", "x-2 waiting held 0", "x-3 waiting held 0"}, rows(parked(t, db)))
	})
}

// ApplyParked applies all due messages, including those that become due
// meanwhile, and ends. It does not wait for messages that are due later.
func TestApplyParkedAppliesDueMessagesAndReturns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"k-1": errNo, "l-1": errNever, "m-1": errNever, "x-1": errNever})
		p := define(marked, bad.run)
		began := time.Now()
		drain(t, db, projector.RunnerConfig{}, p)
		require.Less(t, time.Since(began), 100*time.Millisecond, "nothing is parked")
		stop := run(t, db, f, projector.RunnerConfig{}, p)
		for n := 1; n <= 50; n++ {
			for _, key := range []string{"k", "l", "m", "x"} {
				// Messages that succeed, so that no worker backs off.
				f.deliver(t, keyed(key, n), keyed("ok-"+key, n))
			}
		}
		require.NoError(t, stop())
		bad.fix()
		bad.set("m-1", errNo)
		time.Sleep(time.Second)
		replayAll(t, db, projector.ParkedFilter{Seqs: []int64{2}})
		replayAll(t, db, projector.ParkedFilter{Key: "m"})
		began = time.Now()
		drain(t, db, projector.RunnerConfig{}, p)
		require.Less(t, time.Since(began), time.Second)
		require.Equal(t, upTo(50), noted(db, "a", "k"), "its key was due")
		require.Equal(t, upTo(50), noted(db, "a", "l"), "its key was replayed")
		require.Equal(t, "m-1 waiting unknown 1", rows(parked(t, db))[0], "the message failed again and is due later")
		require.Equal(t, "x-1 stuck permanent 1", rows(parked(t, db))[1], "the message waits for a person")
		require.Len(t, parked(t, db), 100)

		failing := &faulty{unit: db, due: func(context.Context, provider.DueFilter) ([]provider.Parked, error) {
			return nil, errors.New("no database")
		}}
		err := applyParked(t, failing, projector.RunnerConfig{}, p)
		require.ErrorContains(t, err, "no database")
	})
}

// Running runners apply replayed messages, however often a person replays them.
// Promise: G6.14
func TestReplayWhileRunnersRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, g := newDB(t), make(subscription), make(subscription)
		bad := newFaults(map[string]error{"k-1": errNever})
		p := define(marked, bad.run)
		stop, stopOther := run(t, db, f, projector.RunnerConfig{}, p), run(t, db, g, projector.RunnerConfig{}, p)
		f.deliver(t, series("k", 1, 3)...)
		for range 20 {
			replayAll(t, db, all)
			time.Sleep(300 * time.Millisecond)
		}
		bad.fix()
		replayAll(t, db, all)
		time.Sleep(2 * time.Second)
		require.NoError(t, stop())
		require.NoError(t, stopOther())
		require.Empty(t, parked(t, db))
		require.Equal(t, upTo(3), noted(db, "a", "k"))
	})
}

// Draining a key is slower than parking behind it, so a worker first drains a due key.
// Promise: G6.8
func TestHeldKeyDrainsUnderConstantLoad(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"k-1": errNever})
		bad.handle = func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			time.Sleep(9 * time.Millisecond)
			return note("a")(ctx, tx, e)
		}
		store := &faulty{unit: db}
		store.do = func(ctx context.Context, u provider.Unit, run handle) error {
			time.Sleep(time.Duration(len(u.Messages)) * time.Millisecond)
			return db.Do(ctx, u, run)
		}
		stop := run(t, store, f, projector.RunnerConfig{}, define(marked, bad.run))
		ctx, cancel := context.WithCancel(t.Context())
		var sent int
		ended := make(chan struct{})
		go func() { // sends as fast as the worker takes messages
			defer close(ended)
			for sent = 1; ctx.Err() == nil; sent++ {
				select {
				case f <- keyed("k", sent):
				case <-ctx.Done():
					return
				}
			}
		}()
		time.Sleep(300 * time.Millisecond)
		require.Greater(t, len(parked(t, db)), 100)
		bad.fix()
		replayAll(t, db, all)
		began := time.Now()
		for len(parked(t, db)) > 0 {
			require.Less(t, time.Since(began), 30*time.Second, "%d are still held", len(parked(t, db)))
			time.Sleep(time.Second)
		}
		time.Sleep(time.Second)
		require.Empty(t, parked(t, db), "the key is no longer held")
		cancel()
		<-ended
		time.Sleep(5 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, upTo(sent-1), noted(db, "a", "k"))
	})
}

// Promise: G6.8
func TestHeldMessagesOfManyProjectorsAreReplayedWithinTwoSeconds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const projectors, keys = 60, 3
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{})
		var ps []*projector.Projector[txn]
		for i := range projectors {
			name := fmt.Sprint("p", i)
			ps = append(ps, projector.Define(name, types, marked, projector.On("a", func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
				bad.mu.Lock()
				err := bad.errs[e.ID]
				bad.mu.Unlock()
				if err != nil {
					return err
				}
				return note(name)(ctx, tx, e)
			})))
		}
		for k := range keys {
			bad.set(fmt.Sprint("k", k, "-1"), errNever)
		}
		stop := run(t, db, f, projector.RunnerConfig{}, ps...)
		for n := 1; n <= 5; n++ {
			for k := range keys {
				// Messages that succeed, so that no worker backs off.
				f.deliver(t, keyed(fmt.Sprint("k", k), n), keyed(fmt.Sprint("ok", k), n))
			}
		}
		count, err := db.ParkedCount(t.Context(), "")
		require.NoError(t, err)
		require.EqualValues(t, projectors*keys*5, count)
		bad.fix()
		replayAll(t, db, all)
		time.Sleep(2 * time.Second)
		require.NoError(t, stop())
		for i := range projectors {
			for k := range keys {
				require.Equal(t, upTo(5), noted(db, fmt.Sprint("p", i), fmt.Sprint("k", k)))
			}
		}
	})
}
