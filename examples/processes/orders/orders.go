// Package orders charges a card and orders the delivery, or gives the money back.
package orders

import (
	"context"

	"github.com/kinora-go/kinora/task"
)

// Payments is a payment service. It ignores a repeated call with the same key.
type Payments interface {
	// Charge takes money from a card.
	Charge(ctx context.Context, key, card string, cents int64) error
	// Refund gives the money of a charge back. charge is the key of the charge. If there was no charge
	// with that key, Refund does nothing.
	Refund(ctx context.Context, key, charge string) error
}

// Warehouse delivers goods. It ignores a repeated call with the same key.
type Warehouse interface {
	// Deliver orders a delivery. It returns false if the product is sold out.
	Deliver(ctx context.Context, key, product string) (bool, error)
	// Recall cancels a delivery. delivery is the key of the delivery. If there was no delivery with that
	// key, Recall does nothing.
	Recall(ctx context.Context, key, delivery string) error
}

// Order is the input of the process.
type Order struct {
	Card, Product string
	Cents         int64
}

// Process returns the kind of tasks that fulfil orders.
func Process[Tx any](payments Payments, warehouse Warehouse) *task.Definition[Tx, Order, bool] {
	return task.Define("orders/fulfil", func(ctx context.Context, r *task.Run[Tx], o Order) (bool, error) {
		_, err := task.Step(ctx, r, "charge",
			func(ctx context.Context, key string) (bool, error) {
				return true, payments.Charge(ctx, key, o.Card, o.Cents)
			},
			func(ctx context.Context, charge string, _ *bool) error {
				return payments.Refund(ctx, charge+"/undo", charge)
			})
		if err != nil {
			return false, err
		}
		delivered, err := task.Step(ctx, r, "deliver",
			func(ctx context.Context, key string) (bool, error) {
				return warehouse.Deliver(ctx, key, o.Product)
			},
			func(ctx context.Context, delivery string, done *bool) error {
				if done != nil && !*done {
					return nil // sold out: nothing was ordered
				}
				return warehouse.Recall(ctx, delivery+"/undo", delivery)
			})
		if err != nil {
			return false, err
		}
		if !delivered {
			return false, task.GiveUp("sold_out") // the money goes back
		}
		return true, nil
	})
}
