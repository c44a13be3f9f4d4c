package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

const (
	logHeadSQL = `select coalesce(` + lastPosition + `, 0)`

	logNextSQL = `select position, id, recorded_at from kinora.events where position > $1::bigint order by position limit 1`

	logSinceSQL = `
select coalesce((select position from kinora.events where position < e.position order by position desc limit 1), 0) from (
	select position from kinora.events
	where position > $1::bigint and recorded_at >= $2::timestamptz order by position limit 1) e`

	logCountSQL = `
select count(*) from kinora.events where position > $1::bigint and position <= $2::bigint and ($3::text[] is null or type = any($3::text[]))`

	logPlacesSQL = `
select e.position, e.id, e.recorded_at from unnest($1::text[]::uuid[]) i(id),
	lateral (select position, id, recorded_at from kinora.events where id = i.id limit 1) e`

	logEventsSQL = `
select e.position, e.stream, e.version, e.id, e.type, e.schema_version, e.data, e.metadata, e.recorded_at from unnest($1::text[]::uuid[]) i(id),
	lateral (select * from kinora.events where id = i.id limit 1) e`

	lineageSQL = `select id::text from kinora.incarnation`

	// The first eight digits of the name of a WAL file are the timeline.
	timelineSQL = `
select oid::text || '.' || ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int::text
from pg_database where datname = current_database()`
)

// logIndex implements provider.LogIndex.
type logIndex struct{ db *Provider }

func (x logIndex) Head(ctx context.Context) (head int64, err error) {
	err = x.db.pool.QueryRow(ctx, x.db.q(logHeadSQL), planned).Scan(&head)
	return head, err
}

func (x logIndex) Next(ctx context.Context, after int64) (provider.LogPlace, error) {
	return placeOf(x.db.pool.QueryRow(ctx, x.db.q(logNextSQL), planned, after))
}

func (x logIndex) Since(ctx context.Context, after int64, t time.Time) (before int64, found bool, err error) {
	found, err = x.db.row(ctx, "look for a time", nil, []any{&before}, logSinceSQL, planned, after, roundUp(t))
	return before, found, err
}

// LogPosition implements provider.Log.
func (db *Provider) LogPosition(ctx context.Context, from eventstore.From) (int64, error) {
	position, err := provider.FindPosition(ctx, logIndex{db}, from)
	return position, classifyOwn(ctx, wrap("find a position of the log", err))
}

// CountLog implements provider.LogCounter.
func (db *Provider) CountLog(ctx context.Context, types []string, after, to int64) (n int64, err error) {
	_, err = db.row(ctx, "count events", nil, []any{&n}, logCountSQL, planned, after, to, types)
	return n, classifyOwn(ctx, err)
}

// LogPlaces implements provider.Log.
func (db *Provider) LogPlaces(ctx context.Context, ids []string) (map[string]provider.LogPlace, error) {
	place := func(row pgx.CollectableRow) (provider.LogPlace, error) { return placeOf(row) }
	return byID(ctx, db, "find events by id", ids, place, func(p *provider.LogPlace) string { return p.ID }, logPlacesSQL)
}

// LogEvents implements provider.Log.
func (db *Provider) LogEvents(ctx context.Context, ids []string) (map[string]eventstore.Raw, error) {
	return byID(ctx, db, "read events by id", ids, scanEvent, func(e *eventstore.Raw) string { return e.ID }, logEventsSQL)
}

// byID runs a statement that looks events up.
func byID[T any](ctx context.Context, db *Provider, doing string, ids []string, row pgx.RowToFunc[T], id func(*T) string, sql string) (map[string]T, error) {
	found := map[string]T{}
	known := provider.EventIDs(ids)
	if len(known) == 0 {
		return found, wrap(doing, ctx.Err())
	}
	all, err := read(ctx, db, doing, nil, row, sql, planned, known)
	for i := range all {
		found[id(&all[i])] = all[i]
	}
	return found, classifyOwn(ctx, err)
}

// LogID implements provider.Log. The branch is the oid of the database and the timeline of the
// server. It is empty if the role may not read them, or the server does not show them.
func (db *Provider) LogID(ctx context.Context) (provider.LogID, error) { return db.logID(ctx, db.pool) }

func (db *Provider) logID(ctx context.Context, q querier) (id provider.LogID, err error) {
	err = q.QueryRow(ctx, db.q(lineageSQL)).Scan(&id.Lineage)
	if errors.Is(err, pgx.ErrNoRows) {
		err = fmt.Errorf("%w: %s.incarnation has no row: insert into %[2]s.incarnation default values", eventstore.ErrUnsafeLog, db.cfg.Schema)
	}
	if err == nil {
		err = timeline(ctx, q, &id.Branch)
		// no right, no such function, or not supported
		if e := pgError(err); e != nil && (strings.HasPrefix(e.Code, "42") || strings.HasPrefix(e.Code, "0A")) {
			id.Branch, err = "", nil
		}
	}
	if err != nil {
		return provider.LogID{}, fmt.Errorf("identify the log: %w", explain(err))
	}
	return id, nil
}

// timeline reads the branch. If q is a transaction, an error does not abort it.
func timeline(ctx context.Context, q querier, branch *string) error {
	read := func() error { return q.QueryRow(ctx, timelineSQL).Scan(branch) }
	if _, ok := q.(*pgxpool.Pool); ok {
		return read()
	}
	if _, err := q.Exec(ctx, `savepoint kinora`); err != nil {
		return err
	}
	err := read()
	if err != nil {
		_, back := q.Exec(ctx, `rollback to savepoint kinora`)
		err = errors.Join(err, back)
	}
	_, end := q.Exec(ctx, `release savepoint kinora`)
	return errors.Join(err, end)
}

// logName returns LogID.String. It is read once: readers look events of another branch up by id.
func (db *Provider) logName(ctx context.Context, q querier) (string, error) {
	if name := db.logged.Load(); name != nil {
		return *name, nil
	}
	id, err := db.logID(ctx, q)
	if err != nil {
		return "", err
	}
	name := id.String()
	db.logged.Store(&name)
	return name, nil
}
