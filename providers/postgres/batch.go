package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

// Batched runs units for handlers that only write: they queue statements. The opening, their statements, their output and the
// commit are sent in one round trip. Two more follow if a marker exists, a lane is held, or an event is not behind the
// checkpoint. A queued statement must not read, have a callback, or begin or end a transaction: that is a permanent error. All
// statements of a unit are parsed before one is executed, so none can use a table that another one creates.
type Batched struct{ *DB }

// Batched returns the provider for handlers of *pgx.Batch.
func (db *DB) Batched() *Batched { return &Batched{db} }

// queuing is the function of a unit whose handlers queue statements.
type queuing = func(ctx context.Context, tx *pgx.Batch, found provider.Found) (provider.Closing, error)

// Do implements provider.Units. It calls run before it sends a statement, and again, after an opening like that of
// DB.Do, if a marker exists, a lane is held, the checkpoint decides, or run parks messages.
func (b *Batched) Do(ctx context.Context, u provider.Unit, run queuing) error {
	if ctx.Err() == nil && !u.Once && u.Switch == nil && u.Careful == nil && u.DryRun == nil && !u.IsReplay() && (u.Reader == nil || u.Advance != nil) {
		if done, err := b.newUnit(u, true).inOneTrip(ctx, run); done || err != nil {
			return err
		}
	}
	w := b.newUnit(u, true)
	return w.do(ctx, func(pgx.Tx) (provider.Closing, error) { return w.queueHandlers(ctx, run) })
}

// inOneTrip returns false and no error if the unit needs an opening before its handlers run: nothing was committed.
func (w *unit) inOneTrip(ctx context.Context, run queuing) (done bool, err error) {
	if !w.queueOpening() {
		return false, nil
	}
	w.found = w.NewFound(true)
	closing, err := w.queueHandlers(ctx, run)
	switch {
	case err != nil:
		return true, class(ofHandler(err))
	case ctx.Err() != nil:
		return true, ended(ctx)
	case len(closing.Park) > 0:
		return false, nil
	}
	if err := w.queueClosing(ctx, closing); err != nil {
		return true, class(err)
	}
	conn, err := w.acquire(ctx)
	if err != nil {
		return true, classifyOwn(ctx, wrap("acquire a connection", err))
	}
	defer conn.release()
	crash.Point("one trip: before")
	err = w.send(ctx, conn)
	crash.Point("one trip: after")
	if e := pgError(err); e != nil && w.failed == ofUnit && slices.Contains([]string{uniqueViolation, laneHeld, checkpointDecides}, e.Code) {
		return false, nil
	}
	if err == nil && len(closing.Output) > 0 {
		w.db.added()
	}
	return true, err
}

// queueOpening queues the opening. It returns false if that needs a separate round trip.
func (w *unit) queueOpening() bool {
	w.queueFence(&w.Batch)
	lowest := w.lowest()
	if w.Advance == nil {
		w.queueMarkers(&w.Batch, mustMarkSQL)
	} else {
		if lowest != nil && *lowest <= w.Advance.From {
			return false
		}
		lowest = nil
		w.queueAdvance()
		if args, all := w.lookup(); len(all) > 0 {
			w.Queue(w.db.q(unmarkedSQL), args...)
		}
	}
	if len(w.Messages) > 0 || w.Projector != "" && w.Advance == nil {
		w.Queue(w.db.q(unheldSQL), w.Projector, w.Generation, w.lanes(), lowest)
	}
	return true
}

// queueAdvance queues the statement that moves the checkpoint, once.
func (w *unit) queueAdvance() {
	if a := w.Advance; a != nil && !w.advanced {
		w.advanced = true
		args := []any{w.Projector, w.Generation, a.From, a.Mode.String(), uuid.UUID(a.Token), a.To.Position, a.To.ID, recordedAt(a.To)}
		if w.Segment > 0 {
			w.Queue(w.db.q(advanceSegmentSQL), append(args, w.Segment)...)
		} else {
			w.Queue(w.db.q(advanceSQL), args...)
		}
	}
}

