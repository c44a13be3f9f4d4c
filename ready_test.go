package kinora_test

import (
	"context"
	"database/sql"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/stretchr/testify/require"
)

// becomes waits until h replies with status and a body that matches.
func becomes(t *testing.T, h http.Handler, status int, body string) {
	t.Helper()
	patience.NoError(t, func() error {
		if is, text := probe(t, h); is != status || !regexp.MustCompile(body).MatchString(text) {
			return fmt.Errorf("status %d and %s, not %d and %s", status, body, is, text)
		}
		return nil
	})
}

func ready(t *testing.T, cfg kinora.ReadyConfig) http.Handler {
	t.Helper()
	cfg.Again = time.Millisecond
	if cfg.Timeout == 0 {
		cfg.Timeout = patience.Limit()
	}
	h, err := kinora.Ready(cfg)
	require.NoError(t, err)
	return h
}

// A service is not ready while its database is away or not migrated, its log is held back, or its
// projector is behind. It is ready again after that.
// Promise: G13.6
func TestReadyOnPostgreSQL(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t)
	proxy := pgtest.NewProxy(t, server.DSN)
	db, err := postgres.Open(t.Context(), proxy.DSN, nil)
	require.NoError(t, err)
	t.Cleanup(db.Close)
	p := projector.Define("ratings", rating, projector.Options{}, projector.On("rated",
		func(context.Context, pgx.Tx, eventstore.Event[rated]) error { return nil }))
	h := ready(t, kinora.ReadyConfig{Store: db})
	const ok = `^{"ok":true,"checks":\[{"name":"database","ok":true},{"name":"schema","ok":true},{"name":"log","ok":true`

	becomes(t, h, 503, `{"name":"schema","ok":false,"reason":"the database does not fit the program`)
	require.NoError(t, db.Migrate(t.Context()))
	becomes(t, h, 200, ok)

	proxy.Away(true)
	becomes(t, h, 503, `{"name":"database","ok":false,"reason":"`)
	require.NoError(t, server.Restart("INT"))
	_, body := probe(t, h)
	require.NotContains(t, body, "postgres", "the body has no connection string, and no text of an error")
	proxy.Away(false)
	becomes(t, h, 200, ok)

	open := ready(t, kinora.ReadyConfig{Store: db, Open: 100 * time.Millisecond})
	becomes(t, open, 200, ok)
	tx, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	rate(t, db.InTx(tx), "review-1", 1)
	rate(t, db, "review-2", 1)
	becomes(t, open, 503, `{"name":"log","ok":false,"age_seconds":.*"reason":"an open append holds back the log"}`)
	require.NoError(t, tx.Commit(t.Context()))
	becomes(t, open, 200, ok)

	lag := ready(t, kinora.ReadyConfig{Store: db, Projectors: []kinora.Projector{p}, Lag: time.Second})
	becomes(t, lag, 503, `{"name":"lag ratings","ok":false,"reason":"no runner has read the log for it"}`)
	run := func() (stop func()) {
		runner, err := projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{}, p)
		require.NoError(t, err)
		return start(t, runner)
	}
	stop := run()
	becomes(t, lag, 200, `{"name":"lag ratings","ok":true}`) // it has applied everything
	stop()
	rate(t, db, "review-1", 3)
	becomes(t, lag, 503, `{"name":"lag ratings","ok":false,"age_seconds":[1-9].*,"events":3,"reason":"behind by more than 1s"}`)
	stop = run()
	becomes(t, lag, 200, ok)
	stop()
}

// Promise: G13.6
func TestReadyOnSQLite(t *testing.T) {
	t.Parallel()
	db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "events.db"), nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	p := projector.Define("ratings", rating, projector.Options{}, projector.On("rated",
		func(context.Context, *sql.Tx, eventstore.Event[rated]) error { return nil }))
	h := ready(t, kinora.ReadyConfig{Store: db, Projectors: []kinora.Projector{p}, Lag: time.Second})
	becomes(t, h, 503, `{"name":"schema","ok":false`)
	require.NoError(t, db.Migrate(t.Context()))
	becomes(t, h, 503, `{"name":"lag ratings","ok":false`)
	runner, err := projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{}, p)
	require.NoError(t, err)
	stop := start(t, runner)
	becomes(t, h, 200, `{"name":"lag ratings","ok":true}`)
	stop()
	rate(t, db, "review-1", 1)
	becomes(t, h, 503, `"events":1,"reason":"behind by more than 1s"`)
}

// Promise: G7.10
func TestReadyWaitsForNewHandlers(t *testing.T) {
	t.Parallel()
	db, err := memory.New(nil)
	require.NoError(t, err)
	of := func(l projector.Lag) http.Handler {
		return ready(t, kinora.ReadyConfig{Store: db, Projectors: []kinora.Projector{&lagging{l}}})
	}
	becomes(t, of(projector.Lag{NotBegun: []string{"ratings/renamed"}}), 503,
		`{"name":"lag ratings","ok":false,"reason":"new handlers do not take events yet"}`)
	becomes(t, of(projector.Lag{}), 200, `{"name":"lag ratings","ok":true}`)
}

// lagging is a projector with this lag.
type lagging struct{ lag projector.Lag }

func (*lagging) Name() string { return "ratings" }

func (l *lagging) Lag(context.Context, projector.State) (projector.Lag, error) { return l.lag, nil }

// slowStore counts checks, and does not reply until it is released, whatever the context.
type slowStore struct {
	projector.State
	calls   atomic.Int64
	release chan struct{}
}

func (s *slowStore) LogPosition(ctx context.Context, from eventstore.From) (int64, error) {
	s.calls.Add(1)
	<-s.release
	return s.State.LogPosition(ctx, from)
}

// Probes at the same time share one check, and none takes longer than the timeout, even if the
// store does not return.
// Promise: G13.6
func TestReadyIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, err := memory.New(nil)
		require.NoError(t, err)
		store := &slowStore{State: db, release: make(chan struct{})}
		h, err := kinora.Ready(kinora.ReadyConfig{Store: store, Timeout: time.Second})
		require.NoError(t, err)
		for range 3 {
			var all sync.WaitGroup
			began := time.Now()
			for range 50 {
				all.Go(func() {
					status, body := probe(t, h)
					require.Equal(t, 503, status)
					require.Contains(t, body, "no reply in time")
				})
			}
			all.Wait()
			require.Equal(t, time.Second, time.Since(began))
		}
		require.EqualValues(t, 1, store.calls.Load())
		close(store.release)
		synctest.Wait()
		time.Sleep(2 * time.Second)
		for range 10 {
			status, body := probe(t, h)
			require.Equal(t, 200, status, body)
		}
		require.EqualValues(t, 2, store.calls.Load(), "an answer is used again for a second")
	})
}

func TestReadyRefusesAWrongConfiguration(t *testing.T) {
	t.Parallel()
	db, err := memory.New(nil)
	require.NoError(t, err)
	for _, cfg := range []kinora.ReadyConfig{{}, {Store: db, Lag: -1}, {Store: db, Projectors: []kinora.Projector{nil}}} {
		_, err := kinora.Ready(cfg)
		require.ErrorContains(t, err, "ready: ")
	}
	h, err := kinora.Ready(kinora.ReadyConfig{Store: db})
	require.NoError(t, err)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/", nil))
	require.Equal(t, http.StatusMethodNotAllowed, w.Code)
}
