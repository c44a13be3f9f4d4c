package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

// Batched is the unit of work for handlers that only write: they queue statements, and the fence, the marker,
// their statements, their output and the commit travel in one round trip. A queued statement must have no
// callback: it would run when all is committed.
type Batched struct{ *DB }

// Batched makes handlers of *pgx.Batch runnable. What they queue must not read, nor begin or end a transaction.
func (db *DB) Batched() *Batched { return &Batched{db} }

// The markers of a batch that nothing can gate: a mark that is there already, under whichever of its names,
// must be an error, or what follows would apply again.
const mustInsertMarkersSQL = `
with g as (select coalesce((select live from kinora.generations where projector = $1::text), 1) live),
k as (` + markerNames + `)
insert into kinora.markers (handler, generation, message_id)
select k.handler, g.live, k.message_id from k, g order by k.handler, k.message_id`

// isDuplicate tells whether err says that a mark is there already.
func (b *Batched) isDuplicate(err error) bool {
	return violates(err, "markers_pkey") && pgError(err).SchemaName == b.cfg.Schema
}

// Do implements projector.UnitOfWork. apply runs before anything is sent; where the server then answers that
// one of several marks is there already, nothing of it has happened, and apply runs again for the others. What needs an
// answer before the commit (Replay, Behind, Rehearse) is an ordinary transaction, in which apply's batch is sent.
func (b *Batched) Do(ctx context.Context, w projector.Work, apply func(ctx context.Context, tx *pgx.Batch, fresh []int) ([]outbox.Message, error)) error {
	if len(w.Replay) > 0 || w.Behind != nil || w.Rehearse != nil {
		return b.DB.Do(ctx, w, inTx(apply))
	}
	fresh := make([]int, len(w.Marks))
	for i := range fresh {
		fresh[i] = i
	}
	for {
		err := b.try(ctx, w, fresh, apply)
		if err == nil {
			w.Told(len(fresh))
		}
		if !b.isDuplicate(err) {
			return class(err)
		}
		if fresh, err = b.unmarked(ctx, w, fresh); err != nil {
			return class(err)
		}
		if len(fresh) == 0 { // only the rest is left
			w.Marks = nil
			if err = b.try(ctx, w, nil, nil); err == nil {
				w.Told(0)
			}
			return class(err)
		}
	}
}

// inTx is apply in a transaction.
func inTx(apply func(context.Context, *pgx.Batch, []int) ([]outbox.Message, error)) func(context.Context, pgx.Tx, []int) ([]outbox.Message, error) {
	if apply == nil {
		return nil
	}
	return func(ctx context.Context, tx pgx.Tx, fresh []int) ([]outbox.Message, error) {
		batch := &pgx.Batch{}
		out, err := apply(ctx, batch, fresh)
		if err != nil || batch.Len() == 0 {
			return out, err
		}
		if err := tx.SendBatch(ctx, batch).Close(); err != nil && ctx.Err() != nil {
			return nil, tooLong(ctx, err)
		} else if err != nil {
			return nil, fmt.Errorf("send: %w", err)
		}
		return out, nil
	}
}

// try sends the unit once, with the marks at fresh.
func (b *Batched) try(ctx context.Context, w projector.Work, fresh []int, apply func(context.Context, *pgx.Batch, []int) ([]outbox.Message, error)) error {
	batch := &pgx.Batch{}
	var marks []marker.Key
	for _, i := range fresh {
		marks = append(marks, w.Marks[i])
	}
	if err := b.queueOwn(batch, w, marks); err != nil {
		return err
	}
	from := batch.Len()
	to, enqueued := from, false
	if apply != nil {
		if len(w.Marks) == 0 {
			fresh = nil
		}
		out, err := apply(ctx, batch, slices.Clone(fresh))
		if err != nil {
			return ofHandler(err)
		}
		to = batch.Len()
		if err := b.queueEnqueue(batch, out); err != nil {
			return err
		}
		enqueued = len(out) > 0
	}
	if batch.Len() == 0 {
		return nil
	}
	begin := now()
	leave, err := b.turns.take(ctx, turnsOf(projector.Work{Marks: marks}))
	if err != nil {
		return err
	}
	defer leave()
	if err := b.send(ctx, batch, from, to, begin); err != nil {
		return err
	}
	if enqueued {
		b.added()
	}
	return nil
}

// queueOwn queues what the unit does itself.
func (b *Batched) queueOwn(batch *pgx.Batch, w projector.Work, marks []marker.Key) error {
	own := len(marks) > 0 || looksUp(w)
	if own {
		batch.Queue(settingsSQL, markerWait)
	}
	if len(marks) > 0 {
		some := projector.Work{Projector: w.Projector, Marks: marks}
		batch.Queue(b.q(fenceSQL), lockClassFence, b.fence(w.Projector))
		batch.Queue(b.q(mustInsertMarkersSQL), markerArgs(some)...)
	}
	b.queueCounted(batch, w)
	if own {
		batch.Queue(resetSQL)
	}
	return b.queueParked(batch, w)
}

