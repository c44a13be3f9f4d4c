package main

import (
	"context"
	"fmt"
	"hash/fnv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/task"
)

// Money moves between accounts. A projector adds a transfer for each event, and workers run it as a
// process: a debit, a credit, and the undo of the debit if the rule refuses the credit. Money that is
// debited and not credited is in transit. The accounts of the control are moved without steps.
const (
	accounts  = 200
	balance   = 1_000_000
	bankMoney = accounts * balance

	bankTables = `
create table accounts (id int primary key, balance bigint not null, closed boolean not null) with (fillfactor = 50);
create table transit (task text primary key, amount bigint not null);
insert into accounts select i, %d, i %% 3 = 0 from generate_series(0, %d) i;
create table control_accounts (like accounts including all);
insert into control_accounts select * from accounts`

	// moneySQL is all money, read at one moment.
	moneySQL = `select (select sum(balance) from accounts)::bigint + (select coalesce(sum(amount), 0) from transit)::bigint`
)

// transfer is the input of a transfer. A closed account refuses it.
type transfer struct {
	From   int   `json:"from"`
	To     int   `json:"to"`
	Amount int64 `json:"amount"`
}

// transferOf returns the transfer of an event.
func transferOf(id string, amount int64) transfer {
	h := fnv.New64a()
	_, _ = h.Write([]byte(id))
	n := int(h.Sum64() >> 33)
	from := n % accounts
	return transfer{from, (from + 1 + n/accounts%(accounts-1)) % accounts, amount}
}

func (t transfer) refused() bool { return t.To%3 == 0 }

// transfers adds the transfers of an event, in the transaction of its handler.
func (w *work) transfers(ctx context.Context, tx any, e eventstore.Event[moved]) error {
	own, ok := tx.(pgx.Tx)
	if !ok || w.More["transfers"] == "" {
		return nil
	}
	in := transferOf(e.ID, e.Data.Amount)
	return w.db.TasksIn(own).Enqueue(ctx, taskDraft("bank/transfer", e.ID, in), taskDraft("bank/naive", "naive-"+e.ID, in))
}

// execer is a transaction or a pool.
type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// credit adds to an account that is not closed.
func credit(ctx context.Context, on execer, table string, to int, amount int64) (bool, error) {
	tag, err := on.Exec(ctx, `update `+table+` set balance = balance + $2 where id = $1 and not closed`, to, amount)
	return tag.RowsAffected() == 1, err
}

func debit(ctx context.Context, on execer, table string, from int, amount int64) error {
	_, err := on.Exec(ctx, `update `+table+` set balance = balance - $2 where id = $1`, from, amount)
	return err
}

func arrive(ctx context.Context, tx pgx.Tx, id string) error {
	tag, err := tx.Exec(ctx, `delete from transit where task = $1`, id)
	if err == nil && tag.RowsAffected() != 1 {
		err = fmt.Errorf("%s has no money in transit", id)
	}
	return err
}

func (w *work) bank() []task.Kind[pgx.Tx] {
	return []task.Kind[pgx.Tx]{
		task.Define("bank/transfer", func(ctx context.Context, r *task.Run[pgx.Tx], in transfer) (string, error) {
			defer w.busy()()
			_, err := task.StepTx(ctx, r, "debit", func(ctx context.Context, tx pgx.Tx) (bool, []outbox.Message, error) {
				if err := debit(ctx, tx, "accounts", in.From, in.Amount); err != nil {
					return false, nil, err
				}
				_, err := tx.Exec(ctx, `insert into transit (task, amount) values ($1, $2)`, r.ID(), in.Amount)
				return true, nil, err
			}, func(ctx context.Context, tx pgx.Tx, _ bool) ([]outbox.Message, error) {
				if err := debit(ctx, tx, "accounts", in.From, -in.Amount); err != nil {
					return nil, err
				}
				return nil, arrive(ctx, tx, r.ID())
			})
			if err != nil {
				return "", err
			}
			credited, err := task.StepTx(ctx, r, "credit", func(ctx context.Context, tx pgx.Tx) (bool, []outbox.Message, error) {
				credited, err := credit(ctx, tx, "accounts", in.To, in.Amount)
				if err != nil || !credited {
					return false, nil, err
				}
				return true, nil, arrive(ctx, tx, r.ID())
			}, nil)
			if err == nil && !credited {
				err = task.GiveUp("closed")
			}
			return "", err
		}),
		task.Define("bank/naive", func(ctx context.Context, _ *task.Run[pgx.Tx], in transfer) (string, error) {
			defer w.busy()()
			if err := debit(ctx, w.db.Pool(), "control_accounts", in.From, in.Amount); err != nil {
				return "", err
			}
			credited, err := credit(ctx, w.db.Pool(), "control_accounts", in.To, in.Amount)
			if err == nil && !credited {
				err = debit(ctx, w.db.Pool(), "control_accounts", in.From, -in.Amount)
			}
			return "", err
		}),
	}
}
