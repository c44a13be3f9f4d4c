package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

// Batched runs units for handlers that only write: they queue statements. The opening, their statements, their output and the
// commit travel in one round trip, or in two if a marker was there or a lane is held. A queued statement must not read, have a
// callback, or begin or end a transaction: that is a permanent error.
type Batched struct{ *DB }

// Batched returns the provider for handlers of *pgx.Batch.
func (db *DB) Batched() *Batched { return &Batched{db} }

// In one round trip the opening cannot decide what the handlers queue: a marker that is there already and a lane that is held must
// be errors, or the message would take effect again.
const (
	mustMarkSQL = `
insert into kinora.markers (handler, generation, message_id) select $2::text, ` + liveGeneration + `, $3::text`

	mustMarkAllSQL = `
insert into kinora.markers (handler, generation, message_id) select n.handler, ` + liveGeneration + `, n.message_id ` + markerNames

	unheldSQL = `select kinora.unheld($1::text, $2::bytea[])`
)

// Do implements provider.Units. run is called before anything is sent; if the server then answers that a marker is there or a lane
// is held, or if run parks messages, it is called again after an opening like that of DB.Do.
func (b *Batched) Do(ctx context.Context, u provider.Unit, run func(ctx context.Context, tx *pgx.Batch, found provider.Found) (provider.Closing, error)) error {
	w := b.newUnit(u)
	if !u.Once && u.Careful == nil && u.DryRun == nil && !w.isParked() {
		if opened, err := w.inOneTrip(ctx, run); opened || err != nil {
			return err
		}
		w = b.newUnit(u)
	}
	return w.inTwoTrips(ctx, run)
}

// inOneTrip returns false and no error if nothing has happened: the unit needs an answer before its handlers.
func (w *unit) inOneTrip(ctx context.Context, run func(context.Context, *pgx.Batch, provider.Found) (provider.Closing, error)) (done bool, err error) {
	if ctx.Err() != nil {
		return true, ofOwn(ctx, ctx.Err())
	}
	t := &trip{commits: true}
	w.queueFence(&t.Batch)
	switch handlers, messages := w.markers(); len(handlers) {
	case 0:
	case 1:
		t.Queue(w.db.q(mustMarkSQL), w.Projector, handlers[0], messages[0])
	default:
		t.Queue(w.db.q(mustMarkAllSQL), w.Projector, handlers, messages)
	}
	if len(w.Messages) > 0 {
		t.Queue(w.db.q(unheldSQL), w.Projector, w.lanes())
	}
	w.found = newFound(w.Messages, true)
	closing, err := w.queueHandlers(ctx, t, run)
	if err != nil {
		return true, err
	}
	if len(closing.Park) > 0 {
		return false, nil
	}
	if err := w.queueClosing(t, closing); err != nil {
		return true, class(err)
	}
	l, err := w.db.acquire(ctx)
	if err != nil {
		return true, err
	}
	defer l.end()
	crash.Point("one trip: before")
	err = t.send(ctx, l.conn)
	crash.Point("one trip: after")
	if e := pgError(err); e != nil && t.failed < t.handlers && (e.Code == laneHeld || w.db.isMarker(e)) {
		return false, nil
	}
	if err == nil {
		w.db.enqueued(closing)
	}
	return true, w.ofMessage(t, err)
}

// inTwoTrips opens the unit first, and sends all else with the commit.
func (w *unit) inTwoTrips(ctx context.Context, run func(context.Context, *pgx.Batch, provider.Found) (provider.Closing, error)) error {
	t := &trip{commits: true}
	var closing provider.Closing
	return w.do(ctx, func(pgx.Tx) (err error) {
		closing, err = w.queueHandlers(ctx, t, run)
		return err
	}, func(conn *pgx.Conn, _ pgx.Tx) error {
		if err := w.queueClosing(t, closing); err != nil {
			return class(err)
		}
		if t.commits = w.DryRun == nil; t.commits {
			t.Queue(`commit`)
		}
		if t.Len() == 0 {
			return nil
		}
		crash.Point("second trip: before")
		err := t.send(ctx, conn)
		crash.Point("second trip: after")
		if err == nil && t.commits {
			w.db.enqueued(closing)
		}
		return w.ofMessage(t, err)
	})
}

// isMarker reports whether the error is that a marker is there already.
func (db *DB) isMarker(err error) bool {
	return violates(err, "markers_pkey") && pgError(err).SchemaName == db.cfg.Schema
}

// queueHandlers calls run, which queues the handlers' statements.
func (w *unit) queueHandlers(ctx context.Context, t *trip, run func(context.Context, *pgx.Batch, provider.Found) (provider.Closing, error)) (provider.Closing, error) {
	t.handlers = t.Len()
	w.found.Begin = func(message int) { w.begun = append(w.begun, begun{message, t.Len()}) }
	closing, err := run(ctx, &t.Batch, w.found)
	if err != nil {
		return closing, class(ofHandler(err))
	}
	if ctx.Err() != nil {
		return closing, ended(ctx)
	}
	for i, q := range t.QueuedQueries[t.handlers:] {
		if q.Fn == nil && !endsTx(q.SQL) && !beginsTx(q.SQL) {
			continue
		}
		err := fmt.Errorf("a handler queued %.40q: a queued statement must have no callback, and must not begin or end a transaction", q.SQL)
		return closing, &provider.Error{Class: provider.ClassPermanent, Code: "tx_ended", Err: w.at(t.handlers+i, err)}
	}
	t.returned = now()
	return closing, nil
}