// send sends a batch in the implicit transaction of its one Sync. Its statements from and up to are the handler's, the others the
// unit's; begin is when the handler had returned.
//
// Where ctx ends before the answer, the server is asked to break off and to say what became of it. If it undid the handler's statements,
// that counts like a handler that takes too long, unless most of the time went in waiting for others' units and for a connection. If
// it does not say, the unit is in doubt, which does not count.
func (b *Batched) send(ctx context.Context, batch *pgx.Batch, from, to int, begin time.Time) error {
	conn, err := b.pool.Acquire(ctx)
	if err != nil {
		return unbegun(ctx, fmt.Errorf("acquire: %w", err))
	}
	defer conn.Release()
	crash.Point("one trip: before")
	sent := now()
	inner, answered := patient(ctx, conn.Conn())
	defer answered()
	failed, err := results(conn.SendBatch(inner, batch), batch)
	crash.Point("one trip: after")
	_, unsent := errors.AsType[pgx.ErrPreprocessingBatch](err) // which ends the connection, too
	switch e := pgError(err); {
	case err == nil:
		return nil
	case !unsent && inDoubt(err) && conn.Conn().PgConn().IsClosed():
		return &projector.Error{Class: projector.Ambiguous, Code: "commit", Err: fmt.Errorf("send: %w", err)}
	case failed < from && isOwnTrouble(err) && e.Code != syntaxError: // the simple protocol reads all before it begins
		return unbegun(ctx, fmt.Errorf("send: %w", err))
	case ctx.Err() != nil && from <= failed && failed < to && e != nil && e.Code == queryCanceled && now().Sub(sent) > sent.Sub(begin):
		return tooLong(ctx, err)
	}
	return fmt.Errorf("send: %w", err)
}

// now measures how long something takes.
func now() time.Time { return time.Now() } //nolint:forbidigo // no time of the store's is meant

// tooLong is the error of a handler's batch that its deadline ended, with nothing done.
func tooLong(ctx context.Context, err error) error {
	return &projector.Error{Class: projector.UnknownClass, Code: projector.DeadlineCode, Err: fmt.Errorf("send: %w: %w", ctx.Err(), err)}
}

// results reads all results, and tells which statement's is the error: one after the last, where it is none's.
func results(r pgx.BatchResults, batch *pgx.Batch) (failed int, err error) {
	for failed = 0; failed < batch.Len() && batch.QueuedQueries[failed].Fn == nil; failed++ {
		if _, err := r.Exec(); err != nil {
			break
		}
	}
	err = r.Close()
	if e, ok := errors.AsType[pgx.ErrPreprocessingBatch](err); ok {
		failed = slices.IndexFunc(batch.QueuedQueries, func(q *pgx.QueuedQuery) bool { return q.SQL == e.SQL() })
	}
	return failed, err
}

// patient is a context for what is sent in one trip. At the end of ctx the server is asked to break off, again and again, since a
// request that comes too early is lost; and it ends a grace later. The function that it returns is called when all is answered: a
// connection for which it was asked is closed, as a late request may meet what comes next.
func patient(ctx context.Context, conn *pgx.Conn) (inner context.Context, answered func()) {
	inner, end := context.WithCancel(context.WithoutCancel(ctx))
	asked := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(asked)
		defer end()
		limit, cancel := context.WithTimeout(inner, grace)
		defer cancel()
		for limit.Err() == nil {
			_ = conn.PgConn().CancelRequest(limit)
			select {
			case <-limit.Done():
			case <-time.After(grace / 10):
			}
		}
	})
	return inner, func() {
		end()
		if !stop() {
			<-asked
			shut(ctx, conn)
		}
	}
}

// unmarked is what of fresh has no mark yet.
func (b *Batched) unmarked(ctx context.Context, w projector.Work, fresh []int) ([]int, error) {
	keys := slices.Clone(w.Marks)
	outcomes, err := b.Outcomes(ctx, keys)
	if err != nil {
		return nil, unbegun(ctx, err)
	}
	left := slices.DeleteFunc(slices.Clone(fresh), func(i int) bool { return outcomes[i] == projector.Applied })
	if len(left) == len(fresh) {
		// The generation was switched meanwhile, or the marker pruned: begin again.
		return nil, &projector.Error{Class: projector.Transient, Code: "marker", Err: errors.New("a mark that was there is gone")}
	}
	return left, nil
}
