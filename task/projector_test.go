package task_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/task"
)

type (
	placed  struct{ Order string }
	scanned struct{ Order, Tracking string }
	shipped struct{ Order, Tracking string }
)

type parcel struct{}

func (parcel) Apply(any) {}

// A projector starts a task for one event and answers it for another one, in the transaction of its
// checkpoint. The task appends an event in a step. Each unit of the projector is rolled back once after
// it has written, and each step too.
// Promise: T1.1, T5.1
func TestAProjectorStartsAndAnswersTasks(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	types := eventstore.NewTypes(eventstore.Type[placed]("placed"), eventstore.Type[scanned]("scanned"), eventstore.Type[shipped]("shipped"))
	orders, err := eventstore.NewRepository(db, types, "order", func(string) parcel { return parcel{} }, nil)
	require.NoError(t, err)
	// once returns an error the first time that it is called with an id, and rolls the writes back.
	var lock sync.Mutex
	tries := map[string]int{}
	once := func(id string) error {
		lock.Lock()
		defer lock.Unlock()
		if tries[id]++; tries[id] == 1 {
			return errors.New("the first try fails")
		}
		return nil
	}
	ship := task.Define("orders/ship", func(ctx context.Context, r *task.Run[pgx.Tx], order string) (string, error) {
		tracking, err := task.Wait[string](ctx, r, "scanned", time.Hour)
		if err != nil {
			return "", err
		}
		return task.StepTx(ctx, r, "shipped", func(ctx context.Context, tx pgx.Tx) (string, []outbox.Message, error) {
			_, err := orders.UpdateTx(ctx, db.InTx(tx), order, func(parcel) ([]any, error) { return []any{shipped{order, tracking}}, nil })
			return tracking, nil, errors.Join(err, once("step "+order))
		}, nil)
	})
	starts := projector.Define("starts", types, projector.Options{},
		projector.On("placed", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[placed]) error {
			err := db.TasksIn(tx).Enqueue(ctx, ship.New("ship-"+e.Data.Order, e.Data.Order))
			return errors.Join(err, once("placed "+e.Data.Order))
		}),
		projector.On("scanned", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[scanned]) error {
			out, err := json.Marshal(e.Data.Tracking)
			if err != nil {
				return err
			}
			got, err := db.TasksIn(tx).Answer(ctx, task.Answer{Task: "ship-" + e.Data.Order, Name: "scanned", ID: e.ID, Out: out})
			if err == nil && got != task.Taken {
				err = fmt.Errorf("the answer is %s", got)
			}
			return errors.Join(err, once("scanned "+e.Data.Order))
		}),
	)
	runner, err := projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{Retry: claim.Backoff{Base: 5 * time.Millisecond}}, starts)
	require.NoError(t, err)
	worker, err := task.NewWorker(db, task.WorkerConfig{Backoff: claim.Backoff{Base: 5 * time.Millisecond}}, ship)
	require.NoError(t, err)
	group, err := kinora.Start(t.Context(), worker, runner)
	require.NoError(t, err)
	defer func() { require.NoError(t, group.Stop()) }()
	const n = 10
	for i := range n {
		id := fmt.Sprint(i)
		_, err := orders.Update(t.Context(), id, func(parcel) ([]any, error) { return []any{placed{id}, scanned{id, "T-" + id}}, nil })
		require.NoError(t, err)
	}
	patience.Until(t, func() bool {
		c, err := db.TaskCounts(t.Context(), "")
		require.NoError(t, err)
		return c[task.Done] == n
	}, "the tasks")
	got := map[string]int{}
	for e, err := range db.ReadLog(t.Context(), eventstore.From{}, eventstore.LogFilter{Types: []string{"shipped"}}) {
		require.NoError(t, err)
		d, err := eventstore.Decode[shipped](types, e)
		require.NoError(t, err)
		require.Equal(t, "T-"+d.Data.Order, d.Data.Tracking)
		got[d.Data.Order]++
	}
	require.Len(t, got, n)
	for id, times := range got {
		require.Equal(t, 1, times, id)
	}
	lock.Lock()
	defer lock.Unlock()
	require.Len(t, tries, 3*n)
	for id, times := range tries {
		require.GreaterOrEqual(t, times, 2, id)
	}
}
