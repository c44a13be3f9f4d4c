package postgres

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/internal/mutant"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

// A unit with marks begins with these. The fence, the projector's lock in shared mode, comes first, and the
// generation is read by a later statement, whose snapshot is newer than the wait for the lock: whoever
// switches generations holds the lock exclusively. A concurrent unit with the same mark is waited for, for
// half a second at a time, so that a storm of one message does not occupy a connection for long; and nothing is
// scanned (lookUpSQL). Handlers have the settings that were there before.
const (
	settingsSQL = `
select set_config('kinora.lock_timeout', current_setting('lock_timeout'), true), set_config('lock_timeout', $1::text, true),
	set_config('kinora.enable_seqscan', current_setting('enable_seqscan'), true), set_config('enable_seqscan', 'off', true)`
	resetSQL = `
select set_config('lock_timeout', current_setting('kinora.lock_timeout'), true),
	set_config('enable_seqscan', current_setting('kinora.enable_seqscan'), true)`
	fenceSQL = `select pg_advisory_xact_lock_shared($1::int, $2::int)`
	// A mark counts under the handler's name and, so that instances of the old code and of the new one may run
	// at once, under each of its earlier names.
	insertMarkersSQL = `
with g as (select coalesce((select live from kinora.generations where projector = $1::text), 1) live),
k as (` + markerNames + `),
ins as (
	insert into kinora.markers (handler, generation, message_id)
	select k.handler, g.live, k.message_id from k, g order by k.handler, k.message_id
	on conflict on constraint markers_pkey do nothing
	returning handler, message_id)
select k.o::int from k left join ins on ins.handler = k.handler and ins.message_id = k.message_id
group by k.o having count(*) = count(ins.handler) order by k.o`

	markerNames = `
	select o, handler, message_id from unnest($2::text[], $3::text[]) with ordinality n(handler, message_id, o)
	union all
	select o, was, ($3::text[])[o] from unnest($4::int[], $5::text[]) w(o, was)`
	markerWait = "500ms"
)

// Records implements projector.UnitOfWork.
func (db *DB) Records() projector.Records {
	return projector.Records{Marks: true, Park: true, Outbox: true, Rehearse: true}
}

// Do implements projector.UnitOfWork at READ COMMITTED. One round trip begins, fences, marks and parks, and locks what
// is replayed. The tx that apply gets refuses Commit and Rollback; Begin gives it savepoints. Units of this process with the
// same mark follow one another, and those that wait have no connection. A wait for another process's unit that takes longer
// than half a second is a transient error (55P03).
func (db *DB) Do(ctx context.Context, w projector.Work, apply func(ctx context.Context, tx pgx.Tx, fresh []int) ([]outbox.Message, error)) error {
	for {
		if err := db.once(ctx, w, apply); !errors.Is(err, errAgain) {
			return err
		}
	}
}

func (db *DB) once(ctx context.Context, w projector.Work, apply func(context.Context, pgx.Tx, []int) ([]outbox.Message, error)) error {
	leave, err := db.turns.take(ctx, turnsOf(w))
	if err != nil {
		return err
	}
	var outside pgx.Tx
	if w.Rehearse != nil {
		var end func()
		if outside, end, err = db.aside(ctx); err != nil {
			leave()
			return unbegun(ctx, fmt.Errorf("rehearse: connect: %w", err))
		}
		defer end()
	}
	conn, err := db.pool.Acquire(ctx)
	if err != nil {
		leave()
		return unbegun(ctx, fmt.Errorf("begin: %w", err))
	}
	s := newSeat(conn, leave)
	defer s.end()
	crash.Point("marker: before")
	tx, fresh, err := db.begin(ctx, s.conn, w)
	crash.Point("marker: after")
	if tx != nil {
		// Also after a panic or runtime.Goexit in apply; after a commit it does nothing.
		defer rollback(ctx, tx)
	}
	if isOwnTrouble(err) {
		return unbegun(ctx, fmt.Errorf("begin: %w", err))
	}
	if err != nil {
		return class(fmt.Errorf("begin: %w", err))
	}
	known := len(w.Marks) > 0 && len(fresh) == 0
	if known && len(w.Park) == 0 && !looksUp(w) && w.Rehearse == nil {
		w.Told(0)
		return nil
	}
	if known {
		apply = nil
	}
	if w.Rehearse != nil {
		return db.rehearse(ctx, s, tx, outside, w, fresh, apply)
	}
	enqueued, err := db.apply(ctx, s, tx, w, fresh, apply)
	if err != nil {
		return class(err)
	}
	if err := commit(ctx, tx); err != nil {
		return err
	}
	if enqueued {
		db.added()
	}
	w.Told(len(fresh))
	return nil
}

