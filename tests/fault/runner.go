package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
)

const (
	exactName   = "exact"
	controlName = "control" // without markers: it shows what the others are worth
)

// started are the messages whose handler has started, and that are not acked.
type started struct {
	status *status
	mu     sync.Mutex
	ids    map[string]bool
}

func (s *started) start(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ids[id] = true
	s.status.set(wordOpen, int64(len(s.ids)))
}

func (s *started) acking(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.ids, id)
	s.status.set(wordOpen, int64(len(s.ids)))
}

// tracedUnit is a unit of work that writes down when each one had its message in hand.
type tracedUnit struct {
	*postgres.DB
	w *work
	s *started
}

// Do implements projector.UnitOfWork.
func (u tracedUnit) Do(ctx context.Context, work projector.Work, apply func(context.Context, pgx.Tx, []int) ([]outbox.Message, error)) error {
	defer u.w.unit(u.s, work)()
	return u.DB.Do(ctx, work, apply)
}

// tracedBatch is the same in one round trip.
type tracedBatch struct {
	*postgres.Batched
	w *work
	s *started
}

// Do implements projector.UnitOfWork.
func (u tracedBatch) Do(ctx context.Context, work projector.Work, apply func(context.Context, *pgx.Batch, []int) ([]outbox.Message, error)) error {
	defer u.w.unit(u.s, work)()
	return u.Batched.Do(ctx, work, apply)
}

// unit writes down that one has begun, and that it has ended.
func (w *work) unit(s *started, of projector.Work) (end func()) {
	for _, p := range of.Park {
		w.trace.printf("park %s %s %s %s", p.MessageID, p.Handler, p.Class, p.Code)
	}
	if len(of.Marks) == 0 {
		return func() {}
	}
	w.trace.printf("begin %s", of.Marks[0].MessageID)
	return func() {
		w.trace.printf("end %s", of.Marks[0].MessageID)
		if len(of.Replay) > 0 { // nobody acks it
			s.acking(of.Marks[0].MessageID)
		}
	}
}

func (w *work) project(ctx context.Context) error {
	s := &started{status: w.status, ids: map[string]bool{}}
	sub := &subscriber{socket: w.Socket, name: w.Name, group: w.Group, acking: s.acking}
	var runner *projector.Runner
	var err error
	if w.Batched {
		runner, err = newRunner(w, s, sub, tracedBatch{w.db.Batched(), w, s}, func(_ context.Context, b *pgx.Batch, sql string, args ...any) error {
			b.Queue(sql, args...)
			return nil
		})
	} else {
		runner, err = newRunner(w, s, sub, tracedUnit{w.db, w, s}, func(ctx context.Context, tx pgx.Tx, sql string, args ...any) error {
			_, err := tx.Exec(ctx, sql, args...)
			return err
		})
	}
	if err != nil {
		return err
	}
	w.ready(runner.Running())
	defer w.replay(ctx)()
	if name := w.More["replay"]; name != "" {
		go w.mend(ctx, runner, name)
	}
	return kinora.Run(ctx, runner)
}

// newRunner makes a runner of both arms over the same deliveries.
func newRunner[Tx any](w *work, s *started, sub *subscriber, u projector.UnitOfWork[Tx], exec func(context.Context, Tx, string, ...any) error) (*projector.Runner, error) {
	arm := func(name, prefix string, marked bool) *projector.Projector[Tx] {
		sql := fmt.Sprintf(applySQL, prefix)
		return projector.Define(name, types, projector.Options{Markers: marked}, projector.OnEmit(movedAs,
			func(ctx context.Context, tx Tx, e eventstore.Event[moved]) ([]outbox.Message, error) {
				if marked {
					s.start(e.ID)
					w.status.add(wordDone, 1)
					w.trace.printf("start %s %s %d", e.ID, e.Data.Stream, e.Data.N)
				}
				if w.Slow > 0 {
					pause(ctx, w.Least+rand.N(w.Slow-w.Least))
				}
				if marked {
					if err := w.fails(e.Data); err != nil {
						return nil, err
					}
					if err := w.harm(ctx, e.Data, func(sql string, args ...any) error { return exec(ctx, tx, sql, args...) }); err != nil {
						return nil, err
					}
				}
				return w.output(marked, e), exec(ctx, tx, sql, e.Data.Stream, e.Data.N, e.Data.Amount)
			}))
	}
	var arms []*projector.Projector[Tx]
	if w.More["arm"] != controlName {
		arms = append(arms, arm(exactName, "", true))
	}
	if w.Control {
		arms = append(arms, arm(controlName, "control_", false))
	}
	return projector.NewRunner(u, projector.Subscribe(sub, category), &projector.RunnerConfig{
		Concurrency: w.Lanes, Lease: w.Lease, Timeout: w.Timeout, Drain: 5 * time.Second, LogErrors: true,
		Retry: claim.Backoff{Base: 50 * time.Millisecond, Max: time.Second, Attempts: w.Attempts},
	}, arms...)
}
