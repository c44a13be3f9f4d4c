package projector_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// Promise: G6.2
func TestPermanentErrorIsStuckAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"k-1": fmt.Errorf("wrapped: %w", errNever)})
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, bad.run))
		f.deliver(t, keyed("k", 1))
		time.Sleep(10 * time.Minute)
		require.NoError(t, stop())
		require.Equal(t, []string{"k-1 stuck permanent 1"}, rows(parked(t, db)))
		require.Equal(t, 1, bad.tried("k-1"))
	})
}

// A panic, runtime.Goexit and a deadline fail only their unit.
// Promise: G6.2
func TestPanicGoexitAndDeadlineAreErrorsLikeAnyOther(t *testing.T) {
	t.Parallel()
	for name, fn := range map[string]onEvent{
		"panic":  func(context.Context, txn, eventstore.Event[posted]) error { panic("oh") },
		"goexit": func(context.Context, txn, eventstore.Event[posted]) error { runtime.Goexit(); return nil },
		"deadline": func(ctx context.Context, _ txn, _ eventstore.Event[posted]) error {
			<-ctx.Done()
			return ctx.Err()
		},
		"deadline, swallowed": func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			<-ctx.Done()
			return add(ctx, tx, e)
		},
	} {
		code, _, _ := strings.Cut(name, ",")
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				handler := func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
					if e.Stream == "k" {
						return fn(ctx, tx, e)
					}
					return note("a")(ctx, tx, e)
				}
				stop := run(t, db, f, projector.RunnerConfig{Timeout: time.Second}, define(marked, add, handler))
				f.deliver(t, keyed("k", 1))
				require.Equal(t, []string{"k-1 waiting unknown " + code + " 1"}, rows(parked(t, db)))
				f.deliver(t, keyed("other", 7))
				time.Sleep(5 * time.Minute)
				require.NoError(t, stop())
				require.Equal(t, []string{"k-1 stuck unknown " + code + " 5"}, rows(parked(t, db)))
				require.Equal(t, "p/b", parked(t, db)[0].Handler)
				require.Equal(t, 7, total(db, "totals"), "a failed unit leaves nothing, and other messages are applied")
				require.Equal(t, []int{7}, noted(db, "a", "other"))
			})
		})
	}
}

// The same among other messages of a unit.
func TestUnitWithPanicIsSplitAtItsMessage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		handler := func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			if e.Stream == "bad" {
				panic("oh")
			}
			return note("a")(ctx, tx, e)
		}
		ran := together(t, record(db, nil), projector.RunnerConfig{}, marked, handler, keyed("k", 1), keyed("bad", 1), keyed("k", 2))
		require.Equal(t, []string{"k-1", "bad-1 parked 1", "k-2"}, ran, "a unit that panics does not return to the provider")
		require.Equal(t, upTo(2), noted(db, "a", "k"))
	})
}

// A handler that never returns is abandoned once, because a second try would leak a second
// goroutine.
// Promise: G6.13
func TestHandlerThatNeverReturnsIsStuckAtOnce(t *testing.T) {
	t.Parallel()
	for name, together := range map[string]bool{"alone": false, "in a unit of many": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f, calls := newDB(t), make(subscription), &atomic.Int32{}
				release := make(chan struct{})
				g := newGate(func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
					if e.Stream == "k" {
						calls.Add(1)
						<-release
					}
					return note("a")(ctx, tx, e)
				})
				stop := run(t, db, f, projector.RunnerConfig{Timeout: 10 * time.Second}, define(marked, g.run))
				if !together {
					close(g.open)
				}
				f.send(keyed("gate", 1))
				synctest.Wait()
				sent := f.send(keyed("other", 1), keyed("k", 1), keyed("k", 2), keyed("other", 2))
				if synctest.Wait(); together {
					close(g.open)
				}
				acked(t, sent...)
				require.Equal(t, []string{"k-1 stuck permanent stuck 1", "k-2 waiting held 0"}, rows(parked(t, db)))
				time.Sleep(10 * time.Minute)
				require.EqualValues(t, 1, calls.Load())
				close(release)
				require.NoError(t, stop())
				require.Empty(t, noted(db, "a", "k"), "its late work has no effect")
				require.Equal(t, upTo(2), noted(db, "a", "other"))
			})
		})
	}
}

