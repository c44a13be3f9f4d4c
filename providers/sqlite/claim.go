package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// candidates walks the open entries in order and leaves out those that are not eligible, or that have one
// before them in their topic and key that is held, or not eligible. The clock is read once, or an entry could be
// judged leased and its successor, a moment later, as waiting for nobody. What is held is looked at first: there
// may be many eligible ones to walk over otherwise.
//
// Nearby, the first eligible ones are found first, and then what stands before them.
//
// Where only some topics are asked for, each topic that has anything open is walked by itself, so that it costs
// nothing how much the others have: as many as are wanted of each, and the first of all those.
const (
	candidates          = `with recursive` + ckOnce + allTopics + due + candidateGuard + inOrder
	candidatesNear      = `with recursive` + ckOnce + nearOnes + due + inOrder + nearGuarded
	candidatesUnordered = `with recursive` + ckOnce + allTopics + due + inOrder

	candidatesOfTopics          = `with recursive` + ckOnce + someTopics + due + candidateGuard + inOrderOfTopic
	candidatesOfTopicsNear      = `with recursive` + ckOnce + someTopics + due + inOrderOfTopics + candidateGuard + ` order by o.id`
	candidatesOfTopicsUnordered = `with recursive` + ckOnce + someTopics + due + inOrderOfTopic

	ckOnce = ` ck (t) as materialized (select ` + clock + `)`

	allTopics = `
select ` + entryColumns + `
from kinora_outbox o indexed by kinora_outbox_open
where o.open = 1 and o.id > ?4`

	nearOnes = `
, near as (
	select * from kinora_outbox o indexed by kinora_outbox_open
	where o.open = 1 and o.id > ?4`

	nearGuarded = `)
select ` + entryColumns + `
from near o
where true` + candidateGuard + `
order by o.id`

	// From topic to topic it leaps by the index; null is the end.
	someTopics = `,
walked (topic) as (
	select min(topic) from kinora_outbox indexed by kinora_outbox_topic where open = 1 and ?2 is null
	union all
	select (select min(topic) from kinora_outbox indexed by kinora_outbox_topic where open = 1 and topic > w.topic)
	from walked w where w.topic is not null),
names (topic) as materialized (
	select topic from (select topic from walked union select value from json_each(?2))
	where topic is not null and (?3 is null or topic not in (select value from json_each(?3))))
select ` + entryColumns + `
from kinora_outbox o
where o.id in (
	select p.id from names cross join kinora_outbox p on p.id in (
		select o.id from kinora_outbox o indexed by kinora_outbox_topic
		where o.open = 1 and o.topic = names.topic and o.id > ?4`

	due = ` and o.status <> 'abandoned' and o.next_attempt_at <= (select t from ck)`

	candidateGuard = heldGuard + `
	and not exists (
		select 1 from kinora_outbox b indexed by kinora_outbox_lane
		where b.open = 1 and b.topic = o.topic and b.key = o.key and b.id < o.id
			and (b.status = 'abandoned' or b.next_attempt_at > (select t from ck)))`

	heldGuard = `
	and not exists (
		select 1 from kinora_outbox h indexed by kinora_outbox_held
		where h.status = 'held' and h.topic = o.topic and h.key = o.key and h.id < o.id)`

	inOrder = `
order by o.id limit ?1`

	inOrderOfTopics = inOrder + `)
	order by p.id limit ?1)`

	inOrderOfTopic = inOrderOfTopics + `
order by o.id`
)

// EntryCandidates implements provider.Outbox.
func (d *Provider) EntryCandidates(ctx context.Context, q provider.EntryQuery, limit int) ([]outbox.Entry, error) {
	if err := provider.CheckQuery(q); err != nil {
		return nil, fmt.Errorf("read candidates: %w", err)
	}
	entries, err := candidatesOf(ctx, d.reads, q, limit)
	if err != nil {
		return nil, fmt.Errorf("read candidates: %w", err)
	}
	return entries, nil
}

func candidatesOf(ctx context.Context, from querier, q provider.EntryQuery, limit int) ([]outbox.Entry, error) {
	ordered, near, unordered := candidates, candidatesNear, candidatesUnordered
	if len(q.Topics) > 0 || len(q.Except) > 0 {
		ordered, near, unordered = candidatesOfTopics, candidatesOfTopicsNear, candidatesOfTopicsUnordered
	}
	args := []any{max(limit, 0), listOf(q.Topics), listOf(q.Except), q.After}
	query := ordered
	switch {
	case q.Unordered: // and everywhere: it looks at nothing before them anyway
		query = unordered
	case q.Near:
		query = near
	}
	var entries []outbox.Entry
	bytes := 0
	err := each(ctx, from, func(rows *sql.Rows) error {
		e, err := scanEntry(rows)
		if err != nil {
			return err
		}
		if bytes += len(e.Payload); q.Bytes > 0 && bytes > q.Bytes && len(entries) > 0 {
			return errEnough
		}
		entries = append(entries, e)
		return nil
	}, query, args...)
	if err != nil && !errors.Is(err, errEnough) {
		return nil, err
	}
	return entries, nil
}

