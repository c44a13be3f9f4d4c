package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"errors"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// candidates lists eligible entries in order, without those behind an earlier one of their topic and key
// that is held or not eligible. It reads the clock once: else an entry could count as leased, and its
// successor, a moment later, as free. Held entries are checked first: many eligible ones may be behind.
// A near scan finds the first eligible entries before it checks those ahead of them. Some topics are
// walked separately, so that the entries of others cost nothing.
const (
	candidates          = `with recursive` + ckOnce + allTopics + due + candidateGuard + inOrder
	candidatesNear      = `with recursive` + ckOnce + nearEntries + due + inOrder + nearGuarded
	candidatesUnordered = `with recursive` + ckOnce + allTopics + due + inOrder

	candidatesOfTopics          = `with recursive` + ckOnce + someTopics + due + candidateGuard + inOrderOfTopic
	candidatesOfTopicsNear      = `with recursive` + ckOnce + someTopics + due + inOrderOfTopics + candidateGuard + ` order by o.id`
	candidatesOfTopicsUnordered = `with recursive` + ckOnce + someTopics + due + inOrderOfTopic

	ckOnce = ` ck (t) as materialized (select ` + clock + `)`

	allTopics = `
select ` + entryColumns + `
from kinora_outbox o indexed by kinora_outbox_open
where o.open = 1 and o.id > ?4`

	nearEntries = `
, near as (
	select * from kinora_outbox o indexed by kinora_outbox_open
	where o.open = 1 and o.id > ?4`

	nearGuarded = `)
select ` + entryColumns + `
from near o
where true` + candidateGuard + `
order by o.id`

	// The walk skips from topic to topic by the index; null ends it.
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

func candidatesOf(ctx context.Context, from querier, q provider.EntryQuery, limit int) ([]provider.Entry, error) {
	query, near, unordered := candidates, candidatesNear, candidatesUnordered
	if len(q.Topics) > 0 || len(q.Except) > 0 {
		query, near, unordered = candidatesOfTopics, candidatesOfTopicsNear, candidatesOfTopicsUnordered
	}
	switch {
	// always a full scan: without order there are no earlier entries to check
	case q.Unordered:
		query = unordered
	case q.Near:
		query = near
	}
	var entries []provider.Entry
	bytes := 0
	err := eachRow(ctx, from, func(rows *sql.Rows) error {
		e, err := scanEntry(rows)
		if err != nil {
			return err
		}
		if bytes += len(e.Payload); q.Bytes > 0 && bytes > q.Bytes && len(entries) > 0 {
			return errFull
		}
		entries = append(entries, e)
		return nil
	}, query, max(limit, 0), listOf(q.Topics), listOf(q.Except), q.After)
	if err != nil && !errors.Is(err, errFull) {
		return nil, err
	}
	return entries, nil
}

// takeEntry claims entry ?1 for token ?5, if the entry is still as ?2 to ?4 say. The claim of a
// claimed and eligible entry has expired: at the limit ?8 of attempts the entry is abandoned.
const (
	takeEntry     = takeAsRead + takeGuard + takeReturning
	takeUnordered = takeAsRead + takeReturning

	takeAsRead = `
update kinora_outbox as o set
	status = iif(` + exhausted + `, 'abandoned', 'claimed'),
	attempts = iif(` + exhausted + `, attempts, min(attempts, 999999999) + 1),
	suspect = max(suspect, status = 'claimed'),
	token = iif(` + exhausted + `, token, ?5),
	claimed_by = iif(` + exhausted + `, claimed_by, ?6),
	next_attempt_at = iif(` + exhausted + `, next_attempt_at, ` + clock + ` + ?7),
	last_attempt_at = iif(` + exhausted + `, last_attempt_at, ` + clock + `),
	last_error = iif(` + exhausted + `, 'crashed', last_error)
where id = ?1 and open = 1 and status = ?2 and attempts = ?3 and token is ?4
	and status <> 'abandoned' and next_attempt_at <= ` + clock

	exhausted = `status = 'claimed' and ?8 > 0 and attempts >= ?8`

	takeGuard = heldGuard + `
	and not exists (
		select 1 from kinora_outbox b indexed by kinora_outbox_lane
		where b.open = 1 and b.topic = o.topic and b.key = o.key and b.id < o.id
			and (b.status <> 'claimed' or b.token is not ?5))`

	takeReturning = `
returning status, attempts, suspect, next_attempt_at, last_attempt_at`
)

func (s session) take(ctx context.Context, e provider.Entry, q provider.EntryQuery, t claim.Terms) (provider.Entry, bool, error) {
	query := takeEntry
	if q.Unordered {
		query = takeUnordered
	}
	was := e
	taken, err := find(ctx, s, []any{&e.Status, &e.Attempts, &e.Suspect, scanTime(&e.NextAttemptAt), scanTime(&e.LastAttemptedAt)}, query,
		e.Seq, e.Status, e.Attempts, tokenOf(e.Token), tokenOf(t.Token), t.Holder, millis(t.Lease), q.Attempts)
	if err != nil || !taken || e.Status != outbox.Claimed {
		return was, false, err
	}
	e.Token, e.ClaimedBy = t.Token, t.Holder
	// the claim has set the other times
	e.Malformed = e.Headers == nil || e.CreatedAt.IsZero()
	return e, true, nil
}

// ClaimEntries implements provider.Outbox: the portable claim, with all takes in one transaction.
func (d *Provider) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) ([]provider.Entry, error) {
	t, err := t.WithDefaults()
	if err != nil {
		return nil, err
	}
	return claimRows(ctx, d, "claim entries", provider.CheckQuery(q),
		func(from querier) ([]provider.Entry, error) { return candidatesOf(ctx, from, q, t.Limit) },
		func(u *unit, rows []provider.Entry) ([]provider.Entry, error) {
			return claim.Portable(ctx, t,
				func(context.Context, int) ([]provider.Entry, error) { return rows, nil },
				func(ctx context.Context, e provider.Entry, t claim.Terms) (provider.Entry, bool, error) {
					return u.take(ctx, e, q, t)
				},
				provider.Entry.Alone)
		})
}