// at adds to an error the message that queued the statement.
func (w *unit) at(statement int, err error) error {
	for _, b := range slices.Backward(w.begun) {
		if b.at <= statement {
			return &provider.MessageError{Message: b.message, Err: err}
		}
	}
	return err
}

// ofMessage adds to the error of a handler's statement the message that queued it.
func (w *unit) ofMessage(t *trip, err error) error {
	e, ok := errors.AsType[*provider.Error](err)
	if !ok || t.failed < t.handlers || t.failed >= t.output {
		return err
	}
	if pgError(err) == nil { // arguments that cannot be encoded: the driver names only the text of the statement
		sql := t.QueuedQueries[t.failed].SQL
		same := slices.ContainsFunc(t.QueuedQueries[t.failed+1:], func(q *pgx.QueuedQuery) bool { return q.SQL == sql })
		if _, unsent := errors.AsType[pgx.ErrPreprocessingBatch](err); same || !unsent {
			return err
		}
	}
	return &provider.Error{Class: e.Class, Code: e.Code, Err: w.at(t.failed, e.Err)}
}

// trip is what a unit sends in one round trip: statements of its own, those of the handlers, the output, and statements of its own.
type trip struct {
	pgx.Batch
	handlers, output, closing int  // where these begin
	commits                   bool // with its end
	returned                  time.Time
	failed                    int // the statement that failed; after the last one if it is none of them
}

// send sends the batch, and gives its error a class.
//
// If ctx ends before the answer, the server is asked to break off, and to say what became of it. If it undid the handlers' statements,
// that counts like a handler that takes too long, unless most of the time went in waiting for a connection. If it does not say, the unit
// is in doubt, which does not count.
func (t *trip) send(ctx context.Context, conn *pgx.Conn) error {
	sent := now()
	answered := patient(ctx, conn)
	defer answered()
	err := t.results(conn.SendBatch(context.WithoutCancel(ctx), &t.Batch))
	if err == nil {
		if t.commits && conn.PgConn().TxStatus() != 'I' { // a handler began a transaction
			return errEnded()
		}
		return nil
	}
	_, unsent := errors.AsType[pgx.ErrPreprocessingBatch](err) // it ends the connection as well
	ofHandlers := t.handlers <= t.failed && t.failed < t.output
	e := pgError(err)
	switch err = fmt.Errorf("send: %w", err); {
	case t.commits && !unsent && inDoubt(err) && conn.PgConn().IsClosed():
		return &provider.Error{Class: provider.ClassAmbiguous, Code: "commit", Err: err}
	case ofHandlers && ctx.Err() != nil && e != nil && e.Code == queryCanceled && now().Sub(sent) > sent.Sub(t.returned):
		return &provider.Error{Class: provider.ClassUnknown, Code: provider.CodeDeadline, Err: fmt.Errorf("%w: %w", ctx.Err(), err)}
	case t.isOwn() && (e == nil || e.Code != syntaxError): // the simple protocol reads all before it begins
		return ofOwn(ctx, err)
	}
	return class(err)
}

// isOwn reports whether the statement that failed is one of the unit's own, except for the output and the commit.
func (t *trip) isOwn() bool {
	return t.failed < t.handlers || t.closing <= t.failed && t.failed < t.Len() && t.QueuedQueries[t.failed].SQL != `commit`
}

// results reads all results, and notes which statement failed.
func (t *trip) results(r pgx.BatchResults) (err error) {
	for t.failed = 0; t.failed < t.Len(); t.failed++ {
		if _, err := r.Exec(); err != nil {
			break
		}
	}
	err = r.Close()
	if e, ok := errors.AsType[pgx.ErrPreprocessingBatch](err); ok {
		t.failed = slices.IndexFunc(t.QueuedQueries, func(q *pgx.QueuedQuery) bool { return q.SQL == e.SQL() })
	}
	return err
}

// now measures how long something takes.
func now() time.Time { return time.Now() } //nolint:forbidigo // it is compared with no time of the store's

// Switch implements provider.Units.
func (b *Batched) Switch(ctx context.Context, projector string, fn func(ctx context.Context, tx *pgx.Batch, live int) (int, error)) error {
	return b.DB.Switch(ctx, projector, func(ctx context.Context, tx pgx.Tx, live int) (int, error) {
		batch := &pgx.Batch{}
		next, err := fn(ctx, batch, live)
		if err == nil && batch.Len() > 0 {
			err = tx.SendBatch(ctx, batch).Close()
		}
		return next, err
	})
}
