package projector_test

import (
	"context"
	"errors"
	"math"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/stretchr/testify/require"
)

// Two runners that live and are delivered the same failing message wait for each other no longer than its budget takes.
func TestTwoRunnersWithOneFailingMessage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		var tries atomic.Int32
		p := define(marked, func(context.Context, txn, eventstore.Event[posted]) error {
			tries.Add(1)
			return errors.New("no")
		})
		one, other := make(feed), make(feed)
		stopOne, stopOther := run(t, db, one, projector.RunnerConfig{}, p), run(t, db, other, projector.RunnerConfig{}, p)
		a, b := keyed("k", 1), keyed("k", 1)
		one <- a
		other <- b
		begin := time.Now()
		<-a.Acked()
		<-b.Acked()
		require.Less(t, time.Since(begin), 10*time.Second)
		require.LessOrEqual(t, tries.Load(), int32(6), "both may be at the last one")
		require.Len(t, parked(t, db), 1)
		require.NoError(t, stopOne())
		require.NoError(t, stopOther())
	})
}

// A suspect that had to wait is not run where it was parked or skipped meanwhile.
func TestASuspectIsJudgedAgainAfterItWaited(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		p := define(marked, note("a"))
		a := projector.Attempt{Projector: "p", Handler: "p/a", MessageID: "k-1", Key: "k", Takes: []string{"posted"}}
		for _, runner := range []string{"1", "2", "3", "4", "5"} {
			require.NoError(t, db.Alive(t.Context(), runner, time.Minute))
			_, _, err := db.BeginAlone(t.Context(), runner, a, -1)
			require.NoError(t, err)
		}
		stop := run(t, db, f, projector.RunnerConfig{}, p)
		m := keyed("k", 1)
		f <- m
		time.Sleep(10 * time.Second)
		require.Empty(t, noted(db, "a", "k"), "it waits")
		require.NoError(t, db.Do(t.Context(), projector.Work{Projector: "p", Park: []projector.Parked{
			{Projector: "p", Handler: "p/a", MessageID: "k-1", Key: "k", Type: "posted", Holds: true},
		}}, nil))
		<-m.Acked()
		require.NoError(t, stop())
		require.Empty(t, noted(db, "a", "k"))
	})
}

// A runner of another version leaves alone what only newer ones have a handler for.
func TestWhatAnotherVersionsHandlerWaitsForIsLeftToIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, faults := newDB(t), bad{"x": projector.Permanent(errors.New("x"))}
		newer := standing(t, db, faults.first, "x")
		clear(faults)
		older := projector.Define("p", types, marked, projector.On("other", note("other")))
		stop := run(t, db, make(feed), projector.RunnerConfig{}, older)
		_, err := db.SkipParked(t.Context(), projector.ParkedFilter{Seqs: []int64{1}}, person)
		require.NoError(t, err)
		time.Sleep(time.Minute)
		require.Equal(t, []string{"x-2 p/a held", "x-3 p/a held"}, of(parked(t, db)))
		require.NoError(t, stop())
		stop = run(t, db, make(feed), projector.RunnerConfig{}, newer)
		time.Sleep(5 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, []int{2, 3}, noted(db, "a", "x"))
	})
}

// What comes back and cannot just now holds up nothing else.
func TestATransientErrorStopsNothingElseThatComesBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, faults := newDB(t), bad{"x": projector.Permanent(errors.New("x")), "y": projector.Permanent(errors.New("y"))}
		standing(t, db, faults.first, "x", "y")
		busy := func(e eventstore.Event[posted]) error {
			if e.Stream == "x" {
				return &projector.Error{Class: projector.Transient, Err: errors.New("busy")}
			}
			return nil
		}
		stop := run(t, db, make(feed), projector.RunnerConfig{}, define(marked, unless("a", busy)))
		_, err := db.SkipParked(t.Context(), projector.ParkedFilter{Class: new(projector.PermanentClass)}, person)
		require.NoError(t, err)
		time.Sleep(30 * time.Second)
		require.Equal(t, []int{2, 3}, noted(db, "a", "y"))
		require.Equal(t, []string{"x-2 p/a held", "x-3 p/a held"}, of(parked(t, db)), "it is nobody's fault")
		require.NoError(t, stop())
	})
}

// slowJournal begins attempts once it may, and counts once it may.
type slowJournal struct {
	unit
	slow       *atomic.Bool
	begin, end chan struct{}
}

func (l slowJournal) Begin(ctx context.Context, runner string, attempts, done []projector.Attempt) ([]projector.Verdict, error) {
	if l.slow.Load() {
		<-l.begin
	}
	return l.unit.Begin(ctx, runner, attempts, done)
}

func (l slowJournal) CountAttempt(ctx context.Context, runner string, a projector.Attempt, limit int) (int, error) {
	<-l.end
	return l.unit.CountAttempt(ctx, runner, a, limit)
}

