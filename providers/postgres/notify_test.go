package postgres_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// notifying returns a DB as another process would open it.
func notifying(t testing.TB, dsn string, on bool) *postgres.DB {
	t.Helper()
	db, err := postgres.Open(context.Background(), dsn, &postgres.Config{Route: outbox.ByCategory, Notify: on})
	require.NoError(t, err)
	t.Cleanup(db.Close)
	return db
}

// appendOne appends an event that makes an entry.
func appendOne(t testing.TB, db *postgres.DB, stream string) {
	t.Helper()
	_, err := db.Append(context.Background(), stream, eventstore.Any, drafts(t, 1))
	require.NoError(t, err)
}

// listen runs a listener for db until the test ends. If hears is set, it waits until the listener
// is connected.
func listen(t testing.TB, db *postgres.DB, cfg *postgres.ListenerConfig, hears bool) {
	t.Helper()
	first := db.Enqueued()
	l, err := postgres.NewListener(db, cfg)
	require.NoError(t, err)
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	t.Cleanup(func() { stop(); require.NoError(t, <-done) })
	<-l.Running()
	if hears {
		patience.Receive(t, first, "the listener to connect")
	}
}

// logs collects the text of a logger.
type logs struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logs) count(what string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), what)
}

func (l *logs) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// ear returns a connection that listens to the notifications of a database.
func ear(t testing.TB, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(context.Background(), dsn)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	_, err = conn.Exec(context.Background(), "listen kinora_outbox_kinora")
	require.NoError(t, err)
	return conn
}

// hear waits for one notification and returns its payload.
func hear(t testing.TB, conn *pgx.Conn) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience.Limit())
	defer cancel()
	n, err := conn.WaitForNotification(ctx)
	require.NoError(t, err)
	return n.Payload
}

func TestAnAppendInAnotherProcessWakes(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil)
	here, there := notifying(t, dsn, false), notifying(t, dsn, true)
	listen(t, here, nil, true)
	for i := range 20 {
		woken := here.Enqueued()
		appendOne(t, there, fmt.Sprintf("review-%d", i))
		patience.Receive(t, woken, "the append of another process") // Enqueued does not poll
	}
}

func TestNotificationsAreFewAndTheLastOneIsSent(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil)
	db, conn := notifying(t, dsn, true), ear(t, dsn)
	const writers, each = 8, 250
	begin := time.Now()
	var all sync.WaitGroup
	for w := range writers {
		all.Go(func() {
			for range each {
				appendOne(t, db, fmt.Sprintf("review-%d", w))
			}
		})
	}
	all.Wait()
	took := time.Since(begin)
	db.Close()
	_, err := conn.Exec(t.Context(), `select pg_notify('kinora_outbox_kinora', 'end')`)
	require.NoError(t, err)
	n := 0
	for hear(t, conn) != "end" {
		n++
	}
	t.Logf("%d appends in %s sent %d notifications", writers*each, took.Round(time.Millisecond), n)
	require.Positive(t, n)
	require.LessOrEqual(t, n, int(took/(10*time.Millisecond))+2, "at most one in 10ms")
}

// An append during a notification, or less than the pause after one, gets another notification,
// even if the process ends at once.
func TestCloseSendsTheLastNotification(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil)
	conn := ear(t, dsn)
	for i := range 20 {
		db := notifying(t, dsn, true)
		appendOne(t, db, "review-1")
		require.Empty(t, hear(t, conn))
		appendOne(t, db, "review-1")
		if i%2 == 0 {
			db.Close()
		}
		require.Empty(t, hear(t, conn))
	}
}

func TestOnlyAppendsWithNotifyNotify(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil)
	off, on, conn := notifying(t, dsn, false), notifying(t, dsn, true), ear(t, dsn)
	for range 20 {
		appendOne(t, off, "review-1")
	}
	require.NoError(t, pgx.BeginFunc(t.Context(), on.Pool(), func(tx pgx.Tx) error {
		return on.InTx(tx).Enqueue(t.Context(), outbox.Message{Topic: "t", Key: "k", Payload: []byte("{}")})
	}))
	off.Close()
	on.Close()
	_, err := conn.Exec(t.Context(), `select pg_notify('kinora_outbox_kinora', 'end')`)
	require.NoError(t, err)
	require.Equal(t, "end", hear(t, conn))
}

