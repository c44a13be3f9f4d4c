package projector_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// process is the store of one runner. It knows which segments the runner has leased, and can stop.
type process struct {
	unit
	mu     sync.Mutex
	has    map[string]bool
	before func(u *provider.Unit) // called before each unit
	fenced atomic.Int64           // units that were fenced
	// stopped, if not nil, keeps the calls for leases until it is closed.
	stopped atomic.Pointer[chan struct{}]
}

// call makes each unit call fn first.
func (p *process) call(fn func(*provider.Unit)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.before = fn
}

func (p *process) AcquireLease(ctx context.Context, name string, t claim.Terms) (bool, error) {
	if until := p.stopped.Load(); until != nil {
		<-*until
	}
	has, err := p.unit.AcquireLease(ctx, name, t)
	p.set(name, has)
	return has, err
}

func (p *process) ReleaseLease(ctx context.Context, name string, token claim.Token) error {
	p.set(name, false)
	return p.unit.ReleaseLease(ctx, name, token)
}

func (p *process) set(name string, has bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.has == nil {
		p.has = map[string]bool{}
	}
	if p.has[name] = has; !has {
		delete(p.has, name)
	}
}

func (p *process) Do(ctx context.Context, u provider.Unit, run func(context.Context, txn, provider.Found) (provider.Closing, error)) error {
	p.mu.Lock()
	before := p.before
	p.mu.Unlock()
	if before != nil {
		before(&u)
	}
	err := p.unit.Do(ctx, u, run)
	if u.Segment > 0 && errors.Is(err, provider.ErrFenced) {
		p.fenced.Add(1)
	}
	return err
}

// segments returns the numbers of the segments that the runner has leased.
func (p *process) segments() (numbers []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name := range p.has {
		if n, err := strconv.Atoi(name[strings.LastIndex(name, "/")+1:]); err == nil && strings.HasPrefix(name, "segments/p") {
			numbers = append(numbers, n)
		}
	}
	slices.Sort(numbers)
	return numbers
}

// fillStreams appends the numbers from first to last to each of n streams.
func fillStreams(t *testing.T, db *memory.DB, n, first, last int) {
	t.Helper()
	for at := first; at <= last; at++ {
		for i := range n {
			write(t, db, fmt.Sprint("k-", i), at)
		}
	}
}

// exact fails the test unless each of n streams has the numbers up to last, in order.
func exact(t *testing.T, db *memory.DB, table string, n, last int) {
	t.Helper()
	for i := range n {
		require.Equal(t, upTo(last), noted(db, table, fmt.Sprint("k-", i)), "stream %d", i)
	}
}

// soon waits until a condition holds.
func soon(t *testing.T, what string, is func() bool) {
	t.Helper()
	patience.Until(t, is, "%s", what)
}

func atHead(t *testing.T, db *memory.DB) func() bool {
	return func() bool {
		head, err := db.LogPosition(t.Context(), eventstore.From{Now: true})
		require.NoError(t, err)
		return checkpoint(t, db).Place.Position == head
	}
}

// slowly takes a millisecond for each event.
func slowly(fn onEvent) onEvent {
	return func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
		time.Sleep(time.Millisecond)
		return fn(ctx, tx, e)
	}
}

func segmented(n int) projector.Options { return projector.Options{Segments: n} }

const someLease = 3 * time.Second

// begun starts a runner with a store of its own.
func begun(t *testing.T, db *memory.DB, ps ...*projector.Projector[txn]) (*process, func() error) {
	t.Helper()
	p := &process{unit: db}
	return p, start(t, newRunner(t, p, projector.FromLog(db), projector.RunnerConfig{Lease: someLease, Batch: 10}, ps...))
}

// Promise: G7.8, G7.9
func TestSegmentsApplyEachStreamInOrderAndAreSharedFairly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		fillStreams(t, db, 30, 1, 20)
		p := define(segmented(8), slowly(note("a")))
		one, stopOne := begun(t, db, p)
		two, stopTwo := begun(t, db, p)
		three, stopThree := begun(t, db, p)
		fair := func(want ...int) {
			t.Helper()
			time.Sleep(2 * someLease)
			var shares, numbers []int
			for _, of := range []*process{one, two, three} {
				shares, numbers = append(shares, len(of.segments())), append(numbers, of.segments()...)
			}
			slices.Sort(shares)
			require.Equal(t, want, shares)
			slices.Sort(numbers)
			require.Equal(t, upTo(8), numbers, "each segment has one reader")
		}
		fair(2, 3, 3)
		require.NoError(t, stopThree())
		fillStreams(t, db, 30, 21, 25)
		fair(0, 4, 4)
		three, stopThree = begun(t, db, p)
		fair(2, 3, 3)
		soon(t, "all is applied", atHead(t, db))
		for _, stop := range []func() error{stopOne, stopTwo, stopThree} {
			require.NoError(t, stop())
		}
		exact(t, db, "a", 30, 25)
		names, err := db.LeaseNames(t.Context(), "")
		require.NoError(t, err)
		require.Empty(t, names, "a clean end releases all leases")
	})
}

