package orders_test

import (
	"context"
	"errors"
	"testing"

	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/task"

	"github.com/kinora-go/kinora/examples/processes/orders"
)

// services are a payment service and a warehouse. They record each effect by the key of its call.
type services struct {
	charged, refunded, recalled map[string]bool
	loseReply                   bool // of the next charge
}

func (s *services) Charge(_ context.Context, key, _ string, _ int64) error {
	s.charged[key] = true
	if s.loseReply {
		s.loseReply = false
		return errors.New("the connection was closed")
	}
	return nil
}

func (s *services) Refund(_ context.Context, key, charge string) error {
	if key == charge {
		return errors.New("the key is that of a charge")
	}
	if s.charged[charge] {
		s.refunded[charge] = true
	}
	return nil
}

func (*services) Deliver(_ context.Context, _, product string) (bool, error) {
	return product != "lamp", nil // lamps are sold out
}

func (s *services) Recall(_ context.Context, _, delivery string) error {
	s.recalled[delivery] = true
	return nil
}

func TestProcess(t *testing.T) {
	t.Parallel()
	db, err := memory.New(nil)
	check(t, err)
	s := &services{charged: map[string]bool{}, refunded: map[string]bool{}, recalled: map[string]bool{}}
	process := orders.Process[*memory.Model](s, s)
	worker, err := task.NewWorker(db, task.WorkerConfig{}, process)
	check(t, err)
	for _, c := range []struct {
		id, product   string
		lost, refunds bool
		before, after task.Status // a cancellation
	}{
		{"order-1", "chair", false, false, task.Done, task.Done},
		{"order-2", "lamp", false, true, task.Undone, task.Undone},
		{"order-3", "chair", true, true, task.Failed, task.Undone}, // it is not known that the card was charged
	} {
		s.loseReply = c.lost
		check(t, db.Transact(t.Context(), func(ctx context.Context, tx *memory.Model) error {
			return db.TasksIn(tx).Enqueue(ctx, process.New(c.id, orders.Order{Card: "4242", Product: c.product, Cents: 70_00}))
		}))
		run := func(want task.Status) {
			t.Helper()
			_, err := worker.RunOnce(t.Context())
			check(t, err)
			found, err := db.Tasks(t.Context(), task.Filter{IDs: []string{c.id}})
			check(t, err)
			if len(found) != 1 {
				t.Fatalf("%s: %d tasks, want 1", c.id, len(found))
			}
			if found[0].Status != want {
				t.Errorf("%s is %s, want %s", c.id, found[0].Status, want)
			}
		}
		run(c.before)
		_, err := db.CancelTasks(t.Context(), task.Filter{IDs: []string{c.id}}, task.Decision{By: "ann", Reason: "changed her mind"})
		check(t, err)
		run(c.after)
		if key := c.id + "/charge"; !s.charged[key] || s.refunded[key] != c.refunds {
			t.Errorf("%s: charged %t, refunded %t, want a refund: %t", c.id, s.charged[key], s.refunded[key], c.refunds)
		}
	}
	if len(s.recalled) > 0 {
		t.Errorf("recalled %v, which were not ordered", s.recalled)
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
