package projector_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// fleet is several processes with one runner each on one broker without order. Some messages kill
// the process that runs them: from then on nothing that it does reaches the store, and the broker
// redelivers everything that it had not acked.
type fleet struct {
	t          *testing.T
	db         *memory.DB
	cfg        projector.RunnerConfig
	redelivery time.Duration // delay of a redelivery after a death
	restart    time.Duration // how long a process takes to restart
	killers    map[string]bool

	broker chan *message.Message
	wait   sync.WaitGroup
	mu     sync.Mutex
	lives  []*life         // by process; nil while it restarts
	deaths []time.Duration // of those that killers caused, since began
	began  time.Time
}

// life is one life of a process, from start to end.
type life struct {
	faulty
	fleet *fleet
	dead  chan struct{}
	once  sync.Once
	end   context.CancelFunc
}

func (l *life) isDead() bool {
	select {
	case <-l.dead:
		return true
	default:
		return false
	}
}

func (l *life) die() {
	l.once.Do(func() {
		close(l.dead)
		l.end()
	})
}

// newFleet makes a fleet and starts its processes.
func newFleet(t *testing.T, processes int, cfg projector.RunnerConfig, redelivery time.Duration, killers ...string) (f *fleet, stop func()) {
	t.Helper()
	f = &fleet{t: t, db: newDB(t), cfg: cfg, redelivery: redelivery, restart: 5 * time.Second, killers: map[string]bool{},
		broker: make(chan *message.Message, 100_000), lives: make([]*life, processes), began: time.Now()}
	for _, id := range killers {
		f.killers[id] = true
	}
	ctx, cancel := context.WithCancel(t.Context())
	for i := range processes {
		f.wait.Go(func() {
			for ctx.Err() == nil {
				f.live(ctx, i)
				pause(ctx, f.restart)
			}
		})
	}
	return f, func() {
		cancel()
		f.wait.Wait()
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// live runs one life of a process.
func (f *fleet) live(ctx context.Context, process int) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	l := &life{faulty: faulty{unit: f.db}, fleet: f, dead: make(chan struct{}), end: cancel}
	p := define(marked, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
		if f.killers[e.ID] {
			f.mu.Lock()
			f.deaths = append(f.deaths, time.Since(f.began))
			f.mu.Unlock()
			l.die()
			runtime.Goexit()
		}
		return note("a")(ctx, tx, e)
	})
	r := newRunner(f.t, l, projector.Subscribe(l, "review"), f.cfg, p)
	f.mu.Lock()
	f.lives[process] = l
	f.mu.Unlock()
	err := r.Run(ctx)
	f.mu.Lock()
	f.lives[process] = nil
	f.mu.Unlock()
	if err != nil && !l.isDead() {
		f.t.Errorf("a runner ended with %v", err)
	}
}

// Subscribe delivers the broker's messages while the process lives.
func (l *life) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	out := make(chan *message.Message)
	l.fleet.wait.Go(func() {
		for {
			var m *message.Message
			select {
			case <-ctx.Done():
				return
			case m = <-l.fleet.broker:
			}
			c := m.Copy()
			l.fleet.wait.Go(func() { l.hold(ctx, c) })
			select {
			case out <- c:
			case <-ctx.Done():
				return
			}
		}
	})
	return out, nil
}

func (l *life) Close() error { return nil }

// hold redelivers m if the process dies before it acks m.
func (l *life) hold(ctx context.Context, m *message.Message) {
	select {
	case <-m.Acked():
	case <-ctx.Done():
		if !isAcked(m) && l.isDead() {
			time.Sleep(l.fleet.redelivery) // on the clock of a bubble
			l.fleet.broker <- m.Copy()
		}
	}
}

// Do fails for a dead process: nothing that it does reaches the store.
func (l *life) Do(ctx context.Context, u provider.Unit, run handle) error {
	return l.db().Do(ctx, u, func(ctx context.Context, tx txn, found provider.Found) (c provider.Closing, err error) {
		if !l.isDead() {
			c, err = run(ctx, tx, found)
		}
		if err == nil && l.isDead() {
			err = errBusy
		}
		return c, err
	})
}

