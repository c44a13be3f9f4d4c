package sqlite

import (
	"cmp"
	"context"
	"database/sql"
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

// enqueue adds a message created at a time (int64), or now (nil). It reports whether the message
// is new.
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

// openAndHeld reports whether the statuses include claimable ones, and whether they include Held.
func openAndHeld(of []outbox.Status) (open, held bool) {
	return slices.ContainsFunc(of, func(s outbox.Status) bool { return s != outbox.Held }), slices.Contains(of, outbox.Held)
}

// Entries implements outbox.Inspector.
func (d *DB) Entries(ctx context.Context, f outbox.Filter) (entries []outbox.Entry, err error) {
	query, args := listEntries, filterArgs(f, defaultPage)
	if f.OnlyOpen() {
		open, held := openAndHeld(f.Status)
		query, args = listOpenEntries, append(args, open, held)
	}
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
	counts, query, args := provider.ZeroCounts(of), countEntries, []any{listOf(of)}
	if f.OnlyOpen() {
		open, held := openAndHeld(of)
		query, args = countOpenEntries, append(args, open, held)
	}
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