func (w *unit) queueHandlers(ctx context.Context, run queuing) (provider.Closing, error) {
	first := w.Len()
	w.begin(ofHandlers)
	w.found.Begin = w.begin
	closing, err := run(ctx, &w.Batch, w.found)
	if err != nil {
		return closing, err
	}
	for i, q := range w.QueuedQueries[first:] {
		if q.Fn != nil || endsTx(q.SQL) || begins.MatchString(q.SQL) {
			err := fmt.Errorf("a handler queued %.40q: a queued statement must have no callback, and must not begin or end a transaction", q.SQL)
			return closing, &provider.Error{Class: provider.ClassPermanent, Code: "tx_ended", Err: withMessage(w.of(first+i), err)}
		}
	}
	w.returned = now()
	return closing, nil
}

// part is the index of the first statement of a message, given by its index, or of one of these.
type part struct{ at, of int }

const (
	ofHandlers = -1 - iota // before the first message
	ofOutput
	ofCommit
	ofUnit // also before the first part
)

func (w *unit) begin(of int) { w.parts = append(w.parts, part{w.Len(), of}) }

// of returns the message or part of a statement.
func (w *unit) of(statement int) int {
	for _, p := range slices.Backward(w.parts) {
		if p.at <= statement {
			return p.of
		}
	}
	return ofUnit
}

// send sends the batch. Its error has a class, and the message whose statement failed. If ctx ends before the reply, send
// requests a cancellation and waits for the result. A rollback of the handlers' statements then counts like a handler that
// takes too long, unless most of the time was a wait for a connection. Without a reply the result is ambiguous.
func (w *unit) send(ctx context.Context, conn *leased) (err error) {
	sent := now()
	watch(ctx, conn, true, func() { err = w.results(conn.SendBatch(context.WithoutCancel(ctx), &w.Batch)) })
	if err == nil {
		if w.commits() && conn.PgConn().TxStatus() != 'I' { // a handler began a transaction
			return errEnded
		}
		return nil
	}
	e, err := pgError(err), fmt.Errorf("send: %w", err)
	_, unsent := errors.AsType[pgx.ErrPreprocessingBatch](err) // it closes the connection too
	if e != nil || unsent {
		err = withMessage(w.failed, err)
	}
	return w.sendError(ctx, conn, err, e, unsent, sent)
}

// sendError returns an error of send with its class. e is that of the server, or nil.
func (w *unit) sendError(ctx context.Context, conn *leased, err error, e *pgconn.PgError, unsent bool, sent time.Time) error {
	switch {
	case e != nil && e.Code == checkpointFenced && w.failed == ofUnit:
		return errFenced
	case w.commits() && !unsent && isAmbiguous(err) && (conn.IsClosed() || w.failed == ofCommit):
		return &provider.Error{Class: provider.ClassAmbiguous, Code: "commit", Err: err}
	case w.failed >= ofHandlers && ctx.Err() != nil && e != nil && e.Code == queryCanceled && now().Sub(sent) > sent.Sub(w.returned):
		return &provider.Error{Class: provider.ClassUnknown, Code: provider.CodeDeadline, Err: fmt.Errorf("%w: %w", ctx.Err(), err)}
	// the simple protocol parses all statements before it executes one
	case w.failed == ofUnit && (e == nil || e.Code != syntaxError):
		return classifyOwn(ctx, err)
	}
	return class(err)
}

func (w *unit) results(r pgx.BatchResults) error {
	read := 0
	for ; read < w.Len(); read++ {
		if _, err := r.Exec(); err != nil {
			break
		}
	}
	w.failed = w.of(read)
	err := r.Close()
	if e, ok := errors.AsType[pgx.ErrPreprocessingBatch](err); ok { // an argument; the error has the statement's text
		var of []int
		for i, q := range w.QueuedQueries {
			if q.SQL == e.SQL() {
				of = append(of, w.of(i))
			}
		}
		if w.failed = ofHandlers; len(slices.Compact(of)) == 1 { // others may have queued the same statement
			w.failed = of[0]
		}
	}
	return err
}

// withMessage adds to an error the message that queued the statement, if a message did.
func withMessage(n int, err error) error {
	if n < 0 {
		return err
	}
	return &provider.MessageError{Message: n, Err: err}
}

// now measures durations.
func now() time.Time { return time.Now() } //nolint:forbidigo // not compared with the store's times