// A typed nil pointer is an error, and Permanent(nil) is not.
func TestNilErrors(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		var none *projector.Error
		bad := newFaults(map[string]error{"k-1": none, "l-1": fmt.Errorf("wrapped: %w", none)})
		bad.handle = func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			return projector.Permanent(note("a")(ctx, tx, e))
		}
		stop := run(t, db, f, projector.RunnerConfig{LogErrors: true}, define(marked, bad.run))
		f.deliver(t, keyed("k", 1), keyed("l", 1), keyed("m", 1))
		require.NoError(t, stop())
		require.Equal(t, []string{"k-1 waiting unknown 1", "l-1 waiting unknown 1"}, rows(parked(t, db)))
		require.Equal(t, []int{1}, noted(db, "a", "m"))
	})
}

// A handler or RunnerConfig.Classify can only choose classes that describe the message. All other
// classes become unknown, so that the message is neither dropped nor reported as waiting behind
// another.
func TestHandlerCannotChooseReservedClasses(t *testing.T) {
	t.Parallel()
	for _, class := range []projector.Class{provider.ClassShutdown, provider.ClassHeld, projector.ClassUnknown, -1, 42} {
		for _, classify := range []bool{false, true} {
			t.Run(fmt.Sprint(int(class), " classify ", classify), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					db, f := newDB(t), make(subscription)
					cfg, err := projector.RunnerConfig{}, error(&projector.Error{Class: class, Err: context.Canceled})
					if classify {
						cfg.Classify = func(error) projector.Class { return class }
						err = errNo
					}
					bad := newFaults(map[string]error{"k-1": err})
					stop := run(t, db, f, cfg, define(marked, bad.run))
					f.deliver(t, series("k", 1, 2)...)
					list := parked(t, db)
					require.Equal(t, []any{projector.ClassUnknown, projector.StateWaiting, 1}, []any{list[0].Class, list[0].State, list[0].Attempts})
					bad.fix()
					time.Sleep(5 * time.Second)
					require.NoError(t, stop())
					require.Equal(t, upTo(2), noted(db, "a", "k"))
				})
			})
		}
	}
}

// If the store cannot park a message for a while, the worker retries, and does not ack the message
// before.
func TestParkingIsRetriedUntilItSucceeds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		until := time.Now().Add(10 * time.Second)
		store := &faulty{unit: db}
		store.do = func(ctx context.Context, u provider.Unit, run handle) error {
			return db.Do(ctx, u, func(ctx context.Context, tx txn, found provider.Found) (provider.Closing, error) {
				c, err := run(ctx, tx, found)
				if len(c.Park) > 0 && time.Now().Before(until) {
					err = errors.New("no room")
				}
				return c, err
			})
		}
		bad := newFaults(map[string]error{"k-1": errNo})
		stop := run(t, store, f, projector.RunnerConfig{}, define(marked, bad.run))
		sent := f.send(keyed("k", 1))
		synctest.Wait()
		sent = append(sent, f.send(msg("x", "who knows", `{}`))...)
		time.Sleep(9 * time.Second)
		require.False(t, isAcked(sent[0]) || isAcked(sent[1]))
		require.Equal(t, 1, bad.tried("k-1"), "the handler does not run again")
		acked(t, sent...)
		require.NoError(t, stop())
		require.ElementsMatch(t, []string{"k-1", "x"}, []string{parked(t, db)[0].MessageID, parked(t, db)[1].MessageID})
	})
}

// A redelivery to the same runner waits until its message is parked.
func TestRedeliveryWaitsUntilItsMessageIsParked(t *testing.T) {
	t.Parallel()
	for _, opts := range []projector.Options{marked, {}} {
		t.Run(fmt.Sprint("markers ", opts.Markers), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				until := time.Now().Add(time.Minute)
				store := &faulty{unit: db}
				store.do = func(ctx context.Context, u provider.Unit, run handle) error {
					return db.Do(ctx, u, func(ctx context.Context, tx txn, found provider.Found) (provider.Closing, error) {
						c, err := run(ctx, tx, found)
						if len(c.Park) > 0 && time.Now().Before(until) {
							err = errBusy
						}
						return c, err
					})
				}
				bad := newFaults(map[string]error{"k-1": errNever})
				stop := run(t, store, f, projector.RunnerConfig{Concurrency: 4}, define(opts, bad.run))
				m := keyed("k", 1)
				delete(m.Metadata, outbox.HeaderKey)
				delete(m.Metadata, provider.HeaderStream) // it holds no other message
				for range 3 {
					f.send(m)
					time.Sleep(15 * time.Second)
				}
				time.Sleep(2 * time.Minute)
				require.NoError(t, stop())
				require.Equal(t, 1, bad.tried("k-1"))
				require.Equal(t, []string{"k-1 stuck permanent 1"}, rows(parked(t, db)))
			})
		})
	}
}

