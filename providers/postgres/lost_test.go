package postgres_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

type counted struct{ N int }

var table = eventstore.NewTypes(eventstore.Type[counted]("counted"))

func drafts(t testing.TB, ns ...int) []eventstore.Draft {
	t.Helper()
	var values []any
	for _, n := range ns {
		values = append(values, counted{n})
	}
	ds, err := table.Encode(t.Context(), values...)
	require.NoError(t, err)
	return ds
}

// throughProxy returns a database through a proxy that can lose replies, and the same database
// without it.
func throughProxy(t *testing.T) (*pgtest.Proxy, *postgres.DB, *postgres.DB) {
	t.Helper()
	cfg := &postgres.Config{Route: outbox.ByCategory}
	direct := postgrestest.OpenBusy(t, cfg, totals)
	proxy := pgtest.NewProxy(t, direct.Pool().Config().ConnString())
	db, err := postgres.Open(t.Context(), proxy.DSN, cfg)
	require.NoError(t, err)
	t.Cleanup(db.Close)
	return proxy, db, direct
}

// borrowed returns a DB on a pool of the test, with a changed configuration.
func borrowed(t testing.TB, cfg *postgres.Config, dsn string, change ...func(*pgxpool.Config)) *postgres.DB {
	t.Helper()
	config, err := pgxpool.ParseConfig(dsn)
	require.NoError(t, err)
	for _, f := range change {
		f(config)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	db, err := postgres.New(pool, cfg)
	require.NoError(t, err)
	return db
}

func count(t *testing.T, db *postgres.DB, query string) (n int) {
	t.Helper()
	require.NoError(t, db.Pool().QueryRow(t.Context(), query).Scan(&n))
	return n
}

// The statement commits at its Sync, and the reply to that is lost.
// Promise: G1.5
func TestAppendWhoseReplyIsLostIsWrittenOnce(t *testing.T) {
	t.Parallel()
	for name, expected := range map[string]eventstore.Expected{"exact": 1, "no stream": eventstore.NoStream, "any": eventstore.Any} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proxy, db, direct := throughProxy(t)
			_, err := db.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
			require.NoError(t, err)
			stream, before := "a-1", int64(1)
			if expected == eventstore.NoStream {
				stream, before = "a-2", 0
			}
			if expected != eventstore.NoStream { // so that no Parse comes first
				_, err = db.Append(t.Context(), "a-9", eventstore.Any, drafts(t, 1))
				require.NoError(t, err)
				_, err = db.Append(t.Context(), "a-9", 1, drafts(t, 1))
				require.NoError(t, err)
			}
			entries := count(t, direct, `select count(*) from kinora.outbox`)
			proxy.LoseReply(func(kind byte, _ []byte) bool { return kind == 'B' })
			at, err := db.Append(t.Context(), stream, expected, drafts(t, 2, 3))
			require.NoError(t, err)
			require.Equal(t, 1, proxy.Lost())
			require.Equal(t, eventstore.Appended{Stream: stream, Version: before + 2, Position: at.Position, Count: 2, Log: at.Log}, at)
			require.Equal(t, entries+2, count(t, direct, `select count(*) from kinora.outbox`))
			require.Equal(t, int(before)+2, count(t, direct, `select count(*) from kinora.events where stream = '`+stream+`'`))
			require.Equal(t, int(at.Position), count(t, direct, `select max(position) from kinora.events`))
		})
	}
}

// The server has replied that nothing was written. Even if the reply about the reason is lost,
// the append is a repeat.
func TestARepeatIsFoundEvenIfALaterReplyIsLost(t *testing.T) {
	t.Parallel()
	proxy, db, direct := throughProxy(t)
	same := drafts(t, 1)
	first, err := db.Append(t.Context(), "a-1", eventstore.NoStream, same)
	require.NoError(t, err)
	binds := 0
	proxy.LoseReply(func(kind byte, _ []byte) bool {
		if kind == 'B' {
			binds++
		}
		return binds == 2
	})
	again, err := db.Append(t.Context(), "a-1", eventstore.NoStream, same)
	require.NoError(t, err)
	require.Equal(t, 1, proxy.Lost())
	first.Replayed = true
	require.Equal(t, first, again)
	require.Equal(t, 1, count(t, direct, `select count(*) from kinora.events`))
}