// An attempt that has failed is named until it is counted: if the process ends in between, it counts as one of a dead runner.
func TestAFailedAttemptIsNamedUntilItIsCounted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, fail := newDB(t), make(feed), make(chan struct{})
		j := slowJournal{db, &atomic.Bool{}, make(chan struct{}), make(chan struct{})}
		p := define(marked, func(_ context.Context, _ txn, e eventstore.Event[posted]) error {
			if e.Stream != "k" {
				return nil
			}
			<-fail
			return errors.New("no")
		})
		stop := run(t, j, f, projector.RunnerConfig{Concurrency: 3}, p)
		bad, one, other := keyed("k", 1), keyed("l", 1), keyed("m", 1)
		f <- bad
		synctest.Wait() // its handler runs
		j.slow.Store(true)
		f <- one
		synctest.Wait() // it begins, and takes its time
		f <- other
		synctest.Wait() // it is to begin next, and what is done is to be taken back with that
		close(fail)
		synctest.Wait()
		close(j.begin)
		<-one.Acked()
		<-other.Acked()
		attempts, alive, err := db.BeginAlone(t.Context(), "another", projector.Attempt{Projector: "p", Handler: "p/a", MessageID: "k-1", Key: "k"}, 0)
		require.NoError(t, err)
		require.Equal(t, []int{0, 1}, []int{attempts, alive}, "counted, and under way")
		close(j.end)
		<-bad.Acked()
		require.Equal(t, 5, parked(t, db)[0].Attempts)
		require.NoError(t, stop())
	})
}

// dying is a process that ends, as far as others can see, when it is about to park.
type dying struct {
	unit
	dead chan struct{}
}

func (d dying) isDead() bool {
	select {
	case <-d.dead:
		return true
	default:
		return false
	}
}

func (d dying) Do(ctx context.Context, w projector.Work, apply func(context.Context, txn, []int) ([]outbox.Message, error)) error {
	if len(w.Park) > 0 && !d.isDead() {
		close(d.dead)
	}
	if d.isDead() {
		return &projector.Error{Class: projector.Transient, Err: errors.New("dead")}
	}
	return d.unit.Do(ctx, w, apply)
}

func (d dying) Alive(ctx context.Context, runner string, lease time.Duration) error {
	if lease > 0 && d.isDead() {
		return nil
	}
	return d.unit.Alive(ctx, runner, lease)
}

// An attempt that spends the budget stays named until the message is parked: if the process ends in between, nobody tries once more.
func TestWhatIsSpentNeverBeginsAgain(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fault    error
		code     string
		attempts int
		stopped  bool // by somebody who waits for no parking
	}{
		"counted":   {errors.New("no"), "vanished", 3, false},
		"stopped":   {errors.New("no"), "vanished", 3, true},
		"permanent": {projector.Permanent(errors.New("no")), "", 2, false}, // one may be its neighbour's doing
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, starts := newDB(t), &atomic.Int32{}
				p := define(marked, func(context.Context, txn, eventstore.Event[posted]) error {
					starts.Add(1)
					return c.fault
				})
				budget := claim.Backoff{Attempts: 3}
				f, g := make(feed), make(feed)
				first := run(t, dying{db, make(chan struct{})}, f, projector.RunnerConfig{Retry: budget, Drain: time.Second}, p)
				f <- keyed("k", 1)
				time.Sleep(time.Minute)
				if c.stopped {
					f <- keyed("other", 1)
					synctest.Wait() // it cannot be done either
					require.NoError(t, first())
					attempts, alive, err := db.BeginAlone(t.Context(), "another", projector.Attempt{Projector: "p", Handler: "p/a", MessageID: "other-1", Key: "other"}, 0)
					require.NoError(t, err)
					require.Equal(t, []int{0, 0}, []int{attempts, alive}, "it is nobody's suspect")
					time.Sleep(time.Minute)
				}
				before := starts.Load()
				second := run(t, db, g, projector.RunnerConfig{Retry: budget}, p)
				g.deliver(t, keyed("k", 1))
				require.NoError(t, second())
				if !c.stopped {
					_ = first()
				}
				list := parked(t, db)
				require.Len(t, list, 1)
				require.Equal(t, []any{c.code, c.attempts}, []any{list[0].Code, list[0].Attempts})
				require.EqualValues(t, c.attempts, starts.Load())
				require.EqualValues(t, map[string]int{"counted": 3, "stopped": 3, "permanent": 1}[name], before)
			})
		})
	}
}

// failing is a journal that is away for the first replays that fail, or whose process ends, as far as others can see, right after one.
type failing struct {
	dying
	away  int32
	dies  bool
	code  string // how the replay failed, to people
	calls *atomic.Int32
}

func (f failing) Alive(ctx context.Context, runner string, lease time.Duration) error {
	if f.isDead() {
		return nil
	}
	return f.unit.Alive(ctx, runner, lease)
}

func (f failing) Begin(ctx context.Context, runner string, attempts, done []projector.Attempt) ([]projector.Verdict, error) {
	if f.isDead() {
		return nil, errors.New("dead")
	}
	return f.unit.Begin(ctx, runner, attempts, done)
}

