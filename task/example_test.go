package task_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/task"
)

// An external call: the handler may run several times, each time with the same key.
func ExampleDefine() {
	ctx := context.Background()
	welcome := task.Define("mail/welcome", func(_ context.Context, r *task.Run[*memory.Model], address string) (bool, error) {
		fmt.Println("attempt", r.Attempt(), "with the key", r.Key())
		if address == "" {
			return false, task.Permanent(errors.New("no address"))
		}
		return true, nil
	})
	db := open()
	enqueue(db, welcome.New("welcome-ann", "ann@example.com"), welcome.New("welcome-ben", ""))
	enqueue(db, welcome.New("welcome-ann", "ann@example.com")) // again: ignored
	work(db, welcome)
	for t := range tasks(db) {
		fmt.Printf("%s %s %q\n", t.ID, t.Status, t.Code)
	}
	// A person has told ben in another way.
	err := db.CompleteTask(ctx, "welcome-ben", []byte("true"), task.Decision{By: "cy", Reason: "called him"})
	fmt.Println(err)
	work(db, welcome)
	for t := range tasks(db) {
		fmt.Println(t.ID, t.Status)
	}

	// Output:
	// attempt 1 with the key welcome-ann
	// attempt 1 with the key welcome-ben
	// welcome-ann done ""
	// welcome-ben abandoned "permanent"
	// <nil>
	// welcome-ann done
	// welcome-ben done
}

// A command: its writes and the end of the task are one transaction. As a timer it is due later.
func ExampleDefineTx() {
	expire := task.DefineTx("carts/expire", func(_ context.Context, tx *memory.Model, cart string) (bool, []outbox.Message, error) {
		tx.Delete("carts", cart)
		return true, []outbox.Message{{Topic: "carts", Payload: []byte(cart + " has expired")}}, nil
	})
	db, clock := openAt(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
	transact(db, func(ctx context.Context, tx *memory.Model) error {
		tx.Put("carts", "7", "tea")
		return db.TasksIn(tx).Enqueue(ctx, expire.New("expire-7", "7").Later(24*time.Hour))
	})
	left := func() { db.View(func(m *memory.Model) { _, ok := m.Get("carts", "7"); fmt.Println(ok) }) }

	clock.advance(23 * time.Hour)
	transact(db, func(ctx context.Context, tx *memory.Model) error { // the customer has come back
		_, err := db.TasksIn(tx).Postpone(ctx, "expire-7", clock.now().Add(24*time.Hour))
		return err
	})
	clock.advance(2 * time.Hour)
	work(db, expire)
	left()
	clock.advance(22 * time.Hour)
	work(db, expire)
	left()

	// Output:
	// true
	// false
}

// A process: when a later step is refused, the earlier ones are undone.
func ExampleStep() {
	type order struct{ SKU string }
	fulfil := task.Define("orders/fulfil", func(ctx context.Context, r *task.Run[*memory.Model], in order) (string, error) {
		payment, err := task.Step(ctx, r, "charge",
			func(_ context.Context, key string) (string, error) {
				fmt.Println("charge", key)
				return "payment-1", nil
			},
			func(_ context.Context, key string, payment *string) error { // nil: the reply was lost
				fmt.Println("refund", key+"/undo")
				return nil
			})
		if err != nil {
			return "", err
		}
		inStock, err := task.StepTx(ctx, r, "reserve",
			func(_ context.Context, tx *memory.Model) (bool, []outbox.Message, error) {
				n, _ := tx.Get("stock", in.SKU)
				if n == nil || n.(int) == 0 {
					return false, nil, nil // a refusal is a result
				}
				tx.Put("stock", in.SKU, n.(int)-1)
				return true, nil, nil
			},
			func(_ context.Context, tx *memory.Model, reserved bool) ([]outbox.Message, error) {
				if n, _ := tx.Get("stock", in.SKU); reserved {
					tx.Put("stock", in.SKU, n.(int)+1)
				}
				return nil, nil
			})
		if err != nil {
			return "", err
		}
		if !inStock {
			return "", task.GiveUp("out_of_stock")
		}
		return payment, nil
	})
	db := open()
	transact(db, func(_ context.Context, tx *memory.Model) error {
		tx.Put("stock", "lamp", 1)
		return nil
	})
	for _, id := range []string{"order-1", "order-2"} {
		enqueue(db, fulfil.New(id, order{"lamp"}))
		work(db, fulfil)
	}
	for t := range tasks(db) {
		payment, err := fulfil.Result(t)
		fmt.Println(t.ID, t.Status, t.Why, payment, errors.Is(err, task.ErrNotDone))
	}

	// Output:
	// charge order-1/charge
	// charge order-2/charge
	// refund order-2/charge/undo
	// order-1 done  payment-1 false
	// order-2 undone out_of_stock  true
}

// A process waits for an answer, which another program gives in a transaction.
func ExampleWait() {
	approve := task.Define("expenses/approve", func(ctx context.Context, r *task.Run[*memory.Model], cents int) (string, error) {
		by, err := task.Wait[string](ctx, r, "approval", 48*time.Hour)
		if errors.Is(err, task.ErrTimeout) {
			return "nobody has approved it", nil
		}
		return by, err
	})
	db, clock := openAt(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
	answer := func(id, message string) {
		transact(db, func(ctx context.Context, tx *memory.Model) error {
			out, err := db.TasksIn(tx).Answer(ctx, task.Answer{Task: id, Name: "approval", ID: message, Out: []byte(`"ann"`)})
			fmt.Println(id, out)
			return err
		})
	}
	enqueue(db, approve.New("expense-1", 700), approve.New("expense-2", 900))
	work(db, approve)
	answer("expense-1", "click-1")
	answer("expense-1", "click-1")
	work(db, approve)
	clock.advance(49 * time.Hour)
	work(db, approve)
	answer("expense-2", "click-2")
	for t := range tasks(db) {
		fmt.Println(t.ID, t.Status, string(t.Result))
	}

	// Output:
	// expense-1 taken
	// expense-1 again
	// expense-2 late
	// expense-1 done "ann"
	// expense-2 done "nobody has approved it"
}

// The completion of a group runs once, with its last task.
func ExampleDefineGroup() {
	forget := task.Define("erasure/forget", func(_ context.Context, r *task.Run[*memory.Model], system string) (bool, error) {
		return true, nil // call the system with r.Key()
	})
	done := task.DefineGroup("erasure/person", func(_ context.Context, _ *memory.Model, id, person string) ([]outbox.Message, error) {
		fmt.Println(id, "is complete:", person, "is forgotten")
		return nil, nil
	})
	db := open()
	transact(db, func(ctx context.Context, tx *memory.Model) error {
		return db.TasksIn(tx).EnqueueGroup(ctx, done.New("erase-ann", "ann",
			forget.New("erase-ann-crm", "crm"), forget.New("erase-ann-mail", "mail")))
	})
	work(db, forget, done)

	// Output:
	// erase-ann is complete: ann is forgotten
}
