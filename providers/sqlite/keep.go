package sqlite

import (
	"context"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/outbox"
)

// What is held is out of the way of claims: it is not open, so candidates does not come to it, however much it is.
const (
	// followers are pending entries behind one that is stuck: abandoned, or failed with ?1 of its backoff to go.
	followers = `
	select o.id
	from (select topic, key, min(id) as head
		from kinora_outbox indexed by kinora_outbox_stuck
		where status in ('failed', 'abandoned') and (status = 'abandoned' or next_attempt_at >= ` + clock + ` + ?1)
		group by topic, key) s
	cross join kinora_outbox o indexed by kinora_outbox_lane
	where o.open = 1 and o.topic = s.topic and o.key = s.key and o.id > s.head and o.status = 'pending'`

	// orphans are held entries that nothing precedes. It leaps from a key's first held entry to the next key's,
	// so it costs as much as there are keys.
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

	lookToHold   = `select exists (` + followers + `), exists (` + orphans + `)`
	holdEntries  = `update kinora_outbox set status = 'held', open = 0 where id in (` + followers + ` limit ?2)`
	freeOrphans  = `update kinora_outbox set status = 'pending', open = 1 where id in (` + orphans + `)`
	lookForHeld  = `select exists (select 1 from kinora_outbox indexed by kinora_outbox_held where status = 'held')`
	bringEntries = `
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

// HoldEntries implements provider.EntryMaintainer. An idle relay holds up nobody with it: it looks before it begins to write.
func (d *Provider) HoldEntries(ctx context.Context, long time.Duration, limit int) (n int, err error) {
	var hold, free bool
	err = one(ctx, d.reads, []any{&hold, &free}, lookToHold, millis(long))
	hold = hold && limit > 0
	if err == nil && (hold || free) {
		err = d.inTurn(ctx, func(u *unit) error {
			n, err = u.hold(ctx, long, max(limit, 0))
			return err
		})
	}
	if err != nil {
		return 0, fmt.Errorf("hold entries: %w", err)
	}
	return n, nil
}

func (u *unit) hold(ctx context.Context, long time.Duration, limit int) (int, error) {
	held, err := u.changed(ctx, holdEntries, millis(long), limit)
	if err != nil {
		return 0, err
	}
	freed, err := u.changed(ctx, freeOrphans)
	u.entries = freed > 0
	return held, err
}

// changed runs a statement, and returns how many rows it changed.
func (s session) changed(ctx context.Context, query string, args ...any) (int, error) {
	r, err := s.exec(ctx, query, args...)
	if err != nil {
		return 0, err
	}
	n, err := r.RowsAffected()
	return int(n), err
}

// lane is what keeps its order.
type lane struct{ topic, key string }

// window is how many entries of a key, at most, are brought back to be before the first that is still held. The
// others follow as these are published. So claims never have a large backlog of one key to walk over only because
// it was stuck once, and where it is stuck again there is little to hold again.
const window = 500

// bringBack makes the first held entries of each lane pending.
func (u *unit) bringBack(ctx context.Context, lanes map[lane]bool) error {
	for l := range lanes {
		n, err := u.changed(ctx, bringEntries, l.topic, l.key, window)
		if err != nil {
			return err
		}
		u.entries = u.entries || n > 0
	}
	return nil
}

const (
	// What was published, or skipped, for longer than ?3 and ?4; none that was published where ?3 is 0.
	expired = `(status = 'published' and ?3 > 0 and published_at < ` + clock + ` - ?3
		or status = 'skipped' and next_attempt_at < ` + clock + ` - ?4)`

	// An entry is published or skipped after it is created. If all of these were created less than the shorter time
	// ago, so were those after them. Rows with a creation time in the future, which other writers left, do not count.
	lookToDelete = `
select count(*), coalesce(max(id), 0), coalesce(sum(` + expired + `), 0), coalesce(min(iif(created_at <= ` + clock + `, created_at, null)) >= ` + clock + ` - iif(?3 > 0, min(?3, ?4), ?4), 0)
from (select id, status, created_at, published_at, next_attempt_at
	from kinora_outbox where id > ?1 order by id limit ?2)`

	deleteEntries = `delete from kinora_outbox where id > ?1 and id <= ?2 and ` + expired

	deleteLook = 1000 // entries that one call looks at
)

// DeleteEntries implements provider.EntryMaintainer. It writes only where there is something to delete.
func (d *Provider) DeleteEntries(ctx context.Context, keep outbox.EntryRetention, after int64) (n int, next int64, err error) {
	published, skipped := millis(keep.Published), millis(keep.Skipped)
	var looked, found int
	var fresh bool
	err = one(ctx, d.reads, []any{&looked, &next, &found, &fresh}, lookToDelete, after, deleteLook, published, skipped)
	if err == nil && found > 0 {
		err = d.inTurn(ctx, func(u *unit) error {
			n, err = u.changed(ctx, deleteEntries, after, next, published, skipped)
			return err
		})
	}
	if err != nil {
		return 0, after, fmt.Errorf("delete entries: %w", err)
	}
	if looked < deleteLook || fresh {
		next = 0
	}
	return n, next, nil
}
