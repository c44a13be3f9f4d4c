package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"iter"
	"math"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// ReadLog implements provider.LogReader.
func (d *DB) ReadLog(ctx context.Context, from eventstore.From, f eventstore.LogFilter) iter.Seq2[eventstore.Raw, error] {
	return provider.ReadLog(ctx, d, from, f)
}

// Appended implements provider.LogWaker, except for commits of other processes and of a pool of New.
func (d *Provider) Appended() <-chan struct{} { return d.appends.wait() }

const (
	// readLog reads the events up to position ?2. ?4 and ?5 are arrays, or null for all. Without ?6,
	// data and metadata are not read.
	readLog = `
select position, stream, version, id, type, schema_version, iif(?6, data, ''), iif(?6, metadata, '{}'), recorded_at
from kinora_events
where position > ?1 and position <= ?2
	and (?4 is null or substr(stream, 1, instr(stream || '-', '-') - 1) in (select value from json_each(?4)))
	and (?5 is null or type in (select value from json_each(?5)))
order by position limit ?3`

	// readLogEnd reads the last event of the next ?2 positions.
	readLogEnd = `
select position, id, recorded_at from kinora_events
where position > ?1 and position <= (select position + ?2 - 1 from kinora_events where position > ?1 order by position limit 1)
order by position desc limit 1`

	// readLogOld reads the last event that is older than ?2 milliseconds. It reads the younger ones.
	readLogOld = `
select position, id, recorded_at from kinora_events
where position > ?1 and recorded_at <= ` + clock + ` - ?2 order by position desc limit 1`

	// readLogStreams walks each stream of the object ?1 back from a version.
	readLogStreams = `
with recursive back as (
	select e.* from json_each(?1) j cross join kinora_events e on e.stream = j.key and e.version = j.value where e.position > ?2
	union all
	select e.* from back cross join kinora_events e on e.stream = back.stream and e.version = back.version - 1 where e.position > ?2)
select position, stream, version, id, type, schema_version, data, metadata, recorded_at from back order by position`

	readLogHead = `select coalesce(max(position), 0) from kinora_events`
)

// LogPage implements provider.Log. With one writer at a time, every committed event is settled.
func (d *Provider) LogPage(ctx context.Context, q provider.LogQuery) (provider.LogPage, error) {
	if err := provider.CheckLogQuery(q); err != nil {
		return provider.LogPage{}, err
	}
	page, err := d.logPage(ctx, q)
	return result(page, fmt.Sprintf("read the log after %d", q.After), err)
}

func (d *Provider) logPage(ctx context.Context, q provider.LogQuery) (page provider.LogPage, err error) {
	page.End.Position = q.After
	q.Limit = cmp.Or(q.Limit, provider.LogPageEvents)
	var covered provider.LogPlace // the last event that a page with a filter covers
	upper := int64(math.MaxInt64)
	if (q.Filter.Categories != nil || q.Filter.Types != nil) && !q.Unsettled {
		if covered, err = d.logPlace(ctx, readLogEnd, q.After, provider.LogPageScan); err != nil {
			return page, err
		}
		upper = covered.Position
	}
	page.Events, page.Full, err = eventsOf(ctx, d.reads, q.Limit, provider.LogPageBytes, readLog,
		q.After, upper, q.Limit, anyOf(q.Filter.Categories), anyOf(q.Filter.Types), !q.NoData)
	if err != nil {
		return page, err
	}
	for i := range page.Events {
		e := &page.Events[i]
		if page.End = (provider.LogPlace{Position: e.Position, ID: e.ID, RecordedAt: e.RecordedAt}); q.NoData {
			e.Data = nil
		}
	}
	if covered.Position > 0 && !page.Full {
		page.End = covered
	}
	if q.Age > 0 {
		if err := d.dropYoung(ctx, q, &page); err != nil {
			return page, err
		}
	}
	var head int64
	err = one(ctx, d.reads, []any{&head}, readLogHead)
	page.More = head > page.End.Position
	// the page covers no more positions
	page.Full = page.Full || page.More && covered.Position > 0 && page.End == covered
	return page, err
}

// dropYoung ends the page at the last event of the log that is old enough, if the page has it.
func (d *Provider) dropYoung(ctx context.Context, q provider.LogQuery, page *provider.LogPage) error {
	old, err := d.logPlace(ctx, readLogOld, q.After, millis(q.Age))
	if err != nil || old.Position >= page.End.Position {
		return err
	}
	page.Full = false
	if page.End = old; old.Position == 0 {
		page.End.Position = q.After
	}
	page.Events = slices.DeleteFunc(page.Events, func(e eventstore.Raw) bool { return e.Position > old.Position })
	return nil
}

