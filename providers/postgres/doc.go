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
// *DB is a projector.UnitOfWork[pgx.Tx]; db.Batched() is one over *pgx.Batch, for handlers that only write:
// all their statements, the marker and the commit travel in one round trip.
package postgres
