package otel

import (
	"context"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/outbox"
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

// publishing implements outbox.RelayObserver.Publishing. Publishers see the span in the contexts of
// the messages.
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
