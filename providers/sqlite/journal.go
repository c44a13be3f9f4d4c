package sqlite

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/kinora-go/kinora/projector"
)

// ?1 to ?6 are those of inTheWay; ?7 is the handler, ?8 the message, ?9 the runner. Where nothing of a projector is parked,
// which is usual, nothing is in the way.
const (
	nameClear  = nameWhere + ` and not ` + inTheWay + onceOnly
	nameUnheld = nameWhere + onceOnly

	nameWhere = `
insert into kinora_inflight (handler, message_id, runner, named_at)
select ?7, ?8, ?9, ` + clock + `
where not ` + settled + ` and not ` + suspect
	onceOnly = `
on conflict do nothing`

	anyParked = `select exists (select 1 from kinora_parked indexed by kinora_parked_live where state = 'parked' and projector = ?1)`

	verdictOf = `select ` + settled + `, ` + inTheWay + `, ` + suspect

	settled = `exists (
	select 1 from kinora_parked
	where message_id = ?8 and message_id <> '' and state <> 'replayed' and projector = ?1
		and (handler = '' or handler in (select value from json_each(?3))) and (?5 = 0 or id < ?5))`

	suspect = `(` + namedByOther + ` or exists (
	select 1 from kinora_attempts where handler in (select value from json_each(?3)) and message_id = ?8 and vanished = 1))`

	namedByOther = `exists (
	select 1 from kinora_inflight
	where handler in (select value from json_each(?3)) and message_id = ?8 and runner <> ?9)`

	takeBack = `delete from kinora_inflight where handler = ?1 and message_id = ?2 and runner = ?3`
)

// named is whose attempts are counted and named together.
func named(a projector.Attempt) string {
	if a.Handler == "" {
		return a.Projector + "/"
	}
	return a.Handler
}

// Apart implements projector.Journal.
func (d *DB) Apart() *sync.RWMutex { return &d.apart }

