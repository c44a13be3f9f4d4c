package eventstore_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/providers/memory"
)

// Opened and Deposited are the events of an account.
type (
	Opened    struct{ Owner string }
	Deposited struct{ Cents int }
)

var accountTypes = eventstore.NewTypes(
	eventstore.Type[Opened]("account.opened"),
	eventstore.Type[Deposited]("account.deposited"),
)

// Account is an aggregate: Apply computes its state from its events.
type Account struct {
	owner   string
	balance int
}

func (a *Account) Apply(event any) {
	switch e := event.(type) {
	case Opened:
		a.owner = e.Owner
	case Deposited:
		a.balance += e.Cents
	}
}

// Deposit decides: it returns new events, or an error.
func (a *Account) Deposit(cents int) ([]any, error) {
	switch {
	case cents <= 0:
		return nil, fmt.Errorf("deposit %d: must be positive", cents)
	case a.owner == "":
		return []any{Opened{Owner: "ann"}, Deposited{cents}}, nil
	}
	return []any{Deposited{cents}}, nil
}

func newAccount(string) *Account { return &Account{} }

// Update loads an aggregate, lets it decide, and appends the new events.
func ExampleRepository() {
	ctx := context.Background()
	db, err := memory.New(nil) // or sqlite.Open, postgres.Open
	check(err)
	accounts, err := eventstore.NewRepository(db, accountTypes, "account", newAccount, nil)
	check(err)

	for _, cents := range []int{500, 250} {
		at, err := accounts.Update(ctx, "7", func(a *Account) ([]any, error) { return a.Deposit(cents) })
		check(err)
		fmt.Println(at.Stream, "is at version", at.Version)
	}
	_, err = accounts.Update(ctx, "7", func(a *Account) ([]any, error) { return a.Deposit(-1) })
	fmt.Println(err)

	account, version, err := accounts.Load(ctx, "7")
	check(err)
	fmt.Println(account.owner, account.balance, version)

	// Output:
	// account-7 is at version 2
	// account-7 is at version 3
	// deposit -1: must be positive
	// ann 750 3
}

// UpdateTx appends in the caller's transaction, together with a row of its own.
func ExampleRepository_UpdateTx() {
	ctx := context.Background()
	db, err := memory.New(nil)
	check(err)
	accounts, err := eventstore.NewRepository(db, accountTypes, "account", newAccount, nil)
	check(err)

	err = db.Transact(ctx, func(ctx context.Context, tx *memory.Model) error { // a *sql.Tx with sqlite, a pgx.Tx with postgres
		tx.Put("requests", "r-1", "done")
		_, err := accounts.UpdateTx(ctx, db.InTx(tx), "7", func(a *Account) ([]any, error) { return a.Deposit(500) })
		return err
	})
	check(err)
	account, _, err := accounts.Load(ctx, "7")
	check(err)
	fmt.Println(account.balance)

	// Output: 500
}

// Without a repository: append at an expected version, and read the stream.
func ExampleStore() {
	ctx := context.Background()
	db, err := memory.New(nil)
	check(err)
	var store eventstore.Store = db

	drafts, err := accountTypes.Encode(ctx, Opened{Owner: "ann"}, Deposited{500})
	check(err)
	_, err = store.Append(ctx, "account-7", eventstore.NoStream, drafts)
	check(err)

	again, err := store.Append(ctx, "account-7", eventstore.NoStream, drafts) // the reply to the first call was lost
	check(err)
	fmt.Println("version", again.Version, "replayed", again.Replayed)

	others, err := accountTypes.Encode(ctx, Opened{Owner: "ben"})
	check(err)
	_, err = store.Append(ctx, "account-7", eventstore.NoStream, others)
	conflict, ok := errors.AsType[*eventstore.ConflictError](err)
	fmt.Println(ok, conflict.Actual, err)

	for raw, err := range store.ReadStream(ctx, "account-7", 0) {
		check(err)
		fmt.Println(raw.Version, raw.Type, string(raw.Data))
	}

	// Output:
	// version 2 replayed true
	// true 2 append account-7: stream "account-7" is at version 2, expected 0
	// 1 account.opened {"Owner":"ann"}
	// 2 account.deposited {"Cents":500}
}

// An event type was renamed, and its data changed: schema version 1 had dollars, version 2 has
// cents.
func ExampleType() {
	dollarsToCents := func(old json.RawMessage) (json.RawMessage, error) {
		var v struct{ Dollars int }
		if err := json.Unmarshal(old, &v); err != nil {
			return nil, err
		}
		return json.Marshal(Deposited{Cents: 100 * v.Dollars})
	}
	types := eventstore.NewTypes(
		eventstore.Type[Deposited]("account.deposited", dollarsToCents).Was("account.paid_in"),
	)
	stored := eventstore.Raw{Type: "account.paid_in", Schema: 1, Data: []byte(`{"Dollars":5}`)}

	e, err := eventstore.Decode[Deposited](types, stored)
	check(err)
	fmt.Println(e.Type, e.Schema, e.Data.Cents)

	// Output: account.deposited 2 500
}

// NewTypes never fails, so the table can be a package variable. NewRepository and NewRunner
// return its errors.
func ExampleTypes_Err() {
	types := eventstore.NewTypes(eventstore.Type[Opened]("account.opened"), eventstore.Type[*Deposited]("account.deposited"))
	fmt.Println(types.Err())

	// Output:
	// event type "account.deposited": *eventstore_test.Deposited is a pointer or an interface: register a value type
}

// Parts of an id may contain the separator.
func ExampleJoinID() {
	for _, parts := range [][]string{{"42", "ann"}, {"42-a", "nn"}} {
		id := eventstore.JoinID(parts...)
		stream := eventstore.StreamName("review", id)
		back, err := eventstore.SplitID(id)
		check(err)
		fmt.Println(stream, back)
	}

	// Output:
	// review-42-ann [42 ann]
	// review-42~-a-nn [42-a nn]
}

// A middleware sets the metadata of a request once. Every event of the request has it.
func ExampleWithMetadata() {
	ctx := eventstore.WithMetadata(context.Background(), eventstore.Metadata{CorrelationID: "request-1", Actor: "ann"})

	drafts, err := accountTypes.Encode(ctx, Deposited{500})
	check(err)
	fmt.Println(drafts[0].Metadata.CorrelationID, drafts[0].Metadata.Actor, eventstore.MetadataFrom(ctx).Actor)

	// Output: request-1 ann ann
}

// An invalid field is reported before any SQL, without its value.
func ExampleInvalidError() {
	ctx := context.Background()
	db, err := memory.New(nil)
	check(err)
	drafts, err := accountTypes.Encode(ctx, Deposited{500})
	check(err)

	_, err = db.Append(ctx, "account", eventstore.Any, drafts)
	fmt.Println(errors.Is(err, eventstore.ErrInvalid), err)

	// Output: true append account: stream: must be "category-id", and neither part empty
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
