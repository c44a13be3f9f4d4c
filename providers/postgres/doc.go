// Package postgres is a provider that keeps everything in PostgreSQL, through pgx.
//
// Events, outbox entries, markers and parked messages are in one schema next to the service's own
// tables. So each promise is one transaction: an append commits its events with its entries, and
// a unit commits a handler's writes with its marker. Leases and retries use the server's clock,
// read once per statement. The package needs no session state, and therefore works through a
// pooler in transaction mode.
//
//	db, err := postgres.Open(ctx, dsn, &postgres.Config{Route: outbox.ByCategory})
//	err = db.Migrate(ctx)
//
// Relays and workers poll, and look at once when their own process adds something. With Config.Notify and a Listener, what
// other processes add wakes them too. Behind a pooler in transaction mode without prepared statements (pgbouncer before
// 1.21), set default_query_exec_mode=cache_describe in the connection string: see docs/operations.md.
//
// *DB is a provider.Provider[pgx.Tx]. db.Batched() is a provider.Provider[*pgx.Batch], for
// handlers that only write: all their statements, the markers and the commit are sent in one
// round trip. db.SQL() is a provider.Provider[*sql.Tx]. Services on database/sql, sqlx, GORM or sqlc
// use the event store and the outbox in their transactions with db.InSQLTx.
package postgres
