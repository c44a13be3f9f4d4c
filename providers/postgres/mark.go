package postgres

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/outbox"
)

// window is how many entries of a lane, at most, are brought back to be before the first that is still held. The
// others follow as these are published: so claims never have a large backlog of one key to walk over only because it
// was stuck once, and where it is stuck again there is little to hold again.
const window = "500"

// restored brings the first held entries of every lane back: one at least, and as many as make a window with the open
// ones before them, of which those that are gone count no more. A lane's earlier ones come first, so that those
// that stay held stand before nothing that came back. What somebody else has locked is his to bring back, or to
// skip, so that nobody waits here and no order of locks can cross. The ids travel as an array, which leaves the
// planner no choice but the primary key; nothing is held in most lanes, which costs each a look into an index.
const restored = `
restored as (
	update kinora.outbox o set status = 'pending', open = true, held = false
	where o.id = any(array(
		select h.id from lanes l, lateral (
			select f.id from kinora.outbox f
			where f.held and f.topic <> '' and f.topic = l.topic and f.key = l.key and f.status = 'held'
			order by f.id limit 1) f, lateral (
			select h.id from kinora.outbox h
			where h.held and h.topic <> '' and h.topic = l.topic and h.key = l.key and h.status = 'held'
			order by h.id limit greatest(1, ` + window + ` - (
				select count(*) from (
					select from kinora.outbox e
					where e.open and e.topic <> '' and e.topic = l.topic and e.key = l.key and e.id < f.id
						and e.id not in (select id from gone)
					limit ` + window + `) e))
			for update skip locked) h))
	returning o.id)`

const noneGone = `
gone as (select null::bigint as id where false),`

// A mark is one statement. Rows are locked in order: marks that cross would deadlock otherwise. Where an entry is
// published, what is held behind it is pending again. For that the statement's snapshot is new enough: an entry
// was held because of this one before it was claimed, and in a transaction that had it locked (see lockHeadsSQL),
// so that the claim waited for its end; and what is being held at this moment waits for another one.
const markEntriesSQL = `
with ck as materialized (select clock_timestamp() t),
m as (
	select * from unnest($1::bigint[], $2::uuid[], $3::text[], $4::bigint[], $5::text[], $6::boolean[]) m(id, token, status, after, error, gone)),
locked as materialized (select id from kinora.outbox where id = any($1::bigint[]) order by id for update),
deleted as (
	delete from kinora.outbox o using m
	where m.gone and (select count(*) from locked) > 0 and o.id = m.id and o.token = m.token and o.status = 'claimed'
	returning o.id, o.topic, o.key, 'published' as status),
changed as (
	update kinora.outbox o set
		status          = m.status,
		open            = m.status not in ('published', 'abandoned'),
		held            = m.status = 'abandoned',
		stuck           = m.status in ('failed', 'abandoned') or o.stuck and m.status <> 'published',
		attempts        = o.attempts - case when m.status = 'pending' then 1 else 0 end,
		last_error      = case when m.status in ('failed', 'abandoned') or m.status = 'pending' and m.error <> '' then m.error else o.last_error end,
		published_at    = case when m.status = 'published' then ck.t end,
		next_attempt_at = case when m.status in ('failed', 'claimed', 'pending') then ck.t + m.after * interval '1 microsecond' else ck.t end
	from m, ck
	where not m.gone and (select count(*) from locked) > 0 and o.id = m.id and o.token = m.token and o.status = 'claimed'
	returning o.id, o.topic, o.key, o.status),
done as (select * from deleted union all select * from changed),
gone as (select id from done where status = 'published'),
lanes as (select distinct topic, key from done where status = 'published'),` + restored + `
select id from done`

// MarkEntries implements outbox.Store: one statement.
func (db *DB) MarkEntries(ctx context.Context, marks []outbox.Mark) (late []int64, err error) {
	if err := outbox.CheckMarks(marks); err != nil {
		return nil, err
	}
	n := len(marks)
	ids, tokens, statuses, afters, errs, drops := make([]int64, 0, n), make([]uuid.UUID, 0, n), make([]string, 0, n),
		make([]int64, 0, n), make([]string, 0, n), make([]bool, 0, n)
	open := make(map[int64]bool, n)
	for _, m := range marks {
		if _, twice := open[m.Seq]; twice {
			late = append(late, m.Seq) // the first mark ends the claim that the second one names
			continue
		}
		open[m.Seq] = true
		ids, tokens, statuses = append(ids, m.Seq), append(tokens, uuid.UUID(m.Token)), append(statuses, string(m.To))
		afters, errs, drops = append(afters, m.After.Microseconds()), append(errs, m.Error), append(drops, m.Drop)
	}
	rows, err := db.pool.Query(ctx, db.q(markEntriesSQL), planned, ids, tokens, statuses, afters, errs, drops)
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