// A pooler that lost its server replies in its place, and does not know the result of the
// request.
// Promise: G1.5
func TestAPoolersFatalReplyIsAmbiguous(t *testing.T) {
	t.Parallel()
	proxy, db, direct := throughProxy(t)
	proxy.AnswerFatal()
	_, err := db.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
	require.NoError(t, err)
	proxy.LoseReply(func(kind byte, _ []byte) bool { return kind == 'B' })
	at, err := db.Append(t.Context(), "a-2", eventstore.NoStream, drafts(t, 1))
	require.NoError(t, err)
	require.Equal(t, int64(1), at.Version)
	require.Equal(t, 2, count(t, direct, `select count(*) from kinora.events`))

	proxy.LoseReply(isCommit)
	work := marked("m")
	err = do(t.Context(), db, work, func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
		return nil, add(ctx, tx, "k", 1)
	})
	require.Equal(t, provider.ClassAmbiguous, provider.ClassOf(err), "%v", err)
	require.Equal(t, 2, proxy.Lost())
}

// The number of round trips of each call, once its statements are prepared.
func TestRoundTrips(t *testing.T) {
	t.Parallel()
	proxy, db, _ := throughProxy(t)
	n := 0
	stream := func() string { n++; return fmt.Sprintf("a-%d", n) }
	unit := func() provider.Unit {
		n++
		return marked(fmt.Sprint(n))
	}
	for name, c := range map[string]struct {
		trips int
		call  func() error
	}{
		"append one event": {1, func() error {
			_, err := db.Append(t.Context(), stream(), eventstore.NoStream, drafts(t, 1))
			return err
		}},
		"append ten events": {1, func() error {
			_, err := db.Append(t.Context(), stream(), eventstore.Any, drafts(t, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10))
			return err
		}},
		"claim": {1, func() error {
			_, err := db.ClaimEntries(t.Context(), provider.EntryQuery{}, terms(t))
			return err
		}},
		"a unit with a marker and one statement: begin with the marker, statement, commit": {3, func() error {
			return do(t.Context(), db, unit(), func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
				return nil, add(ctx, tx, "k", 1)
			})
		}},
		"a unit without markers": {3, func() error {
			return do(t.Context(), db, provider.Unit{Projector: "p"}, func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
				return nil, add(ctx, tx, "k", 1)
			})
		}},
		"a transaction with an append: begin, append, the transaction's number, commit": {4, func() error {
			return db.Transact(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				_, err := db.InTx(tx).Append(ctx, stream(), eventstore.NoStream, drafts(t, 1))
				return err
			})
		}},
		"a unit that only writes, markers, output and commit included": {1, func() error {
			return queue(t.Context(), db, unit(), func(_ context.Context, b *pgx.Batch) ([]outbox.Message, error) {
				b.Queue(addSQL, "k", 1)
				return []outbox.Message{{Topic: "t"}}, nil
			})
		}},
	} {
		require.NoError(t, c.call(), name) // prepares the statements
		before := proxy.RoundTrips()
		require.NoError(t, c.call(), name)
		require.Equal(t, c.trips, proxy.RoundTrips()-before, name)
	}
}

func isCommit(kind byte, body []byte) bool {
	return kind == 'Q' && bytes.HasPrefix(bytes.ToLower(body), []byte("commit"))
}

// Promise: G4.3
func TestUnitWhoseCommitReplyIsLostIsAmbiguousAndTakesEffectOnce(t *testing.T) {
	t.Parallel()
	proxy, db, direct := throughProxy(t)
	work := marked("m")
	apply := func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
		return nil, add(ctx, tx, "k", 1)
	}
	proxy.LoseReply(isCommit)
	err := do(t.Context(), db, work, apply)
	require.Equal(t, provider.ClassAmbiguous, provider.ClassOf(err), "%v", err)
	require.Equal(t, 1, proxy.Lost())
	require.NoError(t, do(t.Context(), db, work, apply), "after a redelivery, the marker decides")
	require.Equal(t, 1, count(t, direct, `select n from totals where key = 'k'`))
}

