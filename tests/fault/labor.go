package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/task"
)

// programs are what a worker can run, by the name in More["program"].
var programs = map[string]func(w *work) []task.Kind[pgx.Tx]{
	"deploy": (*work).deployed,
	"shop":   (*work).shop, "bank": (*work).bank, "people": (*work).people, "code": (*work).code, "killers": (*work).killers, "crowd": (*work).crowd,
}

// labor runs a worker.
func (w *work) labor(ctx context.Context) error {
	w.http = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 32}}
	defer w.http.CloseIdleConnections()
	cfg := task.WorkerConfig{
		Concurrency: w.Concurrency, Lease: w.Lease, Timeout: w.Timeout, Poll: 100 * time.Millisecond, Drain: w.Patience, Holder: w.Name, LogErrors: true,
		Backoff: claim.Backoff{Base: 100 * time.Millisecond, Max: time.Second, Attempts: w.Attempts},
		Observer: task.WorkerObserver{
			Claimed: func(_ []task.Task, took time.Duration, _ error) {
				w.status.set(wordClaim, max(w.status.get(wordClaim), int64(took)))
			},
			Fenced: func(string) { w.status.add(wordLate, 1) },
			Ended:  func(string, task.Status, string, time.Duration) { w.status.add(wordDone, 1) },
		},
	}
	if w.More["audit"] != "" {
		cfg.Audit = sink{w}
	}
	worker, err := task.NewWorker(w.db, cfg, programs[w.More["program"]](w)...)
	if err != nil {
		return err
	}
	w.ready(worker.Running())
	if w.More["operates"] != "" {
		defer w.operate(ctx)()
	}
	if w.More["unlistened"] != "" {
		return kinora.Run(ctx, worker)
	}
	listener, err := postgres.NewListener(w.db, nil)
	if err != nil {
		return err
	}
	return kinora.Run(ctx, listener, worker)
}

// busy counts a handler as work in hand until done is called.
func (w *work) busy() (done func()) {
	w.status.add(wordOpen, 1)
	return func() { w.status.add(wordOpen, -1) }
}

// effects is the table to which the steps in transactions add a row: each must be there once.
const effects = `create table effects (task text not null, what text not null, ref text not null)`

func effect(ctx context.Context, tx pgx.Tx, of, what, ref string) error {
	_, err := tx.Exec(ctx, `insert into effects (task, what, ref) values ($1, $2, $3)`, of, what, ref)
	return err
}

// order is a process: it charges outside, books inside, has a group of tasks notify others, and
// then closes the order, or gives it up.
type order struct {
	Refused bool `json:"refused"`
}

