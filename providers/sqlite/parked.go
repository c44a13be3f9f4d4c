package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math"

	"github.com/kinora-go/kinora/projector"
)

const insertParked = `
insert into kinora_parked (
	projector, handler, message_id, topic, key, type, holds, payload, headers, class, code, attempts, version, parked_at)
values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ` + clock + `)
on conflict do nothing`

func (u *unit) park(ctx context.Context, parked []projector.Parked) error {
	for _, p := range parked {
		_, err := u.exec(ctx, insertParked, p.Projector, p.Handler, p.MessageID, p.Topic, p.Key, p.Type, p.Holds,
			blobOf(p.Payload), headersOf(p.Headers), p.Class.String(), p.Code, p.Attempts, p.Version)
		if err != nil {
			return err
		}
	}
	return nil
}

// inTheWay tells whether anything is in the way of an attempt: of projector ?1 and key ?2, under the names ?3, which takes
// the types ?4. Only what has a smaller id than ?5 is, and is not among ?6. It leaps from type to type, and looks at
// one message of each: thousands of one key may wait.
const (
	inTheWay = `(?2 <> '' and (exists (
	select 1 from kinora_parked indexed by kinora_parked_handler
	where ` + holding + ` and handler in (select '' union all select value from json_each(?3)) and ` + before + `
) or exists (
	with recursive held (type) as (
		select min(type) from kinora_parked indexed by kinora_parked_type where ` + holding + `
		union all
		select (select min(type) from kinora_parked indexed by kinora_parked_type where ` + holding + ` and type > held.type)
		from held where held.type is not null)
	select 1 from held
	where held.type is not null and held.type not in (select value from json_each(?4)) and exists (
		select 1 from kinora_parked indexed by kinora_parked_type
		where ` + holding + ` and type = held.type and ` + before + `))))`

	holding = `state = 'parked' and holds = 1 and projector = ?1 and key = ?2`
	before  = `id < ?5 and id not in (select value from json_each(?6))`

	isHeld = `select ` + inTheWay
)

// wayArgs are what inTheWay asks of an attempt, with the ids that do not count.
func wayArgs(a projector.Attempt, but []int64) []any {
	return []any{a.Projector, a.Key, namesOf(a), arrayOf(a.Takes), beforeOf(a), arrayOf(but)}
}

// namesOf is a JSON array of all the names of an attempt's handler.
func namesOf(a projector.Attempt) string { return jsonOf(append([]string{named(a)}, a.Was...)) }

// arrayOf is a JSON array for json_each, also of nothing.
func arrayOf[T any](list []T) string {
	if len(list) == 0 {
		return `[]`
	}
	return jsonOf(list)
}

func beforeOf(a projector.Attempt) int64 {
	if a.Seq == 0 {
		return math.MaxInt64
	}
	return a.Seq
}

func (s session) held(ctx context.Context, a projector.Attempt, but []int64) (held bool, err error) {
	if a.Key == "" {
		return false, nil
	}
	err = one(ctx, s, []any{&held}, isHeld, wayArgs(a, but)...)
	return held, err
}

// mustWait fails where nothing is in the way of a. What is, stays there until the unit is over, as nobody else writes.
func (u *unit) mustWait(ctx context.Context, a *projector.Attempt) error {
	if a == nil {
		return nil
	}
	held, err := u.held(ctx, *a, nil)
	if err != nil {
		return fmt.Errorf("look what is in the way: %w", err)
	}
	if !held {
		return &projector.Error{Class: projector.PermanentClass, Code: "not_held", Err: projector.ErrNotHeld}
	}
	return nil
}

const (
	readParked = `select projector, key, parked_at from kinora_parked where id = ?1 and projector = ?2 and state = 'parked'`
	readFloor  = `select coalesce(max(pruned_before), 0) from kinora_floors where handler in (select value from json_each(?1))`
)

// parkedLane is where a parked message stands in the order of its key.
type parkedLane struct {
	projector, key string
	id             int64
}

// mayReplay checks that what is to be replayed may be.
func (u *unit) mayReplay(ctx context.Context, replays []projector.Replay) ([]parkedLane, error) {
	lanes := make([]parkedLane, len(replays))
	earlier := make([]int64, 0, len(replays))
	for i, r := range replays {
		lanes[i].id = r.Seq
		var at int64
		err := one(ctx, u, []any{&lanes[i].projector, &lanes[i].key, &at}, readParked, r.Seq, r.Projector)
		if errors.Is(err, sql.ErrNoRows) {
			return nil, refused("not_parked", r.Seq, projector.ErrNotParked)
		}
		var held bool
		if err == nil {
			held, err = u.held(ctx, r.Attempt, earlier)
		}
		if err != nil {
			return nil, fmt.Errorf("replay %d: %w", r.Seq, err)
		}
		if held {
			return nil, refused("held", r.Seq, projector.ErrHeld)
		}
		if err := u.mayForget(ctx, r, at); err != nil {
			return nil, err
		}
		earlier = append(earlier, r.Seq)
	}
	return lanes, nil
}

