package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/mutant"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

// Records implements projector.UnitOfWork. Only connections of Open's can be watched, so only there can be rehearsed.
func (d *DB) Records() projector.Records {
	return projector.Records{Marks: true, Park: true, Outbox: true, Rehearse: d.owned}
}

// Do implements projector.UnitOfWork. apply runs once. It may use SQL to read, but what it writes it must write
// through tx. Where ctx ends, the transaction is rolled back at once, and others have their turn, though apply
// may not have returned.
func (d *DB) Do(ctx context.Context, w projector.Work, apply func(ctx context.Context, tx *sql.Tx, fresh []int) ([]outbox.Message, error)) error {
	if err := d.checkWork(w); err != nil {
		return unitError(ctx, err, true)
	}
	if w.Rehearse != nil {
		return unitError(ctx, d.rehearse(ctx, w, apply), true)
	}
	u, err := d.begin(ctx)
	if err != nil {
		return unitError(ctx, err, false)
	}
	defer u.end()
	stay := context.AfterFunc(ctx, u.leave)
	defer stay()
	fresh, err := u.work(ctx, w, apply)
	if err != nil {
		return unitError(ctx, err, true)
	}
	if u.idle {
		w.Told(0)
		return nil // there is nothing to commit
	}
	if !stay() {
		return unitError(ctx, ctx.Err(), true)
	}
	if err := u.commit(); err != nil {
		return unitError(ctx, err, true)
	}
	w.Told(len(fresh))
	return nil
}

// work does all of w but its end. It returns which marks are new.
func (u *unit) work(ctx context.Context, w projector.Work, apply func(ctx context.Context, tx *sql.Tx, fresh []int) ([]outbox.Message, error)) ([]int, error) {
	fresh, err := u.marks(ctx, w)
	if err != nil {
		return nil, fmt.Errorf("mark: %w", err)
	}
	// The markers are there already, and nobody else writes meanwhile: so the floors are those of the commit.
	lanes, err := u.mayReplay(ctx, w.Replay)
	if err != nil {
		return nil, err
	}
	if err := u.mustWait(ctx, w.Behind); err != nil {
		return nil, err
	}
	if apply != nil && (len(w.Marks) == 0 || len(fresh) > 0) {
		if err := u.apply(ctx, fresh, apply); err != nil {
			return nil, err
		}
	} else if len(fresh) == 0 && len(w.Park)+len(w.Replay)+len(w.Forget)+len(w.Done) == 0 {
		u.idle = true
		return nil, nil
	}
	if err := u.park(ctx, w.Park); err != nil {
		return nil, fmt.Errorf("park: %w", err)
	}
	if err := u.replayed(ctx, w.Replay, lanes); err != nil {
		return nil, fmt.Errorf("resolve: %w", err)
	}
	return fresh, u.counted(ctx, w.Forget, w.Done, w.Runner)
}

// counted forgets counts, and takes back runner's names of what is done.
func (u *unit) counted(ctx context.Context, forget, done []projector.Attempt, runner string) error {
	for _, a := range done {
		if _, err := u.exec(ctx, takeBack, named(a), a.MessageID, runner); err != nil {
			return fmt.Errorf("take a name back: %w", err)
		}
	}
	for _, a := range forget {
		if _, err := u.exec(ctx, forgetAttempts, namesOf(a), a.MessageID); err != nil {
			return fmt.Errorf("forget attempts: %w", err)
		}
	}
	return nil
}

func (u *unit) apply(ctx context.Context, fresh []int, apply func(ctx context.Context, tx *sql.Tx, fresh []int) ([]outbox.Message, error)) error {
	out, err := apply(ctx, u.tx, fresh)
	if err != nil {
		return err
	}
	ready, err := u.db.normalize(out)
	if err != nil {
		return err
	}
	if err := u.enqueueAll(ctx, ready); err != nil {
		return fmt.Errorf("enqueue: %w", err)
	}
	u.entries = u.entries || len(ready) > 0
	return nil
}

// checkWork refuses marks that could not be told apart later. Parked messages are taken as they are: what is
// wrong with a message must not keep it from being set aside.
func (d *DB) checkWork(w projector.Work) error {
	if w.Rehearse != nil && !d.owned {
		return projector.Permanent(errors.New("rehearse: a pool given to New does not tell what its statements change"))
	}
	for i, m := range w.Marks {
		if err := errors.Join(
			eventstore.CheckText(fmt.Sprintf("marks[%d].handler", i), m.Handler, eventstore.MaxIDBytes),
			eventstore.CheckText(fmt.Sprintf("marks[%d].message_id", i), m.MessageID, eventstore.MaxIDBytes),
		); err != nil {
			return err
		}
	}
	return nil
}

// live is the generation of ?3.
const live = `coalesce((select live from kinora_generations where projector = ?3), 1)`

// insertMark marks ?2 for handler ?1, unless a marker of the live generation is there under that name, or under
// one of ?4.
const insertMark = `
insert into kinora_markers (handler, generation, message_id, processed_at)
select ?1, ` + live + `, ?2, ` + clock + `
where ?4 is null or not exists (
	select 1 from kinora_markers
	where handler in (select value from json_each(?4)) and generation = ` + live + ` and message_id = ?2)
on conflict do nothing`

// marks records the marks that are new, and returns their indexes. The write lock is held already, so whoever
// might hold the same mark has committed or rolled back.
func (u *unit) marks(ctx context.Context, w projector.Work) (fresh []int, err error) {
	for i, m := range w.Marks {
		if mutant.NoMarker {
			fresh = append(fresh, i)
			continue
		}
		r, err := u.exec(ctx, insertMark, m.Handler, m.MessageID, w.Projector, listOf(m.Was))
		if err != nil {
			return nil, err
		}
		n, err := r.RowsAffected()
		if err != nil {
			return nil, err
		}
		if n == 0 {
			continue
		}
		fresh = append(fresh, i)
		for _, was := range m.Was { // for an instance of the old code, which looks under that name
			if _, err := u.exec(ctx, insertMark, was, m.MessageID, w.Projector, nil); err != nil {
				return nil, err
			}
		}
	}
	return fresh, nil
}
