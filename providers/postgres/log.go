package postgres

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// ReadLog implements provider.LogReader.
func (db *DB) ReadLog(ctx context.Context, from eventstore.From, f eventstore.LogFilter) iter.Seq2[eventstore.Raw, error] {
	return provider.ReadLog(ctx, db, from, f)
}

// Appended implements provider.LogWaker. Appends through this DB signal, except in a caller's
// transaction, and a Listener signals for events of other processes.
func (db *Provider) Appended() <-chan struct{} { return db.appends.listen() }

const (
	// byIndexSQL comes first in a transaction whose statements walk the primary key. Otherwise a plan
	// that scans the table, made while there were few events, would be kept while the table grows. If a policy hides rows
	// from the session's role, the statements that follow fail instead.
	byIndexSQL = `
select set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true), set_config('row_security', 'off', true),
	row_security_active('kinora.events')`

	// branchSQL is sent with the rows: they must be of the server on which the position was settled.
	branchSQL = `select ` + onBranch + `, clock_timestamp()`

	// logEndSQL reads the place of the last event that a page with a filter covers, and whether that
	// is before the settled position $2.
	logEndSQL = `
select position, id, recorded_at, coalesce(` + logScanned + ` < $2::bigint, false) from kinora.events
where position > $1::bigint and position <= least($2::bigint, ` + logScanned + `)
order by position desc limit 1`

	// $3 is the number of positions that a page with a filter covers.
	logScanned = `(select position + $3::bigint - 1 from kinora.events where position > $1::bigint order by position limit 1)`

	// $4 is true without data and metadata.
	logSQL = `
select position, stream, version, id, type, schema_version,
	case when not $4::boolean then data end, case when not $4::boolean then metadata end, recorded_at
from kinora.events where position > $1::bigint and position <= $2::bigint order by position limit $3::int`

	// A page with a filter covers positions up to the settled one, or up to $5 if it reaches that. $10 is $4 of logSQL.
	logFilteredSQL = `
select position, stream, version, id, type, schema_version,
	case when not $10::boolean then data end, case when not $10::boolean then metadata end, recorded_at
from kinora.events
where position > $1::bigint and position <= case when ` + logScanned + ` < $2::bigint then ` + logScanned + ` else $5::bigint end
	and ($6::text[] is null or split_part(stream, '-', 1) = any($6::text[])) and ($7::text[] is null or type = any($7::text[]))
	and ($9::bigint = 0 or ` + shareOfStream + ` % $9::bigint = $8::bigint)
order by position limit $4::int`

	// The first four bytes of provider.LaneOfKey, as provider.SegmentOf. It has no text that settings give another meaning.
	shareOfStream = `('x' || encode(substr(sha256(decode('6b657900', 'hex') || convert_to(stream, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint`

	// logOldSQL finds the last event behind $1 that is older than $2 microseconds. It reads the younger ones.
	logOldSQL = `
select position, id, recorded_at from kinora.events
where position > $1::bigint and recorded_at <= clock_timestamp() - $2::bigint * interval '1 microsecond'
order by position desc limit 1`
)

// logStreamsSQL walks each stream back from a version.
const logStreamsSQL = `
with recursive back as (
	select e.* from unnest($1::text[], $2::bigint[]) s(stream, version), lateral (
		select * from kinora.events where stream = s.stream and version = s.version and position > $3::bigint limit 1) e
	union all
	select e.* from back, lateral (
		select * from kinora.events where stream = back.stream and version = back.version - 1 and position > $3::bigint limit 1) e)
select position, stream, version, id, type, schema_version, data, metadata, recorded_at from back order by position`

// LogStreams implements provider.Log.
func (db *Provider) LogStreams(ctx context.Context, versions map[string]int64, after int64) ([]eventstore.Raw, error) {
	streams := slices.Collect(maps.Keys(versions))
	last := mapSlice(streams, func(stream *string) int64 { return versions[*stream] })
	found, err := read(ctx, db, "read streams of the log", nil, scanEvent, logStreamsSQL, planned, streams, last, after)
	return found, classifyOwn(ctx, err)
}

