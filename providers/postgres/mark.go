package postgres

import (
	"context"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
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

// MarkEntries implements provider.Outbox: one statement, or two if entries are published and something is held.
func (db *Provider) MarkEntries(ctx context.Context, marks []outbox.Mark) (late []int64, err error) {
	if err := provider.CheckMarks(marks); err != nil {
		return nil, err
	}
	if seqs := dropped(marks); len(seqs) > 0 {
		done, err := db.mark(ctx, dropEntriesSQL, seqs, uuid.UUID(marks[0].Token))
		switch {
		case err != nil:
			return nil, err
		case len(done) == len(seqs):
			return nil, nil
		case len(done) > 0:
			return without(seqs, done), nil
		} // else something is held, or all are late
	}
	first, late := distinct(marks)
	if len(first) == 0 {
		return late, nil
	}
	seqs := column(first, func(m outbox.Mark) int64 { return m.Seq })
	done, err := db.mark(ctx, markEntriesSQL, seqs,
		column(first, func(m outbox.Mark) uuid.UUID { return uuid.UUID(m.Token) }),
		column(first, func(m outbox.Mark) string { return string(m.To) }),
		column(first, func(m outbox.Mark) int64 { return m.After.Microseconds() }),
		column(first, func(m outbox.Mark) string { return m.Error }),
		column(first, func(m outbox.Mark) bool { return m.Drop }))
	if err != nil {
		return nil, err
	}
	if len(done) < len(seqs) {
		late = append(late, without(seqs, done)...)
	}
	return late, nil
}

// dropped returns the Seqs of marks if all of them delete published entries of one claim, in order of Seq. Otherwise it
// returns nil.
func dropped(marks []outbox.Mark) []int64 {
	seqs := make([]int64, len(marks))
	for i, m := range marks {
		if !m.Drop || m.Token != marks[0].Token || i > 0 && m.Seq <= seqs[i-1] {
			return nil
		}
		seqs[i] = m.Seq
	}
	return seqs
}

// distinct returns the first mark of each entry, and the Seqs of the others: they are late, since the first mark ends
// the claim.
func distinct(marks []outbox.Mark) (first []outbox.Mark, late []int64) {
	seen := make(map[int64]bool, len(marks))
	for _, m := range marks {
		if seen[m.Seq] {
			late = append(late, m.Seq)
			continue
		}
		seen[m.Seq] = true
		first = append(first, m)
	}
	return first, late
}

// without returns the seqs that are not in done.
func without(seqs, done []int64) (rest []int64) {
	slices.Sort(done)
	for _, seq := range seqs {
		if _, ok := slices.BinarySearch(done, seq); !ok {
			rest = append(rest, seq)
		}
	}
	return rest
}

func column[T any](marks []outbox.Mark, of func(outbox.Mark) T) []T {
	all := make([]T, len(marks))
	for i, m := range marks {
		all[i] = of(m)
	}
	return all
}

// mark runs a statement that returns the ids that it changed. The first argument has the ids that it may change.
func (db *Provider) mark(ctx context.Context, sql string, seqs []int64, args ...any) (done []int64, err error) {
	crash.Point("mark: before")
	rows, _ := db.pool.Query(ctx, db.q(sql), append([]any{planned, seqs}, args...)...) // the rows have its error as well
	done = make([]int64, 0, len(seqs))
	var id int64
	_, err = pgx.ForEachRow(rows, []any{&id}, func() error {
		done = append(done, id)
		return nil
	})
	crash.Point("mark: after")
	if err != nil {
		return nil, fmt.Errorf("mark entries: %w", clear(err))
	}
	return done, nil
}
