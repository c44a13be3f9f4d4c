package otel

import (
	"context"
	"errors"
	"fmt"

	"github.com/kinora-go/kinora/internal/errclass"
	"github.com/kinora-go/kinora/provider"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// Attributes of OpenTelemetry's conventions for messaging.
const (
	attrSystem        = "messaging.system"
	attrOperation     = "messaging.operation.name"
	attrOperationType = "messaging.operation.type"
	attrTopic         = "messaging.destination.name"
	attrGroup         = "messaging.consumer.group.name" // the projector
	attrCount         = "messaging.batch.message_count"
	attrError         = "error.type"
)

// Attributes that the conventions do not have.
const (
	attrCategory  = "kinora.category"
	attrProjector = "kinora.projector"
	attrHandler   = "kinora.handler"
	attrOutcome   = "kinora.outcome"
	attrClass     = "kinora.class"
	attrCode      = "kinora.code"
	attrReason    = "kinora.reason"
	attrStatus    = "kinora.status"
	attrKind      = "kinora.task.kind"
	attrStep      = "kinora.task.step"
	attrQuery     = "kinora.query"
)

// classified returns the attribute of an error with a class, or none.
func classified(err error) []attribute.KeyValue {
	if err == nil {
		return nil
	}
	return []attribute.KeyValue{attribute.String(attrError, provider.ClassOf(err).String())}
}

// typed returns the attribute of another error, or none.
func typed(err error) []attribute.KeyValue {
	if err == nil {
		return nil
	}
	return []attribute.KeyValue{attribute.String(attrError, typeOf(err))}
}

// typeOf returns the innermost type of an error: its text may have user data.
func typeOf(err error) string {
	if errors.Is(err, context.DeadlineExceeded) {
		return "timeout"
	}
	return fmt.Sprintf("%T", errclass.Innermost(err))
}

// end ends a span. Attributes are those of its error, if it has one.
func end(span trace.Span, failed []attribute.KeyValue) {
	if len(failed) > 0 {
		span.SetAttributes(failed...)
		span.SetStatus(codes.Error, failed[0].Value.AsString())
	}
	span.End()
}

// parse returns the span context of a traceparent, or an invalid one.
func parse(traceparent string) trace.SpanContext {
	if traceparent == "" {
		return trace.SpanContext{}
	}
	ctx := propagation.TraceContext{}.Extract(context.Background(), propagation.MapCarrier{header: traceparent})
	return trace.SpanContextFromContext(ctx)
}

// format returns the traceparent of a span context, or "" if it is invalid.
func format(c trace.SpanContext) string {
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(trace.ContextWithSpanContext(context.Background(), c), carrier)
	return carrier[header]
}

const header = "traceparent"

// start starts a span for messages with these traceparents: in the trace of a single one, else in a
// new trace with a link to each.
func (t *Telemetry) start(name string, kind trace.SpanKind, traceparents []string, set ...attribute.KeyValue) (context.Context, trace.Span) {
	ctx := context.Background()
	options := []trace.SpanStartOption{trace.WithSpanKind(kind), trace.WithAttributes(append(set, t.system(), attribute.Int(attrCount, len(traceparents)))...)}
	var links []trace.Link
	for _, header := range traceparents {
		if c := parse(header); c.IsValid() {
			links = append(links, trace.Link{SpanContext: c})
		}
	}
	if len(traceparents) == 1 && len(links) == 1 {
		ctx = trace.ContextWithRemoteSpanContext(ctx, links[0].SpanContext)
	} else {
		options = append(options, trace.WithNewRoot(), trace.WithLinks(links...))
	}
	return t.tracer.Start(ctx, name, options...)
}