func (f failing) FailParked(ctx context.Context, runner string, p projector.Parked, a projector.Attempt) error {
	if f.calls.Add(1) <= f.away {
		return errors.New("away")
	}
	if f.dies {
		defer close(f.dead)
	}
	return f.unit.FailParked(ctx, runner, p, a)
}

// What comes back and fails is tried as often as it may be, whatever becomes of the journal; and a person's replay tries it again.
func TestWhatComesBackInVainIsSpentOnce(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]failing{
		"away":    {away: 5},
		"dies":    {dies: true},
		"stopped": {away: math.MaxInt32, code: "vanished"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, starts, mended, budget := newDB(t), &atomic.Int32{}, &atomic.Bool{}, claim.Backoff{Attempts: 3}
				standing(t, db, bad{"x": projector.Permanent(errors.New("x"))}.first, "x")
				p := define(marked, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
					if starts.Add(1); !mended.Load() {
						return errors.New("no")
					}
					return note("a")(ctx, tx, e)
				})
				_, err := db.SkipParked(t.Context(), projector.ParkedFilter{Seqs: []int64{1}}, person)
				require.NoError(t, err)
				f.calls, f.dying = &atomic.Int32{}, dying{db, make(chan struct{})}
				stop := run(t, f, make(feed), projector.RunnerConfig{Retry: budget, Drain: time.Second}, p)
				time.Sleep(time.Minute)
				_ = stop()
				stop = run(t, db, make(feed), projector.RunnerConfig{Retry: budget}, p)
				time.Sleep(time.Minute)
				require.NoError(t, stop())
				require.EqualValues(t, 3, starts.Load())
				list := parked(t, db)
				require.Equal(t, []any{projector.UnknownClass, f.code, 3}, []any{list[0].Class, list[0].Code, list[0].Attempts})
				mended.Store(true)
				r, err := projector.NewRunner(db, projector.Source{}, &projector.RunnerConfig{Retry: budget}, p)
				require.NoError(t, err)
				done, err := r.Replay(t.Context(), projector.ParkedFilter{}, projector.ReplayConfig{Decision: person})
				require.NoError(t, err)
				require.Equal(t, projector.Replays{Replayed: 2}, done)
				require.Equal(t, []int{2, 3}, noted(db, "a", "x"))
			})
		})
	}
}

// slowPark is a unit that cannot park for a while.
type slowPark struct {
	unit
	until time.Time
}

func (s slowPark) Do(ctx context.Context, w projector.Work, apply func(context.Context, txn, []int) ([]outbox.Message, error)) error {
	if len(w.Park) > 0 && time.Now().Before(s.until) {
		return errors.New("no room")
	}
	return s.unit.Do(ctx, w, apply)
}

// Delivered once more to the same runner while it is about to be parked, a message waits for that.
func TestWhatIsAboutToBeParkedWaits(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fault  error
		starts int32
	}{
		"spent":     {errors.New("no"), 3},
		"permanent": {projector.Permanent(errors.New("no")), 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f, starts := newDB(t), make(feed), &atomic.Int32{}
				p := define(marked, func(context.Context, txn, eventstore.Event[posted]) error {
					starts.Add(1)
					return c.fault
				})
				store := slowPark{db, time.Now().Add(time.Minute)}
				stop := run(t, store, f, projector.RunnerConfig{Retry: claim.Backoff{Attempts: 3}, Concurrency: 4}, p)
				for range 3 {
					m := keyed("k", 1)
					m.Metadata[outbox.HeaderKey], m.Metadata[outbox.HeaderStream] = "", "" // it waits for nobody
					f <- m
					time.Sleep(15 * time.Second)
				}
				time.Sleep(time.Minute)
				require.NoError(t, stop())
				require.Equal(t, c.starts, starts.Load())
				require.Len(t, parked(t, db), 1)
			})
		})
	}
}

func TestHaltWantsMarkers(t *testing.T) {
	t.Parallel()
	_, err := projector.NewRunner(newDB(t), projector.Subscribe(make(feed), "review"), nil, define(projector.Options{Parking: projector.Halt}, add))
	require.ErrorContains(t, err, "markers")
}

// One that two others have named has nothing beside it while it runs.
func TestNothingRunsBesideASuspect(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		stop := run(t, db, f, projector.RunnerConfig{Concurrency: 8}, define(marked, note("a")))
		a := projector.Attempt{Projector: "p", Handler: "p/a", MessageID: "k-1"}
		for _, runner := range []string{"1", "2"} {
			require.NoError(t, db.Alive(t.Context(), runner, time.Minute))
			_, _, err := db.BeginAlone(t.Context(), runner, a, -1)
			require.NoError(t, err)
		}
		db.Apart().RLock() // some attempt is under way
		suspect := keyed("k", 1)
		f <- suspect
		for range 1000 { // a lock that is waited for keeps the bubble's clock still
			runtime.Gosched()
		}
		select {
		case <-suspect.Acked():
			t.Error("it did not wait for what is under way")
		default:
		}
		db.Apart().RUnlock()
		<-suspect.Acked()
		require.NoError(t, stop())
	})
}