var errEnough = errors.New("enough payload")

// takeEntry takes ?1 for the token ?5, if it still is as ?2 to ?4 say. An entry that is claimed and eligible has
// lost its claim: at the limit ?8 it is abandoned.
const (
	takeEntry     = takeAsRead + takeGuard + takeReturning
	takeUnordered = takeAsRead + takeReturning

	takeAsRead = `
update kinora_outbox as o set
	status = iif(` + spent + `, 'abandoned', 'claimed'),
	attempts = iif(` + spent + `, attempts, attempts + 1),
	suspect = max(suspect, status = 'claimed'),
	token = iif(` + spent + `, token, ?5),
	claimed_by = iif(` + spent + `, claimed_by, ?6),
	next_attempt_at = iif(` + spent + `, next_attempt_at, ` + clock + ` + ?7),
	last_attempt_at = iif(` + spent + `, last_attempt_at, ` + clock + `),
	last_error = iif(` + spent + `, 'crashed', last_error)
where id = ?1 and open = 1 and status = ?2 and attempts = ?3 and token is ?4
	and status <> 'abandoned' and next_attempt_at <= ` + clock

	spent = `status = 'claimed' and ?8 > 0 and attempts >= ?8`

	takeGuard = heldGuard + `
	and not exists (
		select 1 from kinora_outbox b indexed by kinora_outbox_lane
		where b.open = 1 and b.topic = o.topic and b.key = o.key and b.id < o.id
			and (b.status <> 'claimed' or b.token is not ?5))`

	takeReturning = `
returning status, attempts, suspect, next_attempt_at, last_attempt_at`
)

// TakeEntry implements provider.Outbox.
func (d *Provider) TakeEntry(ctx context.Context, e outbox.Entry, q provider.EntryQuery, t claim.Terms) (taken outbox.Entry, ok bool, err error) {
	if t, err = t.WithDefaults(); err != nil {
		return e, false, err
	}
	err = d.inTurn(ctx, func(u *unit) error {
		taken, ok, err = u.take(ctx, e, q, t)
		return err
	})
	if err != nil {
		return e, false, fmt.Errorf("take entry %d: %w", e.Seq, err)
	}
	return taken, ok, nil
}

func (s session) take(ctx context.Context, e outbox.Entry, q provider.EntryQuery, t claim.Terms) (outbox.Entry, bool, error) {
	query := takeEntry
	if q.Unordered {
		query = takeUnordered
	}
	was := e
	var next int64
	var attempted sql.NullInt64
	err := one(ctx, s, []any{&e.Status, &e.Attempts, &e.Suspect, &next, &attempted}, query,
		e.Seq, e.Status, e.Attempts, tokenOf(e.Token), tokenOf(t.Token), t.Holder, millis(t.Lease), q.Attempts)
	switch {
	case errors.Is(err, sql.ErrNoRows), err == nil && e.Status != outbox.Claimed:
		return was, false, nil
	case err != nil:
		return was, false, err
	}
	e.Token, e.ClaimedBy = t.Token, t.Holder
	e.NextAttemptAt, e.LastAttemptedAt = timeOf(next), timeOrZero(attempted)
	e.Malformed = e.Headers == nil || e.CreatedAt.IsZero() // the claim has set the other times
	return e, true, nil
}

// ClaimEntries implements provider.BatchClaimer: the portable claim, all takes in one transaction. The candidates
// are read before, as every take looks again at all that makes one: so writers do not wait for that, and an idle
// relay holds up nobody.
func (d *Provider) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) (taken []outbox.Entry, err error) {
	if t, err = t.WithDefaults(); err != nil {
		return nil, err
	}
	read, err := d.EntryCandidates(ctx, q, t.Limit)
	if err != nil || len(read) == 0 {
		return nil, err
	}
	err = d.inTurn(ctx, func(u *unit) error {
		taken, err = u.claim(ctx, q, t, func(context.Context, int) ([]outbox.Entry, error) { return read, nil })
		if err != nil || len(taken) > 0 {
			return err
		}
		// Another relay was faster. Nobody is now.
		taken, err = u.claim(ctx, q, t, func(ctx context.Context, limit int) ([]outbox.Entry, error) {
			return candidatesOf(ctx, u, q, limit)
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("claim entries: %w", err)
	}
	return taken, nil
}

func (s session) claim(ctx context.Context, q provider.EntryQuery, t claim.Terms, read func(context.Context, int) ([]outbox.Entry, error)) ([]outbox.Entry, error) {
	return claim.Portable(ctx, t, read,
		func(ctx context.Context, e outbox.Entry, t claim.Terms) (outbox.Entry, bool, error) {
			return s.take(ctx, e, q, t)
		},
		outbox.Entry.Alone)
}
