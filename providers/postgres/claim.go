package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// planned makes the server plan a statement on each call, for the current tables. That costs a
// fraction of a millisecond for a whole batch. See append.go.
const planned = pgx.QueryExecModeCacheDescribe

const entryColumns = `o.id, o.message_id, o.topic, o.key, o.payload, o.headers, o.status, o.attempts, o.suspect, o.token,
	o.claimed_by, o.last_error, o.next_attempt_at, o.created_at, o.last_attempt_at, o.published_at`

func scanEntry(row pgx.CollectableRow) (provider.Entry, error) {
	var e provider.Entry
	var headers string
	var token *uuid.UUID
	var next, created, last, published pgtype.Timestamptz
	err := row.Scan(&e.Seq, &e.ID, &e.Topic, &e.Key, &e.Payload, &headers, &e.Status, &e.Attempts, &e.Suspect, &token,
		&e.ClaimedBy, &e.LastError, &next, &created, &last, &published)
	if err != nil {
		return e, err
	}
	if token != nil {
		e.Token = claim.Token(*token)
	}
	setHeaders(&e, headers)
	setTime(&e, &e.NextAttemptAt, next)
	setTime(&e, &e.CreatedAt, created)
	setTime(&e, &e.LastAttemptedAt, last)
	setTime(&e, &e.PublishedAt, published)
	return e, nil
}

// setHeaders parses the headers of e. If that fails, e is malformed.
func setHeaders(e *provider.Entry, headers string) {
	var err error
	e.Headers, err = provider.ParseHeaders(headers)
	e.Malformed = e.Malformed || err != nil
}

// setTime sets a time of e. If t is out of range, e is malformed. Null is the zero time.
func setTime(e *provider.Entry, to *time.Time, t pgtype.Timestamptz) {
	var ok bool
	if *to, ok = provider.StoredTime(t.Time); t.Valid && (!ok || t.InfinityModifier != pgtype.Finite) {
		*to, e.Malformed = time.Time{}, true
	}
}

// claimedColumns are the columns of a claimed entry that the caller does not know.
const claimedColumns = `o.id, o.message_id, o.topic, o.key, o.payload, o.headers, o.attempts, o.suspect, o.last_error,
	o.next_attempt_at, o.created_at, o.last_attempt_at`

// collectClaimed reads the result of a claim of at most t.Limit entries. The texts of an entry
// share one copy of the driver's bytes, because a relay reads many entries and keeps none for
// long.
func collectClaimed(rows pgx.Rows, t claim.Terms) ([]provider.Entry, error) {
	defer rows.Close()
	var entries []provider.Entry
	var e provider.Entry
	var id, topic, key, payload, headers, lastError pgtype.DriverBytes
	var next, created, last pgtype.Timestamptz
	var texts []byte
	columns := []any{&e.Seq, &id, &topic, &key, &payload, &headers, &e.Attempts, &e.Suspect, &lastError, &next, &created, &last}
	for rows.Next() {
		if err := rows.Scan(columns...); err != nil {
			return nil, err
		}
		texts = append(append(append(append(append(texts[:0], id...), topic...), key...), lastError...), headers...)
		all := string(texts)
		cut := func(length int) (text string) {
			text, all = all[:length], all[length:]
			return text
		}
		e.Status, e.Token, e.ClaimedBy = outbox.Claimed, t.Token, t.Holder
		e.ID, e.Topic, e.Key, e.LastError = cut(len(id)), cut(len(topic)), cut(len(key)), cut(len(lastError))
		e.Payload = append([]byte{}, payload...)
		e.Malformed = false
		setHeaders(&e, cut(len(headers)))
		setTime(&e, &e.NextAttemptAt, next)
		setTime(&e, &e.CreatedAt, created)
		setTime(&e, &e.LastAttemptedAt, last)
		if entries == nil {
			entries = make([]provider.Entry, 0, min(t.Limit, claimedAtOnce))
		}
		entries = append(entries, e)
	}
	return entries, rows.Err()
}

const claimedAtOnce = 64 // initial capacity of the result

