package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

// unit is a call of Do or Switch. Its messages have their ids as markers have them.
type unit struct {
	provider.Unit
	db       *DB
	switches bool // it is a call of Switch
	live     int  // the generation that it found
	found    provider.Found
	marked   map[provider.Marker]bool // the markers that the opening inserted
	due      map[provider.Lane]bool   // the lanes that an opening of parked messages has locked, and whether they are due
	front    []provider.Parked        // the first messages of these lanes
	now      int                      // the message whose handlers run, or in which the transaction failed; -1: none yet
}

func (db *DB) newUnit(u provider.Unit) *unit {
	for i := range u.Messages {
		if id := markerID(u.Messages[i].ID); id != u.Messages[i].ID {
			u.Messages = slices.Clone(u.Messages)
			u.Messages[i].ID = id
		}
	}
	return &unit{Unit: u, db: db, now: -1}
}

// Keeps implements provider.Units.
func (db *DB) Keeps() provider.Keeps {
	return provider.Keeps{Atomic: true, Markers: true, Output: true, DryRun: true}
}

// Do implements provider.Units at READ COMMITTED. One round trip opens the unit. The tx that run gets refuses Commit and Rollback;
// Begin gives it savepoints.
func (db *DB) Do(ctx context.Context, u provider.Unit, run func(ctx context.Context, tx pgx.Tx, found provider.Found) (provider.Closing, error)) error {
	w := db.newUnit(u)
	return w.do(ctx, &trip{}, func(tx pgx.Tx) (provider.Closing, error) {
		status := tx.Conn().PgConn().TxStatus
		w.found.Begin = func(message int) {
			if status() != 'E' {
				w.now = message
			}
		}
		return run(ctx, heldTx{tx}, w.found)
	})
}

// do opens the unit and calls run. What closes the unit is sent with t, which has what run has queued. It commits unless the unit
// is a dry run, or something fails.
func (w *unit) do(ctx context.Context, t *trip, run func(tx pgx.Tx) (provider.Closing, error)) error {
	var outside *dryRun
	if w.DryRun != nil {
		var err error
		if outside, err = w.db.beginDryRun(ctx); err != nil {
			return ofOwn(ctx, err)
		}
		defer outside.end(ctx)
	}
	pooled, err := w.db.pool.Acquire(ctx)
	if err != nil {
		return ofOwn(ctx, fmt.Errorf("acquire a connection: %w", err))
	}
	defer pooled.Release()
	conn := pooled.Conn()
	crash.Point("open unit: before")
	tx, err := w.open(ctx, conn)
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
	var closing provider.Closing
	if attend(ctx, pooled, false, func() { closing, err = run(tx) }) {
		return &provider.Error{Class: provider.ClassUnknown, Code: provider.CodeDeadline,
			Err: fmt.Errorf("the handler did not return, and its transaction was broken off: %w", ctx.Err())}
	}
	if err != nil {
		if err = w.blame(err); !conn.IsClosed() {
			err = ofHandler(err)
		}
		return class(err)
	}
	if err := w.usable(ctx, conn); err != nil {
		return err
	}
	if err := w.queueClosing(t, closing); err != nil {
		return class(err)
	}
	if t.commits {
		t.Queue(`commit`)
	}
	if t.Len() > 0 {
		crash.Point("close unit: before")
		err := t.send(ctx, pooled)
		crash.Point("close unit: after")
		if err != nil {
			return err
		}
	}
	if outside != nil {
		changes, err := outside.changes(ctx, tx)
		if err != nil {
			return class(err)
		}
		w.DryRun(changes)
		return nil
	}
	if !t.commits {
		if err := commit(ctx, tx); err != nil {
			return err
		}
	}
	committed = true
	if len(closing.Output) > 0 {
		w.db.added()
	}
	return nil
}

// blame adds to the error of a statement which message it belongs to.
func (w *unit) blame(err error) error {
	if _, ok := errors.AsType[*provider.MessageError](err); ok || w.now < 0 || pgError(err) == nil {
		return err
	}
	return &provider.MessageError{Message: w.now, Err: err}
}

// usable returns an error if ctx has ended, or the handlers have left the transaction so that it cannot be committed.
func (w *unit) usable(ctx context.Context, conn *pgx.Conn) error {
	switch pg := conn.PgConn(); {
	case ctx.Err() != nil:
		return ended(ctx)
	case pg.IsClosed(): // the commit says why
	case pg.IsBusy():
		return class(errors.New("a handler has left the rows of a query open"))
	case pg.TxStatus() == 'I':
		return errEnded()
	case pg.TxStatus() == 'E':
		failed := &pgconn.PgError{Severity: "ERROR", Code: inFailedTransaction, Message: "the transaction has failed"}
		err := w.blame(fmt.Errorf("a handler went on after an SQL error: %w", failed))
		return &provider.Error{Class: provider.ClassUnknown, Code: inFailedTransaction, Err: err}
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

const switchSQL = `
insert into kinora.generations (projector, live) values ($1::text, $2::int)
on conflict on constraint generations_pkey do update set live = excluded.live`

// Switch implements provider.Units.
func (db *DB) Switch(ctx context.Context, projector string, fn func(ctx context.Context, tx pgx.Tx, live int) (int, error)) error {
	w := db.newUnit(provider.Unit{Projector: projector})
	w.switches = true
	return w.do(ctx, &trip{}, func(tx pgx.Tx) (c provider.Closing, err error) {
		next, err := fn(ctx, heldTx{tx}, w.live)
		if err != nil {
			return c, err
		}
		crash.Point("switch: before")
		_, err = tx.Exec(ctx, db.q(switchSQL), projector, next)
		crash.Point("switch: after")
		return c, err
	})
}
