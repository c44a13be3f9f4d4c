package projector_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type posted struct{ Stars int }
type unhandled struct{}

var types = eventstore.NewTypes(eventstore.Type[posted]("posted"), eventstore.Type[unhandled]("unhandled"))

type (
	txn     = *memory.Model
	onEvent = func(context.Context, txn, eventstore.Event[posted]) error
)

// add counts e's stars in the read model.
func add(_ context.Context, tx txn, e eventstore.Event[posted]) error {
	n, _ := tx.Get("totals", "stars")
	sum, _ := n.(int)
	tx.Put("totals", "stars", sum+e.Data.Stars)
	return nil
}

func total(db *memory.DB, table string) int {
	n := 0
	db.View(func(m *memory.Model) {
		v, _ := m.Get(table, "stars")
		n, _ = v.(int)
	})
	return n
}

func newDB(t *testing.T) *memory.DB {
	t.Helper()
	db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
	require.NoError(t, err)
	return db
}

// feed is a subscriber whose messages the test sends by hand.
type feed chan *message.Message

func (f feed) Subscribe(context.Context, string) (<-chan *message.Message, error) { return f, nil }
func (feed) Close() error                                                         { return nil }

func msg(id, eventType, payload string) *message.Message {
	m := message.NewMessage(id, []byte(payload))
	m.Metadata[outbox.HeaderType] = eventType
	m.Metadata[outbox.HeaderKey] = "review-1"
	m.Metadata[outbox.HeaderStream] = "review-1"
	return m
}

// deliver sends a copy of m and waits until it is acked; a message that was nacked fails the test.
func (f feed) deliver(t *testing.T, m *message.Message) {
	t.Helper()
	c := m.Copy()
	f <- c
	select {
	case <-c.Acked():
	case <-c.Nacked():
		t.Fatal("nacked")
	}
}

// unit is all that a runner uses of a provider.
type unit interface {
	projector.UnitOfWork[txn]
	projector.Journal
	projector.ParkedInspector
	marker.Keeper
}

// run starts a runner of ps over f until the returned function stops it.
func run(t *testing.T, u unit, f feed, cfg projector.RunnerConfig, ps ...*projector.Projector[txn]) (stop func() error) {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	r, err := projector.NewRunner(u, projector.Subscribe(f, "review"), &cfg, ps...)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	<-r.Running()
	return func() error {
		cancel()
		return <-done
	}
}

func define(opts projector.Options, fns ...onEvent) *projector.Projector[txn] {
	var hs []projector.Handler[txn]
	for i, fn := range fns {
		hs = append(hs, projector.On(string(rune('a'+i)), fn))
	}
	return projector.Define("p", types, opts, hs...)
}

var marked = projector.Options{Markers: true}

func parked(t *testing.T, db *memory.DB) []projector.Parked {
	t.Helper()
	list, err := db.ParkedMessages(t.Context(), projector.ParkedFilter{Projector: "p"})
	require.NoError(t, err)
	return list
}

func TestRedeliveryTakesEffectOnce(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		opts projector.Options
		want int
	}{
		"with markers":         {marked, 5 + 3},
		"the control, without": {projector.Options{}, 3*5 + 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, f := newDB(t), make(feed)
			stop := run(t, db, f, projector.RunnerConfig{}, define(c.opts, add))
			for range 3 {
				f.deliver(t, msg("1", "posted", `{"Stars":5}`))
			}
			f.deliver(t, msg("2", "posted", `{"Stars":3}`))
			require.NoError(t, stop())
			require.Equal(t, c.want, total(db, "totals"))
		})
	}
}

// Many runners, as many processes of one consumer group would be, get the same message at the same moment.
func TestConcurrentDuplicatesTakeEffectOnce(t *testing.T) {
	t.Parallel()
	const runners, messages = 16, 50
	db := newDB(t)
	var log bytes.Buffer
	cfg := projector.RunnerConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))}
	feeds := make([]feed, runners)
	for i := range feeds {
		feeds[i] = make(feed)
		stop := run(t, db, feeds[i], cfg, define(marked, add))
		defer func() { require.NoError(t, stop()) }()
	}
	for i := range messages {
		m := msg(string(rune('A'+i)), "posted", `{"Stars":1}`)
		var all sync.WaitGroup
		for _, f := range feeds {
			all.Go(func() {
				c := m.Copy()
				f <- c
				<-c.Acked()
			})
		}
		all.Wait()
	}
	require.Equal(t, messages, total(db, "totals"))
	require.Empty(t, log.String(), "the loser of a race reports no error")
}

