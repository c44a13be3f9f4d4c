// Package otel reports what Kinora does to OpenTelemetry, as metrics and spans.
//
//	tel, err := otel.New(otel.Config{})
//	repo, err := eventstore.NewRepository(db, types, "review", fresh, &eventstore.RepositoryConfig{OnUpdate: tel.Update})
//	relay, err := outbox.NewRelay(db, publisher, &outbox.RelayConfig{Observer: tel.Relay()})
//	runner, err := projector.NewRunner(db, source, projector.RunnerConfig{Observer: tel.Runner()}, ratings)
//	worker, err := task.NewWorker(db, task.WorkerConfig{Observer: tel.Worker()}, kinds...)
//	stop, err := tel.Watch(db, ratings)
//
// Spans follow a message: the update that appends the event, the Publish call of the relay, the unit
// that applies it, and the output of its handlers. The trace context is in the events and messages
// (eventstore.Metadata.Traceparent, the header traceparent).
//   - The span of an update is the parent of the others. If a Publish call or a unit has several
//     messages, its span is in a trace of its own, with a link to the update of each.
//   - A handler's context has the span of its unit, so what it does with this context belongs to it.
//   - Each message of output has a span, which is the parent of what follows.
//
// Names of metrics and attributes are those of OpenTelemetry's conventions for messaging, or begin with
// "kinora.". docs/telemetry.md lists them. Attributes have names of projectors, handlers, topics,
// categories and kinds of tasks, and classes and codes of errors. They never have ids, keys, streams,
// headers, payloads or texts of errors.
//
// For Prometheus, pass a MeterProvider that reads into OpenTelemetry's exporter for it.
package otel

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
)

// Config configures a Telemetry. The zero value is the default.
type Config struct {
	MeterProvider  metric.MeterProvider // nil means otel.GetMeterProvider()
	TracerProvider trace.TracerProvider // nil means otel.GetTracerProvider()
	// System is the attribute messaging.system: the broker, such as "kafka". Empty means "kinora".
	System string
	// Every is the shortest time between two queries of Watch. Zero means 15s.
	Every time.Duration
	// Timeout is how long the queries of Watch for one collection may take together. Zero means 5s.
	Timeout time.Duration
}

// Telemetry reports to OpenTelemetry. Create it with New. Any number of services may share it.
type Telemetry struct {
	cfg    Config
	tracer trace.Tracer
	m      instruments
}

// scope is the name of the instrumentation.
const scope = "github.com/kinora-go/kinora/telemetry/otel"

// New returns a Telemetry, or an error if a duration is negative or the MeterProvider refuses an instrument.
func New(cfg Config) (*Telemetry, error) {
	if cfg.Every < 0 || cfg.Timeout < 0 {
		return nil, fmt.Errorf("telemetry: every %s, timeout %s: must not be negative", cfg.Every, cfg.Timeout)
	}
	cfg.MeterProvider = cmp.Or(cfg.MeterProvider, otel.GetMeterProvider())
	cfg.TracerProvider, cfg.System = cmp.Or(cfg.TracerProvider, otel.GetTracerProvider()), cmp.Or(cfg.System, "kinora")
	cfg.Every, cfg.Timeout = cmp.Or(cfg.Every, 15*time.Second), cmp.Or(cfg.Timeout, 5*time.Second)
	t := &Telemetry{cfg: cfg, tracer: cfg.TracerProvider.Tracer(scope)}
	if err := t.m.create(cfg.MeterProvider.Meter(scope)); err != nil {
		return nil, fmt.Errorf("telemetry: %w", err)
	}
	return t, nil
}

// Update implements eventstore.RepositoryConfig.OnUpdate. The events get the trace context of its span.
// The parent is the span of ctx or, without one, the Traceparent of the Metadata of ctx.
func (t *Telemetry) Update(ctx context.Context, category string) (context.Context, func(at eventstore.Appended, conflicts int, err error)) {
	began := time.Now() //nolint:forbidigo // a duration, as this process sees it
	meta := eventstore.MetadataFrom(ctx)
	if !trace.SpanContextFromContext(ctx).IsValid() {
		ctx = trace.ContextWithRemoteSpanContext(ctx, parse(meta.Traceparent))
	}
	in := attribute.String(attrCategory, category)
	ctx, span := t.tracer.Start(ctx, "append "+category, trace.WithSpanKind(trace.SpanKindProducer), trace.WithAttributes(
		t.system(), attribute.String(attrOperation, "append"), attribute.String(attrOperationType, "create"), in))
	if header := format(span.SpanContext()); header != "" {
		meta.Traceparent = header
		ctx = eventstore.WithMetadata(ctx, meta)
	}
	return ctx, func(at eventstore.Appended, conflicts int, err error) {
		set := []attribute.KeyValue{in}
		if err != nil {
			set = append(set, attribute.String(attrError, updateError(err)))
		}
		t.m.updateTime.Record(ctx, time.Since(began).Seconds(), metric.WithAttributes(set...)) //nolint:forbidigo // as above
		t.m.conflicts.Add(ctx, int64(conflicts), metric.WithAttributes(in))
		if err == nil && !at.Replayed {
			t.m.appended.Add(ctx, int64(at.Count), metric.WithAttributes(in))
		}
		span.SetAttributes(attribute.Int(attrCount, at.Count))
		end(span, set[1:])
	}
}

// updateError returns a word for the error of an update. It may be an error of the caller.
func updateError(err error) string {
	switch {
	case errors.Is(err, eventstore.ErrConflict):
		return "conflict"
	case errors.Is(err, eventstore.ErrInvalid):
		return "invalid"
	}
	return typeOf(err)
}

func (t *Telemetry) system() attribute.KeyValue { return attribute.String(attrSystem, t.cfg.System) }