func (w *work) shop() []task.Kind[pgx.Tx] {
	notify := task.Define("shop/notify", func(ctx context.Context, r *task.Run[pgx.Tx], _ string) (string, error) {
		defer w.busy()()
		return w.call(ctx, "mail", r.Key())
	})
	count := task.DefineTx("shop/count", func(ctx context.Context, tx pgx.Tx, of string) (int, []outbox.Message, error) {
		return 1, nil, effect(ctx, tx, of, "counted", "")
	})
	remind := task.DefineTx("shop/remind", func(ctx context.Context, tx pgx.Tx, of string) (int, []outbox.Message, error) {
		return 1, nil, effect(ctx, tx, of, "reminded", "")
	})
	broken := task.Define("shop/broken", func(context.Context, *task.Run[pgx.Tx], string) (int, error) { return 0, task.Permanent(errDeclined) })
	notified := task.DefineGroup("shop/notified", func(ctx context.Context, tx pgx.Tx, id string, of string) ([]outbox.Message, error) {
		if err := effect(ctx, tx, of, "notified", ""); err != nil {
			return nil, err
		}
		_, err := w.db.TasksIn(tx).Answer(ctx, task.Answer{Task: of, Name: "notified", ID: id, Out: json.RawMessage(`"all"`)})
		return nil, err
	})
	fulfil := task.Define("shop/order", func(ctx context.Context, r *task.Run[pgx.Tx], in order) (string, error) {
		defer w.busy()()
		id := r.ID()
		ref, err := task.Step(ctx, r, "charge", func(ctx context.Context, key string) (string, error) { return w.call(ctx, "pay", key) },
			func(ctx context.Context, key string, _ *string) error {
				_, err := w.call(ctx, "pay", key+"/undo")
				return err
			})
		if err != nil {
			return "", err
		}
		_, err = task.StepTx(ctx, r, "book", func(ctx context.Context, tx pgx.Tx) (string, []outbox.Message, error) {
			if err := effect(ctx, tx, id, "booked", ref); err != nil {
				return "", nil, err
			}
			return ref, nil, w.db.TasksIn(tx).EnqueueGroup(ctx, notified.New(id+"/notify", id, notify.New(id+"/customer", id), notify.New(id+"/store", id), count.New(id+"/count", id)))
		}, func(ctx context.Context, tx pgx.Tx, ref string) ([]outbox.Message, error) {
			return nil, effect(ctx, tx, id, "unbooked", ref)
		})
		if err != nil {
			return "", err
		}
		if _, err := task.Wait[string](ctx, r, "notified", 0); err != nil {
			return "", err
		}
		if in.Refused {
			return "", task.GiveUp("refused")
		}
		_, err = task.StepTx(ctx, r, "close", func(ctx context.Context, tx pgx.Tx) (string, []outbox.Message, error) {
			if err := effect(ctx, tx, id, "closed", ref); err != nil {
				return "", nil, err
			}
			// One by one, because there is a statement for one task.
			if err := w.db.TasksIn(tx).Enqueue(ctx, remind.New(id+"/remind", id).Later(time.Hour)); err != nil {
				return "", nil, err
			}
			return ref, nil, w.db.TasksIn(tx).Enqueue(ctx, broken.New(id+"/broken", id))
		}, nil)
		if err != nil {
			return "", err
		}
		// A timer that a later step moves or cancels.
		_, err = task.StepTx(ctx, r, "settle", func(ctx context.Context, tx pgx.Tx) (bool, []outbox.Message, error) {
			if isEven(id) {
				moved, err := w.db.TasksIn(tx).Postpone(ctx, id+"/remind", time.Unix(1, 0))
				return moved, nil, err
			}
			canceled, err := w.db.TasksIn(tx).Cancel(ctx, id+"/remind")
			return canceled, nil, err
		}, nil)
		return ref, err
	})
	return []task.Kind[pgx.Tx]{notify, count, remind, broken, notified, fulfil}
}

// isEven reports whether the number at the end of an id is even.
func isEven(id string) bool { return strings.ContainsRune("02468", rune(id[len(id)-1])) }

// operate completes, until stop is called, the tasks that are abandoned because their system
// declines them.
func (w *work) operate(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			list, err := w.db.Tasks(ctx, task.Filter{Kind: "shop/broken", Status: []task.Status{task.Abandoned}})
			for _, t := range list {
				err = w.db.CompleteTask(ctx, t.ID, json.RawMessage(`1`), task.Decision{By: w.Name, Reason: "done by hand"})
				if err != nil {
					break
				}
			}
			if err != nil {
				w.trace.printf("operator %v", err)
			}
			pause(ctx, 100*time.Millisecond)
		}
	}()
	return func() { cancel(); <-done }
}

// crowd is a program whose tasks are one transaction each.
func (w *work) crowd() []task.Kind[pgx.Tx] {
	return []task.Kind[pgx.Tx]{task.DefineTx("crowd/count", func(ctx context.Context, tx pgx.Tx, id string) (int, []outbox.Message, error) {
		defer w.busy()()
		pause(ctx, 5*time.Millisecond)
		return 1, nil, effect(ctx, tx, id, "counted", "")
	})}
}

func orderID(n int) string { return fmt.Sprintf("order-%d", n) }