// refused is why a message is not replayed, which no retry of the unit can help.
func refused(code string, seq int64, err error) error {
	return &projector.Error{Class: projector.PermanentClass, Code: code, Err: &projector.ReplayError{Seq: seq, Err: err}}
}

// mayForget fails where the marker of a message that was parked at that time may have been there, and pruned.
func (u *unit) mayForget(ctx context.Context, r projector.Replay, at int64) error {
	if r.Force {
		return nil
	}
	var floor int64
	if err := one(ctx, u, []any{&floor}, readFloor, namesOf(r.Attempt)); err != nil {
		return fmt.Errorf("replay %d: %w", r.Seq, err)
	}
	if at <= floor {
		return refused("pruned", r.Seq, projector.ErrPruned)
	}
	return nil
}

// resolveParked ends the parking of ?1 as ?2; markDue makes the first that waits at each handler, after ?3 of projector
// ?1 and key ?2, go on.
const (
	resolveParked = `
update kinora_parked set state = ?2, due = 0, resolved_at = ` + clock + `, resolved_by = ?3, reason = ?4
where id = ?1 and state = 'parked'`

	markDue = `
with recursive h (handler) as (
	select min(handler) from kinora_parked indexed by kinora_parked_waiting where ` + waiting + `
	union all
	select (select min(handler) from kinora_parked indexed by kinora_parked_waiting where ` + waiting + ` and handler > h.handler)
	from h where h.handler is not null)
update kinora_parked set due = 1
where id in (
	select (select min(id) from kinora_parked indexed by kinora_parked_waiting
		where ` + waiting + ` and handler = h.handler and id > ?3)
	from h where h.handler is not null)`

	waiting = `state = 'parked' and class = 'held' and projector = ?1 and key = ?2`
)

// replayed resolves what does not stay, and then has what waits behind it go on.
func (u *unit) replayed(ctx context.Context, replays []projector.Replay, lanes []parkedLane) error {
	var resolved []parkedLane
	for i, r := range replays {
		if r.Stays {
			continue
		}
		if _, err := u.exec(ctx, resolveParked, r.Seq, projector.Replayed.String(), r.By, r.Reason); err != nil {
			return err
		}
		resolved = append(resolved, lanes[i])
	}
	return u.goOn(ctx, resolved)
}

func (u *unit) goOn(ctx context.Context, resolved []parkedLane) error {
	for _, l := range resolved {
		if l.key == "" {
			continue
		}
		if _, err := u.exec(ctx, markDue, l.projector, l.key, l.id); err != nil {
			return err
		}
	}
	return nil
}

const parkedColumns = `id, projector, handler, message_id, topic, key, type, holds, payload, headers, class, code, attempts,
	version, parked_at, state, resolved_at, resolved_by, reason`

// parkedOf lists what a query that selects parkedColumns finds.
func parkedOf(ctx context.Context, q querier, query string, args ...any) ([]projector.Parked, error) {
	var parked []projector.Parked
	err := each(ctx, q, func(rows *sql.Rows) error {
		p, err := scanParked(rows)
		parked = append(parked, p)
		return err
	}, query, args...)
	if err != nil {
		return nil, err
	}
	return parked, nil
}

func scanParked(rows *sql.Rows) (p projector.Parked, err error) {
	var headers []byte
	var class, state string
	var at int64
	var resolved sql.NullInt64
	err = rows.Scan(&p.Seq, &p.Projector, &p.Handler, &p.MessageID, &p.Topic, &p.Key, &p.Type, &p.Holds, &p.Payload, &headers,
		&class, &p.Code, &p.Attempts, &p.Version, &at, &state, &resolved, &p.By, &p.Reason)
	if err != nil {
		return p, err
	}
	p.Class, p.At, p.ResolvedAt = projector.ParseClass(class), timeOf(at), timeOrZero(resolved)
	for _, s := range []projector.ParkedState{projector.Replayed, projector.Skipped} {
		if state == s.String() {
			p.State = s
		}
	}
	if err := json.Unmarshal(headers, &p.Headers); err != nil {
		return p, fmt.Errorf("headers of parked message %d: %w", p.Seq, err)
	}
	return p, nil
}
