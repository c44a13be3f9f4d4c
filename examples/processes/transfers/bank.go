package transfers

import (
	"context"
	"database/sql"
	"errors"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/kinora-go/kinora/task"
)

// Transfer moves money from one account to another one.
type Transfer struct {
	ID, From, To string
	Cents        int64
}

func (t Transfer) check() error {
	if t.Cents <= 0 || t.From == t.To {
		return errors.New("a transfer requires a positive amount and two accounts")
	}
	return nil
}

// Bank has the accounts of a database.
type Bank struct {
	db       *sqlite.DB
	accounts *eventstore.Repository[*Account]
	process  *task.Definition[*sql.Tx, Transfer, bool]
}

// NewBank returns the bank of a database.
func NewBank(db *sqlite.DB) (*Bank, error) {
	accounts, err := eventstore.NewRepository(db, Types, "account",
		func(string) *Account { return &Account{known: map[string]bool{}} }, nil)
	b := &Bank{db: db, accounts: accounts}
	b.process = task.Define("bank/transfer", b.transfer)
	return b, err
}

// Do runs a command on one account.
func (b *Bank) Do(ctx context.Context, account string, command func(*Account) ([]any, error)) error {
	_, err := b.accounts.Update(ctx, account, command)
	return err
}

// Balance returns the money of an account.
func (b *Bank) Balance(ctx context.Context, account string) (int64, error) {
	a, _, err := b.accounts.Load(ctx, account)
	if err != nil {
		return 0, err
	}
	return a.Cents, nil
}

// Move moves the money in one transaction: both accounts change, or none.
func (b *Bank) Move(ctx context.Context, t Transfer) error {
	if err := t.check(); err != nil {
		return err
	}
	return b.db.Transact(ctx, func(ctx context.Context, tx *sql.Tx) error {
		if err := b.withdraw(ctx, tx, t); err != nil {
			return err
		}
		return b.deposit(ctx, tx, t)
	})
}

func (b *Bank) withdraw(ctx context.Context, tx *sql.Tx, t Transfer) error {
	_, err := b.accounts.UpdateTx(ctx, b.db.InTx(tx), t.From,
		func(a *Account) ([]any, error) { return a.Withdraw(t.ID, t.Cents) })
	return err
}

func (b *Bank) deposit(ctx context.Context, tx *sql.Tx, t Transfer) error {
	_, err := b.accounts.UpdateTx(ctx, b.db.InTx(tx), t.To,
		func(a *Account) ([]any, error) { return a.Deposit(t.ID, t.Cents) })
	return err
}
