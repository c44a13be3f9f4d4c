package main

import (
	"context"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// directory says in which store the events of a tenant are. It never changes that for a tenant, so
// what a process has read stays true, and known tenants do not need the directory's database.
type directory struct {
	pool    *pgxpool.Pool
	tenants sync.Map // the store of a tenant
}

const directoryTables = `
create table stores (store text primary key, dsn text not null);
create table tenants (tenant text primary key, store text not null references stores)`

// addStore makes a store known. Each program of the service starts to read it (fleet.follow), and new
// tenants may be placed in it.
func (d *directory) addStore(ctx context.Context, store, dsn string) error {
	_, err := d.pool.Exec(ctx, `insert into stores (store, dsn) values ($1, $2)`, store, dsn)
	return err
}

// stores returns the connection string of each store.
func (d *directory) stores(ctx context.Context) (map[string]string, error) {
	rows, err := d.pool.Query(ctx, `select store, dsn from stores`)
	if err != nil {
		return nil, err
	}
	all := map[string]string{}
	var store, dsn string
	_, err = pgx.ForEachRow(rows, []any{&store, &dsn}, func() error {
		all[store] = dsn
		return nil
	})
	return all, err
}

// placeSQL places a tenant in the store that has the fewest, unless it has a place. If two programs
// place it at once, the second one gets the place that the first one chose.
const placeSQL = `
insert into tenants (tenant, store)
select $1, store from stores left join tenants using (store) group by store order by count(tenant), store limit 1
on conflict (tenant) do update set store = tenants.store
returning store`

// storeOf returns the store of a tenant.
func (d *directory) storeOf(ctx context.Context, tenant string) (store string, err error) {
	if known, ok := d.tenants.Load(tenant); ok {
		return known.(string), nil
	}
	if err = d.pool.QueryRow(ctx, placeSQL, tenant).Scan(&store); err == nil {
		d.tenants.Store(tenant, store)
	}
	return store, err
}
