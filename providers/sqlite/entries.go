package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// insertEntry takes the creation time from ?6 or, if that is null, from the clock.
const insertEntry = `
insert into kinora_outbox (message_id, topic, key, payload, headers, created_at, next_attempt_at)
values (?1, ?2, ?3, ?4, ?5, coalesce(?6, ` + clock + `), coalesce(?6, ` + clock + `))
on conflict (topic, message_id) do nothing`

// enqueue adds a message created at a time (int64) or now (nil), and reports whether it is new.
func (s session) enqueue(ctx context.Context, m outbox.Message, at any) (bool, error) {
	n, err := s.changed(ctx, insertEntry, m.ID, m.Topic, m.Key, blobOf(m.Payload), headersOf(m.Headers), at)
	return n == 1, err
}

func (s session) enqueueAll(ctx context.Context, ready []outbox.Message) error {
	for _, m := range ready {
		if _, err := s.enqueue(ctx, m, nil); err != nil {
			return err
		}
	}
	return nil
}

// blobOf never returns nil, because the columns are not null.
func blobOf(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

func headersOf(h map[string]string) string {
	if len(h) == 0 {
		return `{}`
	}
	return jsonOf(h)
}

const entryColumns = `id, message_id, topic, key, payload, headers, status, attempts, suspect, token, claimed_by,
	last_error, next_attempt_at, created_at, last_attempt_at, published_at`

func scanEntry(rows *sql.Rows) (e outbox.Entry, err error) {
	var headers string
	var token []byte
	err = rows.Scan(&e.Seq, &e.ID, &e.Topic, &e.Key, &e.Payload, &headers, &e.Status, &e.Attempts, &e.Suspect, &token,
		&e.ClaimedBy, &e.LastError, scanTime(&e.NextAttemptAt), scanTime(&e.CreatedAt), scanTime(&e.LastAttemptedAt), scanTime(&e.PublishedAt))
	if err != nil {
		return e, err
	}
	copy(e.Token[:], token)
	e.Headers, err = provider.ParseHeaders(headers)
	e.Malformed = err != nil
	for _, t := range []*time.Time{&e.NextAttemptAt, &e.CreatedAt, &e.LastAttemptedAt, &e.PublishedAt} {
		var ok bool
		*t, ok = provider.StoredTime(*t)
		e.Malformed = e.Malformed || !ok
	}
	return e, nil
}

// tokenOf returns nil (null) for the zero Token, which means no claim.
func tokenOf(t claim.Token) any {
	if t == (claim.Token{}) {
		return nil
	}
	return t[:]
}

// listOf returns a JSON array for json_each, or nil (null), which means all, for an empty list.
func listOf[T any](list []T) any {
	if len(list) == 0 {
		return nil
	}
	return jsonOf(list)
}

// anyOf returns a JSON array for json_each, or nil (null), which means all, for a nil list.
func anyOf[T any](list []T) any {
	if list == nil {
		return nil
	}
	return jsonOf(list)
}

// Enqueued implements provider.Waker.
func (d *Provider) Enqueued() <-chan struct{} { return d.added.wait() }

// defaultPage is the limit of a listing whose filter has none.
const defaultPage = 100

// filtered is the condition of a Filter: ?1 to ?8. ?9 is the limit of rows (-1: none).
const filtered = ` id > ?1 and id <= ?2
	and (?3 is null or status in (select value from json_each(?3)))
	and (?4 = '' or topic = ?4)
	and (?5 = '' or key = ?5)
	and (?6 = '' or iif(json_valid(headers), headers ->> 'kinora_stream', null) = ?6)
	and (?7 = 0 or created_at < ` + clock + ` - ?7)
	and (?8 is null or id in (select value from json_each(?8)))`

func filterArgs(f provider.EntryFilter, limit int) []any {
	after, upto := span(f.After, f.Seqs)
	return []any{after, upto, listOf(f.Status), f.Topic, f.Key, f.Stream, millis(max(f.Older, 0)), anyOf(f.Seqs), cmp.Or(f.Limit, limit)}
}

// span returns the range of Seqs that a filter can select.
func span(after int64, seqs []int64) (from, upto int64) {
	if len(seqs) == 0 {
		return after, math.MaxInt64
	}
	return max(after, slices.Min(seqs)-1), slices.Max(seqs)
}

// listOpenEntries lists entries of open statuses: claimable ones if ?10, held ones if ?11. It
// merges two indexes that are in order, and sorts nothing.
const (
	listEntries     = `select ` + entryColumns + ` from kinora_outbox where` + filtered + ` order by id limit ?9`
	listOpenEntries = `
select ` + entryColumns + ` from kinora_outbox indexed by kinora_outbox_open
where ?10 and open = 1 and` + filtered + `
union all
select ` + entryColumns + ` from kinora_outbox indexed by kinora_outbox_held_id
where ?11 and status = 'held' and` + filtered + `
order by id limit ?9`
)

// openOf returns the query all or, if f selects only open statuses, open, with whether any is claimable, and whether any is Held.
func openOf(f provider.EntryFilter, all, open string, args ...any) (string, []any) {
	if !f.OnlyOpen() {
		return all, args
	}
	isClaimable := func(s outbox.Status) bool { return s != outbox.Held }
	return open, append(args, slices.ContainsFunc(f.Status, isClaimable), slices.Contains(f.Status, outbox.Held))
}

// Entries implements outbox.Inspector.
func (d *DB) Entries(ctx context.Context, f outbox.Filter) (entries []outbox.Entry, err error) {
	query, args := openOf(f, listEntries, listOpenEntries, filterArgs(f, defaultPage)...)
	if err = provider.CheckFilter(f); err == nil {
		entries, err = collect(ctx, d.reads, scanEntry, query, args...)
	}
	return result(entries, "list entries", err)
}

const (
	countEntries = `select status, count(*) from kinora_outbox
		where ?1 is null or status in (select value from json_each(?1)) group by status`
	countOpenEntries = `
select status, count(*) from kinora_outbox indexed by kinora_outbox_open
where ?2 and open = 1 and status in (select value from json_each(?1)) group by status
union all
select status, count(*) from kinora_outbox indexed by kinora_outbox_held_id
where ?3 and status = 'held' group by status`
)

// StatusCounts implements outbox.Inspector.
func (d *DB) StatusCounts(ctx context.Context, of ...outbox.Status) (map[outbox.Status]int64, error) {
	f := provider.EntryFilter{Status: of}
	query, args := openOf(f, countEntries, countOpenEntries, listOf(of))
	counts := provider.ZeroCounts(of)
	err := provider.CheckFilter(f)
	if err == nil {
		err = count(ctx, d.reads, counts, query, args...)
	}
	return result(counts, "count entries", err)
}

// The first and the last time that can be read: see provider.Entry.Malformed.
const (
	yearOne  = `-62135596800000`
	year9999 = `253402300799999`
)

const requeueEntries = `
update kinora_outbox set status = 'pending', attempts = 0, suspect = 0, next_attempt_at = ` + clock + `
where id in (
	select id from kinora_outbox indexed by kinora_outbox_stuck
	where status in ('failed', 'abandoned')
		and (?10 = 0 or last_attempt_at is null or last_attempt_at between ` + yearOne + ` and ` + year9999 + `) and` + filtered + `
	order by id limit ?9)
returning topic, key, ?10 > 0 and coalesce(last_attempt_at < ` + clock + ` - ?10, 0)`

// Requeue implements outbox.Inspector.
func (d *DB) Requeue(ctx context.Context, f outbox.Filter) (int, error) {
	window := millis(d.cfg.RequeueWindow)
	if f.Force {
		window = 0
	}
	return d.decide(ctx, "requeue", requeueEntries, f, window)
}

const skipEntries = `
update kinora_outbox set status = 'skipped', open = 0, next_attempt_at = ` + clock + `
where id in (
	select id from kinora_outbox indexed by kinora_outbox_open
	where open = 1 and (status <> 'claimed' or next_attempt_at > ` + year9999 + `) and` + filtered + `
	union all
	select id from kinora_outbox indexed by kinora_outbox_held_id
	where status = 'held' and` + filtered + `
	order by id limit ?9)
returning topic, key, 0`

// Skip implements outbox.Inspector.
func (d *DB) Skip(ctx context.Context, f outbox.Filter) (int, error) {
	return d.decide(ctx, "skip", skipEntries, f)
}

func (d *Provider) decide(ctx context.Context, doing, query string, f provider.EntryFilter, more ...any) (int, error) {
	return update(ctx, d, doing, provider.CheckFilter(f), func(u *unit) (n int, err error) {
		lanes := map[lane]bool{}
		err = eachRow(ctx, u, func(rows *sql.Rows) error {
			var l lane
			var stale bool
			err := rows.Scan(&l.topic, &l.key, &stale)
			if err == nil && stale {
				err = outbox.ErrStale
			}
			lanes[l] = true
			n++
			return err
		}, query, append(filterArgs(f, -1), more...)...)
		// requeued entries, or those behind skipped ones, may be claimable now
		u.entries = n > 0
		var held bool
		if err == nil {
			err = one(ctx, u, []any{&held}, anyHeld)
		}
		if err == nil && held {
			err = u.releaseHeld(ctx, lanes)
		}
		return n, err
	})
}

// Held entries are not open, so candidates does not scan them, however many there are.
const (
	// followers are pending entries behind one that is abandoned, or failed with at least ?1 of
	// its backoff left.
	followers = `
	select o.id
	from (select topic, key, min(id) as head
		from kinora_outbox indexed by kinora_outbox_stuck
		where status in ('failed', 'abandoned') and (status = 'abandoned' or next_attempt_at >= ` + clock + ` + ?1)
		group by topic, key) s
	cross join kinora_outbox o indexed by kinora_outbox_lane
	where o.open = 1 and o.topic = s.topic and o.key = s.key and o.id > s.head and o.status = 'pending'`

	// orphans are held entries without an open entry ahead. The walk skips from the first held
	// entry of a key to the next key, so its cost grows with the number of keys.
	orphans = `
	with recursive first (id) as (
		select id from (
			select id from kinora_outbox indexed by kinora_outbox_held
			where status = 'held' order by topic, key, id limit 1)
		union all
		select coalesce((
			select n.id from kinora_outbox n indexed by kinora_outbox_held
			where n.status = 'held' and n.topic = h.topic and n.key > h.key order by n.key, n.id limit 1
		), (
			select n.id from kinora_outbox n indexed by kinora_outbox_held
			where n.status = 'held' and n.topic > h.topic order by n.topic, n.key, n.id limit 1
		))
		from first f cross join kinora_outbox h on h.id = f.id)
	select h.id from first f cross join kinora_outbox h on h.id = f.id
	where not exists (
		select 1 from kinora_outbox b indexed by kinora_outbox_lane
		where b.open = 1 and b.topic = h.topic and b.key = h.key and b.id < h.id)`

	findToHold     = `select exists (` + followers + `), exists (` + orphans + `)`
	holdEntries    = `update kinora_outbox set status = 'held', open = 0 where id in (` + followers + ` limit ?2)`
	releaseOrphans = `update kinora_outbox set status = 'pending', open = 1 where id in (` + orphans + `)`
	anyHeld        = `select exists (select 1 from kinora_outbox indexed by kinora_outbox_held where status = 'held')`
	releaseEntries = `
update kinora_outbox set status = 'pending', open = 1
where id in (
	select id from kinora_outbox indexed by kinora_outbox_held
	where status = 'held' and topic = ?1 and key = ?2
	order by id
	limit max(1, ?3 - (
		select count(*) from (
			select 1 from kinora_outbox indexed by kinora_outbox_lane
			where open = 1 and topic = ?1 and key = ?2 and id < (
				select id from kinora_outbox indexed by kinora_outbox_held
				where status = 'held' and topic = ?1 and key = ?2 order by id limit 1)
			limit ?3))))`
)

// HoldEntries implements provider.EntryMaintainer. It writes only if there is something to change.
func (d *Provider) HoldEntries(ctx context.Context, long time.Duration, limit int) (n int, err error) {
	var hold, free bool
	err = one(ctx, d.reads, []any{&hold, &free}, findToHold, millis(long))
	hold = hold && limit > 0
	if err == nil && (hold || free) {
		err = d.writeTx(ctx, func(u *unit) (err error) {
			if n, err = u.changed(ctx, holdEntries, millis(long), max(limit, 0)); err != nil {
				return err
			}
			freed, err := u.changed(ctx, releaseOrphans)
			u.entries = freed > 0
			return err
		})
	}
	return result(n, "hold entries", err)
}

// changed runs a statement and returns how many rows it changed.
func (s session) changed(ctx context.Context, query string, args ...any) (int, error) {
	r, err := s.exec(ctx, query, args...)
	if err != nil {
		return 0, err
	}
	n, err := r.RowsAffected()
	return int(n), err
}

// execAll runs statements with the same arguments.
func (s session) execAll(ctx context.Context, queries []string, args ...any) error {
	for _, query := range queries {
		if _, err := s.exec(ctx, query, args...); err != nil {
			return err
		}
	}
	return nil
}

// changed runs a statement in a transaction of its own.
func (d *Provider) changed(ctx context.Context, query string, args ...any) (n int, err error) {
	err = d.writeTx(ctx, func(u *unit) error {
		n, err = u.changed(ctx, query, args...)
		return err
	})
	return n, err
}

// lane identifies the entries that are published in order.
type lane struct{ topic, key string }

// window is how many entries of a key are released at most. The others follow as these are published.
// So claims need not walk a large backlog of one key, and few are held again if it gets stuck again.
const window = 500

// releaseHeld makes the first held entries of each lane pending.
func (u *unit) releaseHeld(ctx context.Context, lanes map[lane]bool) error {
	for l := range lanes {
		n, err := u.changed(ctx, releaseEntries, l.topic, l.key, window)
		if err != nil {
			return err
		}
		u.add(news{entries: n > 0})
	}
	return nil
}

const (
	// expired selects entries published more than ?3 ms ago (none if ?3 is 0) or skipped more
	// than ?4 ms ago.
	expired = `(status = 'published' and ?3 > 0 and published_at < ` + clock + ` - ?3
		or status = 'skipped' and next_attempt_at < ` + clock + ` - ?4)`

	// An entry is published or skipped after it is created. If all of these entries were created
	// within the shorter retention, so were those after them. Rows with a creation time in the
	// future, which other writers left, do not count.
	findExpired = `
select count(*), coalesce(max(id), 0), coalesce(sum(` + expired + `), 0), coalesce(min(iif(created_at <= ` + clock + `, created_at, null)) >= ` + clock + ` - iif(?3 > 0, min(?3, ?4), ?4), 0)
from (select id, status, created_at, published_at, next_attempt_at
	from kinora_outbox where id > ?1 order by id limit ?2)`

	deleteEntries = `delete from kinora_outbox where id > ?1 and id <= ?2 and ` + expired

	deleteScan = 1000 // entries that one call scans
)

// DeleteEntries implements provider.EntryMaintainer. It writes only if there are entries to delete.
func (d *Provider) DeleteEntries(ctx context.Context, keep outbox.EntryRetention, after int64) (n int, next int64, err error) {
	published, skipped := millis(keep.Published), millis(keep.Skipped)
	var scanned, found int
	var fresh bool
	err = one(ctx, d.reads, []any{&scanned, &next, &found, &fresh}, findExpired, after, deleteScan, published, skipped)
	if err == nil && found > 0 {
		n, err = d.changed(ctx, deleteEntries, after, next, published, skipped)
	}
	if err != nil {
		return 0, after, fmt.Errorf("delete entries: %w", err)
	}
	if scanned < deleteScan || fresh {
		next = 0
	}
	return n, next, nil
}
