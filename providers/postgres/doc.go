// Package postgres keeps everything in PostgreSQL, through pgx.
//
// Events, outbox entries, markers and parked messages live in one schema beside the service's own tables, so
// that each promise is one transaction: an append commits its events with its entries, and a unit of work
// commits a handler's writes with its marker. Leases and retries live on the server's clock, read once a
// statement. Everything works without session state, so also through a pooler in transaction mode.
//
//	db, err := postgres.Open(ctx, dsn, &postgres.Config{Route: outbox.ByCategory})
//	err = db.Migrate(ctx)
//
// Relays look for entries now and then (outbox.RelayConfig.Poll), and at once for those that their own process adds.
// With Config.Notify, and a Listener beside the relays, those of other processes wake them as well.
//
// Behind a pooler in transaction mode that knows no prepared statements (pgbouncer before 1.21), the connection string
// says default_query_exec_mode=cache_describe: see docs/operations.md.
//
// *DB is a provider.Provider[pgx.Tx]; db.Batched() is a provider.Provider[*pgx.Batch], for handlers that only write:
// all their statements, the markers and the commit travel in one round trip.
package postgres
