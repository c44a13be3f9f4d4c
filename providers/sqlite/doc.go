// Package sqlite is a provider that keeps everything in one SQLite file, without a server.
//
// Streams, outbox, markers, parked messages and the user's own tables share the file, so that whatever a
// handler writes commits together with its marker, and events together with their outbox entries: in one
// transaction. Every table of Kinora is prefixed kinora_.
//
//	db, err := sqlite.Open(ctx, "reviews.db", &sqlite.Config{Route: outbox.ByCategory})
//	err = db.Migrate(ctx)
//	reviews, err := eventstore.NewRepository(db, types, "review", newReview, nil)
//	runner, err := projector.NewRunner(db, projector.Subscribe(subscriber, "review"), projector.RunnerConfig{}, ratings)
//
// SQLite has one writer at a time. Kinora's own transactions, and those that the user begins through DB.SQL, wait for
// their turn in this process, first come first served, and take turns with other processes. A busy database is not an
// error: Kinora waits until the caller's context ends. Single statements through DB.SQL wait for 5s at most. Readers do
// not wait. Commits are as durable as WAL mode with synchronous=FULL makes them: they survive a loss of power. Leases and
// retries use SQLite's clock, which is that of the machine that has the file.
//
// A unit is one immediate transaction, so nothing that its opening finds changes before its commit, in any process. It
// needs at most two statements for markers and one for holds, however many messages and handlers it has.
//
// A handler gets a *sql.Tx, and must not end it. On a DB that Open made, SQLite refuses any commit that is not Kinora's
// own and undoes the unit: also if the handler sends COMMIT as SQL, begins another transaction, or goes on after an error
// that rolled everything back. On a pool given to New there is no such guard, and nothing ends a query that searches for
// a further row. A handler that calls DB.Append waits for itself until its context ends; use DB.InTx. If a query is
// interrupted while others of the transaction are open, SQLite ends all of them and undoes the unit: a handler must not
// take the timeout of a query inside the rows of another for "skip".
//
// The leases of runners, and the names of messages that careful runners have in hand, are committed without a sync. The
// end of a process loses none of them, and a loss of power nothing else. A runner cannot renew its lease while a handler
// runs, in any process that shares the file: its lease should be longer than handlers take.
//
// The driver is modernc.org/sqlite.
package sqlite