// Promise: G7.8
func TestTheNumberOfSegmentsCanChange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		fillStreams(t, db, 40, 1, 10)
		n := 10
		for _, numbers := range [][2]int{{8, 5}, {5, 1}, {1, 3}, {3, 8}} {
			_, stopOld := begun(t, db, define(segmented(numbers[0]), slowly(note("a"))))
			time.Sleep(200 * time.Millisecond)
			_, stopNew := begun(t, db, define(segmented(numbers[1]), slowly(note("a"))))
			fillStreams(t, db, 40, n+1, n+5)
			n += 5
			time.Sleep(100 * time.Millisecond)
			require.NoError(t, stopOld()) // both ran for some time
			soon(t, "all is applied", atHead(t, db))
			soon(t, "the number is the new one", func() bool { return max(checkpointSplit(t, db).Count, 1) == numbers[1] })
			require.NoError(t, stopNew())
			exact(t, db, "a", 40, n)
		}
	})
}

func checkpointSplit(t *testing.T, db *memory.DB) provider.Split {
	c := checkpoint(t, db)
	return c.Split()
}

// A runner that is stopped past its lease, with a unit that has not begun, changes nothing later.
// Promise: G7.8
func TestAPausedReaderOfASegmentIsFenced(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		fillStreams(t, db, 30, 1, 10)
		p := define(segmented(4), slowly(note("a")))
		one, stopOne := begun(t, db, p)
		wake, entered := make(chan struct{}), atomic.Int64{}
		soon(t, "it has all segments", func() bool { return len(one.segments()) == 4 && len(noted(db, "a", "k-0")) > 0 })
		one.call(func(*provider.Unit) {
			entered.Add(1)
			<-wake
		})
		fillStreams(t, db, 30, 11, 12)
		soon(t, "its units are stopped", func() bool { return entered.Load() >= 4 })
		one.stopped.Store(&wake)
		two, stopTwo := begun(t, db, p)
		soon(t, "the other one has all segments", func() bool { return len(two.segments()) == 4 })
		fillStreams(t, db, 30, 13, 15)
		soon(t, "all is applied", atHead(t, db))
		one.call(nil)
		one.stopped.Store(nil)
		close(wake)
		fillStreams(t, db, 30, 16, 17)
		soon(t, "all is applied", atHead(t, db))
		require.NoError(t, stopOne())
		require.NoError(t, stopTwo())
		exact(t, db, "a", 30, 17)
		require.Positive(t, one.fenced.Load(), "the units that were stopped are fenced")
	})
}

// Promise: G7.8
func TestAParkedLaneOfASegmentGoesOnInOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		fillStreams(t, db, 12, 1, 10)
		bad := newFaults(map[string]error{})
		id := published(t, db, "k-3")[4].UUID
		bad.set(id, errNever)
		p := define(segmented(4), bad.run)
		_, stopOne := begun(t, db, p)
		_, stopTwo := begun(t, db, p)
		soon(t, "all is applied or parked", atHead(t, db))
		require.Equal(t, upTo(4), noted(db, "a", "k-3"))
		require.Len(t, parked(t, db), 6)
		for i := range 12 {
			if i != 3 {
				require.Equal(t, upTo(10), noted(db, "a", fmt.Sprint("k-", i)))
			}
		}
		bad.set(id, nil)
		require.Positive(t, replayAll(t, db, projector.ParkedFilter{Projector: "p"}))
		fillStreams(t, db, 12, 11, 12)
		soon(t, "nothing is parked", func() bool { return len(parked(t, db)) == 0 })
		soon(t, "all is applied", atHead(t, db))
		require.NoError(t, stopOne())
		require.NoError(t, stopTwo())
		exact(t, db, "a", 12, 12)
	})
}

// The checkpoint waits for the slowest segment. Wait and Lag ask the segments.
// Promise: G7.8
func TestWaitAsksTheSegmentOfTheStream(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		fillStreams(t, db, 16, 1, 2)
		stuck := provider.SegmentOf("k-0", 4)
		block := make(chan struct{})
		p := define(segmented(4), note("a"))
		one, stop := begun(t, db, p)
		soon(t, "all is applied", atHead(t, db))
		of := checkpointSplit(t, db).First + stuck
		one.call(func(u *provider.Unit) {
			if u.Segment == of {
				<-block
			}
		})
		was := checkpoint(t, db).Place.Position
		blocked := write(t, db, "k-0", 3)
		open := 1
		for i := 1; i < 16; i++ {
			at := write(t, db, fmt.Sprint("k-", i), 3)
			if provider.SegmentOf(fmt.Sprint("k-", i), 4) == stuck {
				open++
				continue
			}
			require.NoError(t, within(t, p, db, at), "stream %d", i)
		}
		require.Equal(t, was, checkpoint(t, db).Place.Position, "the checkpoint is the lowest position of the segments")
		lag, err := p.Lag(t.Context(), db)
		require.NoError(t, err)
		require.EqualValues(t, open, lag.Events)
		require.ErrorIs(t, within(t, p, db, blocked), context.DeadlineExceeded)
		close(block)
		require.NoError(t, within(t, p, db, blocked))
		soon(t, "all is applied", atHead(t, db))
		require.NoError(t, stop())
		exact(t, db, "a", 16, 3)
	})
}