// eligible selects entries that may be claimed, apart from their key. claimable adds the first
// half of the guard: no ineligible entry of the key precedes it, whether that waits, is claimed,
// or is held or abandoned. Lookups are in cases, which are never turned into joins: with
// statistics from when few entries were open, a join walked all of them for each entry (20
// seconds for a claim of 50 of 100,000). The cases return null, so that the planner estimates
// that nearly all rows pass. Here and elsewhere, a comparison of id with 0 or
// of topic with the empty text selects one of the partial indexes: see migration 1.
const (
	eligible  = `o.open and o.id > 0 and ` + due
	claimable = eligible + unpreceded

	// The same for one topic, as a range: an order by topic and id of one topic would be an order
	// by id, which other indexes have.
	eligibleOfTopic  = `o.open and o.topic >= '' and o.topic >= n.topic and o.topic <= n.topic and ` + due
	claimableOfTopic = eligibleOfTopic + unpreceded

	due        = `o.status in ('pending', 'failed', 'claimed') and o.next_attempt_at <= ck.t`
	unpreceded = `
		and case when exists (
			select from kinora.outbox e
			where e.open and e.topic <> '' and e.topic = o.topic and e.key = o.key and e.id < o.id
				and not (e.status in ('pending', 'failed', 'claimed') and e.next_attempt_at <= ck.t)) then null else true end is not null
		and ` + nothingHeld
	nothingHeld = `case when ` + anyHeld + ` and exists (
			select from kinora.outbox e
			where e.held and e.topic <> '' and e.topic = o.topic and e.key = o.key and e.id < o.id) then null else true end is not null`
)

// A claim is one statement. It reads the clock once: if it were read per row, the first entry of
// a key could count as leased and, rows later, no longer block. picked are the eligible entries
// that no ineligible one of their key precedes. They are locked, and rows that others have locked
// are skipped. Exhausted ones (their claim crashed at the limit) are abandoned. The others are
// safe if no earlier open entry of their key is outside picked; one that another transaction has
// locked is outside. Of the safe ones, in order, the batch takes as much payload as allowed. A
// suspect (its claim crashed) is claimed alone if it is the first; otherwise it ends the batch
// before it. Each entry before a safe one in its key is safe too, so a batch never passes an
// entry. Without order every eligible entry is safe.
//
// A near scan picks eligible entries without checking the earlier ones, and leaves that to the
// second half of the guard. That halves the lookups if few entries wait. An exhausted entry
// blocks its key until a full scan.
//
// A claim of some topics walks the open entries of each topic separately, so that the entries of
// other topics cost nothing. It takes up to the limit from each topic, and picks the first of
// all. It locks entries during the walks, and so locks some that it does not pick. If it locked
// them afterwards, concurrent relays would pick the same ones, and all but one would get none. No
// claim waits for a lock, so the order of locks does not matter.
const (
	claimEntriesSQL       = claimHead + claimAny + claimable + claimPicked + claimAbandon + claimNotExhausted + claimSafe + claimTail
	claimNearSQL          = claimHead + claimAny + eligible + claimPicked + claimNotExhausted + claimSafe + claimNotHeld + claimTail
	claimUnorderedSQL     = claimHead + claimAny + eligible + claimPicked + claimAbandon + claimNotExhausted + claimTail
	claimTopicsSQL        = claimTopicsHead + claimableOfTopic + claimPickedOfTopic + claimMerged + claimAbandon + claimNotExhausted + claimSafe + claimTail
	claimTopicsNearSQL    = claimTopicsHead + eligibleOfTopic + claimPickedOfTopic + claimMerged + claimNotExhausted + claimSafe + claimNotHeld + claimTail
	claimTopicsNoOrderSQL = claimTopicsHead + eligibleOfTopic + claimPickedOfTopic + claimMerged + claimAbandon + claimNotExhausted + claimTail

	claimClock = `ck as materialized (select t, t + $2::bigint * interval '1 microsecond' as until from (select clock_timestamp() t) c),`
	claimHead  = `
with ` + claimClock
	claimTopicsHead = `
with recursive ` + claimClock + `
asked as materialized (select $8::text[] as topics, $9::text[] as others),` + openTopics + `,
picked as materialized (
	select p.* from names n, lateral (` + claimCandidate
	claimAny = `
picked as materialized (` + claimCandidate
	claimCandidate = `
	select o.id, o.topic, o.key, octet_length(o.payload) as bytes, o.status = 'claimed' or o.suspect as suspect,
		o.status = 'claimed' and $4::int > 0 and o.attempts >= $4::int as exhausted
	from kinora.outbox o, ck
	where o.id > $7::bigint and `
	claimPicked = `
	order by o.id limit $3::int
	for update of o skip locked`
	claimPickedOfTopic = `
	order by o.topic, o.id limit $3::int
	for update of o skip locked`
	claimMerged = `) p
	order by p.id limit $3::int`
	claimAbandon = `),
abandoned as (
	update kinora.outbox o set status = 'abandoned', open = false, held = true, stuck = true, suspect = true, last_error = 'crashed'
	from picked p where p.exhausted and o.id = p.id`
	claimNotExhausted = `),
batch as materialized (
	select s.id from (
		select o.id, row_number() over w as n, sum(o.bytes) over w as total, count(*) filter (where o.suspect) over w as suspects
		from picked o where not o.exhausted`
	claimSafe = `
	and case when exists (
		select from kinora.outbox e
		where e.open and e.topic <> '' and e.topic = o.topic and e.key = o.key and e.id < o.id
			and e.id not in (select id from picked where not exhausted)) then null else true end is not null`
	claimNotHeld = `
	and ` + nothingHeld
	claimTail = `
		window w as (order by o.id rows unbounded preceding)) s
	where s.n = 1 or s.suspects = 0 and ($6::bigint <= 0 or s.total <= $6::bigint))
update kinora.outbox o set status = 'claimed', token = $1::uuid, claimed_by = $5::text, attempts = least(o.attempts, 999999999) + 1,
	suspect = o.suspect or o.status = 'claimed', last_attempt_at = ck.t, next_attempt_at = ck.until
from batch, ck where o.id = batch.id
returning ` + claimedColumns

	// openTopics are the requested topics or, if none are given, all topics with open entries,
	// found by skipping through the index; without the excluded ones. The last condition is
	// always true: with it the planner estimates few topics, as there are. Without it the planner
	// would estimate a hundred and compile the statement, which takes longer than the claim (100
	// ms).
	openTopics = `
walked as (
	(select o.topic from kinora.outbox o where (select topics from asked) is null and o.open and o.topic >= '' order by o.topic limit 1)
	union all
	select f.topic from walked w, lateral (
		select o.topic from kinora.outbox o where o.open and o.topic >= '' and o.topic > w.topic order by o.topic limit 1) f),
names as materialized (
	select n.topic from asked a, (select topic from walked union select unnest(topics) from asked) n
	where (a.others is null or n.topic <> all(a.others)) and n.topic = coalesce(n.topic, ''))`
)

