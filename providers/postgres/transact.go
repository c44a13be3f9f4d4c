package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/internal/pauses"
)

const (
	transactTries = 20
	transactLimit = 30 * time.Second // from the end of the first run to the start of the last one
	resolveLimit  = 15 * time.Second
	commitGrace   = time.Second // for the reply to a commit after ctx has ended
)

// Transact runs fn in a transaction at READ COMMITTED and commits if fn returns nil. Otherwise, also if fn panics or calls
// runtime.Goexit, it rolls back. After the commit of a transaction that wrote, it wakes relays and workers as Wake does.
//   - fn may run several times, each time in a new transaction. So fn must load the data for its decisions in the transaction,
//     for example with UpdateTx of a repository, and must have no other effects.
//   - fn runs again after a deadlock or a serialization failure, even if fn hides that error, after a commit that failed without
//     a reply, and if it returns a *eventstore.ConflictError, unless the run before it had a conflict with the same expected
//     version: then fn does not load that version.
//   - Transact pauses before another run, and repeated runs of this DB take turns. After 20 runs, or after 30 seconds, or if
//     ctx ends, it returns the last error. An error of fn is returned unchanged.
//   - tx refuses Commit and Rollback. Its Begin makes savepoints. If fn ends the transaction by other means, the error is
//     ErrHeld, and the writes up to there may be committed.
//   - If the reply to the commit is lost, Transact asks the server whether the transaction is committed.
//     eventstore.ErrAmbiguous: the server does not reply, or it crashed, restarted or was replaced. Read the stored data before
//     you call Transact again.
func (db *DB) Transact(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	run := &run{DB: db, fn: fn}
	again, err := run.once(ctx)
	if !again {
		return err
	}
	limit, cancel := context.WithTimeout(ctx, transactLimit)
	defer cancel()
	for try := 1; again && try < transactTries; try++ {
		pauses.Wait(limit, rand.N(pauseAfter(try)), nil)
		again, err = run.inTurn(ctx, limit, err)
	}
	return err
}

// Wake makes relays and workers of this process and, with Config.Notify, of others claim at once. Call it after the commit of
// a transaction that you began yourself. Appends, units and Transact call it.
func (db *DB) Wake() {
	db.added()
	db.due.signal()
}

// run is a call of Transact.
type run struct {
	*DB
	fn       func(ctx context.Context, tx pgx.Tx) error
	conflict eventstore.ConflictError // the last one
}

// inTurn waits for this call's turn and calls once. If limit ends first, it returns the previous error. With a shorter limit,
// all waiting runs would begin together after several deadlocks, which take a second each, and deadlock again.
func (r *run) inTurn(ctx, limit context.Context, previous error) (again bool, err error) {
	if !take(limit, r.turns) {
		return false, previous
	}
	defer func() { <-r.turns }()
	return r.once(ctx)
}

// take locks a channel of capacity 1, unless ctx ends before.
func take(ctx context.Context, lock chan struct{}) bool {
	if ctx.Err() != nil {
		return false
	}
	select {
	case lock <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

// once runs fn in one transaction. again reports whether another run may succeed.
func (r *run) once(ctx context.Context) (again bool, err error) {
	life := r.life(ctx)
	late, cancel := context.WithCancel(context.WithoutCancel(ctx)) // a commit outlives ctx by commitGrace
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(commitGrace, cancel) })()
	again, lost, err := r.transaction(ctx, late)
	if isNetwork(err) || lost != "" { // the server may have crashed: the next call of life must ask again
		r.lifetime.Store(nil)
	}
	if lost != "" { // the connection is released: the pool may have no other one
		return r.resolve(late, lost, life, err)
	}
	return again, err
}

// transaction runs fn and commits with late. lost is the number of a transaction that may be committed.
func (r *run) transaction(ctx, late context.Context) (again bool, lost string, err error) {
	pooled, err := r.acquire(ctx)
	if err != nil {
		return false, "", wrap("transact: acquire a connection", err)
	}
	defer pooled.Release()
	begun, err := pooled.Conn().BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return false, "", wrap("transact: begin", err)
	}
	defer rollback(ctx, begun) // also after a panic or runtime.Goexit in fn
	tx := watchedTx{begun, &failure{conn: begun.Conn().PgConn()}}
	if err := r.fn(ctx, heldTx{tx}); err != nil {
		return isRolledBack(err) || isRolledBack(tx.cause()) || r.loadsAgain(err), "", err
	}
	var xid string
	if err = tx.usable(ctx); err == nil {
		err = wrap("transact: before the commit", begun.QueryRow(ctx, xidSQL).Scan(&xid))
	}
	if err != nil {
		return isRolledBack(err), "", err
	}
	crash.Point("commit: before")
	err = wrap("transact: commit", begun.Commit(late))
	crash.Point("commit: after")
	switch {
	case xid == "" && (err == nil || isAmbiguous(err)): // nothing was written
		return false, "", nil
	case err == nil:
		r.Wake()
	case isAmbiguous(err):
		return false, xid, err
	}
	return isRolledBack(err), "", err
}

