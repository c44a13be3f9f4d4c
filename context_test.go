package kinora_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/task"
	"github.com/stretchr/testify/require"
)

// caused is an event that another one has caused, in one way.
type caused struct{ Way string }

// TestContextFlows: whatever a handler appends, enqueues, emits or publishes with its context has the
// event as its cause, and the event's correlation id and traceparent. So has what a task does that a
// handler has added.
// Promise: G13.1
func TestContextFlows(t *testing.T) {
	t.Parallel()
	types := eventstore.NewTypes(eventstore.Type[posted]("posted"), eventstore.Type[caused]("caused"))
	db, err := memory.New(nil)
	require.NoError(t, err)
	fresh := func(string) *review { return &review{} }
	reviews, err := eventstore.NewRepository(db, types, "review", fresh, nil)
	require.NoError(t, err)
	effects, err := eventstore.NewRepository(db, types, "effect", fresh, nil)
	require.NoError(t, err)
	add := func(ctx context.Context, tx txn, way string) error {
		_, err := effects.UpdateTx(ctx, db.InTx(tx), way, func(*review) ([]any, error) { return []any{caused{way}}, nil })
		return err
	}
	in := func(topic string) []outbox.Message { return []outbox.Message{{Topic: topic}} }
	done := make(chan string, 10)

	oneTx := task.DefineTx("reviews/one", func(ctx context.Context, tx txn, _ string) (bool, []outbox.Message, error) {
		return true, in("task"), add(ctx, tx, "task")
	})
	steps := task.Define("reviews/steps", func(ctx context.Context, r *task.Run[txn], _ string) (bool, error) {
		return task.StepTx(ctx, r, "add", func(ctx context.Context, tx txn) (bool, []outbox.Message, error) {
			return true, in("step"), add(ctx, tx, "step")
		}, nil)
	})
	group := task.DefineGroup("reviews/group", func(ctx context.Context, tx txn, _ string, _ string) ([]outbox.Message, error) {
		return in("group"), add(ctx, tx, "group")
	})
	worker, err := task.NewWorker(db, task.WorkerConfig{Observer: task.WorkerObserver{
		Ended: func(kind string, _ task.Status, _ string, _ time.Duration) { done <- kind },
	}}, oneTx, steps, group)
	require.NoError(t, err)

	ways := projector.Define("ways", types, projector.Options{},
		projector.On("append", func(ctx context.Context, tx txn, _ eventstore.Event[posted]) error { return add(ctx, tx, "handler") }),
		projector.OnEmit("emit", func(context.Context, txn, eventstore.Event[posted]) ([]outbox.Message, error) { return in("emit"), nil }),
		projector.On("enqueue", func(ctx context.Context, tx txn, _ eventstore.Event[posted]) error {
			return db.InTx(tx).Enqueue(ctx, in("enqueue")...)
		}),
		projector.On("publish", func(ctx context.Context, tx txn, _ eventstore.Event[posted]) error {
			m := message.NewMessage("m-1", nil)
			m.SetContext(ctx)
			return outbox.NewPublisher(db.InTx(tx)).Publish("publish", m, message.NewMessage("m-2", nil))
		}),
		projector.On("tasks", func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			if err := db.TasksIn(tx).Enqueue(ctx, steps.New("steps", "")); err != nil {
				return err
			}
			return db.TasksIn(tx).EnqueueGroup(ctx, group.New("group", "", oneTx.New("one", "")))
		}),
	)
	runner, err := projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{}, ways)
	require.NoError(t, err)
	g, err := kinora.Start(t.Context(), runner, worker)
	require.NoError(t, err)
	defer func() { require.NoError(t, g.Stop()) }()

	ctx := eventstore.WithMetadata(t.Context(), eventstore.Metadata{CorrelationID: "c-1", CausationID: "request", Traceparent: "00-1", Actor: "ann"})
	_, err = reviews.Update(ctx, "1", func(*review) ([]any, error) { return []any{posted{5}}, nil })
	require.NoError(t, err)
	for range 2 {
		patience.Receive(t, done, "the end of the tasks")
	}

	var cause string
	var found []string
	for e, err := range db.ReadLog(t.Context(), eventstore.From{}, eventstore.LogFilter{}) {
		require.NoError(t, err)
		if e.Type == "posted" {
			cause = e.ID
			continue
		}
		found = append(found, strings.TrimPrefix(e.Stream, "effect-"))
		require.Equal(t, eventstore.Metadata{CorrelationID: "c-1", CausationID: cause, Traceparent: "00-1"}, e.Metadata, e.Stream)
	}
	slices.Sort(found)
	require.Equal(t, []string{"group", "handler", "step", "task"}, found)

	entries, err := db.Entries(t.Context(), outbox.Filter{})
	require.NoError(t, err)
	found = nil
	for _, e := range entries {
		found = append(found, e.Topic)
		require.Equal(t, map[string]string{
			provider.HeaderCorrelation: "c-1", provider.HeaderCausation: cause, provider.HeaderTraceparent: "00-1",
		}, e.Headers, "%s %s", e.Topic, e.ID)
	}
	slices.Sort(found)
	require.Equal(t, []string{"emit", "enqueue", "group", "publish", "publish", "step", "task"}, found)
}
