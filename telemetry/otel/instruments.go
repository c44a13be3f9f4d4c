package otel

import (
	"context"
	"errors"
	"fmt"

	"github.com/kinora-go/kinora/internal/errclass"
	"github.com/kinora-go/kinora/provider"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// instruments are the metrics that observers record. Those of Watch are in watch.go.
type instruments struct {
	updateTime, sendTime, claimTime, markTime, entryWait          metric.Float64Histogram
	processTime, handlerTime, delay                               metric.Float64Histogram
	taskClaimTime, stepTime, runTime, changeTime, countTime       metric.Float64Histogram
	appended, conflicts                                           metric.Int64Counter
	sent, marks, lateMarks, pauses, heldEntries, deletedEntries   metric.Int64Counter
	emptyClaims, suspects                                         metric.Int64Counter
	consumed, handled, retries, parkings, replays                 metric.Int64Counter
	completed, unmarked, pruned                                   metric.Int64Counter
	claimedTasks, fenced, deletedTasks, emptyTaskClaims, vanished metric.Int64Counter
	watchErrors                                                   metric.Int64Counter
}

// Boundaries of histograms, in seconds: those of the conventions, and wider ones for messages that wait.
var (
	short = metric.WithExplicitBucketBoundaries(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
	long  = metric.WithExplicitBucketBoundaries(0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 3600, 21600, 86400)
)

func (m *instruments) create(meter metric.Meter) (err error) {
	counter := func(name, unit, text string) metric.Int64Counter {
		c, failed := meter.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(text))
		err = errors.Join(err, failed)
		return c
	}
	duration := func(name, text string, buckets metric.HistogramOption) metric.Float64Histogram {
		h, failed := meter.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(text), buckets)
		err = errors.Join(err, failed)
		return h
	}
	*m = instruments{
		appended:  counter("kinora.append.events", "{event}", "Events that updates have appended"),
		conflicts: counter("kinora.append.conflicts", "{conflict}", "Conflicts of updates, after which they decided again or failed"),
		sent:      counter("messaging.client.sent.messages", "{message}", "Messages that relays attempted to publish"),
		marks: counter("kinora.relay.marks", "{entry}",
			"Entries that relays have marked, by their new status: claimed is a renewal, pending a release"),
		lateMarks: counter("kinora.relay.late_marks", "{entry}",
			"Marks that changed nothing, because another relay had taken the entry over"),
		emptyClaims:    counter("kinora.relay.empty_claims", "{claim}", "Claims that found no entry, or lost each race for one"),
		suspects:       counter("kinora.relay.suspects", "{entry}", "Claimed entries whose earlier claim ended with its lease"),
		pauses:         counter("kinora.relay.pauses", "{pause}", "Pauses of topics whose publishes all failed"),
		heldEntries:    counter("kinora.relay.held", "{entry}", "Entries that were held behind others that wait for long"),
		deletedEntries: counter("kinora.relay.deleted", "{entry}", "Entries that were deleted at the end of their retention"),
		consumed:       counter("messaging.client.consumed.messages", "{message}", "Messages of committed units"),
		handled:        counter("kinora.projector.handled", "{message}", "Messages that handlers have applied, skipped or failed to apply"),
		retries: counter("kinora.projector.retries", "{unit}",
			"Units that failed for a reason outside of their messages, and are tried again"),
		parkings: counter("kinora.projector.parkings", "{message}", "Messages that were parked, or stay parked after a failed attempt"),
		replays:  counter("kinora.projector.replays", "{message}", "Parked messages that were applied"),
		completed: counter("kinora.projector.completed", "{message}",
			"Events that were read from the log because the broker had not delivered them"),
		unmarked:        counter("kinora.projector.unmarked", "{message}", "Messages that were applied in a store that keeps no markers"),
		pruned:          counter("kinora.projector.pruned", "{row}", "Old markers, and replayed and skipped messages, that were deleted"),
		claimedTasks:    counter("kinora.task.claimed", "{task}", "Tasks that workers have claimed"),
		emptyTaskClaims: counter("kinora.task.empty_claims", "{claim}", "Claims that found no task, or lost each race for one"),
		vanished:        counter("kinora.task.vanished", "{task}", "Claimed tasks whose earlier claim ended with its lease"),
		fenced:          counter("kinora.task.fenced", "{change}", "Changes that came too late, because another worker had taken the task over"),
		deletedTasks:    counter("kinora.task.deleted", "{task}", "Tasks that were deleted at the end of their retention"),
		watchErrors:     counter("kinora.watch.errors", "{query}", "Queries of Watch that failed: their gauges have no value"),
		updateTime:      duration("kinora.append.duration", "Duration of updates: loading, deciding and appending", short),
		sendTime:        duration("messaging.client.operation.duration", "Duration of Publish calls", short),
		claimTime:       duration("kinora.relay.claim.duration", "Duration of claims of entries", short),
		markTime:        duration("kinora.relay.mark.duration", "Duration of statements that mark entries", short),
		entryWait:       duration("kinora.relay.wait", "Time from the append of an entry to its claim", long),
		processTime:     duration("messaging.process.duration", "Duration of units", short),
		handlerTime:     duration("kinora.projector.handler.duration", "Duration of handlers", short),
		delay:           duration("kinora.projector.delay", "Time from the recording of an event to the commit of its effect", long),
		taskClaimTime:   duration("kinora.task.claim.duration", "Duration of claims of tasks", short),
		stepTime:        duration("kinora.task.step.duration", "Duration of steps", short),
		runTime:         duration("kinora.task.run.duration", "Duration of runs of tasks, by the status that they lead to", short),
		changeTime:      duration("kinora.task.change.duration", "Duration of statements that change tasks", short),
		countTime:       duration("kinora.task.count.duration", "Duration of counting a task in its group", short),
	}
	return err
}

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
	attrCheck     = "kinora.check"
	attrNeeds     = "kinora.needs"
	attrService   = "kinora.service.kind" // "relay", "runner" or "worker"
	attrVersion   = "kinora.service.version"
	attrModel     = "kinora.projector.version"
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

// start starts a span for messages: in the trace of a single one, else in a new trace with a link to each.
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
