package kinora_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/task"
	"github.com/stretchr/testify/require"
)

type rated struct{ Stars int }

var rating = eventstore.NewTypes(eventstore.Type[rated]("rated"))

// probe returns the status and the body of a reply of h.
func probe(t *testing.T, h http.Handler) (status int, body string) {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	require.Equal(t, "application/json", w.Header().Get("Content-Type"))
	require.True(t, json.Valid(w.Body.Bytes()))
	return w.Code, w.Body.String()
}

// rate appends n events to a stream.
func rate(t *testing.T, db eventstore.Store, stream string, n int) {
	t.Helper()
	for range n {
		drafts, err := rating.Encode(t.Context(), rated{Stars: 5})
		require.NoError(t, err)
		_, err = db.Append(t.Context(), stream, eventstore.Any, drafts)
		require.NoError(t, err)
	}
}

// slowPublisher waits for each message.
type slowPublisher struct{ wait func() error }

func (p slowPublisher) Publish(string, ...*message.Message) error { return p.wait() }
func (slowPublisher) Close() error                                { return nil }

func start(t *testing.T, s kinora.Service) (stop func()) {
	t.Helper()
	group, err := kinora.Start(t.Context(), s)
	require.NoError(t, err)
	return func() { require.NoError(t, group.Stop()) }
}

// A relay whose publisher does not return is not healthy, until it returns. A slow publisher is.
// Promise: G13.5
func TestHealthyWhileARelayPublishes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
		require.NoError(t, err)
		rate(t, db, "review-1", 20)
		var stalls atomic.Bool
		release := make(chan struct{})
		relay, err := outbox.NewRelay(db, slowPublisher{func() error {
			if !stalls.Load() {
				time.Sleep(50 * time.Second)
				return nil
			}
			<-release
			return nil
		}}, nil)
		require.NoError(t, err)
		healthy := kinora.Healthy(0, relay, newWorker("another service"))
		status, body := probe(t, healthy)
		require.Equal(t, 200, status, "it has not started: %s", body)
		stop := start(t, relay)
		for range 100 {
			time.Sleep(10 * time.Second)
			status, body := probe(t, healthy)
			require.Equal(t, 200, status, body)
		}
		stalls.Store(true)
		rate(t, db, "review-2", 1)
		time.Sleep(55 * time.Second)
		status, _ = probe(t, healthy)
		require.Equal(t, 200, status)
		time.Sleep(10 * time.Second)
		status, body = probe(t, healthy)
		require.Equal(t, 503, status)
		require.Regexp(t, `^{"ok":false,"loops":\[{"name":"relay","late_seconds":6\d(\.\d+)?,"ok":false}\]}`, body)
		close(release)
		synctest.Wait()
		status, body = probe(t, healthy)
		require.Equal(t, 200, status, body)
		stop()
	})
}

// A runner with a handler that does not return after its deadline is not healthy, until it returns.
// A slow handler is.
// Promise: G13.5
func TestHealthyWhileHandlersRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, err := memory.New(nil)
		require.NoError(t, err)
		release := make(chan struct{})
		p := projector.Define("ratings", rating, projector.Options{}, projector.On("rated",
			func(_ context.Context, _ *memory.Model, e eventstore.Event[rated]) error {
				if e.Stream == "review-2" {
					<-release
					return nil
				}
				time.Sleep(25 * time.Second)
				return nil
			}))
		rate(t, db, "review-1", 20)
		runner, err := projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{}, p)
		require.NoError(t, err)
		healthy := kinora.Healthy(0, runner)
		stop := start(t, runner)
		for range 60 {
			time.Sleep(10 * time.Second)
			status, body := probe(t, healthy)
			require.Equal(t, 200, status, body)
		}
		rate(t, db, "review-2", 1)
		time.Sleep(110 * time.Second) // the runner waits for it for a minute
		status, body := probe(t, healthy)
		require.Equal(t, 200, status, body)
		time.Sleep(20 * time.Second)
		status, body = probe(t, healthy)
		require.Equal(t, 503, status)
		require.Contains(t, body, `{"name":"handler ratings/rated","late_seconds":`)
		close(release)
		synctest.Wait()
		status, body = probe(t, healthy)
		require.Equal(t, 200, status, body)
		require.NotContains(t, body, "handler")
		stop()
	})
}

// A worker with a handler that does not return is not healthy, until it returns.
// Promise: G13.5
func TestHealthyWhileTasksRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, err := memory.New(nil)
		require.NoError(t, err)
		release := make(chan struct{})
		kind := task.Define[*memory.Model]("mail/send", func(context.Context, *task.Run[*memory.Model], rated) (int, error) {
			<-release
			return 0, nil
		})
		worker, err := task.NewWorker(db, task.WorkerConfig{}, kind)
		require.NoError(t, err)
		require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx *memory.Model) error {
			return db.TasksIn(tx).Enqueue(ctx, kind.New("1", rated{5}))
		}))
		healthy := kinora.Healthy(0, worker)
		stop := start(t, worker)
		time.Sleep(80 * time.Second)
		status, body := probe(t, healthy)
		require.Equal(t, 200, status, body)
		time.Sleep(20 * time.Second)
		status, body = probe(t, healthy)
		require.Equal(t, 503, status)
		require.Contains(t, body, `{"name":"task mail/send","late_seconds":`)
		close(release)
		synctest.Wait()
		status, body = probe(t, healthy)
		require.Equal(t, 200, status, body)
		stop()
	})
}

// A service that has ended with an error is not healthy.
// Promise: G13.5
func TestHealthyAfterAServiceHasEnded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, err := memory.New(nil)
		require.NoError(t, err)
		p := projector.Define("ratings", rating, projector.Options{Parking: projector.Halt}, projector.On("rated",
			func(context.Context, *memory.Model, eventstore.Event[rated]) error {
				return projector.Permanent(errors.New("no"))
			}))
		runner, err := projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{}, p)
		require.NoError(t, err)
		group, err := kinora.Start(t.Context(), runner)
		require.NoError(t, err)
		rate(t, db, "review-1", 1) // now: Start returns the error of a service that ends before it is running
		<-group.Ended()
		healthy := kinora.Healthy(10*time.Second, runner)
		time.Sleep(11 * time.Second)
		status, body := probe(t, healthy)
		require.Equal(t, 503, status, body)
		require.ErrorIs(t, group.Stop(), projector.ErrHalted)
	})
}