// Begin implements projector.Journal: a statement for each attempt that is clear, and one for their projector. Its commit is not synced; on a
// pool given to New, it is whatever commits are there.
func (d *DB) Begin(ctx context.Context, runner string, attempts, done []projector.Attempt) ([]projector.Verdict, error) {
	if len(attempts)+len(done) == 0 {
		return nil, nil
	}
	verdicts := make([]projector.Verdict, len(attempts))
	err := d.inTurn(unsynced(ctx), func(u *unit) error {
		for _, a := range done {
			if _, err := u.exec(ctx, takeBack, named(a), a.MessageID, runner); err != nil {
				return err
			}
		}
		name := map[string]string{} // by projector, what names an attempt
		for i, a := range attempts {
			if name[a.Projector] == "" {
				var parked bool
				if err := one(ctx, u, []any{&parked}, anyParked, a.Projector); err != nil {
					return err
				}
				name[a.Projector] = map[bool]string{false: nameUnheld, true: nameClear}[parked]
			}
			var err error
			if verdicts[i], err = u.verdict(ctx, runner, a, name[a.Projector]); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("begin attempts: %w", err)
	}
	return verdicts, nil
}

func (u *unit) verdict(ctx context.Context, runner string, a projector.Attempt, name string) (projector.Verdict, error) {
	args := append(wayArgs(a, nil), named(a), a.MessageID, runner)
	if n, err := u.changed(ctx, name, args...); err != nil || n == 1 {
		return projector.Clear, err
	}
	var isSettled, isHeld, isSuspect bool
	if err := one(ctx, u, []any{&isSettled, &isHeld, &isSuspect}, verdictOf, args...); err != nil {
		return projector.Clear, err
	}
	switch {
	case isSettled:
		return projector.Settled, nil
	case isHeld:
		return projector.Held, nil
	case isSuspect:
		return projector.Suspect, nil
	default:
		return projector.Clear, nil // it has named it already
	}
}

// ?1 are the names of the handler, ?2 is the message. A runner that lived at ?4 may have wanted to say that it lives, and
// waited for the file since.
const (
	now = `select ` + clock

	takeFromDead = `
delete from kinora_inflight
where handler in (select value from json_each(?1)) and message_id = ?2 and runner <> ?3 and not exists (
	select 1 from kinora_runners r where r.runner = kinora_inflight.runner and r.expires_at > ?4)`

	countOthers = `
select count(distinct runner) from kinora_inflight
where handler in (select value from json_each(?1)) and message_id = ?2 and runner <> ?3`

	countAttempts = `
select coalesce(sum(attempts), 0) from kinora_attempts
where handler in (select value from json_each(?1)) and message_id = ?2`

	forgetAttempts = `delete from kinora_attempts where handler in (select value from json_each(?1)) and message_id = ?2`

	addAttempts = `
insert into kinora_attempts (handler, message_id, attempts, last_at, vanished) values (?1, ?2, ?3, ` + clock + `, ?4)
on conflict (handler, message_id) do update set attempts = attempts + ?3, last_at = ` + clock + `, vanished = max(vanished, ?4)`

	nameAnyway = `
insert into kinora_inflight (handler, message_id, runner, named_at) values (?1, ?2, ?3, ` + clock + `)
on conflict do nothing`
)

// BeginAlone implements projector.Journal. It is synced, since it counts.
func (d *DB) BeginAlone(ctx context.Context, runner string, a projector.Attempt, limit int) (attempts, alive int, err error) {
	names := namesOf(a)
	var began int64
	if err := one(ctx, d.reads, []any{&began}, now); err != nil {
		return 0, 0, fmt.Errorf("begin an attempt alone: %w", err)
	}
	err = d.inTurn(ctx, func(u *unit) error {
		dead, err := u.changed(ctx, takeFromDead, names, a.MessageID, runner, began)
		if err != nil {
			return err
		}
		if attempts, err = u.count(ctx, a, dead, true); err != nil {
			return err
		}
		if err := one(ctx, u, []any{&alive}, countOthers, names, a.MessageID, runner); err != nil {
			return err
		}
		if limit >= 0 && attempts+alive >= limit {
			return nil
		}
		_, err = u.exec(ctx, nameAnyway, named(a), a.MessageID, runner)
		return err
	})
	if err != nil {
		return 0, 0, fmt.Errorf("begin an attempt alone: %w", err)
	}
	return attempts, alive, nil
}

// CountAttempt implements projector.Journal.
func (d *DB) CountAttempt(ctx context.Context, runner string, a projector.Attempt, limit int) (n int, err error) {
	err = d.inTurn(ctx, func(u *unit) error {
		if n, err = u.count(ctx, a, 0, false); err != nil {
			return err
		}
		if n++; runner != "" && limit >= 0 && n >= limit {
			return nil
		}
		if _, err := u.exec(ctx, takeBack, named(a), a.MessageID, runner); err != nil {
			return err
		}
		n, err = u.count(ctx, a, 1, false)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("count an attempt: %w", err)
	}
	return n, nil
}

// count adds more to the attempts of a, those of runners that have died or not, and returns how many there are under all names.
func (u *unit) count(ctx context.Context, a projector.Attempt, more int, vanished bool) (n int, err error) {
	if more > 0 {
		if _, err := u.exec(ctx, addAttempts, named(a), a.MessageID, more, vanished); err != nil {
			return 0, err
		}
	}
	err = one(ctx, u, []any{&n}, countAttempts, namesOf(a), a.MessageID)
	return n, err
}

const (
	stayAlive = `
insert into kinora_runners (runner, expires_at) values (?1, ` + clock + ` + ?2)
on conflict (runner) do update set expires_at = ` + clock + ` + ?2`

	endRunner = `delete from kinora_runners where runner = ?1`
	endNames  = `delete from kinora_inflight where runner = ?1` // it walks over what is under way, which is little
)

// Alive implements projector.Journal. It waits, as all that writes does, for a handler that runs, in whatever process: so a
// lease must be longer than handlers take. BeginAlone waits, too, and forgives the time that it waited.
func (d *DB) Alive(ctx context.Context, runner string, lease time.Duration) error {
	err := d.inTurn(unsynced(ctx), func(u *unit) error {
		if lease > 0 {
			_, err := u.exec(ctx, stayAlive, runner, millis(lease))
			return err
		}
		if _, err := u.exec(ctx, endRunner, runner); err != nil {
			return err
		}
		_, err := u.exec(ctx, endNames, runner)
		return err
	})
	if err != nil {
		return fmt.Errorf("runner is alive: %w", err)
	}
	return nil
}

// dueParked merges what is due of projector ?1 and, of each type of ?2, what was unregistered: at most ?4 after ?3 of each.
const dueParked = `
select ` + parkedColumns + ` from kinora_parked
where id in (
	select id from (
		select id from kinora_parked indexed by kinora_parked_due
		where due = 1 and projector = ?1 and id > ?3 order by id limit ?4)
	union all
	select p.id from json_each(?2) t cross join kinora_parked p on p.id in (
		select id from kinora_parked indexed by kinora_parked_unregistered
		where state = 'parked' and code = 'unregistered' and projector = ?1 and type = t.value and id > ?3
		order by id limit ?4))
order by id limit ?4`

// DueParked implements projector.Journal.
func (d *DB) DueParked(ctx context.Context, name string, types []string, after int64, limit int) ([]projector.Parked, error) {
	parked, err := parkedOf(ctx, d.reads, dueParked, name, arrayOf(types), after, max(limit, 0))
	if err != nil {
		return nil, fmt.Errorf("list what is due: %w", err)
	}
	return parked, nil
}

const (
	notDue = `
update kinora_parked set due = 0 where id = ?7 and due = 1 and ` + inTheWay

	failParked = `
update kinora_parked set class = ?2, code = ?3, attempts = ?4, version = ?5, due = 0
where id = ?1 and state = 'parked'`
)

// FailParked implements projector.Journal.
func (d *DB) FailParked(ctx context.Context, runner string, p projector.Parked, a projector.Attempt) error {
	err := d.inTurn(ctx, func(u *unit) error {
		if p.Class == projector.HeldClass {
			a.Seq = p.Seq
			_, err := u.exec(ctx, notDue, append(wayArgs(a, nil), p.Seq)...)
			return err
		}
		if err := u.counted(ctx, []projector.Attempt{a}, []projector.Attempt{a}, runner); err != nil {
			return err
		}
		_, err := u.exec(ctx, failParked, p.Seq, p.Class.String(), p.Code, p.Attempts, p.Version)
		return err
	})
	if err != nil {
		return fmt.Errorf("fail parked message %d: %w", p.Seq, err)
	}
	return nil
}

// Each forgets at most ?2 of what is older than ?1 ms; the first two, of projector ?3.
const (
	pruneResolved = `
delete from kinora_parked where id in (
	select id from kinora_parked indexed by kinora_parked_resolved
	where state <> 'parked' and projector = ?3 and resolved_at < ` + clock + ` - ?1 order by resolved_at limit ?2)`

	pruneAttempts = `
delete from kinora_attempts where (handler, message_id) in (
	select handler, message_id from kinora_attempts indexed by kinora_attempts_age
	where substr(handler, 1, instr(handler, '/') - 1) = ?3 and last_at < ` + clock + ` - ?1 order by last_at limit ?2)`

	// One that never said that it lives is dead since it named something.
	pruneNames = `
delete from kinora_inflight where (handler, message_id, runner) in (
	select i.handler, i.message_id, i.runner from kinora_inflight i left join kinora_runners r on r.runner = i.runner
	where coalesce(r.expires_at, i.named_at) < ` + clock + ` - ?1 limit ?2)`

	pruneRunners = `
delete from kinora_runners where runner in (
	select r.runner from kinora_runners r
	where r.expires_at < ` + clock + ` - ?1 and not exists (select 1 from kinora_inflight i where i.runner = r.runner)
	limit ?2)`
)

// PruneJournal implements projector.Journal.
func (d *DB) PruneJournal(ctx context.Context, name string, keep time.Duration, limit int) (pruned int, err error) {
	err = d.inTurn(ctx, func(u *unit) error {
		for _, query := range []string{pruneResolved, pruneAttempts} {
			n, err := u.changed(ctx, query, millis(keep), max(limit, 0), name)
			if err != nil {
				return err
			}
			pruned += n
		}
		n, err := u.changed(ctx, pruneNames, millis(keep), max(limit, 0))
		if err != nil {
			return err
		}
		pruned += n
		_, err = u.exec(ctx, pruneRunners, millis(keep), max(limit, 0))
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("prune the journal: %w", err)
	}
	return pruned, nil
}
