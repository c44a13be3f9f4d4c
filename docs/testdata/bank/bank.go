// Package bank keeps accounts. Transfers change two of them at once, and each account has a statement for each month.
package bank

import (
	"context"
	"database/sql"
	"errors"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// Entry is the event of money that came in, or went out if Cents is negative.
type Entry struct {
	Cents int64
	Day   string // such as "2026-11-24"
}

var types = eventstore.NewTypes(eventstore.Type[Entry]("account.entry"))

// ErrFunds is the error for an account with too little money.
var ErrFunds = errors.New("the account has too little money")

// Account is the state of one account.
type Account struct{ cents int64 }

// Apply adds one event to the state.
func (a *Account) Apply(event any) {
	if e, ok := event.(Entry); ok {
		a.cents += e.Cents
	}
}

// Book adds an entry.
func (a *Account) Book(e Entry) ([]any, error) {
	if a.cents+e.Cents < 0 {
		return nil, ErrFunds
	}
	return []any{e}, nil
}

// Statements keeps the sums of each account and month.
var Statements = projector.Define("statements", types, projector.Options{Markers: true, Tables: []string{"statements"}},
	projector.OnCreate(func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `create table `+projector.Table(ctx, "statements")+` (
			account text, month text, received integer not null, spent integer not null, primary key (account, month)) strict`)
		return err
	}),
	projector.On("entry", func(ctx context.Context, tx *sql.Tx, e eventstore.Event[Entry]) error {
		_, err := tx.ExecContext(ctx, `
			insert into `+projector.Table(ctx, "statements")+` (account, month, received, spent) values (?1, ?2, max(?3, 0), max(-?3, 0))
			on conflict (account, month) do update set received = received + excluded.received, spent = spent + excluded.spent`,
			e.Stream, e.Data.Day[:len("2026-11")], e.Data.Cents)
		return err
	}))

// Bank has the accounts of a database.
type Bank struct {
	db       *sqlite.DB
	accounts *eventstore.Repository[*Account]
}

// New returns the bank of a database.
func New(db *sqlite.DB) (*Bank, error) {
	accounts, err := eventstore.NewRepository(db, types, "account", func(string) *Account { return &Account{} }, nil)
	return &Bank{db, accounts}, err
}

// Deposit adds money. A command with the same id changes nothing.
func (b *Bank) Deposit(ctx context.Context, id, account string, e Entry) (eventstore.Appended, error) {
	return b.accounts.Update(ctx, account, func(a *Account) ([]any, error) { return a.Book(e) }, eventstore.CommandID(id))
}

// Transfer moves money from one account to another one, or returns ErrFunds. A command with the same id changes nothing.
func (b *Bank) Transfer(ctx context.Context, id, from, to string, e Entry) (last eventstore.Appended, err error) {
	if e.Cents <= 0 || from == to {
		return last, errors.New("a transfer requires a positive amount and two accounts")
	}
	err = b.db.Transact(ctx, func(ctx context.Context, tx *sql.Tx) error {
		for _, part := range []struct {
			account string
			cents   int64
		}{{from, -e.Cents}, {to, e.Cents}} {
			last, err = b.accounts.UpdateTx(ctx, b.db.InTx(tx), part.account, func(a *Account) ([]any, error) {
				return a.Book(Entry{part.cents, e.Day})
			}, eventstore.CommandID(id))
			if err != nil {
				return err
			}
		}
		return nil
	})
	return last, err
}

// Statement is the statement of an account for a month.
type Statement struct{ Opening, Received, Spent, Closing int64 }

// Statement returns the statement of an account for a month.
func (b *Bank) Statement(ctx context.Context, account, month string) (s Statement, err error) {
	err = b.db.SQL().QueryRowContext(ctx, `
		select coalesce(sum(received - spent) filter (where month < ?2), 0),
			coalesce(sum(received) filter (where month = ?2), 0), coalesce(sum(spent) filter (where month = ?2), 0)
		from statements where account = ?1`, eventstore.StreamName("account", account), month).Scan(&s.Opening, &s.Received, &s.Spent)
	s.Closing = s.Opening + s.Received - s.Spent
	return s, err
}
