package dormant

import (
	"context"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/task"
)

// Store is a database with tasks, of any provider.
type Store[Tx any] interface {
	eventstore.Store
	provider.Provider[Tx]
	provider.TaskProvider[Tx]
}

// Service marks customers as dormant.
type Service[Tx any] struct {
	db        Store[Tx]
	inTx      func(tx Tx) eventstore.TxStore
	clock     func() time.Time
	customers *eventstore.Repository[*Customer]
	timer     *task.Definition[Tx, Timer, bool]
}

// Timer is the input of a timer.
type Timer struct {
	Customer string
	Period   int
}

// New returns a service on a database. inTx returns its event store in a transaction.
func New[Tx any](db Store[Tx], inTx func(tx Tx) eventstore.TxStore, clock func() time.Time) (*Service[Tx], error) {
	customers, err := eventstore.NewRepository(db, Types, "customer",
		func(id string) *Customer { return &Customer{id: id, period: 1} }, nil)
	s := &Service[Tx]{db: db, inTx: inTx, clock: clock, customers: customers}
	s.timer = task.DefineTx("customers/dormant", s.expire)
	return s, err
}

// expire runs when the timer is due, in one transaction with the end of the task.
func (s *Service[Tx]) expire(ctx context.Context, tx Tx, t Timer) (bool, []outbox.Message, error) {
	at, err := s.customers.UpdateTx(ctx, s.inTx(tx), t.Customer,
		func(c *Customer) ([]any, error) { return c.Expire(t.Period, s.clock()) })
	return at.Count > 0, nil, err
}

// Timers starts, postpones and cancels timers. From the log, each event does so once.
func (s *Service[Tx]) Timers() *projector.Projector[Tx] {
	return projector.Define("dormant-timers", Types, projector.Options{},
		projector.On("ordered", func(ctx context.Context, tx Tx, e eventstore.Event[Ordered]) error {
			tasks, id, due := s.db.TasksIn(tx), timerID(e.Data.Customer, e.Data.Period), e.Data.At.Add(After)
			// The first order of a period adds the timer. The later ones find and postpone it.
			err := tasks.Enqueue(ctx, s.timer.New(id, Timer{e.Data.Customer, e.Data.Period}).Due(due))
			if err == nil {
				_, err = tasks.Postpone(ctx, id, due)
			}
			return err
		}),
		projector.On("left", func(ctx context.Context, tx Tx, e eventstore.Event[Left]) error {
			_, err := s.db.TasksIn(tx).Cancel(ctx, timerID(e.Data.Customer, e.Data.Period))
			return err
		}),
	)
}

func timerID(customer string, period int) string {
	return fmt.Sprintf("dormant-%d-%s", period, customer)
}

// Worker returns a worker of the timers.
func (s *Service[Tx]) Worker(cfg task.WorkerConfig) (*task.Worker, error) {
	return task.NewWorker(s.db, cfg, s.timer)
}

// Do runs a command on a customer.
func (s *Service[Tx]) Do(ctx context.Context, customer string, command func(*Customer) ([]any, error)) (eventstore.Appended, error) {
	return s.customers.Update(ctx, customer, command)
}
