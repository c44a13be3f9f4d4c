package postgres

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
)

// planned makes the server plan a statement each time, for the tables as they are: it costs a fraction of a
// millisecond for a whole batch. See append.go.
const planned = pgx.QueryExecModeCacheDescribe

const entryColumns = `o.id, o.message_id, o.topic, o.key, o.payload, o.headers, o.status, o.attempts, o.suspect, o.token,
	o.claimed_by, o.last_error, o.next_attempt_at, o.created_at, o.last_attempt_at, o.published_at`

func scanEntry(row pgx.CollectableRow) (outbox.Entry, error) {
	var e outbox.Entry
	var headers []byte
	var token *uuid.UUID
	var last, published *time.Time
	err := row.Scan(&e.Seq, &e.ID, &e.Topic, &e.Key, &e.Payload, &headers, &e.Status, &e.Attempts, &e.Suspect, &token,
		&e.ClaimedBy, &e.LastError, &e.NextAttemptAt, &e.CreatedAt, &last, &published)
	if err != nil {
		return e, err
	}
	if token != nil {
		e.Token = claim.Token(*token)
	}
	e.NextAttemptAt, e.CreatedAt = e.NextAttemptAt.UTC(), e.CreatedAt.UTC()
	if last != nil {
		e.LastAttemptedAt = last.UTC()
	}
	if published != nil {
		e.PublishedAt = published.UTC()
	}
	return e, json.Unmarshal(headers, &e.Headers)
}

// eligible is what may be claimed by itself; claimable, the first half of the guard, that no ineligible entry of
// its key precedes: neither one that waits or is taken, nor one that is set aside. Lookups stand in cases, which are
// never turned into joins: with statistics from when little was open, that was a walk over all of it for each (20
// seconds for a claim of 50 of 100,000). They give null, so that the planner takes nearly all rows to pass. Here and
// elsewhere, "id > 0" and "topic <> ”" say which of the partial indexes is meant: see migration 1.
const (
	eligible = `o.open and o.id > 0 and o.status in ('pending', 'failed', 'claimed') and o.next_attempt_at <= ck.t`

	claimable = eligible + `
		and case when exists (
			select from kinora.outbox e
			where e.open and e.topic <> '' and e.topic = o.topic and e.key = o.key and e.id < o.id
				and not (e.status in ('pending', 'failed', 'claimed') and e.next_attempt_at <= ck.t)) then null else true end is not null
		and ` + nothingHeld
	nothingHeld = `case when exists (
			select from kinora.outbox e
			where e.held and e.topic <> '' and e.topic = o.topic and e.key = o.key and e.id < o.id) then null else true end is not null`
)

// A claim in one statement. The clock is read once: read per row, the first entry of a key can be judged
// leased and, rows later, no longer in the way. picked are the eligible entries that no ineligible one of
// their key precedes, locked, skipping those that others hold. Of these, spent ones (their claim vanished, at
// the limit) are abandoned; a suspect (its claim vanished) goes alone if it is the first, and else ends the
// batch before it. safe are those whose key has no earlier open entry outside of the batch: what others had
// locked is one. Without order every eligible entry is claimable, and the batch is safe.
const (
	claimEntriesSQL   = claimHead + claimable + claimPicked + claimSafe + claimTail
	claimUnorderedSQL = claimHead + eligible + claimPicked + claimTail

	claimHead = `
with ck as materialized (select clock_timestamp() t),
picked as materialized (
	select o.id, o.topic, o.key, o.status = 'claimed' or o.suspect as suspect,
		o.status = 'claimed' and $5::int > 0 and o.attempts >= $5::int as spent
	from kinora.outbox o, ck
	where `
	claimPicked = ` and ($4::text[] is null or o.topic = any($4::text[])) and ($7::text[] is null or o.topic <> all($7::text[]))
	order by o.id limit $3::int
	for update of o skip locked),
abandoned as (
	update kinora.outbox o set status = 'abandoned', open = false, held = true, stuck = true, suspect = true, last_error = 'vanished'
	from picked p where p.spent and o.id = p.id),
batch as materialized (
	select p.id, p.topic, p.key from picked p
	where not p.spent and (
		p.id < coalesce((select min(id) from picked where suspect and not spent), p.id + 1)
		or p.suspect and p.id = (select min(id) from picked where not spent))),
safe as materialized (
	select b.id from batch b`
	claimSafe = `
	where case when exists (
		select from kinora.outbox e
		where e.open and e.topic <> '' and e.topic = b.topic and e.key = b.key and e.id < b.id
			and e.id not in (select id from batch)) then null else true end is not null`
	claimTail = `)
update kinora.outbox o set status = 'claimed', token = $1::uuid, claimed_by = $6::text, attempts = o.attempts + 1,
	suspect = o.suspect or o.status = 'claimed', last_attempt_at = ck.t, next_attempt_at = ck.t + $2::bigint * interval '1 microsecond'
from safe, ck where o.id = safe.id
returning ` + entryColumns
)

