package projector_test

import (
	"context"
	"encoding/json"
	"errors"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// standing parks the first messages of keys, each with two behind it, for a projector whose fault can be mended.
func standing(t *testing.T, db *memory.DB, bad func(e eventstore.Event[posted]) error, keys ...string) *projector.Projector[txn] {
	t.Helper()
	p, f := define(marked, unless("a", bad)), make(feed)
	stop := run(t, db, f, projector.RunnerConfig{Retry: once, Version: "v1"}, p)
	for i := 1; i <= 3; i++ {
		for _, key := range keys {
			f.deliver(t, keyed(key, i))
		}
	}
	require.NoError(t, stop())
	return p
}

// bad fails the first of each key with an error of its own, and keys for which it is not mended yet.
type bad map[string]error

func (b bad) first(e eventstore.Event[posted]) error {
	if e.Data.Stars == 1 {
		return b[e.Stream]
	}
	return nil
}

func TestReplayByWhatItIsAskedFor(t *testing.T) {
	t.Parallel()
	permanent := projector.PermanentClass
	for name, c := range map[string]struct {
		filter projector.ParkedFilter
		done   []string // keys
	}{
		"one":         {projector.ParkedFilter{Seqs: []int64{1}}, []string{"x"}},
		"a key":       {projector.ParkedFilter{Key: "y"}, []string{"y"}},
		"a projector": {projector.ParkedFilter{Projector: "p"}, []string{"x", "y", "z"}},
		"a class":     {projector.ParkedFilter{Class: &permanent}, []string{"x", "y"}},
		"a code":      {projector.ParkedFilter{Code: "no"}, []string{"z"}},
		"a handler":   {projector.ParkedFilter{Handler: "p/a", Limit: 2}, []string{"x", "y"}},
		"one behind":  {projector.ParkedFilter{Seqs: []int64{4}}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			faults := bad{"x": projector.Permanent(errors.New("x")), "y": projector.Permanent(errors.New("y")),
				"z": &projector.Error{Class: projector.UnknownClass, Code: "no", Err: errors.New("z")}}
			p := standing(t, db, faults.first, "x", "y", "z")
			require.Len(t, parked(t, db), 9)
			clear(faults)
			done, err := operator(t, db, p).Replay(t.Context(), c.filter, projector.ReplayConfig{Decision: person, Rate: -1})
			require.NoError(t, err)
			require.Equal(t, 3*len(c.done), done.Replayed)
			for _, key := range []string{"x", "y", "z"} {
				if slices.Contains(c.done, key) {
					require.Equal(t, []int{1, 2, 3}, noted(db, "a", key))
				} else {
					require.Empty(t, noted(db, "a", key))
				}
			}
			list, err := db.ParkedMessages(t.Context(), projector.ParkedFilter{State: projector.Replayed})
			require.NoError(t, err)
			for _, one := range list {
				require.False(t, one.ResolvedAt.IsZero())
				if one.MessageID == c.done[0]+"-1" {
					require.Equal(t, person, one.Decision)
				}
			}
		})
	}
}

func TestWhatFailsAgainStaysParked(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	faults := bad{"x": projector.Permanent(errors.New("x")), "y": projector.Permanent(errors.New("y"))}
	p := standing(t, db, faults.first, "x", "y")
	faults["x"] = &projector.Error{Code: "other", Err: errors.New("another fault")}
	delete(faults, "y")
	done, err := operator(t, db, p).Replay(t.Context(), projector.ParkedFilter{}, projector.ReplayConfig{Decision: person, Rate: -1})
	require.NoError(t, err)
	require.Equal(t, projector.Replays{Replayed: 3, Failed: 1, Waiting: 2}, done)
	require.Equal(t, []string{"x-1 p/a unknown other", "x-2 p/a held", "x-3 p/a held"}, of(parked(t, db)))
	require.Equal(t, 2, parked(t, db)[0].Attempts)
	require.Equal(t, []int{1, 2, 3}, noted(db, "a", "y"))
	require.Empty(t, noted(db, "a", "x"))
}

// A unit that ended by its own deadline, and says shutdown, is no shutdown of this runner: it fails alone.
func TestReplayGoesOnPastWhatSaysShutdown(t *testing.T) {
	t.Parallel()
	says := &projector.Error{Class: projector.Shutdown, Err: context.Canceled}
	db, faults := newDB(t), bad{"x": says, "y": says}
	p := standing(t, db, faults.first, "x", "y")
	require.Equal(t, "x-1 p/a unknown deadline", of(parked(t, db))[0])
	delete(faults, "y")
	done, err := operator(t, db, p).Replay(t.Context(), projector.ParkedFilter{}, projector.ReplayConfig{Decision: person, Rate: -1})
	require.NoError(t, err)
	require.Equal(t, projector.Replays{Replayed: 3, Failed: 1, Waiting: 2}, done)
}