// ClaimEntries implements provider.BatchClaimer.
func (db *Provider) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) ([]provider.Entry, error) {
	if err := provider.CheckQuery(q); err != nil {
		return nil, fmt.Errorf("claim entries: %w", err)
	}
	sql := statementFor(q, claimStatements)
	args := []any{planned, uuid.UUID(t.Token), t.Lease.Microseconds(), t.Limit, q.Attempts, t.Holder, q.Bytes, max(q.After, 0)}
	crash.Point("claim: before")
	// the rows return its error too
	rows, _ := db.pool.Query(ctx, db.q(sql), append(args, topicArgs(q)...)...)
	entries, err := collectClaimed(rows, t)
	crash.Point("claim: after")
	if err != nil {
		return nil, fmt.Errorf("claim entries: %w", explain(err))
	}
	// returning has no order
	slices.SortFunc(entries, func(a, b provider.Entry) int { return cmp.Compare(a.Seq, b.Seq) })
	return entries, nil
}

// some returns nil for an empty list.
func some[T any](all []T) []T {
	if len(all) == 0 {
		return nil
	}
	return all
}

// statements are the statements of one kind, for all topics and for some.
type statements struct{ all, some byOrder }

type byOrder struct{ ordered, near, unordered string }

var (
	claimStatements = statements{
		all:  byOrder{claimEntriesSQL, claimNearSQL, claimUnorderedSQL},
		some: byOrder{claimTopicsSQL, claimTopicsNearSQL, claimTopicsNoOrderSQL},
	}
	candidateStatements = statements{
		all:  byOrder{entryCandidatesSQL, nearCandidatesSQL, unorderedCandidatesSQL},
		some: byOrder{topicCandidatesSQL, topicNearSQL, topicNoOrderSQL},
	}
)

// statementFor returns the statement for q.
func statementFor(q provider.EntryQuery, of statements) string {
	by := of.all
	if len(topicArgs(q)) > 0 {
		by = of.some
	}
	switch {
	// always a full scan: without order there are no earlier entries to check
	case q.Unordered:
		return by.unordered
	case q.Near:
		return by.near
	}
	return by.ordered
}

// topicArgs returns nil if q selects all topics.
func topicArgs(q provider.EntryQuery) []any {
	if len(q.Topics) == 0 && len(q.Except) == 0 {
		return nil
	}
	return []any{some(q.Topics), some(q.Except)}
}