// A handler that is added while segments are at different positions begins behind all of them, whether the program without it
// ends or not.
// Promise: G7.10
func TestAHandlerIsAddedToASplitProjector(t *testing.T) {
	t.Parallel()
	for name, stays := range map[string]bool{"the old program ends": false, "the old program stays": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			addToSplit(t, stays)
		})
	}
}

func addToSplit(t *testing.T, stays bool) {
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		fillStreams(t, db, 20, 1, 10)
		_, stop := begun(t, db, define(segmented(4), slowly(note("a"))))
		soon(t, "some are applied", func() bool { return len(noted(db, "a", "k-0")) > 3 })
		newer := define(segmented(4), slowly(note("a")), note("b"))
		_, stopNew := begun(t, db, newer)
		if stays {
			takesEvents(t, db, newer)
			defer func() { require.NoError(t, stop()) }()
		} else {
			require.NoError(t, stop())
		}
		fillStreams(t, db, 20, 11, 15)
		soon(t, "all is applied", func() bool { return atHead(t, db)() && len(parked(t, db)) == 0 })
		require.NoError(t, stopNew())
		exact(t, db, "a", 20, 15)
		began := int64(-1)
		for _, h := range checkpoint(t, db).Handlers {
			if h.Handler == "p/b" {
				began = h.Position
			}
		}
		require.Positive(t, began)
		for i := range 20 {
			var want []int
			for e, err := range db.ReadStream(t.Context(), fmt.Sprint("k-", i), 0) {
				require.NoError(t, err)
				if e.Position > began {
					want = append(want, int(e.Version))
				}
			}
			require.Equal(t, want, noted(db, "b", fmt.Sprint("k-", i)), "stream %d: all events behind %d, in order", i, began)
		}
	})
}

// Promise: G7.8
func TestARebuildIsSplitAndSendsNothingTwice(t *testing.T) {
	t.Parallel()
	for _, how := range []projector.RebuildHow{projector.BlueGreen, projector.InPlace} {
		t.Run(how.String(), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				n := 0
				fillNext := func(count int) {
					for range count {
						n++
						write(t, db, fmt.Sprint("k-", n%15), n)
					}
				}
				fillNext(300)
				p := sending(projector.Options{Segments: 4}, nil)
				_, stopOne := begun(t, db, p)
				store := &process{unit: db}
				r := newRunner(t, store, projector.FromLog(db), projector.RunnerConfig{Lease: someLease, Batch: 10}, p)
				stopTwo := start(t, r)
				soon(t, "all is applied", atHead(t, db))
				done := make(chan error, 1)
				go func() { done <- rebuild(t, r, request(how)) }()
				for range 30 {
					fillNext(5)
					time.Sleep(30 * time.Millisecond)
				}
				require.NoError(t, <-done)
				fillNext(20)
				soon(t, "all is applied", atHead(t, db))
				require.NoError(t, stopOne())
				require.NoError(t, stopTwo())
				require.Equal(t, once(n), sent(t, db), "each event has sent its message once")
				table := "notes_g2"
				if how == projector.InPlace {
					table = "notes_g1"
				}
				for i := range 15 {
					var want []int
					for e := 1; e <= n; e++ {
						if e%15 == i {
							want = append(want, e)
						}
					}
					require.Equal(t, want, noted(db, table, fmt.Sprint("k-", i)))
				}
			})
		})
	}
}

func TestSegmentsAreRefused(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	for name, refused := range map[string]func() (*projector.Runner, error){
		"a negative number": func() (*projector.Runner, error) {
			return projector.NewRunner[txn](db, projector.FromLog(db), projector.RunnerConfig{}, define(segmented(-1), note("a")))
		},
		"too many": func() (*projector.Runner, error) {
			return projector.NewRunner[txn](db, projector.FromLog(db), projector.RunnerConfig{}, define(segmented(257), note("a")))
		},
		"a broker": func() (*projector.Runner, error) {
			return projector.NewRunner[txn](db, projector.Subscribe(make(subscription), "t"), projector.RunnerConfig{},
				define(projector.Options{Segments: 2, Markers: true}, note("a")))
		},
	} {
		_, err := refused()
		require.ErrorIs(t, err, projector.ErrInput, name)
		require.ErrorContains(t, err, "options.Segments", name)
	}
}