// A service that the handlers call may be down. Then every message fails, and the backlog should
// stay in the broker.
// Promise: G6.6
func TestWorkerBacksOffWhenEveryMessageFails(t *testing.T) {
	t.Parallel()
	for name, batch := range map[string]int{"units of one": 1, "units of many": 32} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription, 64)
				bad := newFaults(map[string]error{})
				for n := 1; n <= 40; n++ {
					f <- keyed(fmt.Sprint("m", n), 1)
					if n != 20 {
						bad.set(fmt.Sprint("m", n, "-1"), errNo)
					}
				}
				stop := run(t, db, f, projector.RunnerConfig{Batch: batch, Retry: claim.Backoff{Base: time.Hour}}, define(marked, bad.run))
				time.Sleep(20 * time.Minute)
				require.NoError(t, stop())
				var last time.Duration
				var pauses []time.Duration
				for n := 1; n <= 25; n++ {
					at := bad.at[fmt.Sprint("m", n, "-1")]
					pauses = append(pauses, at[0]-last)
					last = at[len(at)-1]
				}
				ms, s := time.Millisecond, time.Second
				require.Equal(t, []time.Duration{0, 0, 0, 100 * ms, 200 * ms, 400 * ms, 800 * ms, 1600 * ms, 3200 * ms, 6400 * ms, 12800 * ms, 25600 * ms, 30 * s, 30 * s}, pauses[:14])
				require.Equal(t, []time.Duration{30 * s, 0, 0, 0, 100 * ms}, pauses[19:24], "the 20th is applied")
			})
		})
	}
}

// The attempt count is in the row, so it is kept across runners.
// Promise: G6.10
func TestAttemptsAreKeptAcrossRunners(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		bad := newFaults(map[string]error{"k-1": errNo})
		p := define(marked, bad.run)
		f := make(subscription)
		stop := run(t, db, f, projector.RunnerConfig{}, p)
		f.deliver(t, keyed("k", 1))
		time.Sleep(200 * time.Millisecond)
		require.NoError(t, stop())
		require.Equal(t, []string{"k-1 waiting unknown 2"}, rows(parked(t, db)))
		stop = run(t, db, make(subscription), projector.RunnerConfig{}, p)
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Equal(t, []string{"k-1 stuck unknown 5"}, rows(parked(t, db)))
		require.Equal(t, 5, bad.tried("k-1"))
	})
}

// Two runners get the same failing message: each attempt is counted once.
// Promise: G6.10
func TestTwoRunnersShareTheAttemptCount(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		bad := newFaults(map[string]error{"k-1": errNo})
		one, other := make(subscription), make(subscription)
		p := define(marked, bad.run)
		stopOne, stopOther := run(t, db, one, projector.RunnerConfig{}, p), run(t, db, other, projector.RunnerConfig{}, p)
		m := recorded(keyed("k", 1), time.Now().Add(time.Second))
		acked(t, append(one.send(m), other.send(m)...)...)
		time.Sleep(time.Minute)
		require.NoError(t, stopOne())
		require.NoError(t, stopOther())
		require.Equal(t, []string{"k-1 stuck unknown 5"}, rows(parked(t, db)))
		require.LessOrEqual(t, bad.tried("k-1"), 6, "both may have failed before either parked the message")
	})
}

func TestAttemptLimitMayBeAnyNumberOrNone(t *testing.T) {
	t.Parallel()
	for limit, want := range map[int]string{1: "k-1 stuck unknown 1", 3: "k-1 stuck unknown 3", -1: "k-1 waiting unknown 20"} {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				bad := newFaults(map[string]error{"k-1": errNo})
				stop := run(t, db, f, projector.RunnerConfig{Retry: claim.Backoff{Attempts: limit}}, define(marked, bad.run))
				f.deliver(t, keyed("k", 1))
				for bad.tried("k-1") < 20 && limit < 0 || time.Since(bad.began) < time.Minute {
					time.Sleep(time.Second)
				}
				require.NoError(t, stop())
				require.Equal(t, want, rows(parked(t, db))[0])
			})
		})
	}
}
