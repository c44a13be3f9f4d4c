package sqlite

import (
	"context"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/outbox"
)

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

// HoldEntries implements provider.EntryMaintainer. It reads before it writes, so an idle relay
// takes no write lock.
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

// window is how many entries of a key are released at most until they are ahead of the first held
// one. The others follow as these are published. So claims need not walk a large backlog of one
// key only because it was stuck once, and if the key gets stuck again, few entries must be held
// again.
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

// DeleteEntries implements provider.EntryMaintainer. It writes only if it finds entries to
// delete.
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
