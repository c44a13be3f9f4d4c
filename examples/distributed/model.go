package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
)

// topic is the category of the streams: outbox.ByCategory publishes their events to it.
const topic = "account"

// Moved is the only event. Money was moved to or from an account.
type Moved struct{ Amount int64 }

var types = eventstore.NewTypes(eventstore.Type[Moved]("account.moved"))

// tables are two read models of the same events. history has the versions in the order in which they
// were applied.
const tables = `
create table if not exists deliveries (account text primary key, balance bigint not null, history bigint[] not null);
create table if not exists balances (account text primary key, balance bigint not null, history bigint[] not null)`

// deliveries has only what the broker delivers. So it shows what the broker loses.
var deliveries = projector.Define("deliveries", types, projector.Options{Markers: true, BrokerOnly: true},
	projector.On("moved", into("deliveries")))

// balances also reads the log, and applies the events of an account in their order. This is how a
// service would define it.
var balances = projector.Define("balances", types, projector.Options{Markers: true, Ordered: true},
	projector.On("moved", into("balances")))

// into returns a handler that writes to a table.
func into(table string) func(context.Context, pgx.Tx, eventstore.Event[Moved]) error {
	query := fmt.Sprintf(`
		insert into %[1]s as t (account, balance, history) values ($1, $2, array[$3::bigint])
		on conflict (account) do update set balance = t.balance + $2, history = t.history || $3::bigint`, table)
	return func(ctx context.Context, tx pgx.Tx, e eventstore.Event[Moved]) error {
		_, err := tx.Exec(ctx, query, e.Stream, e.Data.Amount, e.Version)
		return err
	}
}
