package transfers

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/task"
)

// Verdict is the answer of a person who checks a transfer.
type Verdict struct{ OK bool }

// checked is the amount from which a person checks a transfer.
const checked = 10_000_00

// transfer moves money in steps: withdraw, perhaps wait for a person, deposit. If a later step is
// refused, the money goes back.
func (b *Bank) transfer(ctx context.Context, r *task.Run[*sql.Tx], t Transfer) (bool, error) {
	refused, err := task.StepTx(ctx, r, "withdraw",
		func(ctx context.Context, tx *sql.Tx) (string, []outbox.Message, error) {
			return refusal(b.withdraw(ctx, tx, t))
		},
		func(ctx context.Context, tx *sql.Tx, refused string) ([]outbox.Message, error) {
			if refused != "" {
				return nil, nil // it withdrew nothing
			}
			_, err := b.accounts.UpdateTx(ctx, b.db.InTx(tx), t.From,
				func(*Account) ([]any, error) { return []any{Returned{t.ID, t.Cents}}, nil })
			return nil, err
		})
	if err != nil {
		return false, err
	}
	if refused != "" {
		return false, task.GiveUp(refused)
	}
	if t.Cents >= checked {
		v, err := task.Wait[Verdict](ctx, r, "verdict", 48*time.Hour)
		switch {
		case errors.Is(err, task.ErrTimeout):
			return false, task.GiveUp("not_checked")
		case err != nil:
			return false, err
		case !v.OK:
			return false, task.GiveUp("rejected")
		}
	}
	refused, err = task.StepTx(ctx, r, "deposit",
		func(ctx context.Context, tx *sql.Tx) (string, []outbox.Message, error) {
			return refusal(b.deposit(ctx, tx, t))
		}, nil)
	if err != nil {
		return false, err
	}
	if refused != "" {
		return false, task.GiveUp(refused)
	}
	return true, nil
}

// refusal makes the refusal of an account a result of the step. Other errors are retried.
func refusal(err error) (string, []outbox.Message, error) {
	switch {
	case errors.Is(err, ErrFunds):
		return "funds", nil, nil
	case errors.Is(err, ErrClosed):
		return "closed", nil, nil
	}
	return "", nil, err
}

// Start starts the process. A repeated call with the same transfer changes nothing.
func (b *Bank) Start(ctx context.Context, t Transfer) error {
	if err := t.check(); err != nil {
		return err
	}
	return b.db.Transact(ctx, func(ctx context.Context, tx *sql.Tx) error {
		return b.db.TasksIn(tx).Enqueue(ctx, b.process.New(t.ID, t))
	})
}

// Check passes the verdict of a person to the process. message is the id of the request.
func (b *Bank) Check(ctx context.Context, transfer, message string, ok bool) (out task.Outcome, err error) {
	verdict, err := json.Marshal(Verdict{ok})
	if err != nil {
		return "", err
	}
	answer := task.Answer{Task: transfer, Name: "verdict", ID: message, Out: verdict}
	err = b.db.Transact(ctx, func(ctx context.Context, tx *sql.Tx) error {
		out, err = b.db.TasksIn(tx).Answer(ctx, answer)
		return err
	})
	return out, err
}

// Worker returns a worker of the processes.
func (b *Bank) Worker(cfg task.WorkerConfig) (*task.Worker, error) {
	return task.NewWorker(b.db, cfg, b.process)
}
