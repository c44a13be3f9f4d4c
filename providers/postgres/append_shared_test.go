package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// appender is one caller of the mixture. Its stream has all events that it has appended.
type appender struct {
	db      *postgres.DB
	stream  string
	version int64
	last    []eventstore.Draft  // of the last append to its stream
	acked   []string            // ids in its stream, in order
	ended   map[string][]string // those of its earlier streams
	hot     []string            // ids in the stream of all
	unknown map[string]bool     // ids of appends whose result is not known
	refused []string            // ids of appends that have failed
	kinds   map[string]int
}

// step makes one append, and checks its result.
func (a *appender) step(t *testing.T) error {
	ctx, kind := t.Context(), rand.IntN(12)
	events := drafts(t, 1, 2)[:1+rand.IntN(2)]
	stream, expected := a.stream, eventstore.Expected(a.version)
	var want error
	switch {
	case kind == 0:
		expected, want = expected+7, eventstore.ErrConflict
	case kind == 1 && a.last != nil:
		events, expected = a.last, eventstore.Expected(a.version-int64(len(a.last)))
	case kind == 2 && a.last != nil:
		stream, events, expected, want = "other-"+a.stream[2:], a.last, eventstore.Any, eventstore.ErrEventIDReused
	case kind == 3:
		taken := uuid.NewString()
		if err := enqueued(ctx, a.db, taken); err != nil {
			return nil // the connection was terminated
		}
		events = events[:1]
		events[0].ID, want = taken, eventstore.ErrEventIDReused
	case kind <= 5:
		stream, expected = "hot-1", eventstore.Any
	case kind == 6:
		var end context.CancelFunc
		ctx, end = context.WithTimeout(ctx, time.Duration(rand.IntN(3000))*time.Microsecond)
		defer end()
	}
	at, err := a.db.Append(ctx, stream, expected, events)
	return a.judge(ctx, stream, events, at, err, want, kind == 1)
}

func (a *appender) judge(ctx context.Context, stream string, events []eventstore.Draft, at eventstore.Appended, err, want error, again bool) error {
	ids := make([]string, len(events))
	for i := range events {
		ids[i] = events[i].ID
	}
	unknown := func(kind string) {
		a.kinds[kind]++
		for _, id := range ids {
			a.unknown[id] = true
		}
		if stream == a.stream { // it may still be appended: continue with another stream
			a.ended[a.stream] = a.acked
			a.stream, a.version, a.last, a.acked = a.stream+"x", 0, nil, nil
		}
	}
	switch {
	case want == nil && err == nil && again && a.last != nil:
		a.kinds["repeat"]++
		if !slices.Equal(ids, a.acked[len(a.acked)-len(ids):]) || at.Version != a.version {
			return fmt.Errorf("repeat of %v is at %d", ids, at.Version)
		}
	case want == nil && err == nil && stream == "hot-1":
		a.kinds["hot"]++
		a.hot = append(a.hot, ids...)
	case want == nil && err == nil:
		a.kinds["append"]++
		if a.version += int64(len(ids)); at.Version != a.version || at.Count != len(ids) {
			return fmt.Errorf("append of %d to %s at %d: %+v", len(ids), stream, a.version, at)
		}
		a.acked, a.last = append(a.acked, ids...), events
	case want != nil && errors.Is(err, want):
		a.kinds[want.Error()]++
		var conflict *eventstore.ConflictError
		if errors.As(err, &conflict) && conflict.Actual != a.version {
			return fmt.Errorf("the actual version is %d: %w", a.version, err)
		}
	case errors.Is(err, eventstore.ErrAmbiguous):
		unknown("ambiguous")
	case ctx.Err() != nil || strings.Contains(err.Error(), "57P01"):
		a.kinds["canceled or terminated"]++
		a.refused = append(a.refused, ids...)
	default:
		return fmt.Errorf("want %w, got %w", want, err)
	}
	return nil
}

