package otel

import (
	"context"
	"strings"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
)

// Runner returns an observer for RunnerConfig.Observer.
func (t *Telemetry) Runner() projector.RunnerObserver {
	ctx := context.Background()
	of := func(projector string) attribute.KeyValue { return attribute.String(attrProjector, projector) }
	return projector.RunnerObserver{
		Processing: t.processing,
		Emitting:   t.emitting,
		Handled: func(handler string, skipped bool, waited, took time.Duration, err error) {
			outcome := "applied"
			switch {
			case err != nil:
				outcome = "failed"
			case skipped:
				outcome = "skipped"
			}
			in := []attribute.KeyValue{of(projectorOf(handler)), attribute.String(attrHandler, handler)}
			t.m.handled.Add(ctx, 1, metric.WithAttributes(append(in, attribute.String(attrOutcome, outcome))...))
			if outcome != "applied" {
				return
			}
			t.m.handlerTime.Record(ctx, took.Seconds(), metric.WithAttributes(in...))
			if waited > 0 {
				t.m.delay.Record(ctx, waited.Seconds(), metric.WithAttributes(in...))
			}
		},
		Unit: func(projector string, messages int, took time.Duration, err error) {
			in := []attribute.KeyValue{t.system(), attribute.String(attrGroup, projector), attribute.String(attrOperation, "process")}
			if err == nil {
				t.m.consumed.Add(ctx, int64(messages), metric.WithAttributes(in...))
			}
			t.m.processTime.Record(ctx, took.Seconds(), metric.WithAttributes(append(in, classified(err)...)...))
		},
		Retried: func(projector string, class projector.Class, _ time.Duration) {
			t.m.retries.Add(ctx, 1, metric.WithAttributes(of(projector), attribute.String(attrClass, class.String())))
		},
		Parked: func(projector, handler string, class projector.Class, code string) {
			t.m.parkings.Add(ctx, 1, metric.WithAttributes(of(projector), attribute.String(attrHandler, handler),
				attribute.String(attrClass, class.String()), attribute.String(attrCode, code)))
		},
		Replayed: func(projector string) { t.m.replays.Add(ctx, 1, metric.WithAttributes(of(projector))) },
		Pruned:   func(rows int) { t.m.pruned.Add(ctx, int64(rows)) },
		Completed: func(projector, reason string) {
			t.m.completed.Add(ctx, 1, metric.WithAttributes(of(projector), attribute.String(attrReason, reason)))
		},
		Unmarked: func(handler string) {
			t.m.unmarked.Add(ctx, 1, metric.WithAttributes(of(projectorOf(handler)), attribute.String(attrHandler, handler)))
		},
	}
}

// projectorOf returns the projector of the full name of a handler.
func projectorOf(handler string) string {
	name, _, _ := strings.Cut(handler, "/")
	return name
}

// processing implements projector.RunnerObserver.Processing.
func (t *Telemetry) processing(projector string, messages []eventstore.Raw) (context.Context, func(error)) {
	traceparents := make([]string, len(messages))
	for i := range messages {
		traceparents[i] = messages[i].Metadata.Traceparent
	}
	ctx, span := t.start("process "+projector, trace.SpanKindConsumer, traceparents,
		attribute.String(attrOperation, "process"), attribute.String(attrOperationType, "process"), attribute.String(attrGroup, projector))
	return ctx, func(err error) { end(span, classified(err)) }
}

// emitting implements projector.RunnerObserver.Emitting. Each message gets a span of its own. It is a
// child of the unit's span if the unit is in the trace of the cause. Otherwise it is a child of the
// cause, with a link to the unit.
func (t *Telemetry) emitting(ctx context.Context, handler string, output []outbox.Message) {
	unit := trace.SpanContextFromContext(ctx)
	for i := range output {
		m := &output[i]
		options := []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindProducer), trace.WithAttributes(
			t.system(), attribute.String(attrOperation, "emit"), attribute.String(attrOperationType, "create"),
			attribute.String(attrTopic, m.Topic), attribute.String(attrHandler, handler))}
		parent := ctx
		if cause := parse(m.Headers[header]); cause.IsValid() && cause.TraceID() != unit.TraceID() {
			parent = trace.ContextWithRemoteSpanContext(ctx, cause)
			options = append(options, trace.WithLinks(trace.Link{SpanContext: unit}))
		}
		_, span := t.tracer.Start(parent, "emit "+m.Topic, options...)
		if traceparent := format(span.SpanContext()); traceparent != "" {
			m.Headers[header] = traceparent
		}
		span.End()
	}
}
