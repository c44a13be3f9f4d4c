package otel_test

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/telemetry/otel"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/metric/noop"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	nooptrace "go.opentelemetry.io/otel/trace/noop"
)

const (
	childSpans = "KINORA_TEST_SPANS" // the file for the spans of the second process
	childDSN   = "KINORA_TEST_DSN"
)

type posted struct{ Text string }

var types = eventstore.NewTypes(eventstore.Type[posted]("review.posted"))

type review struct{ posted int }

func (r *review) Apply(any) { r.posted++ }

func post(texts ...string) func(*review) ([]any, error) {
	return func(*review) (all []any, err error) {
		for _, text := range texts {
			all = append(all, posted{text})
		}
		return all, nil
	}
}

// span is a span as the tests compare it.
type span struct {
	Name, Trace, ID, Parent string
	Links                   []string // the spans
	Kind                    string
	Failed                  string
	Text                    string // everything that was exported
}

func spanOf(s sdk.ReadOnlySpan) span {
	one := span{
		Name: s.Name(), Trace: s.SpanContext().TraceID().String(), ID: s.SpanContext().SpanID().String(),
		Kind: s.SpanKind().String(), Failed: s.Status().Description,
	}
	if s.Parent().IsValid() {
		one.Parent = s.Parent().SpanID().String()
	}
	for _, l := range s.Links() {
		one.Links = append(one.Links, l.SpanContext.SpanID().String())
	}
	one.Text = fmt.Sprintf("%+v", tracetest.SpanStubFromReadOnlySpan(s))
	return one
}

// telemetry returns a Telemetry of spans, and a function that returns those that have ended.
func telemetry(t *testing.T) (*otel.Telemetry, trace.TracerProvider, func() []span) {
	t.Helper()
	spans := tracetest.NewSpanRecorder()
	tracers := sdk.NewTracerProvider(sdk.WithSpanProcessor(spans))
	tel, err := otel.New(otel.Config{MeterProvider: noop.NewMeterProvider(), TracerProvider: tracers})
	require.NoError(t, err)
	return tel, tracers, func() (all []span) {
		for _, s := range spans.Ended() {
			all = append(all, spanOf(s))
		}
		return all
	}
}

func named(all []span, name string) (found []span) {
	for _, s := range all {
		if s.Name == name {
			found = append(found, s)
		}
	}
	return found
}

// topics returns the publisher and the subscriber of Watermill's topics in a database.
func topics(pool *sql.DB, group string) (message.Publisher, message.Subscriber, error) {
	schema := wsql.DefaultPostgreSQLSchema{}
	pub, err := wsql.NewPublisher(pool, wsql.PublisherConfig{SchemaAdapter: schema, AutoInitializeSchema: true}, watermill.NopLogger{})
	if err != nil {
		return nil, nil, err
	}
	sub, err := wsql.NewSubscriber(pool, wsql.SubscriberConfig{
		ConsumerGroup: group, SchemaAdapter: schema, OffsetsAdapter: wsql.DefaultPostgreSQLOffsetsAdapter{},
		InitializeSchema: true, PollInterval: 10 * time.Millisecond,
	}, watermill.NopLogger{})
	return pub, sub, err
}

// consume is the second process: it applies the reviews that a broker delivers, publishes the output, and
// writes its spans to a file, until standard input ends.
func consume(dsn, file string) {
	ctx := context.Background()
	must := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	out, err := os.Create(file)
	must(err)
	tracers := sdk.NewTracerProvider(sdk.WithSyncer(lines{json.NewEncoder(out)}))
	tel, err := otel.New(otel.Config{MeterProvider: noop.NewMeterProvider(), TracerProvider: tracers})
	must(err)
	db, err := postgres.Open(ctx, dsn, &postgres.Config{Route: outbox.ByCategory})
	must(err)
	pub, sub, err := topics(stdlib.OpenDBFromPool(db.Pool()), "ratings")
	must(err)
	ratings := projector.Define("ratings", types, projector.Options{Markers: true}, projector.OnEmit("posted",
		func(ctx context.Context, _ pgx.Tx, _ eventstore.Event[posted]) ([]outbox.Message, error) {
			_, work := tracers.Tracer("app").Start(ctx, "work of the handler")
			work.End()
			return []outbox.Message{{Topic: "moderation", Payload: []byte("{}")}}, nil
		}))
	runner, err := projector.NewRunner(db, projector.Subscribe(sub, "review"), projector.RunnerConfig{
		Observer: tel.Runner(), Grace: time.Hour, // a slow broker is waited for
	}, ratings)
	must(err)
	relay, err := outbox.NewRelay(db, pub, &outbox.RelayConfig{Topics: []string{"moderation"}, Observer: tel.Relay()})
	must(err)
	group, err := kinora.Start(ctx, runner, relay)
	must(err)
	fmt.Println("ready")
	_, err = io.ReadAll(os.Stdin)
	must(err)
	must(group.Stop())
	must(out.Close())
}