// loadsAgain reports whether err is a conflict, unless fn expected the same version before: then it does not load it.
func (r *run) loadsAgain(err error) bool {
	c, ok := errors.AsType[*eventstore.ConflictError](err)
	if !ok || c.Stream == r.conflict.Stream && c.Expected == r.conflict.Expected {
		return false
	}
	r.conflict = *c
	return true
}

const (
	xidSQL    = `select coalesce(pg_current_xact_id_if_assigned()::text, '')`
	lifeSQL   = `select ` + lifeColumn + ` from pg_stat_bgwriter`
	statusSQL = `select coalesce(pg_xact_status($1::text::xid8), ''), ` + lifeColumn + ` from pg_stat_bgwriter`

	// The server resets its statistics when it recovers from a crash. A standby has its own.
	lifeColumn = `extract(epoch from pg_postmaster_start_time())::text || ' ' || coalesce(extract(epoch from stats_reset)::text, '')`
)

// life identifies the time between two crashes of one server: after a crash, another transaction may get the number of a lost
// one. It is read once, because reading statistics is slow in some versions.
func (db *Provider) life(ctx context.Context) string {
	if s := db.lifetime.Load(); s != nil {
		return *s
	}
	var s string
	if err := db.pool.QueryRow(ctx, lifeSQL).Scan(&s); err != nil {
		return "" // unknown
	}
	db.lifetime.Store(&s)
	return s
}

// resolve asks the server whether a transaction is committed whose commit had no reply. again reports that it is not.
func (r *run) resolve(ctx context.Context, xid, life string, lost error) (again bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, resolveLimit)
	defer cancel()
	for try := 1; ; try++ {
		var status, now string
		_ = r.pool.QueryRow(ctx, statusSQL, xid).Scan(&status, &now) // an error: the server may be restarting
		switch {
		case status == "aborted":
			return true, lost
		case status == "committed" && now == life:
			r.Wake()
			return false, nil
		case status == "committed" || try >= resolveTries || pause(ctx, try) != nil:
			r.Wake()
			return false, fmt.Errorf("%w: %w", eventstore.ErrAmbiguous, lost)
		}
	}
}

// failure records why a transaction failed, because its function may hide the error.
type failure struct {
	conn *pgconn.PgConn
	err  error        // of a statement
	last func() error // returns the error of the last statement whose result is read by the caller
}

// note records the errors of the last statement and of this one, unless they only say that the transaction has failed.
func (f *failure) note(err error) {
	if f.last != nil {
		last := f.last
		f.last = nil
		f.note(last())
	}
	if e := pgError(err); e != nil && e.Code != inFailedTransaction {
		f.err = err
	}
}

// cause returns the error that put the transaction into the failed state, or nil if it is not in that state.
func (f *failure) cause() error {
	if f.conn.TxStatus() != 'E' {
		return nil
	}
	if !f.conn.IsBusy() {
		f.note(nil)
	}
	return f.err
}

// usable returns an error if ctx has ended, or if fn left a transaction that cannot be committed.
func (f *failure) usable(ctx context.Context) error {
	switch {
	case ctx.Err() != nil:
		return wrap("transact", ctx.Err())
	case f.conn.IsClosed():
		return errors.New("transact: the connection was lost before the commit")
	case f.conn.IsBusy():
		return errors.New("transact: fn has left the rows of a query open: close them")
	case f.conn.TxStatus() == 'I':
		return fmt.Errorf("transact: fn has ended the transaction: %w", ErrHeld)
	case f.conn.TxStatus() == 'E':
		const what = "transact: fn returned nil after an SQL error, which rolled the transaction back"
		return cmp.Or(wrap(what, f.cause()), errors.New(what))
	}
	return nil
}

// watchedTx is a transaction, or a savepoint in one, whose errors are recorded.
type watchedTx struct {
	pgx.Tx
	*failure
}

func (t watchedTx) Begin(ctx context.Context) (pgx.Tx, error) {
	inner, err := t.Tx.Begin(ctx)
	t.note(err)
	return watchedTx{inner, t.failure}, err
}

func (t watchedTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	tag, err := t.Tx.Exec(ctx, sql, args...)
	t.note(err)
	return tag, err
}

func (t watchedTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	t.note(nil)
	rows, err := t.Tx.Query(ctx, sql, args...)
	t.last = rows.Err
	return rows, err
}

func (t watchedTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return watchedRow{t.Tx.QueryRow(ctx, sql, args...), t.failure}
}

func (t watchedTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	n, err := t.Tx.CopyFrom(ctx, table, columns, rows)
	t.note(err)
	return n, err
}

func (t watchedTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	t.note(nil)
	results := t.Tx.SendBatch(ctx, b)
	t.last = results.Close
	return results
}

type watchedRow struct {
	pgx.Row
	*failure
}

func (r watchedRow) Scan(dest ...any) error {
	err := r.Row.Scan(dest...)
	r.note(err)
	return err
}
