package otel_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/kinora-go/kinora/task"
	"github.com/kinora-go/kinora/telemetry/otel"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	promexport "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// The secret is in everything that telemetry and logs must not show.
const secret = "canary-3f9c1d"

// measured is what a service has reported.
type measured struct {
	tel      *otel.Telemetry
	reader   *metric.ManualReader
	registry *prometheus.Registry
	spans    *tracetest.SpanRecorder
	logs     *buffer
	lacks    string // what a test waits for
}

// buffer is a bytes.Buffer for several goroutines.
type buffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

func newMeasured(t *testing.T) *measured {
	t.Helper()
	m := &measured{reader: metric.NewManualReader(), registry: prometheus.NewRegistry(), spans: tracetest.NewSpanRecorder(), logs: &buffer{}}
	exporter, err := promexport.New(promexport.WithRegisterer(m.registry), promexport.WithoutScopeInfo(), promexport.WithoutTargetInfo())
	require.NoError(t, err)
	m.tel, err = otel.New(otel.Config{
		MeterProvider:  metric.NewMeterProvider(metric.WithReader(m.reader), metric.WithReader(exporter)),
		TracerProvider: sdk.NewTracerProvider(sdk.WithSpanProcessor(m.spans)),
		Every:          time.Millisecond, Timeout: patience.Limit(),
	})
	require.NoError(t, err)
	return m
}

// broker loses the messages of the topic "lost", and refuses those of "down" and those with the text "refuse".
type broker struct{ message.Publisher }

func (b broker) Publish(topic string, ms ...*message.Message) error {
	switch topic {
	case "lost":
		return nil
	case "down":
		return errors.New("refused: " + secret)
	}
	if slices.ContainsFunc(ms, func(m *message.Message) bool { return strings.Contains(string(m.Payload), "refuse") }) {
		return errors.New("refused: " + secret)
	}
	return b.Publisher.Publish(topic, ms...)
}

