package otel

import (
	"context"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/task"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
)

// Relay returns an observer for RelayConfig.Observer.
func (t *Telemetry) Relay() outbox.RelayObserver {
	ctx := context.Background()
	return outbox.RelayObserver{
		Claimed: func(entries []outbox.Entry, took time.Duration, err error) {
			t.m.claimTime.Record(ctx, took.Seconds(), metric.WithAttributes(classified(err)...))
			if len(entries) == 0 && err == nil {
				t.m.emptyClaims.Add(ctx, 1)
			}
			for i := range entries {
				e := &entries[i]
				if e.Suspect {
					t.m.suspects.Add(ctx, 1, metric.WithAttributes(attribute.String(attrTopic, e.Topic)))
				}
				if !e.CreatedAt.IsZero() {
					t.m.entryWait.Record(ctx, e.LastAttemptedAt.Sub(e.CreatedAt).Seconds(), metric.WithAttributes(attribute.String(attrTopic, e.Topic)))
				}
			}
		},
		Publishing: t.publishing,
		Published: func(topic string, messages int, took time.Duration, err error) {
			set := metric.WithAttributes(append(typed(err), t.system(), attribute.String(attrTopic, topic), attribute.String(attrOperation, "publish"))...)
			t.m.sent.Add(ctx, int64(messages), set)
			t.m.sendTime.Record(ctx, took.Seconds(), set, metric.WithAttributes(attribute.String(attrOperationType, "send")))
		},
		Marked: func(marks []outbox.Mark, late int, took time.Duration, err error) {
			t.m.markTime.Record(ctx, took.Seconds(), metric.WithAttributes(classified(err)...))
			if err != nil {
				return
			}
			counts := map[outbox.Status]int64{}
			for _, m := range marks {
				counts[m.To]++
			}
			for to, n := range counts {
				t.m.marks.Add(ctx, n, metric.WithAttributes(attribute.String(attrStatus, string(to))))
			}
			t.m.lateMarks.Add(ctx, int64(late))
		},
		Paused: func(topic string, _ time.Duration) {
			t.m.pauses.Add(ctx, 1, metric.WithAttributes(attribute.String(attrTopic, topic)))
		},
		Held:    func(entries int) { t.m.heldEntries.Add(ctx, int64(entries)) },
		Deleted: func(entries int) { t.m.deletedEntries.Add(ctx, int64(entries)) },
	}
}

// publishing implements outbox.RelayObserver.Publishing. Publishers see the span in the contexts of the messages.
func (t *Telemetry) publishing(topic string, messages []*message.Message) func(error) {
	traceparents := make([]string, len(messages))
	for i, m := range messages {
		traceparents[i] = m.Metadata[header]
	}
	ctx, span := t.start("publish "+topic, trace.SpanKindProducer, traceparents,
		attribute.String(attrOperation, "publish"), attribute.String(attrOperationType, "send"), attribute.String(attrTopic, topic))
	for _, m := range messages {
		m.SetContext(trace.ContextWithSpan(m.Context(), trace.SpanFromContext(ctx)))
	}
	return func(err error) { end(span, typed(err)) }
}

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

// emitting implements projector.RunnerObserver.Emitting. Each message gets a span: a child of the unit's
// if that is in the trace of the cause, else a child of the cause, with a link to the unit.
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

// Worker returns an observer for WorkerConfig.Observer.
func (t *Telemetry) Worker() task.WorkerObserver {
	ctx := context.Background()
	of := func(kind string) attribute.KeyValue { return attribute.String(attrKind, kind) }
	return task.WorkerObserver{
		Claimed: func(tasks []task.Task, took time.Duration, err error) {
			t.m.taskClaimTime.Record(ctx, took.Seconds(), metric.WithAttributes(classified(err)...))
			if len(tasks) == 0 && err == nil {
				t.m.emptyTaskClaims.Add(ctx, 1)
			}
			for i := range tasks {
				if tasks[i].Vanished > 0 {
					t.m.vanished.Add(ctx, 1, metric.WithAttributes(of(tasks[i].Kind)))
				}
				t.m.claimedTasks.Add(ctx, 1, metric.WithAttributes(of(tasks[i].Kind)))
			}
		},
		Step: func(kind, step string, took time.Duration, err error) {
			t.m.stepTime.Record(ctx, took.Seconds(), metric.WithAttributes(append(classified(err), of(kind), attribute.String(attrStep, step))...))
		},
		Ended: func(kind string, to task.Status, code string, took time.Duration) {
			set := []attribute.KeyValue{of(kind), attribute.String(attrStatus, string(to))}
			if code != "" {
				set = append(set, attribute.String(attrCode, code))
			}
			t.m.runTime.Record(ctx, took.Seconds(), metric.WithAttributes(set...))
		},
		Changed: func(changes, refused int, took time.Duration, err error) {
			t.m.changeTime.Record(ctx, took.Seconds(), metric.WithAttributes(classified(err)...))
		},
		Fenced: func(kind string) { t.m.fenced.Add(ctx, 1, metric.WithAttributes(of(kind))) },
		Counted: func(groupKind string, took time.Duration) {
			t.m.countTime.Record(ctx, took.Seconds(), metric.WithAttributes(of(groupKind)))
		},
		Deleted: func(tasks int) { t.m.deletedTasks.Add(ctx, int64(tasks)) },
	}
}
