package postgres

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

// unit is a call of Do. Its messages have their ids as in the table of markers.
type unit struct {
	provider.Unit
	pgx.Batch  // the closing, after the statements that handlers queued; in one round trip the whole unit
	db         *Provider
	acquire    func(ctx context.Context) (*leased, error)
	queues     bool // its handlers queue statements
	found      provider.Found
	marked     map[provider.Marker]bool // that the opening inserted, or with Advance those that do not exist
	checkpoint provider.Checkpoint
	mayHold    bool      // the projector has held lanes: those of the messages must be looked up
	advanced   bool      // the statement that moves the checkpoint is queued
	now        int       // message whose handlers run, or in which the transaction failed; -1: none
	parts      []part    // parts of the batch
	returned   time.Time // when queuing handlers returned
	failed     int       // message or part of the failed statement of the batch
}

func (db *Provider) newUnit(u provider.Unit, queues bool) *unit {
	u.Generation = u.Build().Generation
	u.Messages = withMarkerIDs(u.Messages)
	return &unit{Unit: u, db: db, acquire: db.lease, queues: queues, now: -1}
}

// leased is a connection of the pool, for a unit.
type leased struct {
	*pgx.Conn
	release func()
	abandon func() // after its network connection was closed: gives its place in the pool to another one
}

func (db *Provider) lease(ctx context.Context) (*leased, error) {
	pooled, err := db.acquire(ctx)
	if err != nil {
		return nil, err
	}
	return &leased{pooled.Conn(), pooled.Release, func() { pooled.Hijack() }}, nil
}

// withMarkerIDs returns the messages with their ids as in the table of markers.
func withMarkerIDs(messages []provider.Message) []provider.Message {
	for i := range messages {
		if id := markerID(messages[i].ID); id != messages[i].ID {
			messages = slices.Clone(messages)
			messages[i].ID = id
		}
	}
	return messages
}

// Keeps implements provider.Units.
func (db *Provider) Keeps() provider.Keeps {
	return provider.Keeps{Atomic: true, Markers: true, Output: true, DryRun: true, Tables: true, Reset: true}
}

// Do implements provider.Units at READ COMMITTED. One round trip opens the unit, or two if it has more than 16 messages and a
// lane of its projector is held. run's tx refuses Commit and Rollback; its Begin makes savepoints. For a unit with Switch:
//   - With Snapshot the transaction is REPEATABLE READ.
//   - A lock that is not free within a second is CodeBusy, and one of a table of Reset, Rename and Show within 300 ms: less than
//     the default of deadlock_timeout, so that a reader who has locked some of these tables gets no error. Readers wait until the
//     unit ends.
//   - Reset truncates: a transaction with an older snapshot then finds the tables empty.
//   - The role must own the tables of Rename and the existing views of Show, and may truncate those of Reset and create views.
//   - If a view of Show must be dropped to change its columns, no other view may depend on it. Its owner, options and grants are
//     restored, except grants on columns that it has no longer. If the type of a column changes, a prepared statement that reads
//     the view fails once ("0A000"). If a renamed table had its name, those who could read the table can read the view.
func (db *Provider) Do(ctx context.Context, u provider.Unit, run func(ctx context.Context, tx pgx.Tx, found provider.Found) (provider.Closing, error)) error {
	w := db.newUnit(u, false)
	return w.do(ctx, func(tx pgx.Tx) (provider.Closing, error) {
		w.found.Begin = func(message int) {
			if tx.Conn().PgConn().TxStatus() != 'E' {
				w.now = message
			}
		}
		return run(ctx, heldTx{tx}, w.found)
	})
}

// do opens the unit, calls run, and closes the unit with one round trip. A dry run is not committed.
func (w *unit) do(ctx context.Context, run func(tx pgx.Tx) (provider.Closing, error)) (err error) {
	if w.Switch != nil {
		if err := provider.CheckSwitch(&w.Unit); err != nil {
			return invalidUnit(err)
		}
	}
	var outside *dryRun
	tasked := w.db.tasked.Load()
	if w.DryRun != nil {
		if outside, err = w.db.beginDryRun(ctx); err != nil {
			return classifyOwn(ctx, err)
		}
		defer outside.end(ctx)
	}
	conn, err := w.acquire(ctx)
	if err != nil {
		return classifyOwn(ctx, wrap("acquire a connection", err))
	}
	defer conn.release()
	crash.Point("open unit: before")
	tx, err := w.open(ctx, conn.Conn)
	crash.Point("open unit: after")
	if tx != nil {
		defer rollback(ctx, tx) // also after a panic or runtime.Goexit in run
	}
	if err != nil {
		return err
	}
	if err := w.reset(ctx, tx); err != nil {
		return err
	}
	closing, err := w.handle(ctx, conn, tx, run)
	if err == nil {
		err = w.close(ctx, conn, tx, closing)
	}
	if err != nil {
		return err
	}
	if w.DryRun != nil {
		changes, err := outside.changes(ctx, tx)
		if err == nil {
			w.DryRun(changes)
		}
		return class(err)
	}
	if len(closing.Output) > 0 && !w.isSnapshot() {
		w.db.added()
	}
	if w.db.tasked.Load() != tasked {
		w.db.tasksDue()
	}
	return nil
}

// handle calls run. Its error has a class.
func (w *unit) handle(ctx context.Context, conn *leased, tx pgx.Tx, run func(tx pgx.Tx) (provider.Closing, error)) (closing provider.Closing, err error) {
	if watch(ctx, conn, false, func() { closing, err = run(tx) }) {
		return closing, &provider.Error{Class: provider.ClassUnknown, Code: provider.CodeDeadline,
			Err: fmt.Errorf("the handler did not return, and its transaction was rolled back: %w", ctx.Err())}
	}
	if err != nil {
		if _, blamed := errors.AsType[*provider.MessageError](err); !blamed && pgError(err) != nil {
			err = withMessage(w.now, err)
		}
		if !conn.IsClosed() {
			err = ofHandler(err)
		}
		return closing, class(err)
	}
	if err := w.CheckClosing(&closing); err != nil {
		return closing, err
	}
	return closing, w.usable(ctx, conn.Conn)
}

