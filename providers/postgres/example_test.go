package postgres_test

import (
	"context"
	"database/sql"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
)

// The example is a process that relays the entries of others, which have Config.Notify. Its
// appends go through a pooler; its listener connects to the server.
func ExampleNewListener() {
	relaying := func(ctx context.Context, pooler, server string, publisher message.Publisher) (*kinora.Group, error) {
		db, err := postgres.Open(ctx, pooler+"?default_query_exec_mode=cache_describe", &postgres.Config{Notify: true})
		if err != nil {
			return nil, err
		}
		listener, err := postgres.NewListener(db, &postgres.ListenerConfig{DSN: server})
		if err != nil {
			return nil, err
		}
		relay, err := outbox.NewRelay(db, publisher, nil)
		if err != nil {
			return nil, err
		}
		return kinora.Start(ctx, listener, relay)
	}
	_ = relaying
}

// A service on database/sql commits a row of its own with an event, its outbox entry and a message.
// With sqlx, tx is the field Tx of a *sqlx.Tx; with GORM, it is tx.Statement.ConnPool.(*sql.Tx).
func ExampleDB_InSQLTx() {
	type posted struct{ Product string }
	types := eventstore.NewTypes(eventstore.Type[posted]("review.posted"))

	post := func(ctx context.Context, pool *sql.DB, db *postgres.DB, product string) error {
		tx, err := pool.BeginTx(ctx, nil) // READ COMMITTED
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(ctx, `insert into products (name) values ($1)`, product); err != nil {
			return err
		}
		events, err := types.Encode(ctx, posted{product})
		if err != nil {
			return err
		}
		view := db.InSQLTx(tx)
		if _, err := view.Append(ctx, "review-"+product, eventstore.Any, events); err != nil {
			return err
		}
		if err := view.Enqueue(ctx, outbox.Message{Topic: "mail", Payload: []byte("new: " + product)}); err != nil {
			return err
		}
		if err := tx.Commit(); err != nil {
			return err
		}
		db.Wake() // the relay publishes at once
		return nil
	}
	open := func(db *postgres.DB) *sql.DB { return stdlib.OpenDBFromPool(db.Pool()) } // or sql.Open("pgx", dsn)
	_, _ = post, open
}

// A handler gets the *sql.Tx of its unit: its writes commit with the checkpoint or the markers.
func ExampleDB_SQL() {
	type posted struct{ Product string }
	types := eventstore.NewTypes(eventstore.Type[posted]("review.posted"))
	counts := projector.Define("review-counts", types, projector.Options{},
		projector.On("posted", func(ctx context.Context, tx *sql.Tx, e eventstore.Event[posted]) error {
			_, err := tx.ExecContext(ctx, `insert into counts as c (product, n) values ($1, 1)
				on conflict (product) do update set n = c.n + 1`, e.Data.Product)
			return err
		}))
	run := func(ctx context.Context, db *postgres.DB) error {
		runner, err := projector.NewRunner(db.SQL(), projector.FromLog(db), projector.RunnerConfig{}, counts)
		if err != nil {
			return err
		}
		return kinora.Run(ctx, runner)
	}
	_ = run
}