// LogPage implements provider.Log.
func (db *Provider) LogPage(ctx context.Context, q provider.LogQuery) (provider.LogPage, error) {
	if err := provider.CheckLogQuery(q); err != nil {
		return provider.LogPage{}, err
	}
	q.Limit = cmp.Or(q.Limit, provider.LogPageEvents)
	for try := 1; ; try++ {
		page, err := db.logPage(ctx, q)
		switch {
		case err == nil:
			return page, nil
		case try == 3 || !errors.Is(err, errBranch):
			return provider.LogPage{}, classifyOwn(ctx, fmt.Errorf("read the log after %d: %w", q.After, err))
		}
	}
}

// errBranch: the rows are of another branch than the settled position.
var errBranch = errors.New("the server was restarted or replaced during the read")

func (db *Provider) logPage(ctx context.Context, q provider.LogQuery) (provider.LogPage, error) {
	is := db.log.known()
	r := logRows{settled: -1}
	if q.After < is.position && !q.Unsettled { // a page of settled events needs no sighting
		r = db.newLogRows(q, is.branch, is.position)
		if err := r.read(ctx, db); err != nil || r.full {
			r.page.More, r.page.Full = true, r.full
			return r.page, err
		}
	}
	is, settled, open, err := db.settle(ctx, q.After)
	if err != nil {
		return r.page, err
	}
	if settled != r.settled {
		r = db.newLogRows(q, is.branch, settled)
		if err := r.read(ctx, db); err != nil {
			return r.page, err
		}
	}
	whole := q.Unsettled && !r.full && !r.young // it has all visible events
	r.page.Full = r.full
	r.page.More = r.full || is.head > r.reached().Position && !whole
	r.page.Waiting = open
	return r.page, nil
}

// logRows reads the rows of one page.
type logRows struct {
	provider.LogQuery
	branch  string // on which the next one is settled
	settled int64
	limit   int
	page    provider.LogPage
	last    provider.LogPlace // the last settled event that a page with a filter covers
	bytes   int
	full    bool      // there are events behind the page, up to the settled position
	young   bool      // events that are too young were dropped
	now     time.Time // on the store's clock
	hidden  func() error
}

func (db *Provider) newLogRows(q provider.LogQuery, branch string, settled int64) logRows {
	limit := int64(q.Limit)
	if size := db.eventSize.Load(); size > 0 && !q.NoData { // few events are read and dropped
		limit = min(limit, max(provider.LogPageBytes/size, 1))
	}
	page := provider.LogPage{End: provider.LogPlace{Position: q.After}, Server: branch}
	return logRows{LogQuery: q, branch: branch, settled: settled, limit: int(limit), page: page}
}

// reached returns the place of the last event of the page, or its end.
func (r *logRows) reached() provider.LogPlace {
	if n := len(r.page.Events); n > 0 && r.page.Events[n-1].Position > r.page.End.Position {
		return placeOfEvent(&r.page.Events[n-1])
	}
	return r.page.End
}

func (r *logRows) read(ctx context.Context, db *Provider) error {
	if err := db.pool.SendBatch(ctx, r.batch(db)).Close(); err != nil {
		if errors.Is(err, errBranch) {
			db.log.forget(r.branch)
		}
		return cmp.Or(r.hidden(), err)
	}
	if n := len(r.page.Events); n > 0 && !r.NoData {
		db.eventSize.Store(int64(max(r.bytes/n, 1)))
	}
	r.end()
	if r.Age > 0 {
		return r.dropYoung(ctx, db)
	}
	return nil
}

func (r *logRows) filtered() bool {
	return r.Filter.Categories != nil || r.Filter.Types != nil || r.Shares > 0
}

// selectsNone reports whether no event can pass the filter.
func (r *logRows) selectsNone() bool {
	none := func(of []string) bool { return of != nil && len(of) == 0 }
	return none(r.Filter.Categories) || none(r.Filter.Types)
}

func (r *logRows) batch(db *Provider) *pgx.Batch {
	b := &pgx.Batch{}
	r.hidden = db.queueByIndex(b)
	b.Queue(db.q(branchSQL)).QueryRow(func(row pgx.Row) error {
		var branch string
		if err := row.Scan(&branch, &r.now); err != nil {
			return err
		}
		if branch != r.branch {
			return errBranch
		}
		return nil
	})
	upper := r.settled
	if r.Unsettled {
		upper = math.MaxInt64
	}
	if !r.filtered() {
		b.Queue(db.q(logSQL), r.After, upper, r.limit+1, r.NoData).Query(r.scan)
		return b
	}
	scan := int64(provider.LogPageScan)
	if r.selectsNone() {
		scan = math.MaxInt32
	}
	b.Queue(db.q(logEndSQL), r.After, r.settled, scan).QueryRow(func(row pgx.Row) (err error) {
		r.last, err = placeOf(row, &r.full)
		return err
	})
	if !r.selectsNone() {
		b.Queue(db.q(logFilteredSQL), r.After, r.settled, scan, r.limit+1, upper,
			r.Filter.Categories, r.Filter.Types, r.Share, r.Shares, r.NoData).Query(r.scan)
	}
	return b
}

