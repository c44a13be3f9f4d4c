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

// claimable is the first half of the guard: an eligible entry that no ineligible one of its key precedes.
const claimable = `o.open and o.status in ('pending', 'failed', 'claimed') and o.next_attempt_at <= ck.t
		and not exists (
			select from kinora.outbox e
			where e.open and e.topic = o.topic and e.key = o.key and e.id < o.id
				and not (e.status in ('pending', 'failed', 'claimed') and e.next_attempt_at <= ck.t))`

// A claim in one statement. The clock is read once: read per row, the first entry of a key can be judged
// leased and, rows later, no longer in the way. picked are the eligible entries that no ineligible one of
// their key precedes, locked, skipping those that others hold. Of these, spent ones (their claim vanished, at
// the limit) are abandoned; a suspect (its claim vanished) goes alone if it is the first, and else ends the
// batch before it. safe are those whose key has no earlier open entry outside of the batch: what others had
// locked is one.
const claimEntriesSQL = `
with ck as materialized (select clock_timestamp() t),
picked as materialized (
	select o.id, o.topic, o.key, o.status = 'claimed' or o.suspect as suspect,
		o.status = 'claimed' and $5::int > 0 and o.attempts >= $5::int as spent
	from kinora.outbox o, ck
	where ` + claimable + ` and ($4::text[] is null or o.topic = any($4::text[]))
	order by o.id limit $3::int
	for update of o skip locked),
abandoned as (
	update kinora.outbox o set status = 'abandoned', suspect = true, last_error = 'vanished'
	from picked p where p.spent and o.id = p.id),
batch as materialized (
	select p.id, p.topic, p.key from picked p
	where not p.spent and (
		p.id < all (select id from picked where suspect and not spent)
		or p.suspect and p.id = (select min(id) from picked where not spent))),
safe as materialized (
	select b.id from batch b
	where not exists (
		select from kinora.outbox e
		where e.open and e.topic = b.topic and e.key = b.key and e.id < b.id
			and not exists (select from batch q where q.id = e.id)))
update kinora.outbox o set status = 'claimed', token = $1::uuid, claimed_by = $6::text, attempts = o.attempts + 1,
	suspect = o.suspect or o.status = 'claimed', last_attempt_at = ck.t, next_attempt_at = ck.t + $2::bigint * interval '1 microsecond'
from safe, ck where o.id = safe.id
returning ` + entryColumns