// logPlace returns the place of an event, or a zero one if there is none.
func (d *Provider) logPlace(ctx context.Context, query string, args ...any) (p provider.LogPlace, err error) {
	_, err = find(ctx, d.reads, []any{&p.Position, &p.ID, scanTime(&p.RecordedAt)}, query, args...)
	return p, err
}

const (
	readLogNext = `select position, id, recorded_at from kinora_events where position > ?1 order by position limit 1`

	// readLogSince reads the position before that of the first event that was recorded at ?2 or later.
	readLogSince = `
select coalesce((select max(position) from kinora_events where position < e.position), 0) from (
	select position from kinora_events where position > ?1 and recorded_at >= ?2 order by position limit 1) e`

	readLogPlaces = `
select e.position, e.id, e.recorded_at from json_each(?1) j cross join kinora_events e on e.id = j.value`

	readLogEvents = `
select e.position, e.stream, e.version, e.id, e.type, e.schema_version, e.data, e.metadata, e.recorded_at
from json_each(?1) j cross join kinora_events e on e.id = j.value`

	readLineage = `select id from kinora_incarnation`
)

// logIndex implements provider.LogIndex.
type logIndex struct{ db *Provider }

func (x logIndex) Head(ctx context.Context) (head int64, err error) {
	err = one(ctx, x.db.reads, []any{&head}, readLogHead)
	return head, err
}

func (x logIndex) Next(ctx context.Context, after int64) (provider.LogPlace, error) {
	return x.db.logPlace(ctx, readLogNext, after)
}

// Since rounds t up to the clock's milliseconds.
func (x logIndex) Since(ctx context.Context, after int64, t time.Time) (before int64, found bool, err error) {
	found, err = find(ctx, x.db.reads, []any{&before}, readLogSince, after, t.Add(time.Millisecond-1).UnixMilli())
	return before, found, err
}

// LogPosition implements provider.Log.
func (d *Provider) LogPosition(ctx context.Context, from eventstore.From) (int64, error) {
	position, err := provider.FindPosition(ctx, logIndex{d}, from)
	return result(position, "find a position of the log", err)
}

// LogStreams implements provider.Log.
func (d *Provider) LogStreams(ctx context.Context, versions map[string]int64, after int64) (found []eventstore.Raw, err error) {
	found, _, err = eventsOf(ctx, d.reads, 0, math.MaxInt, readLogStreams, jsonOf(versions), after)
	return result(found, "read streams of the log", err)
}

// LogEvents implements provider.Log.
func (d *Provider) LogEvents(ctx context.Context, ids []string) (map[string]eventstore.Raw, error) {
	all, _, err := eventsOf(ctx, d.reads, 0, math.MaxInt, readLogEvents, jsonOf(provider.EventIDs(ids)))
	events := make(map[string]eventstore.Raw, len(all))
	for _, e := range all {
		events[e.ID] = e
	}
	return result(events, "read events by id", err)
}

// LogPlaces implements provider.Log.
func (d *Provider) LogPlaces(ctx context.Context, ids []string) (map[string]provider.LogPlace, error) {
	places := map[string]provider.LogPlace{}
	err := eachRow(ctx, d.reads, func(rows *sql.Rows) error {
		var p provider.LogPlace
		err := rows.Scan(&p.Position, &p.ID, scanTime(&p.RecordedAt))
		places[p.ID] = p
		return err
	}, readLogPlaces, jsonOf(provider.EventIDs(ids)))
	return result(places, "find events by id", err)
}

// LogID implements provider.Log. A file does not show that it is a copy, so Branch is empty.
func (d *Provider) LogID(ctx context.Context) (id provider.LogID, err error) {
	err = one(ctx, d.reads, []any{&id.Lineage}, readLineage)
	return result(id, "identify the log", err)
}

// logID is LogID, and reads the lineage once.
func (d *Provider) logID(ctx context.Context, q querier) (provider.LogID, error) {
	if id := d.id.Load(); id != nil {
		return *id, nil
	}
	var id provider.LogID
	if err := one(ctx, q, []any{&id.Lineage}, readLineage); err != nil {
		return id, wrap("read the lineage of the log", err)
	}
	d.id.Store(&id)
	return id, nil
}