// run runs a service with everything that can be measured, for as long as until is false: a relay, a
// projector on a broker, a worker, and a store that is watched.
func run(t *testing.T, until func(m *measured) bool) *measured {
	t.Helper()
	m := newMeasured(t)
	log := slog.New(slog.NewJSONHandler(m.logs, &slog.HandlerOptions{Level: slog.LevelDebug}))
	db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "events.db"), &sqlite.Config{Route: outbox.ByCategory})
	require.NoError(t, err)
	defer func() { require.NoError(t, db.Close()) }()
	require.NoError(t, db.Migrate(t.Context()))

	var later atomic.Bool // the text "later" was refused once
	unread := projector.Define("unread", types, projector.Options{}, projector.On("posted", func(context.Context, *sql.Tx, eventstore.Event[posted]) error { return nil }))
	ratings := projector.Define("ratings", types, projector.Options{Markers: true}, projector.OnEmit("posted",
		func(_ context.Context, _ *sql.Tx, e eventstore.Event[posted]) ([]outbox.Message, error) {
			if strings.HasPrefix(e.Data.Text, "bad") {
				return nil, projector.Permanent(errors.New("a bad review: " + secret))
			}
			if e.Data.Text == "later" && !later.Swap(true) {
				return nil, &projector.Error{Class: projector.ClassTransient, Code: "away", Err: errors.New("a service is away: " + secret)}
			}
			return []outbox.Message{{Topic: "moderation", Payload: []byte(e.Data.Text)}}, nil
		}))
	channel := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	runner, err := projector.NewRunner(db, projector.Subscribe(channel, "review", "lost", "down"), projector.RunnerConfig{
		Observer: m.tel.Runner(), Grace: 100 * time.Millisecond, Logger: log,
	}, ratings)
	require.NoError(t, err)
	relay, err := outbox.NewRelay(db, broker{channel}, &outbox.RelayConfig{Observer: m.tel.Relay(), Logger: log, Keep: outbox.EntryRetention{Published: time.Minute}})
	require.NoError(t, err)
	kind := task.Define("mail/send", func(ctx context.Context, r *task.Run[*sql.Tx], to string) (int, error) {
		n, err := task.Step(ctx, r, "deliver", func(context.Context, string) (int, error) {
			if strings.HasPrefix(to, "bad") {
				return 0, task.Permanent(errors.New("no such mailbox: " + secret))
			}
			return 1, nil
		}, nil)
		return n, err
	})
	worker, err := task.NewWorker(db, task.WorkerConfig{Observer: m.tel.Worker(), Logger: log, Backoff: claim.Backoff{Base: time.Hour}}, kind)
	require.NoError(t, err)
	stop, err := m.tel.Watch(db, ratings)
	require.NoError(t, err)
	stopFailing, err := m.tel.Watch(&stubborn{State: db, fails: true}, unread)
	require.NoError(t, err)
	group, err := kinora.Start(t.Context(), runner, worker, relay)
	require.NoError(t, err)

	meta := eventstore.Metadata{CorrelationID: secret + "-correlation", Actor: secret + "-actor", Extra: map[string]string{secret + "-header": secret}}
	ctx := eventstore.WithMetadata(t.Context(), meta)
	live := func() bool {
		c, err := db.Checkpoint(t.Context(), provider.Build{Projector: "ratings"})
		return err == nil && c.Mode == provider.ModeLive
	}
	patience.Until(t, live, "the projector to go live")
	for _, category := range []string{"review", "lost", "down"} {
		repo, err := eventstore.NewRepository(db, types, category, func(string) *review { return &review{} }, &eventstore.RepositoryConfig{OnUpdate: m.tel.Update})
		require.NoError(t, err)
		for n := range 12 {
			_, err = repo.Update(ctx, fmt.Sprint(secret, n), post("good "+secret))
			require.NoError(t, err)
		}
		_, err = repo.Update(ctx, secret+"1", func(*review) ([]any, error) { return nil, errors.New(secret) })
		require.Error(t, err)
	}
	repo, err := eventstore.NewRepository(db, types, "review", func(string) *review { return &review{} }, &eventstore.RepositoryConfig{OnUpdate: m.tel.Update})
	require.NoError(t, err)
	for n, text := range []string{"later", "bad " + secret} {
		_, err = repo.Update(ctx, fmt.Sprint(secret, n), post(text))
		require.NoError(t, err)
	}
	require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		return db.TasksIn(tx).Enqueue(ctx, kind.New("1", "good"), kind.New("2", "bad"))
	}))
	require.NoError(t, db.Transact(ctx, func(ctx context.Context, tx *sql.Tx) error { // they are claimed together
		for id, text := range map[string]string{"a": "refuse", "b": "good", "c": "good"} {
			if _, err := repo.UpdateTx(ctx, db.InTx(tx), secret+id, post(text)); err != nil {
				return err
			}
		}
		return nil
	}))
	newer, err := types.Encode(ctx, posted{}) // of a schema version that no program knows
	require.NoError(t, err)
	newer[0].Schema = 9
	_, err = db.Append(ctx, "review-newer", eventstore.Any, newer)
	require.NoError(t, err)
	patience.NoError(t, func() error {
		if !until(m) {
			return errors.New(m.lacks)
		}
		return nil
	})
	require.NoError(t, stop())
	require.NoError(t, stopFailing())
	require.NoError(t, group.Stop())
	require.NoError(t, channel.Close())
	return m
}

// collect returns the metrics that m has reported, by name.
func (m *measured) collect(t *testing.T) map[string]metricdata.Metrics {
	t.Helper()
	var all metricdata.ResourceMetrics
	require.NoError(t, m.reader.Collect(t.Context(), &all))
	found := map[string]metricdata.Metrics{}
	for _, s := range all.ScopeMetrics {
		for _, one := range s.Metrics {
			found[one.Name] = one
		}
	}
	return found
}