// apply runs the handlers and does all that comes after them, but for the commit.
func (db *DB) apply(ctx context.Context, s *seat, tx pgx.Tx, w projector.Work, fresh []int, apply func(context.Context, pgx.Tx, []int) ([]outbox.Message, error)) (enqueued bool, err error) {
	if apply != nil {
		var out []outbox.Message
		err := s.run(ctx, func() (err error) {
			out, err = apply(ctx, heldTx{tx}, fresh)
			return err
		})
		if err == nil {
			enqueued, err = len(out) > 0, db.InTx(tx).Enqueue(ctx, out...)
		} else if !tx.Conn().IsClosed() {
			err = ofHandler(err)
		}
		if err != nil {
			return false, err
		}
	}
	if len(w.Replay) > 0 {
		if err := unended(tx); err != nil {
			return false, err
		}
	}
	return enqueued, db.resolve(ctx, tx, w.Replay)
}

// begin begins the transaction and does the unit's own part, in one round trip. It returns the indexes of fresh marks.
func (db *DB) begin(ctx context.Context, conn *pgx.Conn, w projector.Work) (tx pgx.Tx, fresh []int, err error) {
	b := &pgx.Batch{}
	b.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	marks := len(w.Marks) > 0 && !mutant.NoMarker
	replayed := replays{of: w.Replay}
	own := marks || looksUp(w)
	if own {
		b.Queue(settingsSQL, markerWait)
	}
	if len(w.Replay) > 0 {
		replayed.lock(db, b, w.Projector)
	}
	if marks && mutant.MarkerApart {
		if fresh, err = db.markApart(ctx, conn, w); err != nil {
			return nil, nil, err
		}
		marks = false
	}
	if marks {
		b.Queue(db.q(fenceSQL), lockClassFence, db.fence(w.Projector))
		b.Queue(db.q(insertMarkersSQL), markerArgs(w)...).Query(func(rows pgx.Rows) error {
			fresh, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (int, error) {
				var o int
				err := row.Scan(&o)
				return o - 1, err
			})
			return err
		})
	}
	if w.Behind != nil {
		b.Queue(db.q(behindSQL), attemptArgs(*w.Behind, nil)...).QueryRow(behind)
	}
	replayed.check(db, b)
	db.queueCounted(b, w)
	if own {
		b.Queue(resetSQL)
	}
	if mutant.NoMarker {
		for i := range w.Marks {
			fresh = append(fresh, i)
		}
	}
	if err := db.queueParked(b, w); err != nil {
		return nil, nil, err
	}
	results := conn.SendBatch(ctx, b)
	err = results.Close() // this runs what is to be done with the results
	if err == nil {
		err = replayed.err()
	}
	return results.Tx(), fresh, err
}

// looksUp tells whether a unit looks into what is parked, counted or under way.
func looksUp(w projector.Work) bool {
	return len(w.Replay)+len(w.Forget)+len(w.Done) > 0 || w.Behind != nil
}

// queueCounted queues what is forgotten, and what is no longer under way.
func (db *DB) queueCounted(b *pgx.Batch, w projector.Work) {
	for _, a := range w.Forget {
		b.Queue(db.q(forgetSQL), named(a), hashOf(a.MessageID))
	}
	for _, a := range w.Done {
		b.Queue(db.q(doneSQL), named(a), hashOf(a.MessageID), w.Runner, db.calls.Add(1))
	}
}

func (db *DB) queueParked(b *pgx.Batch, w projector.Work) error {
	for _, p := range w.Park {
		args, err := parkArgs(p)
		if err != nil {
			return err
		}
		b.Queue(db.q(parkSQL), args...)
	}
	return nil
}

func (db *DB) fence(projectorName string) int32 { return lockKey(db.cfg.Schema + "/" + projectorName) }

// markerArgs are the arguments of insertMarkersSQL.
func markerArgs(w projector.Work) []any {
	handlers, ids := make([]string, len(w.Marks)), make([]string, len(w.Marks))
	at, was := []int32{}, []string{}
	for i, k := range w.Marks {
		handlers[i], ids[i] = k.Handler, k.MessageID
		for _, name := range k.Was {
			at, was = append(at, int32(i+1)), append(was, name)
		}
	}
	return []any{w.Projector, handlers, ids, at, was}
}