func (l *life) db() *memory.DB { return l.fleet.db }

func (l *life) Beat(ctx context.Context, runner string, lease, record time.Duration) (provider.Health, error) {
	if l.isDead() {
		return provider.Health{}, errBusy
	}
	return l.db().Beat(ctx, runner, lease, record)
}

func (l *life) InFlight(ctx context.Context, p provider.Build, w provider.Worker, ids []string) error {
	if l.isDead() {
		return errBusy
	}
	return l.db().InFlight(ctx, p, w, ids)
}

func (l *life) Try(ctx context.Context, p provider.Parked, limit int, again time.Duration) (bool, error) {
	if l.isDead() {
		return false, errBusy
	}
	return l.db().Try(ctx, p, limit, again)
}

// send publishes messages that are recorded now.
func (f *fleet) send(msgs ...*message.Message) {
	for _, m := range msgs {
		f.broker <- recorded(m, time.Now())
	}
}

// traffic publishes messages of innocent keys for a while and returns how many of each key.
func (f *fleet) traffic(keys int, every, length time.Duration) (each int) {
	for ; time.Duration(each)*every < length; each++ {
		for k := range keys {
			f.send(keyed(fmt.Sprint("innocent", k), each+1))
		}
		time.Sleep(every)
	}
	return each
}

func (f *fleet) dead() []time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.deaths)
}

// untilStuck waits until n messages are stuck, for at most two hours.
func (f *fleet) untilStuck(n int) {
	for began := time.Now(); time.Since(began) < 2*time.Hour; time.Sleep(time.Minute) {
		list, err := f.db.Parked(f.t.Context(), projector.ParkedFilter{States: []projector.ParkedState{projector.StateStuck}})
		require.NoError(f.t, err)
		if len(list) == n {
			return
		}
	}
}

// A killer ends its process each time it runs. It is stuck after the number of deaths in
// docs/adr/0014, which depends on how soon the broker redelivers it. No innocent message is ever
// stuck.
// Promise: G6.11
func TestDeathsUntilAKillerIsStuck(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		processes  int
		careful    bool
		redelivery time.Duration
		killers    int
		most       int
	}{
		// The first process had not recorded it as in flight, the second had. Then it has four
		// attempts left.
		"redelivered after 30 s":   {4, false, 30 * time.Second, 1, 6},
		"redelivered after 10 min": {4, false, 10 * time.Minute, 1, 6},
		"five of them, after 30 s": {4, false, 30 * time.Second, 5, 29},
		// Each runner meets it once before the first lease of a dead runner ends.
		"redelivered at once":   {4, false, 0, 1, 4 + 5},
		"at once to 20 runners": {20, false, 0, 1, 20 + 5},
		// Every message is recorded as in flight.
		"at once to 20 careful runners": {20, true, 0, 1, 5},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var killers []string
				for i := range c.killers {
					killers = append(killers, fmt.Sprint("killer", i, "-1"))
				}
				f, stop := newFleet(t, c.processes, projector.RunnerConfig{Careful: c.careful}, c.redelivery, killers...)
				each := f.traffic(5, 500*time.Millisecond, 30*time.Second)
				for i := range c.killers { // among innocent messages
					f.send(keyed(fmt.Sprint("killer", i), 1))
					f.send(series(fmt.Sprint("bystander", i), 1, 5)...)
					time.Sleep(200 * time.Millisecond)
				}
				f.untilStuck(c.killers)
				for i := range c.killers {
					f.send(keyed(fmt.Sprint("killer", i), 2))
				}
				time.Sleep(time.Minute)
				stop()
				deaths := f.dead()
				if c.killers == 1 && c.redelivery > 0 || c.careful {
					require.Len(t, deaths, c.most)
				}
				require.LessOrEqual(t, len(deaths), c.most)
				var want []string
				for i := range c.killers {
					want = append(want, fmt.Sprint("killer", i, "-1 stuck unknown crashed 5"), fmt.Sprint("killer", i, "-2 waiting held 0"))
					require.ElementsMatch(t, upTo(5), noted(f.db, "a", fmt.Sprint("bystander", i)))
				}
				require.ElementsMatch(t, want, rows(parked(t, f.db)))
				for k := range 5 {
					require.ElementsMatch(t, upTo(each), noted(f.db, "a", fmt.Sprint("innocent", k)))
				}
			})
		})
	}
}