func TestHandlersDedupeIndependently(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		failures := 2
		flaky := func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			tx.Put("flaky", "stars", e.Data.Stars)
			if failures--; failures >= 0 {
				return errors.New("not yet")
			}
			return nil
		}
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, add, flaky))
		f.deliver(t, msg("1", "posted", `{"Stars":5}`))
		f.deliver(t, msg("1", "posted", `{"Stars":5}`))
		require.NoError(t, stop())
		require.Equal(t, 5, total(db, "totals"), "the handler before it did not run again")
		require.Equal(t, 5, total(db, "flaky"))
	})
}

func TestWhatCannotBeHandledIsParkedWithItsPayload(t *testing.T) {
	t.Parallel()
	noID, noType := msg("", "posted", `{"Stars":1}`), msg("2", "", `{"Stars":2}`)
	newer := msg("5", "posted", `{}`)
	newer.Metadata[outbox.HeaderSchema] = "9"
	for name, c := range map[string]struct {
		m             *message.Message
		handler, code string
	}{
		"no id":             {noID, "", "malformed"},
		"no type":           {noType, "", "malformed"},
		"unregistered type": {msg("3", "who knows", `{"Stars":3}`), "", "unregistered"},
		"undecodable":       {msg("4", "posted", `{"Stars":"four"}`), "p/a", "undecodable"},
		"no JSON":           {msg("6", "posted", "\x00\xff"), "p/a", "undecodable"},
		"newer schema":      {newer, "p/a", "unregistered"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, f := newDB(t), make(feed)
			stop := run(t, db, f, projector.RunnerConfig{Version: "v7"}, define(marked, add))
			f.deliver(t, c.m)
			f.deliver(t, keyed("next", 1))
			require.NoError(t, stop())
			require.Equal(t, 1, total(db, "totals"), "the neighbour goes on")
			list := parked(t, db)
			require.Len(t, list, 1)
			got := list[0]
			require.False(t, got.At.IsZero())
			require.Equal(t, projector.Parked{
				Seq: got.Seq, At: got.At, Projector: "p", Handler: c.handler, MessageID: c.m.UUID, Topic: "review", Key: "review-1",
				Type: c.m.Metadata[outbox.HeaderType], Holds: true, Version: "v7",
				Payload: c.m.Payload, Headers: c.m.Metadata, Class: projector.PermanentClass, Code: c.code, Attempts: 1,
			}, got)
		})
	}
}

func TestUnhandledAndUnknownTypesAreSkipped(t *testing.T) {
	t.Parallel()
	db, f := newDB(t), make(feed)
	stop := run(t, db, f, projector.RunnerConfig{}, define(projector.Options{Unknown: projector.SkipUnknown}, add))
	f.deliver(t, msg("1", "unhandled", `{}`))
	f.deliver(t, msg("2", "who knows", `{}`))
	require.NoError(t, stop())
	require.Empty(t, parked(t, db))
}

// tries runs one message through a handler that fails, and tells when it was tried.
func tries(t *testing.T, fn func(n int) error) (at []time.Duration, db *memory.DB) {
	t.Helper()
	db, f := newDB(t), make(feed)
	begin := time.Now()
	stop := run(t, db, f, projector.RunnerConfig{}, define(marked, func(_ context.Context, tx txn, _ eventstore.Event[posted]) error {
		at = append(at, time.Since(begin))
		tx.Put("totals", "stars", len(at))
		return fn(len(at))
	}))
	f.deliver(t, msg("1", "posted", `{}`))
	require.NoError(t, stop())
	return at, db
}

func TestUnknownErrorsAreCountedThenParked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		at, db := tries(t, func(int) error { return errors.New("secret of a user") })
		ms := time.Millisecond
		require.Equal(t, []time.Duration{0, 100 * ms, 300 * ms, 700 * ms, 1500 * ms}, at)
		got := parked(t, db)
		require.Len(t, got, 1)
		require.Equal(t, projector.UnknownClass, got[0].Class)
		require.Equal(t, 5, got[0].Attempts)
		require.Zero(t, total(db, "totals"), "nothing of a failed unit stays")
	})
}

func TestPermanentErrorsAreParkedAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		at, db := tries(t, func(int) error { return projector.Permanent(errors.New("never")) })
		require.Len(t, at, 1)
		require.Len(t, parked(t, db), 1)
		require.Equal(t, projector.PermanentClass, parked(t, db)[0].Class)
	})
}

func TestTransientErrorsAreNeverCounted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		at, db := tries(t, func(n int) error {
			if n < 100 {
				return &projector.Error{Class: projector.Transient, Code: "57P01", Err: errors.New("away")}
			}
			return nil
		})
		require.Len(t, at, 100)
		require.Equal(t, 30*time.Second, at[99]-at[98], "the backoff has a ceiling")
		require.Empty(t, parked(t, db))
		require.Equal(t, 100, total(db, "totals"))
	})
}