// close writes what belongs to the unit, and commits, unless it is a dry run or compares.
func (w *unit) close(ctx context.Context, conn *leased, tx pgx.Tx, closing provider.Closing) (err error) {
	if err := w.queueClosing(ctx, closing); err != nil {
		return class(err)
	}
	if w.commits() {
		w.Queue(`commit`)
	}
	if w.Len() > 0 {
		crash.Point("close unit: before")
		err = w.send(ctx, conn)
		crash.Point("close unit: after")
	}
	if err == nil && w.Switch != nil {
		err = w.endSwitch(ctx, tx)
	}
	if err == nil && w.DryRun == nil && !w.commits() && !w.isSnapshot() {
		crash.Point("commit: before")
		err = wrap("commit", tx.Commit(ctx))
		crash.Point("commit: after")
		if isAmbiguous(err) {
			return &provider.Error{Class: provider.ClassAmbiguous, Code: "commit", Err: err}
		}
		err = class(err)
	}
	return err
}

// commits reports whether the unit commits within its batch. If its handlers have a transaction,
// pgx commits instead, and then refuses handlers that keep the transaction.
func (w *unit) commits() bool { return w.queues && w.DryRun == nil && w.Switch == nil }

// usable returns an error if ctx has ended, or if the handlers left a transaction that cannot be committed.
func (w *unit) usable(ctx context.Context, conn *pgx.Conn) error {
	switch pg := conn.PgConn(); {
	case ctx.Err() != nil:
		return ended(ctx)
	case pg.IsClosed(): // the commit returns the reason
	case pg.IsBusy():
		return class(errors.New("a handler has left the rows of a query open"))
	case pg.TxStatus() == 'I':
		return errEnded
	case pg.TxStatus() == 'E':
		err := withMessage(w.now, errors.New("a handler continued after an SQL error"))
		return &provider.Error{Class: provider.ClassUnknown, Code: inFailedTransaction, Err: err}
	}
	return nil
}

// ended returns the error of a unit whose ctx ended while its handlers ran.
func ended(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return &provider.Error{Class: provider.ClassShutdown, Err: ctx.Err()}
	}
	return &provider.Error{Class: provider.ClassUnknown, Code: provider.CodeDeadline, Err: ctx.Err()}
}

// grace is how long a handler has to return after its context has ended.
const grace = time.Second

// watch calls f, which uses the connection, and reports whether the connection was lost. If f has not returned within grace
// after the end of ctx, watch closes the network connection, because f may be using the rest: the server rolls the transaction
// back, and the pool can open another one. If f only waits for the server, interrupt requests cancellation from the end of ctx
// on, repeatedly, because a request that comes too early is lost. A late one may hit the next statement: the connection is
// closed then too.
func watch(ctx context.Context, conn *leased, interrupt bool, f func()) (lost bool) {
	broken := false
	returned, watched := make(chan struct{}), make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(watched)
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
		defer cancel()
		for limit.Err() == nil {
			if interrupt {
				_ = conn.PgConn().CancelRequest(limit)
			}
			select {
			case <-returned:
				return
			case <-limit.Done():
			case <-time.After(grace / 10):
			}
		}
		broken = true
		_ = conn.PgConn().Conn().Close()
		conn.abandon()
		limit, cancel = context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_ = conn.PgConn().CancelRequest(limit) // otherwise the server would notice only at the end of a statement
	})
	defer func() { // also after a panic
		close(returned)
		if stop() {
			return
		}
		<-watched
		if lost = broken; lost || interrupt {
			closeConn(ctx, conn.Conn)
		}
	}()
	f()
	return false
}

// rollback rolls back uncommitted work. After five seconds it gives up, and the driver closes the
// connection: a server that does not reply must not keep a runner from stopping.
func rollback(ctx context.Context, tx pgx.Tx) {
	if tx.Conn().PgConn().TxStatus() == 'I' {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_ = tx.Rollback(ctx)
}

// ErrHeld is the error of Commit and Rollback of a transaction of a handler or of Transact.
var ErrHeld = errors.New("return to end this transaction: nil commits it, an error rolls it back")

var errEnded = &provider.Error{Class: provider.ClassPermanent, Code: "tx_ended", Err: errors.New("a handler ended the transaction")}

// heldTx is a transaction that only its unit or Transact ends.
type heldTx struct{ pgx.Tx }

func (heldTx) Commit(context.Context) error   { return ErrHeld }
func (heldTx) Rollback(context.Context) error { return ErrHeld }

// Exec refuses statements that end the transaction, except those sent through Conn or behind a comment. The owner then
// notices that its transaction has ended, unless another one was begun in its place.
func (t heldTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if endsTx(sql) {
		return pgconn.CommandTag{}, ErrHeld
	}
	return t.Tx.Exec(ctx, sql, args...)
}

var (
	ends   = regexp.MustCompile(`(?i)^\s*(commit|end|abort|rollback|prepare\s+transaction)\b`)
	goesTo = regexp.MustCompile(`(?i)^\s*rollback\s+((work|transaction)\s+)?to\b`)
	begins = regexp.MustCompile(`(?i)^\s*(begin|start\s+transaction)\b`)
)

// endsTx reports whether a statement ends the transaction. A rollback to a savepoint does not.
func endsTx(sql string) bool { return ends.MatchString(sql) && !goesTo.MatchString(sql) }