// claimRows reads candidates, and takes them in a transaction, which checks each one again. It reads before the
// transaction begins, so writers do not wait for the reading, and an idle claimer takes no write lock. If none could be
// taken, another claim was first, and it reads again: no claim can while the transaction holds the lock.
func claimRows[Row, Taken any](
	ctx context.Context, d *Provider, doing string, invalid error,
	candidates func(from querier) ([]Row, error), take func(*unit, []Row) ([]Taken, error),
) ([]Taken, error) {
	var rows []Row
	err := cmp.Or(d.notInside(ctx), invalid) // also if there is nothing to claim
	if err == nil {
		rows, err = candidates(d.reads)
	}
	if err != nil || len(rows) == 0 {
		return nil, wrap(doing, err)
	}
	return update(ctx, d, doing, nil, func(u *unit) ([]Taken, error) {
		taken, err := take(u, rows)
		if err != nil || len(taken) > 0 {
			return taken, err
		}
		if rows, err = candidates(u); err == nil {
			taken, err = take(u, rows)
		}
		return taken, err
	})
}

// markEntry changes entry ?1, which the claim with token ?2 holds.
const (
	markEntry = `
update kinora_outbox set
	status = ?3,
	open = ?3 <> 'published',
	attempts = max(attempts, 1) - (?3 = 'pending'),
	next_attempt_at = iif(?3 in ('failed', 'claimed', 'pending'), ` + clock + ` + ?4, next_attempt_at),
	last_error = iif(?3 in ('failed', 'abandoned') or ?3 = 'pending' and ?5 <> '', ?5, last_error),
	published_at = iif(?3 = 'published', ` + clock + `, null)
where id = ?1 and status = 'claimed' and token = ?2`

	dropEntry = `
delete from kinora_outbox where id = ?1 and status = 'claimed' and token = ?2`

	// lanesOf returns no row if no entry is held.
	lanesOf = `
select id, topic, key from kinora_outbox
where (` + anyHeld + `) and id in (select value from json_each(?1))`
)

// MarkEntries implements provider.Outbox.
func (d *Provider) MarkEntries(ctx context.Context, marks []outbox.Mark) (late []int64, err error) {
	if err := provider.CheckMarks(marks); err != nil || len(marks) == 0 {
		return nil, err
	}
	err = d.writeTx(ctx, func(u *unit) error {
		lanes, err := u.lanesToRelease(ctx, marks)
		if err != nil {
			return err
		}
		done := map[lane]bool{}
		for _, m := range marks {
			ok, err := u.change(ctx, m)
			if err != nil {
				return err
			}
			if !ok {
				late = append(late, m.Seq)
			} else if l, ok := lanes[m.Seq]; ok {
				done[l] = true
			}
		}
		return u.releaseHeld(ctx, done)
	})
	return result(late, "mark entries", err)
}

// lanesToRelease returns the lanes of the entries to be published, by Seq, if any entry is held.
func (s session) lanesToRelease(ctx context.Context, marks []outbox.Mark) (map[int64]lane, error) {
	var seqs []int64
	for _, m := range marks {
		if m.To == outbox.Published {
			seqs = append(seqs, m.Seq)
		}
	}
	if len(seqs) == 0 {
		return nil, nil
	}
	lanes := map[int64]lane{}
	err := fill(ctx, s, lanes, func(seq *int64, l *lane) []any { return []any{seq, &l.topic, &l.key} }, lanesOf, jsonOf(seqs))
	return lanes, err
}

func (s session) change(ctx context.Context, m outbox.Mark) (ok bool, err error) {
	query, args := markEntry, []any{m.Seq, tokenOf(m.Token), string(m.To), millis(m.After), m.Error}
	if m.Drop {
		query, args = dropEntry, args[:2]
	}
	n, err := s.changed(ctx, query, args...)
	return n == 1, err
}