// enqueued adds a message with an id to the outbox, for the topic of the appender's events.
func enqueued(ctx context.Context, db *postgres.DB, id string) error {
	return pgx.BeginFunc(ctx, db.Pool(), func(tx pgx.Tx) error {
		return db.InTx(tx).Enqueue(ctx, outbox.Message{ID: id, Topic: "a", Key: "k", Payload: []byte("x")})
	})
}

// TestAppendsThatShareACommit: 64 callers whose appends succeed, conflict, repeat, reuse ids and are
// canceled, while connections are terminated. Each gets its own result.
// Promise: G1.13
func TestAppendsThatShareACommit(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, &postgres.Config{Route: outbox.ByCategory}, totals)
	killer, err := pgxpool.New(t.Context(), db.Pool().Config().ConnString())
	require.NoError(t, err)
	defer killer.Close()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var kills sync.WaitGroup
	kills.Go(func() {
		for ctx.Err() == nil {
			_, _ = killer.Exec(t.Context(), `select pg_terminate_backend(pid) from pg_stat_activity
				where datname = current_database() and pid <> pg_backend_pid() and state = 'active' order by random() limit 2`)
			wait(ctx, 50*time.Millisecond)
		}
	})
	callers := make([]*appender, 64)
	for i := range callers {
		callers[i] = &appender{db: db, stream: fmt.Sprint("a-", i), ended: map[string][]string{}, unknown: map[string]bool{}, kinds: map[string]int{}}
	}
	patience.Until(t, func() bool {
		var all sync.WaitGroup
		for _, a := range callers {
			all.Go(func() {
				for range 30 {
					if err := a.step(t); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		all.Wait()
		return t.Failed() || !slices.ContainsFunc(sharedKinds, func(kind string) bool {
			return !slices.ContainsFunc(callers, func(a *appender) bool { return a.kinds[kind] > 0 })
		})
	}, "appends of all kinds")
	stop()
	kills.Wait()
	requireShared(t, db, callers)
}

// sharedKinds are the results that appends that share a transaction must have had.
var sharedKinds = []string{"append", "hot", "repeat", "canceled or terminated", eventstore.ErrConflict.Error(), eventstore.ErrEventIDReused.Error()}

// requireShared compares the streams with the results of the callers.
func requireShared(t *testing.T, db *postgres.DB, callers []*appender) {
	t.Helper()
	hot, unknown := map[string]int{}, map[string]bool{}
	for _, a := range callers {
		a.ended[a.stream] = a.acked
		for stream, acked := range a.ended {
			var stored []string
			for e, err := range db.ReadStream(t.Context(), stream, 0) {
				require.NoError(t, err)
				if !a.unknown[e.ID] {
					stored = append(stored, e.ID)
				}
			}
			require.Equal(t, acked, stored, stream)
		}
		for _, id := range a.refused {
			require.Zero(t, count(t, db, `select count(*) from kinora.events where id = '`+id+`'`), "an append that was refused")
		}
		for _, id := range a.hot {
			hot[id]++
		}
		for id := range a.unknown {
			unknown[id] = true
		}
	}
	for e, err := range db.ReadStream(t.Context(), "hot-1", 0) {
		require.NoError(t, err)
		if !unknown[e.ID] {
			hot[e.ID]--
		}
	}
	for id, n := range hot {
		require.Zero(t, n, id)
	}
	events := count(t, db, `select count(*) from kinora.events`)
	require.Equal(t, events, count(t, db, `select count(*) from kinora.outbox where message_id in (select id::text from kinora.events)`), "entries of events")
}

// locked returns a DB, and locks the row of the stream a-locked until unlock is called.
func locked(t *testing.T) (db *postgres.DB, unlock func()) {
	t.Helper()
	db = postgrestest.OpenBusy(t, nil)
	_, err := db.Append(t.Context(), "a-locked", eventstore.Any, drafts(t, 1))
	require.NoError(t, err)
	tx, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `select from kinora.streams where stream = 'a-locked' for update`)
	require.NoError(t, err)
	return db, func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }
}

// TestALockedStreamDelaysNoOtherAppendForLong: the transactions of appends wait for the row of a stream,
// which another transaction has locked.
// Promise: G1.13
func TestALockedStreamDelaysNoOtherAppendForLong(t *testing.T) {
	t.Parallel()
	db, unlock := locked(t)
	defer unlock()
	ends := make(chan error, 100)
	for i := range 100 {
		stream := fmt.Sprint("a-", i)
		if i == 50 {
			stream = "a-locked"
		}
		go func() {
			_, err := db.Append(t.Context(), stream, eventstore.Any, drafts(t, 2))
			ends <- err
		}()
	}
	for range 99 {
		require.NoError(t, patience.Receive(t, ends, "the appends to other streams"))
	}
	require.Empty(t, ends)
	unlock()
	require.NoError(t, <-ends)
}

// TestLockedStreamsStopNoOtherAppend: appends that run alone wait for the row of a stream, as many as run at
// a time.
// Promise: G1.13
func TestLockedStreamsStopNoOtherAppend(t *testing.T) {
	t.Parallel()
	db, unlock := locked(t)
	defer unlock()
	blocked := postgres.MostAppends(db)
	ends := make(chan error, blocked)
	for i := range blocked {
		go func() {
			_, err := db.Append(t.Context(), "a-locked", eventstore.Any, drafts(t, 2))
			ends <- err
		}()
		patience.Until(t, func() bool {
			return count(t, db, waitingSQL) == i+1
		}, "append %d to wait for the row", i)
	}
	_, err := db.Append(patience.Context(t), "a-other", eventstore.Any, drafts(t, 3))
	require.NoError(t, err)
	unlock()
	for range blocked {
		require.NoError(t, <-ends)
	}
}

// waitingAppends waits until n appends wait for the next transaction.
func waitingAppends(t *testing.T, db *postgres.DB, n int) {
	t.Helper()
	patience.Until(t, func() bool { return postgres.WaitingAppends(db) == n }, "%d appends that wait", n)
}

// Promise: G1.13
func TestAppendsThatWaitShareATransaction(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	release := postgres.HoldAppends(db)
	const callers = 40
	ends := make(chan error, callers)
	for i := range callers {
		go func() {
			_, err := db.Append(t.Context(), fmt.Sprint("b-", i), eventstore.NoStream, drafts(t, i))
			ends <- err
		}()
	}
	waitingAppends(t, db, callers)
	release()
	for range callers {
		require.NoError(t, <-ends)
	}
	require.Equal(t, callers, count(t, db, `select count(*) from kinora.events where stream like 'b-%'`))
	require.Equal(t, 1, count(t, db, `select count(distinct xmin::text) from kinora.events where stream like 'b-%'`))
}

// TestACanceledAppendThatWaitsIsNotAmbiguous: nothing is sent if the append waits for its turn, or its
// transaction for a connection.
// Promise: G1.13
func TestACanceledAppendThatWaitsIsNotAmbiguous(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"turn", "connection"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, nil)
			_, err := db.Append(t.Context(), "a-1", eventstore.Any, drafts(t, 1)) // identifies the log
			require.NoError(t, err)
			release := postgres.HoldAppends(db)
			ctx, cancel := context.WithCancel(t.Context())
			ended, other := make(chan error, 1), make(chan error, 1)
			go func() {
				_, err := db.Append(ctx, "b-1", eventstore.Any, drafts(t, 3))
				ended <- err
			}()
			go func() {
				_, err := db.Append(t.Context(), "b-2", eventstore.Any, drafts(t, 3))
				other <- err
			}()
			waitingAppends(t, db, 2)
			var conns []*pgxpool.Conn
			if what == "connection" {
				for range db.Pool().Config().MaxConns {
					conn, err := db.Pool().Acquire(t.Context())
					require.NoError(t, err)
					conns = append(conns, conn)
				}
				release()
				waitingAppends(t, db, 0)
			}
			cancel()
			err = <-ended
			require.ErrorIs(t, err, context.Canceled)
			require.NotErrorIs(t, err, eventstore.ErrAmbiguous)
			for _, conn := range conns {
				conn.Release()
			}
			if what == "turn" {
				release()
			}
			require.NoError(t, <-other)
			require.Zero(t, count(t, db, `select count(*) from kinora.events where stream = 'b-1'`))
		})
	}
}