// A runner that runs may be the one that replays (the race detector says whether it may).
func TestARunnerThatRunsReplays(t *testing.T) {
	t.Parallel()
	db, f, fault := newDB(t), make(feed), &broken{}
	r, err := projector.NewRunner(db, projector.Subscribe(f, "review"), nil, define(marked, unless("a", fault.first)))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	<-r.Running()
	for i := 1; i <= 3; i++ {
		f.deliver(t, keyed("k", i))
	}
	for range 20 { // while it looks for what it may bring back
		_, err = r.Replay(t.Context(), projector.ParkedFilter{Limit: 1}, projector.ReplayConfig{Decision: person, Rate: -1})
		require.NoError(t, err)
	}
	fault.mended.Store(true)
	_, err = r.Replay(t.Context(), projector.ParkedFilter{}, projector.ReplayConfig{Decision: person, Rate: -1})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return len(parked(t, db)) == 0 }, 10*time.Second, 10*time.Millisecond)
	cancel()
	require.NoError(t, <-done)
	require.Equal(t, []int{1, 2, 3}, noted(db, "a", "k"))
}

// Nobody can tell of an event from a time of which the markers are pruned.
func TestWaitTellsWhereMarkersArePruned(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		p := define(marked, add)
		at, err := db.Append(t.Context(), "review-1", eventstore.NoStream, []eventstore.Draft{{ID: uuid.NewString(), Type: "posted", Schema: 1, Data: []byte(`{"Stars":5}`)}})
		require.NoError(t, err)
		entries, err := db.Entries(t.Context(), outbox.Filter{})
		require.NoError(t, err)
		stop := run(t, db, f, projector.RunnerConfig{}, p)
		f.deliver(t, msg(entries[0].ID, "posted", `{"Stars":5}`))
		require.NoError(t, p.Wait(t.Context(), db, at))
		require.NoError(t, stop())
		time.Sleep(9 * 24 * time.Hour)
		pruned, err := marker.Prune(t.Context(), db, marker.Retention{}, p.Handlers()...)
		require.NoError(t, err)
		require.Equal(t, 1, pruned)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, p.Wait(ctx, db, at), projector.ErrPruned)
	})
}

func TestReplayIsNoFlood(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, faults := newDB(t), bad{"x": projector.Permanent(errors.New("x"))}
		p := standing(t, db, faults.first, "x")
		clear(faults)
		begin := time.Now()
		done, err := operator(t, db, p).Replay(t.Context(), projector.ParkedFilter{}, projector.ReplayConfig{Decision: person, Rate: 0.5})
		require.NoError(t, err)
		require.Equal(t, 3, done.Replayed)
		require.Equal(t, 6*time.Second, time.Since(begin))
	})
}

func TestReplayRefuses(t *testing.T) {
	t.Parallel()
	db, faults := newDB(t), bad{"x": projector.Permanent(errors.New("x"))}
	r := operator(t, db, standing(t, db, faults.first, "x"))
	for name, ask := range map[string]func() error{
		"nobody's decision": func() error {
			_, err := r.Replay(t.Context(), projector.ParkedFilter{}, projector.ReplayConfig{})
			return err
		},
		"what is resolved": func() error {
			_, err := r.Replay(t.Context(), projector.ParkedFilter{State: projector.Skipped}, projector.ReplayConfig{Decision: person})
			return err
		},
		"a negative number": func() error {
			_, err := r.Rehearse(t.Context(), projector.ParkedFilter{Projector: "p", Limit: -1}, false)
			return err
		},
	} {
		require.ErrorIs(t, ask(), projector.ErrInput, name)
	}
	_, err := r.Replay(t.Context(), projector.ParkedFilter{Projector: "q"}, projector.ReplayConfig{Decision: person})
	require.NoError(t, err, "it has nothing parked")
	_, err = r.Rehearse(t.Context(), projector.ParkedFilter{Projector: "q"}, false)
	require.ErrorIs(t, err, projector.ErrNoHandler)
	require.Len(t, parked(t, db), 3)
}

