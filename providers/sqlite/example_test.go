package sqlite_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// Bought is an event of a cart.
type Bought struct{ Product string }

// A file with events, and rows of the application in the same transaction.
func Example() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "kinora")
	must(err)
	defer func() { must(os.RemoveAll(dir)) }()
	db, err := sqlite.Open(ctx, filepath.Join(dir, "shop.db"), nil)
	must(err)
	defer func() { must(db.Close()) }()
	must(db.Migrate(ctx))
	_, err = db.SQL().ExecContext(ctx, `create table requests (id text primary key)`)
	must(err)

	types := eventstore.NewTypes(eventstore.Type[Bought]("cart.bought"))
	drafts, err := types.Encode(ctx, Bought{Product: "tea"})
	must(err)
	buy := func(request string) error {
		return db.Transact(ctx, func(ctx context.Context, tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, `insert into requests values (?)`, request); err != nil {
				return err
			}
			_, err := db.InTx(tx).Append(ctx, "cart-1", eventstore.NoStream, drafts)
			return err
		})
	}
	fmt.Println(buy("request-1"))
	fmt.Println(buy("request-1") != nil) // the same request: nothing is written

	for raw, err := range db.ReadStream(ctx, "cart-1", 0) {
		must(err)
		fmt.Println(raw.Version, raw.Type, string(raw.Data))
	}

	// Output:
	// <nil>
	// true
	// 1 cart.bought {"Product":"tea"}
}

// Deposited and Withdrawn are events of an account.
type (
	Deposited struct{ Amount int }
	Withdrawn struct{ Amount int }
)

var accountTypes = eventstore.NewTypes(
	eventstore.Type[Deposited]("account.deposited"), eventstore.Type[Withdrawn]("account.withdrawn"))

// Account is an aggregate.
type Account struct{ Balance int }

// Apply implements eventstore.Aggregate.
func (a *Account) Apply(event any) {
	switch e := event.(type) {
	case Deposited:
		a.Balance += e.Amount
	case Withdrawn:
		a.Balance -= e.Amount
	}
}

// A transfer changes two accounts, or none. On PostgreSQL it is the same with a pgx.Tx.
func ExampleDB_Transact() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "kinora")
	must(err)
	defer func() { must(os.RemoveAll(dir)) }()
	db, err := sqlite.Open(ctx, filepath.Join(dir, "bank.db"), nil)
	must(err)
	defer func() { must(db.Close()) }()
	must(db.Migrate(ctx))
	accounts, err := eventstore.NewRepository(db, accountTypes, "account", func(string) *Account { return &Account{} }, nil)
	must(err)

	transfer := func(from, to string, amount int) error {
		return db.Transact(ctx, func(ctx context.Context, tx *sql.Tx) error { // may run several times
			_, err := accounts.UpdateTx(ctx, db.InTx(tx), from, func(a *Account) ([]any, error) {
				if a.Balance < amount {
					return nil, fmt.Errorf("%s has only %d", from, a.Balance)
				}
				return []any{Withdrawn{amount}}, nil
			})
			if err != nil {
				return err
			}
			_, err = accounts.UpdateTx(ctx, db.InTx(tx), to, func(*Account) ([]any, error) { return []any{Deposited{amount}}, nil })
			return err
		})
	}
	_, err = accounts.Update(ctx, "ann", func(*Account) ([]any, error) { return []any{Deposited{100}}, nil })
	must(err)
	fmt.Println(transfer("ann", "ben", 70))
	fmt.Println(transfer("ann", "ben", 70))
	for _, id := range []string{"ann", "ben"} {
		a, _, err := accounts.Load(ctx, id)
		must(err)
		fmt.Println(id, a.Balance)
	}

	// Output:
	// <nil>
	// ann has only 30
	// ann 30
	// ben 70
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