// ClaimEntries implements outbox.BatchClaimer.
func (db *DB) ClaimEntries(ctx context.Context, q outbox.Query, t claim.Terms) ([]outbox.Entry, error) {
	sql := claimEntriesSQL
	if q.Unordered {
		sql = claimUnorderedSQL
	}
	rows, err := db.pool.Query(ctx, db.q(sql), planned,
		uuid.UUID(t.Token), t.Lease.Microseconds(), t.Limit, some(q.Topics), q.Attempts, t.Holder, some(q.Except))
	if err != nil {
		return nil, fmt.Errorf("claim entries: %w", clear(err))
	}
	entries, err := pgx.CollectRows(rows, scanEntry)
	if err != nil {
		return nil, fmt.Errorf("claim entries: %w", clear(err))
	}
	slices.SortFunc(entries, func(a, b outbox.Entry) int { return int(a.Seq - b.Seq) }) // returning keeps no order
	return entries, nil
}

// some is nil where there is none.
func some[T any](all []T) []T {
	if len(all) == 0 {
		return nil
	}
	return all
}

const (
	entryCandidatesSQL     = candidatesHead + claimable + candidatesTail
	unorderedCandidatesSQL = candidatesHead + eligible + candidatesTail

	candidatesHead = `
with ck as materialized (select clock_timestamp() t)
select ` + entryColumns + `
from kinora.outbox o, ck
where `
	candidatesTail = ` and ($2::text[] is null or o.topic = any($2::text[])) and ($3::text[] is null or o.topic <> all($3::text[]))
order by o.id limit $1::int`
)

// EntryCandidates implements outbox.Store.
func (db *DB) EntryCandidates(ctx context.Context, q outbox.Query, limit int) ([]outbox.Entry, error) {
	sql := entryCandidatesSQL
	if q.Unordered {
		sql = unorderedCandidatesSQL
	}
	rows, err := db.pool.Query(ctx, db.q(sql), planned, limit, some(q.Topics), some(q.Except))
	if err == nil {
		var entries []outbox.Entry
		if entries, err = pgx.CollectRows(rows, scanEntry); err == nil {
			return entries, nil
		}
	}
	return nil, fmt.Errorf("read candidates: %w", clear(err))
}

// The row is locked first, and judged by a later statement's snapshot and clock: a wait for the lock makes
// them old. Then either of the two changes applies.
const (
	lockEntrySQL = `select 1 from kinora.outbox where id = $1::bigint for update`

	takeEntrySQL     = takeAny + takeGuard + takeReturning
	takeUnorderedSQL = takeAny + takeReturning

	takeAny = `
with ck as materialized (select clock_timestamp() t)
update kinora.outbox o set
	status          = case when spent then 'abandoned' else 'claimed' end,
	open            = not spent,
	held            = spent,
	stuck           = o.stuck or spent,
	last_error      = case when spent then 'vanished' else o.last_error end,
	token           = case when spent then o.token else $2::uuid end,
	claimed_by      = case when spent then o.claimed_by else $3::text end,
	attempts        = case when spent then o.attempts else o.attempts + 1 end,
	suspect         = o.suspect or o.status = 'claimed',
	last_attempt_at = case when spent then o.last_attempt_at else ck.t end,
	next_attempt_at = case when spent then o.next_attempt_at else ck.t + $4::bigint * interval '1 microsecond' end
from ck, lateral (select o2.status = 'claimed' and $5::int > 0 and o2.attempts >= $5::int as spent from kinora.outbox o2 where o2.id = $1::bigint) s
where o.id = $1::bigint and o.open and o.status = $6::text and o.attempts = $7::int and o.token is not distinct from $8::uuid
	and o.next_attempt_at <= ck.t and o.status in ('pending', 'failed', 'claimed')`
	takeGuard = `
	and case when exists (
		select from kinora.outbox e
		where e.open and e.topic <> '' and e.topic = o.topic and e.key = o.key and e.id < o.id
			and not (e.status = 'claimed' and e.token = $2::uuid)) then null else true end is not null
	and ` + nothingHeld
	takeReturning = `
returning ` + entryColumns
)

// TakeEntry implements outbox.Store.
func (db *DB) TakeEntry(ctx context.Context, e outbox.Entry, q outbox.Query, t claim.Terms) (outbox.Entry, bool, error) {
	var token *uuid.UUID
	if e.Token != (claim.Token{}) {
		token = (*uuid.UUID)(&e.Token)
	}
	sql := takeEntrySQL
	if q.Unordered {
		sql = takeUnorderedSQL
	}
	b := &pgx.Batch{}
	b.Queue(db.q(lockEntrySQL), e.Seq)
	b.Queue(db.q(sql), e.Seq, uuid.UUID(t.Token), t.Holder, t.Lease.Microseconds(), q.Attempts, string(e.Status), e.Attempts, token)
	results := db.pool.SendBatch(ctx, b) // one implicit transaction
	defer func() { _ = results.Close() }()
	if _, err := results.Exec(); err != nil {
		return e, false, fmt.Errorf("take entry %d: %w", e.Seq, clear(err))
	}
	rows, err := results.Query()
	if err != nil {
		return e, false, fmt.Errorf("take entry %d: %w", e.Seq, clear(err))
	}
	taken, err := pgx.CollectExactlyOneRow(rows, scanEntry)
	if err == nil {
		err = results.Close()
	}
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return e, false, nil
	case err != nil:
		return e, false, fmt.Errorf("take entry %d: %w", e.Seq, clear(err))
	case taken.Status != outbox.Claimed:
		return e, false, nil
	}
	return taken, true, nil
}