// placeOf returns the place of an event and further columns. The place is zero if there is no row.
func placeOf(row pgx.Row, more ...any) (p provider.LogPlace, err error) {
	var id uuid.UUID
	err = row.Scan(append([]any{&p.Position, &id, &p.RecordedAt}, more...)...)
	if errors.Is(err, pgx.ErrNoRows) {
		return provider.LogPlace{}, nil
	}
	p.ID, p.RecordedAt = id.String(), p.RecordedAt.UTC()
	return p, err
}

// scan reads rows up to the limit and LogPageBytes, and drops the remaining ones.
func (r *logRows) scan(rows pgx.Rows) error {
	defer rows.Close()
	for rows.Next() {
		if len(r.page.Events) == r.limit || r.bytes >= provider.LogPageBytes {
			r.full, r.last = true, provider.LogPlace{}
			break
		}
		raw, bytes, err := scanRaw(rows)
		if err != nil {
			return err
		}
		if r.Shares > 0 && provider.SegmentOf(raw.Stream, r.Shares) != r.Share {
			// Then others of this share were left out, which the checkpoint must not pass.
			return fmt.Errorf("the server computes the segment of a stream in another way: position %d", raw.Position)
		}
		r.page.Events, r.bytes = append(r.page.Events, raw), r.bytes+bytes
	}
	rows.Close()
	return rows.Err()
}

func scanEvent(row pgx.CollectableRow) (eventstore.Raw, error) {
	e, _, err := scanRaw(row)
	return e, err
}

func scanRaw(rows pgx.CollectableRow) (raw eventstore.Raw, bytes int, err error) {
	var id uuid.UUID
	var metadata []byte
	err = rows.Scan(&raw.Position, &raw.Stream, &raw.Version, &id, &raw.Type, &raw.Schema, &raw.Data, &metadata, &raw.RecordedAt)
	if err != nil {
		return raw, 0, err
	}
	raw.ID, raw.RecordedAt = id.String(), raw.RecordedAt.UTC()
	raw.Metadata = metadataOf(metadata)
	return raw, len(raw.Data) + len(metadata), nil
}

func placeOfEvent(e *eventstore.Raw) provider.LogPlace {
	return provider.LogPlace{Position: e.Position, ID: e.ID, RecordedAt: e.RecordedAt}
}

// metadataOf returns stored metadata. What other software wrote in another form is left out: an error
// would make the events behind it unreadable.
func metadataOf(stored []byte) (m eventstore.Metadata) {
	if len(stored) > len(`{}`) {
		_ = json.Unmarshal(stored, &m)
	}
	return m
}

// end sets the page's end to the last settled event that it covers.
func (r *logRows) end() {
	if r.last.Position > 0 {
		r.page.End = r.last
		return
	}
	for i := range slices.Backward(r.page.Events) {
		if e := &r.page.Events[i]; e.Position <= r.settled {
			r.page.End = placeOfEvent(e)
			return
		}
	}
}

// dropYoung ends the page at the last event of the log that is old enough, if the page has it.
func (r *logRows) dropYoung(ctx context.Context, db *Provider) error {
	last := r.reached()
	if last.Position == r.After || !last.RecordedAt.After(r.now.Add(-r.Age)) {
		return nil
	}
	old, err := placeOf(db.pool.QueryRow(ctx, db.q(logOldSQL), planned, r.After, r.Age.Microseconds()))
	if err != nil || old.Position >= last.Position {
		return err
	}
	r.young, r.full = true, false
	r.page.Events = slices.DeleteFunc(r.page.Events, func(e eventstore.Raw) bool { return e.Position > old.Position })
	switch {
	case old.Position == 0:
		r.page.End = provider.LogPlace{Position: r.After}
	case old.Position < r.page.End.Position:
		r.page.End = old
	}
	return nil
}
