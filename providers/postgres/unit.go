package postgres

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

// unit is a call of Do.
type unit struct {
	provider.Unit
	db     *DB
	found  provider.Found
	marked map[mark]bool          // the markers that the opening inserted
	inLane map[provider.Lane]bool // the lanes that an opening of parked messages has locked, and whether they are due
	listed []listed               // the first messages of these lanes
	begun  []begun                // of handlers that queue statements
	now    int                    // the message whose handlers run; -1: none yet
	failed int                    // the message after which the transaction had failed; -1: none
}

// begun is where the statements of a message begin in a batch.
type begun struct{ message, at int }

func (db *DB) newUnit(u provider.Unit) *unit { return &unit{Unit: u, db: db, now: -1, failed: -1} }

// isParked reports whether the messages of the unit are parked ones.
func (w *unit) isParked() bool { return len(w.Messages) > 0 && w.Messages[0].Parked != nil }

// newFound is a Found in which all handlers are fresh, or none.
func newFound(ms []provider.Message, fresh bool) provider.Found {
	handlers := 0
	for i := range ms {
		handlers += len(ms[i].Handlers)
	}
	flags := make([]bool, handlers+len(ms))
	for i := range flags[:handlers] {
		flags[i] = fresh
	}
	found := provider.Found{Fresh: make([][]bool, len(ms)), Held: flags[handlers:]}
	for i := range ms {
		n := len(ms[i].Handlers)
		found.Fresh[i], flags = flags[:n:n], flags[n:]
	}
	return found
}

// Keeps implements provider.Units.
func (db *DB) Keeps() provider.Keeps {
	return provider.Keeps{Atomic: true, Markers: true, Output: true, DryRun: true}
}

// Do implements provider.Units at READ COMMITTED. One round trip opens the unit. The tx that run gets refuses Commit and Rollback;
// Begin gives it savepoints.
func (db *DB) Do(ctx context.Context, u provider.Unit, run func(ctx context.Context, tx pgx.Tx, found provider.Found) (provider.Closing, error)) error {
	w := db.newUnit(u)
	var closing provider.Closing
	return w.do(ctx, func(tx pgx.Tx) (err error) {
		w.found.Begin = w.beginIn(tx)
		closing, err = run(ctx, heldTx{tx}, w.found)
		return err
	}, func(conn *pgx.Conn, tx pgx.Tx) error {
		if err := w.usable(ctx, conn); err != nil {
			return err
		}
		b := &trip{}
		if err := w.queueClosing(b, closing); err != nil {
			return class(err)
		}
		if b.Len() > 0 {
			crash.Point("close unit: before")
			err := b.send(ctx, conn)
			crash.Point("close unit: after")
			if err != nil {
				return err
			}
		}
		if w.DryRun != nil {
			return nil
		}
		if err := commit(ctx, tx); err != nil {
			return err
		}
		db.enqueued(closing)
		return nil
	})
}

// do opens the unit, calls run, and then finish, which commits unless the unit is a dry run. It rolls back unless finish has
// committed.
func (w *unit) do(ctx context.Context, run func(tx pgx.Tx) error, finish func(conn *pgx.Conn, tx pgx.Tx) error) error {
	var outside *dryRun
	if w.DryRun != nil {
		var err error
		if outside, err = w.db.beginDryRun(ctx); err != nil {
			return ofOwn(ctx, err)
		}
		defer outside.end(ctx)
	}
	l, err := w.db.acquire(ctx)
	if err != nil {
		return err
	}
	defer l.end()
	crash.Point("open unit: before")
	tx, err := w.open(ctx, l.conn)
	crash.Point("open unit: after")
	committed := false
	defer func() { // also after a panic or runtime.Goexit in run
		if !committed {
			rollback(ctx, tx)
		}
	}()
	if err != nil {
		return ofOwn(ctx, fmt.Errorf("open the unit: %w", err))
	}
	if err := l.run(ctx, func() error { return run(tx) }); err != nil {
		if err = w.blame(err); !l.conn.IsClosed() {
			err = ofHandler(err)
		}
		return class(err)
	}
	if ctx.Err() != nil {
		return ended(ctx)
	}
	if err := finish(l.conn, tx); err != nil {
		return err
	}
	if outside == nil {
		committed = true
		return nil
	}
	changes, err := outside.changes(ctx, tx)
	if err != nil {
		return class(err)
	}
	w.DryRun(changes)
	return nil
}

