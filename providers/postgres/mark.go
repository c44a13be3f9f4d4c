package postgres

import (
	"context"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/crash"
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
lanes as (select distinct topic, key from done where status = 'published' and ` + anyHeld + `),` + restored + `
select id from done`

// The usual mark, that all entries of a claim are published and not kept, is a shorter one where nothing is held, nor
// abandoned.
const dropEntriesSQL = `
delete from kinora.outbox o
where o.id = any($1::bigint[]) and o.token = $2::uuid and o.status = 'claimed' and not (` + anyHeld + `)
returning o.id`

// anyHeld is looked up once, and saves each lane its own look where nothing is held.
const anyHeld = `(select h.id from kinora.outbox h where h.held and h.id > 0 order by h.id limit 1) is not null`

// MarkEntries implements outbox.Store: one statement, or where that finds that something is held, another one.
func (db *DB) MarkEntries(ctx context.Context, marks []outbox.Mark) (late []int64, err error) {
	if err := outbox.CheckMarks(marks); err != nil {
		return nil, err
	}
	undone := make(map[int64]bool, len(marks))
	var first []outbox.Mark
	for _, m := range marks {
		if undone[m.Seq] {
			late = append(late, m.Seq) // the first mark ends the claim that the second one names
			continue
		}
		undone[m.Seq] = true
		first = append(first, m)
	}
	if dropped(first) {
		if err := db.mark(ctx, undone, dropEntriesSQL, column(first, func(m outbox.Mark) int64 { return m.Seq }), uuid.UUID(first[0].Token)); err != nil {
			return nil, err
		}
		left := slices.DeleteFunc(slices.Clone(first), func(m outbox.Mark) bool { return !undone[m.Seq] })
		none := len(left) == len(first) // something is held, or all are late; else what is left is late
		if first = left; !none {
			return append(late, column(left, func(m outbox.Mark) int64 { return m.Seq })...), nil
		}
	}
	if len(first) > 0 {
		err := db.mark(ctx, undone, markEntriesSQL,
			column(first, func(m outbox.Mark) int64 { return m.Seq }),
			column(first, func(m outbox.Mark) uuid.UUID { return uuid.UUID(m.Token) }),
			column(first, func(m outbox.Mark) string { return string(m.To) }),
			column(first, func(m outbox.Mark) int64 { return m.After.Microseconds() }),
			column(first, func(m outbox.Mark) string { return m.Error }),
			column(first, func(m outbox.Mark) bool { return m.Drop }))
		if err != nil {
			return nil, err
		}
	}
	for _, m := range first {
		if undone[m.Seq] {
			late = append(late, m.Seq)
		}
	}
	return late, nil
}

// dropped tells whether marks are those of entries of one claim, all published and not kept.
func dropped(marks []outbox.Mark) bool {
	for _, m := range marks {
		if !m.Drop || m.Token != marks[0].Token {
			return false
		}
	}
	return len(marks) > 0
}

func column[T any](marks []outbox.Mark, of func(outbox.Mark) T) []T {
	all := make([]T, len(marks))
	for i, m := range marks {
		all[i] = of(m)
	}
	return all
}

// mark runs a statement that returns the ids that it changed.
func (db *DB) mark(ctx context.Context, undone map[int64]bool, sql string, args ...any) error {
	crash.Point("mark: before")
	rows, _ := db.pool.Query(ctx, db.q(sql), append([]any{planned}, args...)...) // whose error the rows have as well
	var id int64
	_, err := pgx.ForEachRow(rows, []any{&id}, func() error {
		undone[id] = false
		return nil
	})
	crash.Point("mark: after")
	if err != nil {
		return fmt.Errorf("mark entries: %w", clear(err))
	}
	return nil
}
