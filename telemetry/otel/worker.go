package otel

import (
	"context"
	"time"

	"github.com/kinora-go/kinora/task"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

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