// ClaimEntries implements outbox.BatchClaimer.
func (db *DB) ClaimEntries(ctx context.Context, q outbox.Query, t claim.Terms) ([]outbox.Entry, error) {
	rows, err := db.pool.Query(ctx, db.q(claimEntriesSQL), planned, uuid.UUID(t.Token), t.Lease.Microseconds(), t.Limit, topics(q), q.Attempts, t.Holder)
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

func topics(q outbox.Query) []string {
	if len(q.Topics) == 0 {
		return nil
	}
	return q.Topics
}

const entryCandidatesSQL = `
with ck as materialized (select clock_timestamp() t)
select ` + entryColumns + `
from kinora.outbox o, ck
where ` + claimable + ` and ($2::text[] is null or o.topic = any($2::text[]))
order by o.id limit $1::int`

// EntryCandidates implements outbox.Store.
func (db *DB) EntryCandidates(ctx context.Context, q outbox.Query, limit int) ([]outbox.Entry, error) {
	rows, err := db.pool.Query(ctx, db.q(entryCandidatesSQL), planned, limit, topics(q))
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

	takeEntrySQL = `
with ck as materialized (select clock_timestamp() t)
update kinora.outbox o set
	status          = case when spent then 'abandoned' else 'claimed' end,
	last_error      = case when spent then 'vanished' else o.last_error end,
	token           = case when spent then o.token else $2::uuid end,
	claimed_by      = case when spent then o.claimed_by else $3::text end,
	attempts        = case when spent then o.attempts else o.attempts + 1 end,
	suspect         = o.suspect or o.status = 'claimed',
	last_attempt_at = case when spent then o.last_attempt_at else ck.t end,
	next_attempt_at = case when spent then o.next_attempt_at else ck.t + $4::bigint * interval '1 microsecond' end
from ck, lateral (select o2.status = 'claimed' and $5::int > 0 and o2.attempts >= $5::int as spent from kinora.outbox o2 where o2.id = $1::bigint) s
where o.id = $1::bigint and o.open and o.status = $6::text and o.attempts = $7::int and o.token is not distinct from $8::uuid
	and o.next_attempt_at <= ck.t and o.status in ('pending', 'failed', 'claimed')
	and not exists (
		select from kinora.outbox e
		where e.open and e.topic = o.topic and e.key = o.key and e.id < o.id
			and not (e.status = 'claimed' and e.token = $2::uuid))
returning ` + entryColumns
)

// TakeEntry implements outbox.Store.
func (db *DB) TakeEntry(ctx context.Context, e outbox.Entry, q outbox.Query, t claim.Terms) (outbox.Entry, bool, error) {
	var token *uuid.UUID
	if e.Token != (claim.Token{}) {
		token = (*uuid.UUID)(&e.Token)
	}
	b := &pgx.Batch{}
	b.Queue(db.q(lockEntrySQL), e.Seq)
	b.Queue(db.q(takeEntrySQL), e.Seq, uuid.UUID(t.Token), t.Holder, t.Lease.Microseconds(), q.Attempts, string(e.Status), e.Attempts, token)
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

// Rows are locked in order: marks that cross would deadlock otherwise.
const markEntriesSQL = `
with ck as materialized (select clock_timestamp() t),
held as materialized (select id from kinora.outbox where id = any($1::bigint[]) order by id for update)
update kinora.outbox o set
	status          = m.status,
	open            = m.status <> 'published',
	attempts        = o.attempts - case when m.status = 'pending' then 1 else 0 end,
	last_error      = case when m.status in ('failed', 'abandoned') then m.error else o.last_error end,
	published_at    = case when m.status = 'published' then ck.t end,
	next_attempt_at = case when m.status in ('failed', 'claimed') then ck.t + m.after * interval '1 microsecond' else ck.t end
from unnest($1::bigint[], $2::uuid[], $3::text[], $4::bigint[], $5::text[]) m(id, token, status, after, error), ck, held
where o.id = held.id and o.id = m.id and o.token = m.token and o.status = 'claimed'
returning o.id`

// MarkEntries implements outbox.Store: one statement.
func (db *DB) MarkEntries(ctx context.Context, marks []outbox.Mark) (late []int64, err error) {
	if err := outbox.CheckMarks(marks); err != nil {
		return nil, err
	}
	n := len(marks)
	ids, tokens, statuses, afters, errs := make([]int64, 0, n), make([]uuid.UUID, 0, n), make([]string, 0, n), make([]int64, 0, n), make([]string, 0, n)
	open := make(map[int64]bool, n)
	for _, m := range marks {
		if _, twice := open[m.Seq]; twice {
			late = append(late, m.Seq) // the first mark ends the claim that the second one names
			continue
		}
		open[m.Seq] = true
		ids, tokens, statuses = append(ids, m.Seq), append(tokens, uuid.UUID(m.Token)), append(statuses, string(m.To))
		afters, errs = append(afters, m.After.Microseconds()), append(errs, m.Error)
	}
	rows, err := db.pool.Query(ctx, db.q(markEntriesSQL), planned, ids, tokens, statuses, afters, errs)
	if err != nil {
		return nil, fmt.Errorf("mark entries: %w", clear(err))
	}
	done, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return nil, fmt.Errorf("mark entries: %w", clear(err))
	}
	for _, id := range done {
		open[id] = false
	}
	for _, id := range ids {
		if open[id] {
			late = append(late, id)
		}
	}
	return late, nil
}