func TestAmbiguousCommitIsDecidedByTheMarker(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		stop := run(t, &loseReply{unit: db}, f, projector.RunnerConfig{}, define(marked, add))
		f.deliver(t, msg("1", "posted", `{"Stars":5}`))
		require.NoError(t, stop())
		require.Equal(t, 5, total(db, "totals"))
		require.Empty(t, parked(t, db))
	})
}

// loseReply commits its first unit and says that it does not know.
type loseReply struct {
	unit
	done bool
}

func (l *loseReply) Do(ctx context.Context, w projector.Work, apply func(context.Context, txn, []int) ([]outbox.Message, error)) error {
	err := l.unit.Do(ctx, w, apply)
	if err == nil && !l.done {
		l.done = true
		return &projector.Error{Class: projector.Ambiguous, Err: errors.New("reply lost")}
	}
	return err
}

func TestPanicGoexitAndDeadlineAreIsolated(t *testing.T) {
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
				db, f := newDB(t), make(feed)
				stop := run(t, db, f, projector.RunnerConfig{Timeout: time.Second}, define(marked, fn, add))
				f.deliver(t, msg("1", "posted", `{"Stars":5}`))
				require.NoError(t, stop())
				require.Equal(t, 5, total(db, "totals"), "the other handler of the projector goes on")
				require.Len(t, parked(t, db), 1)
				require.Equal(t, code, parked(t, db)[0].Code)
				require.Equal(t, 5, parked(t, db)[0].Attempts)
			})
		})
	}
}

// An error that is a nil pointer is an error, whatever was meant, and ends nothing but its attempt; a fault that is none is none.
func TestErrorsThatAreNil(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		typed := func(context.Context, txn, eventstore.Event[posted]) error {
			var none *projector.Error
			return none
		}
		wrapped := func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			return fmt.Errorf("x: %w", typed(ctx, tx, e))
		}
		permanent := func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			return projector.Permanent(add(ctx, tx, e))
		}
		stop := run(t, db, f, projector.RunnerConfig{LogErrors: true}, define(marked, typed, wrapped, permanent))
		f.deliver(t, msg("1", "posted", `{"Stars":5}`))
		require.NoError(t, stop())
		require.Equal(t, []string{"1 p/a unknown", "1 p/b unknown"}, of(parked(t, db)))
		require.Equal(t, 5, total(db, "totals"))
	})
}

func TestATimeoutMayBeAsLongAsADurationCanBe(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		stop := run(t, db, f, projector.RunnerConfig{Timeout: math.MaxInt64, Lease: math.MaxInt64}, define(marked, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			time.Sleep(time.Hour)
			return errors.Join(ctx.Err(), add(ctx, tx, e))
		}))
		f.deliver(t, msg("1", "posted", `{"Stars":5}`))
		require.NoError(t, stop())
		require.Equal(t, 5, total(db, "totals"))
	})
}

func TestParkingIsTriedUntilItSucceeds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		stop := run(t, slowPark{db, time.Now().Add(10 * time.Second)}, f, projector.RunnerConfig{}, define(marked, add))
		f.deliver(t, msg("1", "who knows", `{}`))
		require.NoError(t, stop())
		require.Len(t, parked(t, db), 1)
	})
}

// A handler has all of its time from its own start: having waited for its turn is not held against it.
func TestWaitingForTheTransactionIsNotTheHandlersFault(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(feed)
		ctx, cancel := context.WithCancel(t.Context())
		hog := make(chan struct{})
		go func() { // another writer, which holds the turn nearly as long as a handler may take, again and again
			defer close(hog)
			for held := 10 * time.Second; ctx.Err() == nil; held = 900 * time.Millisecond {
				_ = db.Tx(ctx, func(*memory.Model) error { time.Sleep(held); return nil })
			}
		}()
		synctest.Wait()
		stop := run(t, db, f, projector.RunnerConfig{Timeout: time.Second}, define(marked, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			time.Sleep(200 * time.Millisecond)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return add(ctx, tx, e)
		}))
		f.deliver(t, msg("1", "posted", `{"Stars":5}`))
		require.NoError(t, stop())
		cancel()
		<-hog
		require.Equal(t, 5, total(db, "totals"))
		require.Empty(t, parked(t, db))
	})
}

// An error that says shutdown, from something that is not this runner's own, is the handler's like any other.
func TestSomebodyElsesShutdownIsAnErrorLikeAnyOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		at, db := tries(t, func(int) error { return &projector.Error{Class: projector.Shutdown, Err: context.Canceled} })
		require.Len(t, at, 5)
		require.Len(t, parked(t, db), 1)
	})
}