// lines is an exporter that writes each span as a line.
type lines struct{ to *json.Encoder }

func (l lines) ExportSpans(_ context.Context, spans []sdk.ReadOnlySpan) error {
	for _, s := range spans {
		if err := l.to.Encode(spanOf(s)); err != nil {
			return err
		}
	}
	return nil
}

func (lines) Shutdown(context.Context) error { return nil }

// The trace of a command goes from the append through the relay, the broker, the handler in another
// process and its output, to the message that this output becomes.
// Promise: G13.1
func TestTheTraceOfACommandCrossesProcessesAndABroker(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil)
	db, err := postgres.Open(t.Context(), dsn, &postgres.Config{Route: outbox.ByCategory})
	require.NoError(t, err)
	t.Cleanup(db.Close)
	pool := stdlib.OpenDBFromPool(db.Pool())
	t.Cleanup(func() { require.NoError(t, pool.Close()) })
	pub, sub, err := topics(pool, "test")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sub.Close()) })
	moderation, err := sub.Subscribe(t.Context(), "moderation")
	require.NoError(t, err)

	file := filepath.Join(t.TempDir(), "spans.json")
	program, err := os.Executable()
	require.NoError(t, err)
	child := exec.Command(program)
	child.Env = append(os.Environ(), childSpans+"="+file, childDSN+"="+dsn)
	child.Stderr = os.Stderr
	stdin, err := child.StdinPipe()
	require.NoError(t, err)
	stdout, err := child.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	t.Cleanup(func() { _ = child.Process.Kill() })
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ready\n", line)

	patience.Until(t, func() bool {
		c, err := db.Checkpoint(t.Context(), provider.Build{Projector: "ratings"})
		return err == nil && c.Mode == provider.ModeLive
	}, "the second process to apply what the broker delivers")

	tel, tracers, ended := telemetry(t)
	relay, err := outbox.NewRelay(db, pub, &outbox.RelayConfig{Topics: []string{"review"}, Observer: tel.Relay()})
	require.NoError(t, err)
	group, err := kinora.Start(t.Context(), relay)
	require.NoError(t, err)
	repo, err := eventstore.NewRepository(db, types, "review", func(string) *review { return &review{} },
		&eventstore.RepositoryConfig{OnUpdate: tel.Update})
	require.NoError(t, err)
	ctx, command := tracers.Tracer("app").Start(t.Context(), "command")
	_, err = repo.Update(ctx, "1", post("good"))
	require.NoError(t, err)
	command.End()

	output := patience.Receive(t, moderation, "the output")
	output.Ack()
	require.NoError(t, group.Stop())
	require.NoError(t, stdin.Close())
	require.NoError(t, child.Wait())

	all := ended()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	for line := range strings.Lines(string(text)) {
		var s span
		require.NoError(t, json.Unmarshal([]byte(line), &s))
		all = append(all, s)
	}
	one := func(name string) span {
		found := named(all, name)
		require.Len(t, found, 1, name)
		require.Equal(t, command.SpanContext().TraceID().String(), found[0].Trace, name)
		require.Empty(t, found[0].Links, name)
		return found[0]
	}
	appended, emitted := one("append review"), one("emit moderation")
	require.Equal(t, command.SpanContext().SpanID().String(), appended.Parent)
	require.Equal(t, appended.ID, one("publish review").Parent)
	process := one("process ratings")
	require.Equal(t, appended.ID, process.Parent)
	require.Equal(t, process.ID, one("work of the handler").Parent)
	require.Equal(t, process.ID, emitted.Parent)
	require.Equal(t, emitted.ID, one("publish moderation").Parent)
	require.Equal(t, "00-"+emitted.Trace+"-"+emitted.ID+"-01", output.Metadata["traceparent"])
	require.Equal(t, []string{"producer", "producer", "consumer", "producer"},
		[]string{appended.Kind, one("publish review").Kind, process.Kind, emitted.Kind})
}

