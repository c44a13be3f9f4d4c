package sqlite_test

import (
	"context"
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
		tx, err := db.SQL().BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }() // no effect after the commit
		if _, err := tx.ExecContext(ctx, `insert into requests values (?)`, request); err != nil {
			return err
		}
		if _, err := db.InTx(tx).Append(ctx, "cart-1", eventstore.NoStream, drafts); err != nil {
			return err
		}
		return tx.Commit()
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

func must(err error) {
	if err != nil {
		panic(err)
	}
}
