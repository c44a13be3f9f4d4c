// Package sqlite is a provider that keeps everything in one SQLite file, without a server.
//
// Streams, outbox, markers, parked messages and the user's own tables share the file, so that whatever a
// handler writes commits together with its marker, and events together with their outbox entries: in one
// transaction. Every table of Kinora is prefixed kinora_.
//
//	db, err := sqlite.Open(ctx, "reviews.db", &sqlite.Config{Route: outbox.ByCategory})
//	err = db.Migrate(ctx)
//	reviews, err := eventstore.NewRepository(db, types, "review", newReview, nil)
//	runner, err := projector.NewRunner(db, projector.Subscribe(subscriber, "review"), nil, ratings)
//
// SQLite admits one writer at a time. Kinora's own transactions, and those that the user begins through DB.SQL,
// queue for their turn in this process, first come first served, and take turns with other processes: a busy
// database is waited for until the caller's context ends, and never raised. What the user runs through DB.SQL waits
// for 5s at most. Readers wait for nobody. Durability is that of WAL mode with synchronous=FULL: what was
// acknowledged survives the loss of power. Leases and retries live on SQLite's clock, which is that of the machine
// that holds the file.
//
// A handler gets a *sql.Tx. It must not end it, and does not get far if it tries: on a DB that Open made,
// SQLite refuses a commit that is not Kinora's own and undoes the unit, also where the handler sent the word
// as SQL, began another transaction, or went on after an error that had rolled everything back. On a pool given to New, nothing guards
// against that, and nothing ends a query that searches for a further row. A handler that calls DB.Append waits for
// itself until its context ends; it uses DB.InTx. Where a query is interrupted while others of the transaction are open, SQLite ends
// all of them and undoes the unit: a handler that takes the timeout of a query inside the rows of another for "skip" loses it.
//
// Which attempts are under way, and which runners live, is committed without waiting for the disk: the kill of a process
// loses none of it; a loss of power may lose it, and nothing else. As all writers take turns, a runner cannot say that it lives
// while a handler runs, in whatever process: its lease must be longer than handlers take.
//
// A rehearsal tells the rows of all tables that are left in the file, by their primary keys, or their rowids. It needs a DB
// that Open made.
//
// The driver is modernc.org/sqlite.
package sqlite