// A unit and a Publish call of several messages have spans in traces of their own, with a link to the
// update of each message. Output stays in the trace of its cause.
// Promise: G13.1
func TestSpansOfBatchesHaveLinks(t *testing.T) {
	t.Parallel()
	db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
	require.NoError(t, err)
	tel, _, ended := telemetry(t)
	repo, err := eventstore.NewRepository(db, types, "review", func(string) *review { return &review{} },
		&eventstore.RepositoryConfig{OnUpdate: tel.Update})
	require.NoError(t, err)
	for _, id := range []string{"1", "2", "3"} {
		_, err := repo.Update(t.Context(), id, post("good"))
		require.NoError(t, err)
	}
	var appended []string
	traces := map[string]string{} // of the updates, by span
	for _, s := range named(ended(), "append review") {
		appended, traces[s.ID] = append(appended, s.ID), s.Trace
	}
	require.Len(t, appended, 3)

	p := projector.Define("ratings", types, projector.Options{}, projector.OnEmit("posted",
		func(context.Context, *memory.Model, eventstore.Event[posted]) ([]outbox.Message, error) {
			return []outbox.Message{{Topic: "moderation"}}, nil
		}))
	runner, err := projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{Observer: tel.Runner()}, p)
	require.NoError(t, err)
	relay, err := outbox.NewRelay(db, discard{}, &outbox.RelayConfig{Observer: tel.Relay()})
	require.NoError(t, err)
	group, err := kinora.Start(t.Context(), runner, relay)
	require.NoError(t, err)
	patience.Until(t, func() bool {
		lag, err := p.Lag(t.Context(), db)
		counts, countErr := db.StatusCounts(t.Context(), outbox.Pending, outbox.Claimed)
		return err == nil && countErr == nil && lag.Events == 0 && counts[outbox.Pending]+counts[outbox.Claimed] == 0
	}, "everything to be applied and published")
	require.NoError(t, group.Stop())

	for _, name := range []string{"process ratings", "publish review"} {
		found := slices.DeleteFunc(named(ended(), name), func(s span) bool { return len(s.Links) != 3 })
		require.Len(t, found, 1, name)
		require.ElementsMatch(t, appended, found[0].Links)
		require.Empty(t, found[0].Parent)
	}
	unit := named(ended(), "process ratings")[0]
	emitted := named(ended(), "emit moderation")
	require.Len(t, emitted, 3)
	for _, s := range emitted {
		require.Equal(t, traces[s.Parent], s.Trace, "it is in the trace of its cause")
		require.Equal(t, []string{unit.ID}, s.Links)
	}
}

// discard is a publisher that drops everything.
type discard struct{}

func (discard) Publish(string, ...*message.Message) error { return nil }
func (discard) Close() error                              { return nil }

// The Traceparent in the metadata of a context is the parent of an update without a span, and a tracer
// that does not record changes no metadata.
func TestAnUpdateContinuesTheTraceOfItsMetadata(t *testing.T) {
	t.Parallel()
	const parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	tel, _, ended := telemetry(t)
	meta := eventstore.Metadata{Traceparent: parent, Actor: "ann", Extra: map[string]string{"a": "b"}}
	ctx, end := tel.Update(eventstore.WithMetadata(t.Context(), meta), "review")
	end(eventstore.Appended{}, 0, eventstore.ErrConflict)
	s := ended()[0]
	require.Equal(t, "4bf92f3577b34da6a3ce929d0e0e4736", s.Trace)
	require.Equal(t, "00f067aa0ba902b7", s.Parent)
	require.Equal(t, "conflict", s.Failed)
	meta.Traceparent = "00-" + s.Trace + "-" + s.ID + "-01"
	require.Equal(t, meta, eventstore.MetadataFrom(ctx))

	off, err := otel.New(otel.Config{MeterProvider: noop.NewMeterProvider(), TracerProvider: nooptrace.NewTracerProvider()})
	require.NoError(t, err)
	meta.Traceparent = parent
	ctx, end = off.Update(eventstore.WithMetadata(t.Context(), meta), "review")
	end(eventstore.Appended{}, 0, nil)
	require.Equal(t, meta, eventstore.MetadataFrom(ctx))
}