// beginIn is Found.Begin for handlers that run their statements. It notices that the transaction failed in the message before.
func (w *unit) beginIn(tx pgx.Tx) func(int) {
	status := tx.Conn().PgConn().TxStatus
	return func(message int) {
		if w.failed < 0 && status() == 'E' {
			w.failed = w.now
		}
		w.now = message
	}
}

// blame adds to the error of a statement which message it belongs to.
func (w *unit) blame(err error) error {
	message := w.now
	if w.failed >= 0 {
		message = w.failed
	}
	if _, ok := errors.AsType[*provider.MessageError](err); ok || message < 0 || pgError(err) == nil {
		return err
	}
	return &provider.MessageError{Message: message, Err: err}
}

// usable returns an error if the handlers have left the transaction so that it cannot be committed.
func (w *unit) usable(ctx context.Context, conn *pgx.Conn) error {
	switch pg := conn.PgConn(); {
	case pg.IsClosed(): // the commit says why
	case pg.IsBusy():
		return class(errors.New("a handler has left the rows of a query open"))
	case pg.TxStatus() == 'I':
		return errEnded()
	case pg.TxStatus() == 'E':
		w.found.Begin(w.now) // notices it
		return class(w.blame(errWentOn(&pgconn.PgError{Severity: "ERROR", Code: inFailedTransaction, Message: "the transaction has failed"})))
	}
	return nil
}

// ended is the error of a unit whose ctx ended while its handlers ran.
func ended(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return &provider.Error{Class: provider.ClassShutdown, Err: ctx.Err()}
	}
	return &provider.Error{Class: provider.ClassUnknown, Code: provider.CodeDeadline, Err: ctx.Err()}
}

// enqueued notifies relays of the output of a unit that has committed.
func (db *DB) enqueued(c provider.Closing) {
	if len(c.Output) > 0 {
		db.added()
	}
}

const (
	fenceAloneSQL = `select pg_advisory_xact_lock($1::int, $2::int)`

	generationSQL = `select coalesce((select live from kinora.generations where projector = $1::text), 1)`

	switchSQL = `
insert into kinora.generations (projector, live) values ($1::text, $2::int)
on conflict on constraint generations_pkey do update set live = excluded.live`
)

// Switch implements provider.Units.
func (db *DB) Switch(ctx context.Context, projector string, fn func(ctx context.Context, tx pgx.Tx, live int) (int, error)) error {
	tx, err := db.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return ofOwn(ctx, fmt.Errorf("switch generations: %w", err))
	}
	defer rollback(ctx, tx)
	if _, err := tx.Exec(ctx, fenceAloneSQL, lockClassFence, db.fence(projector)); err != nil {
		return ofOwn(ctx, fmt.Errorf("wait for the units of %s: %w", projector, err))
	}
	var live int
	if err := tx.QueryRow(ctx, db.q(generationSQL), projector).Scan(&live); err != nil {
		return ofOwn(ctx, fmt.Errorf("read the generation of %s: %w", projector, err))
	}
	next, err := fn(ctx, heldTx{tx}, live)
	if err != nil {
		return class(ofHandler(err))
	}
	crash.Point("switch: before")
	_, err = tx.Exec(ctx, db.q(switchSQL), projector, next)
	crash.Point("switch: after")
	if err != nil {
		return class(fmt.Errorf("write the generation of %s: %w", projector, err))
	}
	return commit(ctx, tx)
}