func TestRehearsalShowsAndLeavesNothing(t *testing.T) {
	t.Parallel()
	db, faults := newDB(t), bad{"x": projector.Permanent(errors.New("x")), "y": projector.Permanent(errors.New("y"))}
	p := standing(t, db, faults.first, "x", "y")
	delete(faults, "x")
	before := parked(t, db)
	r := operator(t, db, p)
	got, err := r.Rehearse(t.Context(), projector.ParkedFilter{Projector: "p"}, false)
	require.NoError(t, err)
	require.Equal(t, 3, got.Messages)
	require.Equal(t, 2, got.Waiting)
	require.Len(t, got.Failures, 1)
	require.Equal(t, "y-1", got.Failures[0].Parked.MessageID)
	require.ErrorContains(t, got.Failures[0].Err, "y")
	require.Equal(t, []projector.Change{{Table: "a", After: json.RawMessage(`{"key":"x","value":[1,2,3]}`)}}, got.Changes)
	require.Equal(t, before, parked(t, db))
	require.Empty(t, noted(db, "a", "x"))
	done, err := r.Replay(t.Context(), projector.ParkedFilter{}, projector.ReplayConfig{Decision: person, Rate: -1})
	require.NoError(t, err)
	require.Equal(t, projector.Replays{Replayed: 3, Failed: 1, Waiting: 2}, done, "it told the truth")
}

// A replay whose handler ends the process counts, as a delivery does; one that panics is an error like any.
func TestReplaysArePartOfTheJournal(t *testing.T) {
	t.Parallel()
	db, faults := newDB(t), bad{"x": projector.Permanent(errors.New("x"))}
	p := standing(t, db, faults.first, "x")
	clear(faults)
	a := projector.Attempt{Projector: "p", Handler: "p/a", MessageID: "x-1"}
	for range 5 { // earlier lives of an operator's process, dead
		_, _, err := db.BeginAlone(t.Context(), time.Now().String(), a, -1)
		require.NoError(t, err)
	}
	done, err := operator(t, db, p).Replay(t.Context(), projector.ParkedFilter{}, projector.ReplayConfig{Decision: person, Rate: -1})
	require.NoError(t, err)
	require.Equal(t, projector.Replays{Failed: 1, Waiting: 2}, done)
	require.Equal(t, "x-1 p/a unknown vanished", of(parked(t, db))[0])
}

func TestWaitTellsOfSkippedEvents(t *testing.T) {
	t.Parallel()
	db, err := memory.New(nil)
	require.NoError(t, err)
	drafts, err := types.Encode(t.Context(), posted{1})
	require.NoError(t, err)
	at, err := db.Append(t.Context(), "review-1", eventstore.NoStream, drafts)
	require.NoError(t, err)
	p, f := define(marked, func(context.Context, txn, eventstore.Event[posted]) error {
		return projector.Permanent(errors.New("no"))
	}), make(feed)
	stop := run(t, db, f, projector.RunnerConfig{}, p)
	f.deliver(t, msg(drafts[0].ID, "posted", `{"Stars":1}`))
	require.ErrorIs(t, p.Wait(t.Context(), db, at), projector.ErrParked)
	_, err = db.SkipParked(t.Context(), projector.ParkedFilter{}, person)
	require.NoError(t, err)
	require.ErrorIs(t, p.Wait(t.Context(), db, at), projector.ErrSkipped)
	require.NoError(t, stop())
}

var once = claim.Backoff{Attempts: 1}

// Of many messages each has its time; one whose handler never returns, or ends its goroutine, fails alone.
func TestARehearsalOutlivesItsHandlers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		no := projector.Permanent(errors.New("no"))
		db, faults := newDB(t), bad{"x": no, "y": no, "z": no}
		standing(t, db, faults.first, "x", "y", "z")
		release := make(chan struct{})
		mended := define(marked, unless("a", func(e eventstore.Event[posted]) error {
			switch e.Stream {
			case "x":
				runtime.Goexit()
			case "y":
				<-release
			default:
				time.Sleep(12 * time.Second) // three of them take longer than one may
			}
			return nil
		}))
		got, err := operator(t, db, mended).Rehearse(t.Context(), projector.ParkedFilter{Projector: "p"}, false)
		require.NoError(t, err)
		require.Equal(t, 3, got.Messages)
		require.Equal(t, 4, got.Waiting)
		var failed []string
		for _, f := range got.Failures {
			failed = append(failed, f.Parked.MessageID+": "+f.Err.Error())
		}
		require.Equal(t, []string{"x-1: unknown (goexit): the handler called runtime.Goexit",
			"y-1: unknown (stuck): the handler has not returned after its deadline"}, failed)
		require.Equal(t, []projector.Change{{Table: "a", After: json.RawMessage(`{"key":"z","value":[1,2,3]}`)}}, got.Changes)
		close(release)
	})
}