// rollback gives up after five seconds, and the driver closes the connection: a server that does not answer
// must not keep a runner from stopping.
func rollback(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_ = tx.Rollback(ctx)
}

var errEnded = errors.New("the handler ended its transaction")

// unended is an error where the handler ended the transaction.
func unended(tx pgx.Tx) error {
	if tx.Conn().PgConn().TxStatus() == 'I' {
		return &projector.Error{Class: projector.PermanentClass, Code: "tx_ended", Err: errEnded}
	}
	return nil
}

// commit commits, and tells what is known where it does not succeed.
func commit(ctx context.Context, tx pgx.Tx) error {
	if err := unended(tx); err != nil {
		return err
	}
	crash.Point("commit: before")
	err := tx.Commit(ctx)
	crash.Point("commit: after")
	switch {
	case err == nil:
		return nil
	case errors.Is(err, pgx.ErrTxCommitRollback):
		return &projector.Error{Class: projector.UnknownClass, Code: inFailedTransaction,
			Err: fmt.Errorf("commit: the handler went on after an SQL error: %w", err)}
	case inDoubt(err):
		return &projector.Error{Class: projector.Ambiguous, Code: "commit", Err: fmt.Errorf("commit: %w", err)}
	}
	return class(fmt.Errorf("commit: %w", err))
}

// heldTx is a transaction that its unit of work ends, and nobody else.
type heldTx struct{ pgx.Tx }

// ErrHeld is what Commit and Rollback of a handler's transaction return: its unit of work ends it.
var ErrHeld = errors.New("the unit of work ends this transaction")

var endsTx = regexp.MustCompile(`(?i)^\s*(commit|end|abort|rollback|prepare\s+transaction)\b`)
var toSavepoint = regexp.MustCompile(`(?i)^\s*rollback\s+(work\s+|transaction\s+)?to\b`)

// Exec refuses statements that end the transaction. Through Conn, or behind a comment, they get past it: then
// the unit notices that its transaction is gone, but not one that was begun in its place.
func (t heldTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if endsTx.MatchString(sql) && !toSavepoint.MatchString(sql) {
		return pgconn.CommandTag{}, ErrHeld
	}
	return t.Tx.Exec(ctx, sql, args...)
}

func (heldTx) Commit(context.Context) error   { return ErrHeld }
func (heldTx) Rollback(context.Context) error { return ErrHeld }

// outcomesSQL: a marker under the handler's name or an earlier one is 1; else a parked row under one,
// or from before any handler, is 2, and a skipped one 3; else 0.
const outcomesSQL = `
select case
	when exists (select from kinora.markers m where m.message_id = n.message_id and m.handler = any(h.names)
		and m.generation = coalesce((select live from kinora.generations where projector = n.projector), 1)) then 1
	when exists (select from kinora.parked p where ` + settled + ` and p.state = 'parked') then 2
	when exists (select from kinora.parked p where ` + settled + ` and p.state = 'skipped') then 3
	else 0 end
from unnest($1::text[], $2::text[], $3::text[], $6::bytea[]) with ordinality n(projector, handler, message_id, message_hash, o),
	lateral (select array(select was from unnest($4::int[], $5::text[]) w(o, was) where w.o = n.o) || n.handler names) h
order by n.o`

const settled = `p.state <> 'replayed' and p.message_hash <> '' and p.message_hash = n.message_hash and p.projector = n.projector
		and (p.handler = '' or p.handler = any(h.names))`

// Outcomes implements projector.State.
func (db *DB) Outcomes(ctx context.Context, keys []marker.Key) ([]projector.Outcome, error) {
	projectors, hashes := make([]string, len(keys)), make([][]byte, len(keys))
	for i, k := range keys {
		projectors[i], hashes[i] = projectorOf(k.Handler), hashOf(k.MessageID)
	}
	args := append(markerArgs(projector.Work{Marks: keys}), hashes)
	args[0] = projectors
	rows, err := db.pool.Query(ctx, db.q(outcomesSQL), append([]any{planned}, args...)...)
	if err == nil {
		var found []projector.Outcome
		if found, err = pgx.CollectRows(rows, pgx.RowTo[projector.Outcome]); err == nil {
			return found, nil
		}
	}
	return nil, fmt.Errorf("read outcomes: %w", clear(err))
}