// The attempts at a suspect are spaced further and further apart. It is stuck only if each of them,
// over more than a quarter of an hour, ended with its process.
func TestAttemptsAtASuspectAreSpacedApart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f, stop := newFleet(t, 4, projector.RunnerConfig{}, 30*time.Second, "killer-1")
		time.Sleep(time.Minute)
		f.send(keyed("killer", 1))
		var stuckAt time.Duration
		for stuckAt == 0 && time.Since(f.began) < time.Hour {
			time.Sleep(time.Second)
			if list := parked(t, f.db); len(list) > 0 && list[0].State == projector.StateStuck {
				stuckAt = time.Since(f.began)
			}
		}
		stop()
		deaths := f.dead()
		require.Len(t, deaths, 6)
		// An attempt may take its timeout and a lease.
		lease, attempt := 15*time.Second, 45*time.Second
		for i, want := range []time.Duration{attempt, 8 * lease, 64 * lease} {
			apart := deaths[3+i] - deaths[2+i]
			require.GreaterOrEqual(t, apart, want)
			require.Less(t, apart, want+2*time.Second)
		}
		require.InDelta(t, (deaths[5] + attempt).Seconds(), stuckAt.Seconds(), 3, "it is stuck one attempt's time after the last death")
	})
}

// A killer may be a parked message: one that waited behind another, or one that a person replays.
func TestParkedKillerBecomesStuck(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f, stop := newFleet(t, 4, projector.RunnerConfig{}, 30*time.Second, "k-2")
		f.killers["k-1"] = true
		parkFirst(t, f.db, newFaults(map[string]error{"k-1": errNever}), "k")
		time.Sleep(time.Minute)
		skip(t, f.db, projector.ParkedFilter{Seqs: []int64{1}})
		f.untilStuck(1)
		require.LessOrEqual(t, len(f.dead()), 4+5)
		require.Equal(t, []string{"k-2 stuck unknown crashed 5", "k-3 waiting held 0"}, rows(parked(t, f.db)))
		before := len(f.dead())
		replayAll(t, f.db, all)
		f.untilStuck(1)
		stop()
		require.Len(t, f.dead(), before+5, "five more attempts")
		require.Equal(t, []string{"k-2 stuck unknown crashed 5", "k-3 waiting held 0"}, rows(parked(t, f.db)))
	})
}

// An operator or a platform kills processes at random. No message is at fault, so none is stuck.
// Promise: G6.12
func TestRandomKillsLeaveNoMessageStuck(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f, stop := newFleet(t, 4, projector.RunnerConfig{Concurrency: 2}, 5*time.Second)
		f.restart = time.Second
		seed := rand.Uint64()
		random := rand.New(rand.NewPCG(seed, 0))
		ctx, cancel := context.WithCancel(t.Context())
		kills := 0
		f.wait.Go(func() {
			for ctx.Err() == nil {
				pause(ctx, time.Duration(random.ExpFloat64()*float64(2*time.Second)))
				f.mu.Lock()
				if l := f.lives[random.IntN(len(f.lives))]; l != nil {
					l.die()
					kills++
				}
				f.mu.Unlock()
			}
		})
		each := f.traffic(5, 100*time.Millisecond, time.Minute)
		cancel()
		time.Sleep(30 * time.Minute)
		stop()
		require.Greater(t, kills, 5)
		require.Empty(t, rows(parked(t, f.db)), "seed %d", seed)
		for k := range 5 {
			require.ElementsMatch(t, upTo(each), noted(f.db, "a", fmt.Sprint("innocent", k)), "seed %d", seed)
		}
	})
}
