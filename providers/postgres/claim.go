package postgres

import (
	"cmp"
	"context"
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

const entryColumns = `o.id, o.message_id, o.topic, o.key, o.payload, o.headers, o.status, o.attempts, o.suspect, o.token,
	o.claimed_by, o.last_error, o.next_attempt_at, o.created_at, o.last_attempt_at, o.published_at`

func scanEntry(row pgx.CollectableRow) (provider.Entry, error) {
	var e provider.Entry
	var headers string
	var token uuid.NullUUID
	err := row.Scan(&e.Seq, &e.ID, &e.Topic, &e.Key, &e.Payload, &headers, &e.Status, &e.Attempts, &e.Suspect, &token, &e.ClaimedBy, &e.LastError,
		entryTime{&e, &e.NextAttemptAt}, entryTime{&e, &e.CreatedAt}, entryTime{&e, &e.LastAttemptedAt}, entryTime{&e, &e.PublishedAt})
	if err != nil {
		return e, err
	}
	e.Token = claim.Token(token.UUID)
	setHeaders(&e, headers)
	return e, nil
}

// setHeaders parses the headers of e. If that fails, e is malformed.
func setHeaders(e *provider.Entry, headers string) {
	var err error
	e.Headers, err = provider.ParseHeaders(headers)
	e.Malformed = e.Malformed || err != nil
}

// entryTime is where a time of an entry goes. One out of range makes the entry malformed. Null is the zero time.
type entryTime struct {
	of *provider.Entry
	to *time.Time
}

// ScanTimestamptz implements pgtype.TimestamptzScanner.
func (t entryTime) ScanTimestamptz(v pgtype.Timestamptz) error {
	var ok bool
	*t.to, ok = provider.StoredTime(v.Time)
	t.of.Malformed = t.of.Malformed || v.Valid && (!ok || v.InfinityModifier != pgtype.Finite)
	return nil
}

// claimedColumns are the columns of a claimed entry that the caller does not know.
const claimedColumns = `o.id, o.message_id, o.topic, o.key, o.payload, o.headers, o.attempts, o.suspect, o.last_error,
	o.next_attempt_at, o.created_at, o.last_attempt_at`

// collectClaimed reads the result of a claim of at most t.Limit entries. The texts of an entry share one copy of the
// driver's bytes: a relay reads many entries and keeps none for long.
func collectClaimed(rows pgx.Rows, t claim.Terms) ([]provider.Entry, error) {
	defer rows.Close()
	var entries []provider.Entry
	var e provider.Entry
	var id, topic, key, payload, headers, lastError pgtype.DriverBytes
	var texts []byte
	columns := []any{&e.Seq, &id, &topic, &key, &payload, &headers, &e.Attempts, &e.Suspect, &lastError,
		entryTime{&e, &e.NextAttemptAt}, entryTime{&e, &e.CreatedAt}, entryTime{&e, &e.LastAttemptedAt}}
	for rows.Next() {
		e.Malformed = false
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
		setHeaders(&e, cut(len(headers)))
		if entries == nil {
			entries = make([]provider.Entry, 0, min(t.Limit, 64))
		}
		entries = append(entries, e)
	}
	if err := rows.Err(); err != nil { // the commit may have failed after the rows were sent
		return nil, err
	}
	return entries, nil
}

// eligible selects entries that may be claimed, apart from their key. claimable adds the first half of the guard: no
// ineligible entry of the key precedes it, whether that waits, is claimed, held or abandoned. Lookups are in cases, which are
// never turned into joins: with statistics from when few entries were open, a join walked all of them for each entry (20
// seconds for a claim of 50 of 100,000). The cases return null, so that the planner estimates that nearly all rows pass. A
// comparison of id with 0, or of topic with the empty text, selects one of the partial indexes: see migration 1.
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

// A claim is one statement. It reads the clock once: if it were read per row, the first entry of a key could count as leased
// and, rows later, no longer block. picked are the eligible entries that no ineligible one of their key precedes. They are
// locked, and rows that others have locked are skipped. Exhausted ones (their claim crashed at the limit) are abandoned. The
// others are safe if no earlier open entry of their key is outside picked. Of the safe ones, in order, the batch takes as
// much payload as allowed. A suspect (its claim crashed) is claimed alone if it is the first; otherwise it ends the batch
// before it. Each entry before a safe one in its key is safe too, so a batch never passes an entry.
//
// A near scan leaves the check of the earlier ones to the second half of the guard, which halves the lookups if few entries
// wait. An exhausted entry blocks its key until a full scan.
//
// A claim of some topics walks the open entries of each topic separately, so that those of other topics cost nothing. It
// locks entries during the walks, also some that it does not pick: if it locked them afterwards, concurrent relays would pick
// the same ones, and all but one would get none. No claim waits for a lock, so the order of locks does not matter.
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

	// openTopics are the requested topics or, if none are given, all topics with open entries, found by skipping through the
	// index; without the excluded ones. The last condition is always true. Without it the planner would estimate a hundred
	// topics and compile the statement, which takes longer than the claim (100 ms).
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

// ClaimEntries implements provider.Outbox.
func (db *Provider) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) ([]provider.Entry, error) {
	if err := provider.CheckQuery(q); err != nil {
		return nil, wrap("claim entries", err)
	}
	sql, near, unordered := claimEntriesSQL, claimNearSQL, claimUnorderedSQL
	args := []any{planned, uuid.UUID(t.Token), t.Lease.Microseconds(), t.Limit, q.Attempts, t.Holder, q.Bytes, max(q.After, 0)}
	if len(q.Topics)+len(q.Except) > 0 {
		sql, near, unordered = claimTopicsSQL, claimTopicsNearSQL, claimTopicsNoOrderSQL
		args = append(args, some(q.Topics), some(q.Except))
	}
	switch {
	case q.Unordered: // always a full scan: without order there are no earlier entries to check
		sql = unordered
	case q.Near:
		sql = near
	}
	crash.Point("claim: before")
	rows, _ := db.pool.Query(ctx, db.q(sql), args...) // the rows return its error too
	entries, err := collectClaimed(rows, t)
	crash.Point("claim: after")
	slices.SortFunc(entries, func(a, b provider.Entry) int { return cmp.Compare(a.Seq, b.Seq) }) // returning has no order
	return entries, wrap("claim entries", explain(err))
}