// Candidates are the first claimable entries or, in a near scan, the claimable ones of the first
// eligible entries.
const (
	entryCandidatesSQL     = candidatesHead + candidatesOf + claimable + candidatesTail + candidatesAll + candidatesEnd
	nearCandidatesSQL      = candidatesHead + candidatesOf + eligible + candidatesTail + candidatesNear + candidatesEnd
	unorderedCandidatesSQL = candidatesHead + candidatesOf + eligible + candidatesTail + candidatesAll + candidatesEnd
	topicCandidatesSQL     = topicCandidatesHead + candidatesOf + claimableOfTopic + topicCandidatesTail + candidatesAll + candidatesEnd
	topicNearSQL           = topicCandidatesHead + candidatesOf + eligibleOfTopic + topicCandidatesTail + candidatesNear + candidatesEnd
	topicNoOrderSQL        = topicCandidatesHead + candidatesOf + eligibleOfTopic + topicCandidatesTail + candidatesAll + candidatesEnd

	candidatesHead = `
with ck as materialized (select clock_timestamp() t),
first as materialized (`
	topicCandidatesHead = `
with recursive ck as materialized (select clock_timestamp() t),
asked as materialized (select $4::text[] as topics, $5::text[] as others),` + openTopics + `,
first as materialized (
select p.* from names n, lateral (`
	candidatesOf = `
select o.id, o.topic, o.key, octet_length(o.payload) as bytes
from kinora.outbox o, ck
where o.id > $3::bigint and `
	candidatesTail = `
order by o.id limit $1::int)`
	topicCandidatesTail = `
order by o.topic, o.id limit $1::int) p
order by p.id limit $1::int)`
	candidatesAll = `,
picked as materialized (select o.id, o.bytes from first o`
	candidatesNear = candidatesAll + `, ck where true` + unpreceded
	candidatesEnd  = `)
select ` + entryColumns + `
from (select id, sum(bytes) over (order by id) as total from picked) p join kinora.outbox o on o.id = p.id
where $2::bigint <= 0 or p.total <= $2::bigint or p.id = (select min(id) from picked)
order by o.id`
)

// EntryCandidates implements provider.Outbox.
func (db *Provider) EntryCandidates(ctx context.Context, q provider.EntryQuery, limit int) ([]provider.Entry, error) {
	if err := provider.CheckQuery(q); err != nil {
		return nil, fmt.Errorf("read candidates: %w", err)
	}
	rows, err := db.pool.Query(ctx, db.q(statementFor(q, candidateStatements)), append([]any{planned, limit, q.Bytes, max(q.After, 0)}, topicArgs(q)...)...)
	if err == nil {
		var entries []provider.Entry
		if entries, err = pgx.CollectRows(rows, scanEntry); err == nil {
			return entries, nil
		}
	}
	return nil, fmt.Errorf("read candidates: %w", explain(err))
}

// The first statement locks the row. The second judges the row with a newer snapshot and clock,
// because a wait for the lock makes the first ones stale, and then takes or abandons the entry.
const (
	lockEntrySQL = `select 1 from kinora.outbox where id = $1::bigint for update`

	takeEntrySQL     = takeAny + takeGuard + takeReturning
	takeUnorderedSQL = takeAny + takeReturning

	takeAny = `
with ck as materialized (select clock_timestamp() t)
update kinora.outbox o set
	status          = case when exhausted then 'abandoned' else 'claimed' end,
	open            = not exhausted,
	held            = exhausted,
	stuck           = o.stuck or exhausted,
	last_error      = case when exhausted then 'crashed' else o.last_error end,
	token           = case when exhausted then o.token else $2::uuid end,
	claimed_by      = case when exhausted then o.claimed_by else $3::text end,
	attempts        = case when exhausted then o.attempts else least(o.attempts, 999999999) + 1 end,
	suspect         = o.suspect or o.status = 'claimed',
	last_attempt_at = case when exhausted then o.last_attempt_at else ck.t end,
	next_attempt_at = case when exhausted then o.next_attempt_at else ck.t + $4::bigint * interval '1 microsecond' end
from ck, lateral (select o2.status = 'claimed' and $5::int > 0 and o2.attempts >= $5::int as exhausted from kinora.outbox o2 where o2.id = $1::bigint) s
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

// TakeEntry implements provider.Outbox.
func (db *Provider) TakeEntry(ctx context.Context, e provider.Entry, q provider.EntryQuery, t claim.Terms) (provider.Entry, bool, error) {
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
		return e, false, fmt.Errorf("take entry %d: %w", e.Seq, explain(err))
	}
	rows, err := results.Query()
	if err != nil {
		return e, false, fmt.Errorf("take entry %d: %w", e.Seq, explain(err))
	}
	taken, err := pgx.CollectExactlyOneRow(rows, scanEntry)
	if err == nil {
		err = results.Close()
	}
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return e, false, nil
	case err != nil:
		return e, false, fmt.Errorf("take entry %d: %w", e.Seq, explain(err))
	case taken.Status != outbox.Claimed:
		return e, false, nil
	}
	// the claim has set the other times
	taken.Malformed = taken.Headers == nil || taken.CreatedAt.IsZero()
	return taken, true, nil
}