// Promise: G4.3
func TestBatchedUnitWhoseReplyIsLostIsAmbiguousAndTakesEffectOnce(t *testing.T) {
	t.Parallel()
	proxy, db, direct := throughProxy(t)
	do := func(id string) error {
		work := marked(id)
		return queue(t.Context(), db, work, func(_ context.Context, b *pgx.Batch) ([]outbox.Message, error) {
			b.Queue(addSQL, "k", 1)
			return nil, nil
		})
	}
	require.NoError(t, do("first")) // prepares the statements
	proxy.LoseReply(func(kind byte, _ []byte) bool { return kind == 'B' })
	err := do("m")
	require.Equal(t, provider.ClassAmbiguous, provider.ClassOf(err), "%v", err)
	require.NoError(t, do("m"))
	require.Equal(t, 2, count(t, direct, `select n from totals where key = 'k'`))
}

// A connection that broke while idle is closed after five seconds, and another one is used.
func TestAnIdleConnectionThatDoesNotReplyIsReplaced(t *testing.T) {
	t.Parallel()
	proxy, db, _ := throughProxy(t)
	_, err := db.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
	require.NoError(t, err)
	// pgx checks only connections that were idle for a second
	time.Sleep(1100 * time.Millisecond)
	proxy.Mute()
	_, err = db.Append(patience.Context(t), "a-1", 1, drafts(t, 2))
	require.NoError(t, err)
}

// Close does not wait long for a connection in use or on a broken network.
// Promise: G9.3
func TestCloseHasALimit(t *testing.T) {
	t.Parallel()
	db, err := postgres.Open(t.Context(), postgrestest.DSN(t, nil), nil)
	require.NoError(t, err)
	conn, err := db.Pool().Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	closed := make(chan struct{})
	go func() { db.Close(); close(closed) }()
	patience.Receive(t, closed, "Close, although a connection is in use")
}

// The server rolled the append back and would accept it now: the caller gets no error.
// Promise: G1.3
func TestAppendIsTriedAgainAfterADeadlock(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		state string
		tries int // tries that fail
	}{{"40P01", 3}, {"40001", 3}, {"40001", 1000}} {
		t.Run(fmt.Sprint(c.state, " ", c.tries), func(t *testing.T) {
			t.Parallel()
			db := postgrestest.Open(t, &postgres.Config{Route: outbox.ByCategory})
			_, err := db.Pool().Exec(t.Context(), fmt.Sprintf(`
				create sequence tries; -- it also counts what is rolled back
				create function refuse() returns trigger language plpgsql as $$ begin
					if nextval('tries') <= %d then raise exception 'not now' using errcode = '%s'; end if;
					return new;
				end $$;
				create trigger refuse before insert on kinora.outbox for each row execute function refuse()`, c.tries, c.state))
			require.NoError(t, err)
			if c.tries == 1000 {
				limit := 250 * time.Millisecond
				patience.Until(t, func() bool { // a context that ends in a pause between tries
					limit *= 2
					ctx, cancel := context.WithTimeout(t.Context(), limit)
					defer cancel()
					_, err = db.Append(ctx, "a-1", eventstore.NoStream, drafts(t, 1))
					require.Error(t, err)
					return strings.Contains(err.Error(), c.state)
				}, "the error of the last try")
				require.NotErrorIs(t, err, eventstore.ErrAmbiguous)
				require.Zero(t, count(t, db, `select count(*) from kinora.events`))
				return
			}
			at, err := db.Append(patience.Context(t), "a-1", eventstore.NoStream, drafts(t, 1))
			require.NoError(t, err)
			require.Equal(t, eventstore.Appended{Stream: "a-1", Version: 1, Position: at.Position, Count: 1, Log: at.Log}, at)
			require.Equal(t, 1, count(t, db, `select count(*) from kinora.events`))
			require.Equal(t, 1, count(t, db, `select count(*) from kinora.outbox`))
			require.Equal(t, c.tries+1, count(t, db, `select last_value from tries`))
		})
	}
}

// A handler that keeps its transaction cannot write through it after the unit has ended.
func TestAKeptTransactionIsClosed(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, totals)
	var kept pgx.Tx
	for id, fails := range map[string]error{"m1": nil, "m2": errors.New("no")} {
		err := do(t.Context(), db, marked(id), func(_ context.Context, tx pgx.Tx) ([]outbox.Message, error) {
			kept = tx
			return nil, fails
		})
		require.ErrorIs(t, err, fails)
		_, err = kept.Exec(t.Context(), addSQL, "k", 1)
		require.ErrorIs(t, err, pgx.ErrTxClosed)
	}
	require.Zero(t, count(t, db, `select count(*) from totals`))
}
