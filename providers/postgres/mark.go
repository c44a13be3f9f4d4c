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

// window is how many entries of a lane are released at most until they are ahead of the first
// held one. The others follow as these are published. So claims need not walk a large backlog of
// one key only because it was stuck once, and if the key gets stuck again, few entries must be
// held again.
const window = "500"

// restored releases the first held entries of every lane: at least one, and as many as fill the
// window together with the open ones before them, not counting those in gone. Earlier ones are
// released first, so that no entry that stays held is before a released one. Locked rows are
// skipped: their transaction releases or skips them, so this statement waits for none, and no
// order of locks can cross. The ids are passed as an array, which forces the planner to use the
// primary key. Most lanes have no held entry, which costs one index lookup each.
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

// A mark is one statement. It locks rows in order, because marks that cross would deadlock
// otherwise. If an entry is published, it releases the held ones behind it. The statement's
// snapshot is new enough for that: an entry was held because of this one before this one was
// claimed, and in a transaction that had locked it (see lockHeadsSQL), so that the claim waited
// for that transaction's end. An entry that is being held at this time waits for another one.
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
		attempts        = greatest(o.attempts, 1) - case when m.status = 'pending' then 1 else 0 end,
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

// The usual mark publishes all entries of a claim and keeps none. It is shorter if no entry is
// held or abandoned.
const dropEntriesSQL = `
delete from kinora.outbox o
where o.id = any($1::bigint[]) and o.token = $2::uuid and o.status = 'claimed' and not (` + anyHeld + `)
returning o.id`

// anyHeld is evaluated once. If no entry is held, it saves the lookup for each lane.
const anyHeld = `(select h.id from kinora.outbox h where h.held and h.id > 0 order by h.id limit 1) is not null`

// MarkEntries implements provider.Outbox with one statement, or two if entries are published and
// others are held.
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
		}
		// Here an entry is held, or all marks are late.
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

// dropped returns the Seqs of marks if all of them delete published entries of one claim, in
// order of Seq. Otherwise it returns nil.
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

// distinct returns the first mark of each entry, and the Seqs of the others: they are late,
// because the first mark ends the claim.
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

// mark runs a statement that returns the ids that it changed. The first argument has the ids that
// it may change.
func (db *Provider) mark(ctx context.Context, sql string, seqs []int64, args ...any) (done []int64, err error) {
	crash.Point("mark: before")
	// the rows return its error too
	rows, _ := db.pool.Query(ctx, db.q(sql), append([]any{planned, seqs}, args...)...)
	done = make([]int64, 0, len(seqs))
	var id int64
	_, err = pgx.ForEachRow(rows, []any{&id}, func() error {
		done = append(done, id)
		return nil
	})
	crash.Point("mark: after")
	if err != nil {
		return nil, fmt.Errorf("mark entries: %w", explain(err))
	}
	return done, nil
}
