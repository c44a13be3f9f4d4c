package main

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
)

// category is that of the streams: "rating-tenant-product". The tenant is a part of the stream's id,
// so no two stores have the same stream. outbox.ByCategory publishes the events to this topic.
const category = "rating"

// Rated is the only event: a customer of a tenant has rated a product.
type Rated struct {
	Tenant, Product string
	Stars           int64
}

var types = eventstore.NewTypes(eventstore.Type[Rated]("product.rated"))

// model is a read model in a database of its own, with a table for the events of all stores.
type model struct {
	name string
	db   *postgres.DB
	// apply writes an event to the rows of a store.
	apply func(ctx context.Context, tx pgx.Tx, store string, e eventstore.Event[Rated]) error
	reset string // deletes the rows of a store
}

// of returns the projector that fills the model from one store. A checkpoint is a position in one
// log, so each store needs a projector of its own, and the name of the store is part of its name.
func (m *model) of(store string) *projector.Projector[pgx.Tx] {
	return projector.Define(m.name+"-"+store, types, projector.Options{},
		projector.On("rated", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[Rated]) error {
			return m.apply(ctx, tx, store, e)
		}),
		// A rebuild of one store's part must leave the parts of the other stores alone. So this is
		// not Options.Tables, whose tables are emptied.
		projector.OnReset(func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, m.reset, store)
			return err
		}))
}

// totalsTable has the ratings of each product. versions are those of the product's events, in the
// order in which they were applied.
const totalsTable = `
create table totals (
	store text, tenant text, product text, ratings bigint not null, stars bigint not null, versions bigint[] not null,
	primary key (store, tenant, product))`

func newTotals(db *postgres.DB) *model {
	return &model{name: "totals", db: db, reset: `delete from totals where store = $1`, apply: addToTotals}
}

func addToTotals(ctx context.Context, tx pgx.Tx, store string, e eventstore.Event[Rated]) error {
	_, err := tx.Exec(ctx, `
		insert into totals as t (store, tenant, product, ratings, stars, versions) values ($1, $2, $3, 1, $4, array[$5::bigint])
		on conflict (store, tenant, product) do update
		set ratings = t.ratings + 1, stars = t.stars + $4, versions = t.versions || $5::bigint`,
		store, e.Data.Tenant, e.Data.Product, e.Data.Stars, e.Version)
	return err
}

// chartsTable has how often each tenant got each number of stars.
const chartsTable = `
create table charts (
	store text, tenant text, stars bigint, ratings bigint not null,
	primary key (store, tenant, stars))`

func newCharts(db *postgres.DB) *model {
	return &model{name: "charts", db: db, reset: `delete from charts where store = $1`,
		apply: func(ctx context.Context, tx pgx.Tx, store string, e eventstore.Event[Rated]) error {
			_, err := tx.Exec(ctx, `
				insert into charts as t (store, tenant, stars, ratings) values ($1, $2, $3, 1)
				on conflict (store, tenant, stars) do update set ratings = t.ratings + 1`,
				store, e.Data.Tenant, e.Data.Stars)
			return err
		}}
}

// billingTable is that of another service. It knows no stores.
const billingTable = `create table billing (tenant text primary key, ratings bigint not null)`

// billing gets the events of all stores from the broker. It cannot read their logs: BrokerOnly. Its
// markers make it exact, by the ids of the events. These are unique over all stores.
var billing = projector.Define("billing", types, projector.Options{Markers: true, BrokerOnly: true},
	projector.On("rated", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[Rated]) error {
		_, err := tx.Exec(ctx, `
			insert into billing as t (tenant, ratings) values ($1, 1)
			on conflict (tenant) do update set ratings = t.ratings + 1`, e.Data.Tenant)
		return err
	}))
