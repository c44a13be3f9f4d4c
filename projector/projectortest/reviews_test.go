package projectortest_test

import (
	"context"
	"database/sql"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	. "github.com/kinora-go/kinora/projector/projectortest"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/providers/sqlite"
)

type (
	posted struct {
		Product, Author string
		Stars           int
	}
	edited struct {
		Product, Author string
		Stars, Was      int
	}
	flagged struct{ Product string }
)

var types = eventstore.NewTypes(
	eventstore.Type[posted]("review.posted"), eventstore.Type[edited]("review.edited"), eventstore.Type[flagged]("review.flagged"))

const tables = `
create table ratings (product text primary key, reviews bigint not null, stars bigint not null);
create table latest (product text primary key, author text not null, stars bigint not null, at text not null default '')`

func openSQLite(t testing.TB) *sqlite.DB {
	db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "test.db"), &sqlite.Config{Route: outbox.ByCategory})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	require.NoError(t, db.Migrate(t.Context()))
	_, err = db.SQL().ExecContext(t.Context(), tables)
	require.NoError(t, err)
	return db
}

func openPostgres(t testing.TB) *postgres.DB { return postgrestest.Open(t, nil, tables) }

func readSQLite(ctx context.Context, db *sqlite.DB) ([]string, error) {
	return Rows(ctx, db.SQL().QueryContext, `select product, reviews, stars from ratings order by product`)
}

func readPostgres(ctx context.Context, db *postgres.DB) ([]string, error) {
	return Rows(ctx, db.Pool().Query, `select product, reviews, stars from ratings order by product`)
}

var marked = projector.Options{Markers: true}

type txn = *sql.Tx

const addRating = `
	insert into ratings as r (product, reviews, stars) values ($1, $2, $3)
	on conflict (product) do update set reviews = r.reviews + excluded.reviews, stars = r.stars + excluded.stars`

func onPosted(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
	return add(ctx, tx, e.Data.Product, 1, e.Data.Stars)
}

func onEdited(ctx context.Context, tx txn, e eventstore.Event[edited]) error {
	return add(ctx, tx, e.Data.Product, 0, e.Data.Stars-e.Data.Was)
}

func add(ctx context.Context, tx txn, product string, reviews, stars int) error {
	_, err := tx.ExecContext(ctx, strings.ReplaceAll(addRating, "ratings", projector.Table(ctx, "ratings")), product, reviews, stars)
	return err
}

// define returns a projector with a right handler of edited, and other handlers.
func define(opts projector.Options, hs ...projector.Handler[txn]) *projector.Projector[txn] {
	return projector.Define("ratings", types, opts, append(hs, projector.On("edited", onEdited))...)
}

var (
	ratings = define(marked, projector.OnEmit("posted", func(ctx context.Context, tx txn, e eventstore.Event[posted]) ([]outbox.Message, error) {
		if e.Data.Stars == 1 {
			return []outbox.Message{{Topic: "alerts", Payload: []byte("one star by " + e.Data.Author)}}, onPosted(ctx, tx, e)
		}
		return nil, onPosted(ctx, tx, e)
	}))
	ratingsPG = projector.Define("ratings", types, marked,
		projector.On("posted", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[posted]) error {
			_, err := tx.Exec(ctx, addRating, e.Data.Product, 1, e.Data.Stars)
			return err
		}),
		projector.On("edited", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[edited]) error {
			_, err := tx.Exec(ctx, addRating, e.Data.Product, 0, e.Data.Stars-e.Data.Was)
			return err
		}))
)

// ten are ten events of five streams.
var ten = []Event{
	In("review-42-ann", posted{"42", "ann", 5}), In("review-42-bob", posted{"42", "bob", 1}), In("review-7-ann", posted{"7", "ann", 2}),
	In("review-42-ann", edited{"42", "ann", 3, 5}), In("review-42-cid", posted{"42", "cid", 4}), In("review-7-ann", edited{"7", "ann", 4, 2}),
	In("review-42-bob", edited{"42", "bob", 2, 1}), In("review-7-dan", posted{"7", "dan", 5}), In("review-42-ann", edited{"42", "ann", 5, 3}),
	In("review-7-dan", edited{"7", "dan", 1, 5}),
}