// The first notification is sent at once, and one for all requests within 10ms of its end. Close
// sends a requested one, and waits at most a second if none can be sent.
func TestOneNotificationServesManyRequests(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		var sent []time.Duration
		n := postgres.NewNotifier(func(context.Context) {
			sent = append(sent, time.Since(begin))
			time.Sleep(time.Millisecond)
		})
		for range 25 {
			n.Ask()
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		require.Equal(t, []time.Duration{0, 11 * time.Millisecond, 22 * time.Millisecond}, sent)
		// for requests made while the third one was sent
		n.Close()
		n.Close()
		n.Ask()
		synctest.Wait()
		require.Equal(t, []time.Duration{0, 11 * time.Millisecond, 22 * time.Millisecond, 25 * time.Millisecond}, sent)
	})
	synctest.Test(t, func(t *testing.T) {
		n := postgres.NewNotifier(func(ctx context.Context) { <-ctx.Done() })
		begin := time.Now()
		n.Ask()
		n.Ask()
		n.Close()
		require.Equal(t, time.Second, time.Since(begin))
	})
}

const endListeners = `select count(pg_terminate_backend(pid)) from pg_stat_activity
	where datname = current_database() and pid <> pg_backend_pid() and query = 'listen kinora_outbox_kinora'`

func TestAListenerReconnectsAndWakes(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil)
	here, there := notifying(t, dsn+"&pool_max_conns=1", false), notifying(t, dsn, true)
	said := &logs{}
	listen(t, here, &postgres.ListenerConfig{Logger: said.logger()}, true)
	for range 3 {
		woken := here.Enqueued()
		require.Equal(t, 1, count(t, there, endListeners))
		patience.Receive(t, woken, "the listener to connect again") // notifications may have been missed
		woken = here.Enqueued()
		appendOne(t, there, "review-1")
		patience.Receive(t, woken, "a notification")
	}
	require.Equal(t, 3, said.count("level=WARN"), said.text.String())
}

func TestAHalfOpenListenerIsNoticed(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil)
	proxy := pgtest.NewProxy(t, dsn)
	here, there := notifying(t, dsn, false), notifying(t, dsn, true)
	listen(t, here, &postgres.ListenerConfig{DSN: proxy.DSN, Probe: 500 * time.Millisecond, Logger: (&logs{}).logger()}, true)
	woken := here.Enqueued()
	proxy.Mute()
	patience.Receive(t, woken, "the listener to connect again")
	woken = here.Enqueued()
	appendOne(t, there, "review-1")
	patience.Receive(t, woken, "a notification")
}

func TestAListenerOutlivesABusyPool(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil)
	here, there := notifying(t, dsn+"&pool_max_conns=1", false), notifying(t, dsn, true)
	said := &logs{}
	listen(t, here, &postgres.ListenerConfig{Probe: 300 * time.Millisecond, Logger: said.logger()}, true)
	conn, err := here.Pool().Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	patience.Until(t, func() bool { return said.count("level=DEBUG") >= 3 }, "three probes")
	woken := here.Enqueued()
	appendOne(t, there, "review-1")
	patience.Receive(t, woken, "a notification")
	require.Zero(t, said.count("level=WARN"), said.text.String())
}

func TestNewListenerRefuses(t *testing.T) {
	t.Parallel()
	_, err := postgres.NewListener(nil, nil)
	require.Error(t, err)
	db := notifying(t, postgrestest.DSN(t, nil), false)
	_, err = postgres.NewListener(db, &postgres.ListenerConfig{Probe: -1})
	require.ErrorContains(t, err, "Probe")
	_, err = postgres.NewListener(db, &postgres.ListenerConfig{DSN: "postgres://h:port/"})
	require.Error(t, err)
	l, err := postgres.NewListener(db, nil)
	require.NoError(t, err)
	ended, end := context.WithCancel(t.Context())
	end()
	require.NoError(t, l.Run(ended))
	require.ErrorContains(t, l.Run(ended), "called twice")
}
