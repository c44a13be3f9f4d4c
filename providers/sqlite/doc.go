// Package sqlite is a provider that keeps everything in one SQLite file, without a server. Its driver is modernc.org/sqlite.
//
// Streams, outbox, markers, parked messages and the application's tables share the file. So the
// writes of a handler commit together with its marker, and events together with their outbox
// entries, in one transaction. The names of Kinora's tables begin with kinora_.
//
//	db, err := sqlite.Open(ctx, "reviews.db", &sqlite.Config{Route: outbox.ByCategory})
//	err = db.Migrate(ctx)
//	reviews, err := eventstore.NewRepository(db, types, "review", newReview, nil)
//	runner, err := projector.NewRunner(db, projector.Subscribe(subscriber, "review"), projector.RunnerConfig{}, ratings)
//
// SQLite has one writer at a time. Kinora's transactions, and those that the application begins
// through DB.SQL, wait for a write lock of this process in the order of their arrival, and
// compete with other processes for the lock of the file. A busy database is not an error: Kinora
// waits until the caller's context ends. Single statements through DB.SQL wait for at most 5s.
// Readers do not wait. Commits are as durable as WAL mode with synchronous=FULL makes them: they
// survive a loss of power. Leases and retries use SQLite's clock, which is the clock of the
// machine that has the file.
//
// A unit is one immediate transaction, so no process can change the rows that its opening read
// before it commits. It needs at most two statements for markers, one for the checkpoint and one
// for holds, however many messages and handlers it has.
//
// A unit with Switch is such a transaction too, also with Snapshot: other writers wait for it. Its
// tables and views are those of the file or of one attached schema, because a view cannot show a
// table of another schema. Replacing a view drops the view's triggers. Rows are compared with IS, so
// 1 and 1.0 are equal, and 1 and '1' are not. In a Difference a blob is shown as "\x" and
// hexadecimal digits. A repair does not write generated columns, and fails if a row that it does not
// repair has a unique value of one that it does.
//
// A handler gets a *sql.Tx and must not end it. On a DB from Open, SQLite refuses every commit
// except Kinora's own and rolls the unit back: also if the handler sends COMMIT as SQL, begins
// another transaction, or continues after an error that rolled everything back. A DB from New has
// no such guard, and does not interrupt a query that searches for a further row when the context
// ends. A handler must append with DB.InTx: DB.Append is provider.ErrInTransaction. If a query is
// interrupted while others of the transaction are open, SQLite ends all of them and rolls the unit
// back: inside the rows of a query, a handler must not continue after another one that timed out.
//
// Leases, renewals of tasks, and the messages in flight of careful runners, are committed without a
// sync. They survive the end of the process. A loss of power may lose them, and nothing else. Runners
// and workers cannot renew leases while a handler's transaction is open in any process that shares
// the file: make leases longer than such handlers take.
package sqlite
