package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/provider"
)

// Positions are drawn from a sequence, and transactions commit in any order. So a missing position
// was rolled back, or its event may still become visible. Every writer of events holds the gap lock,
// in shared mode, from before it draws a position until its transaction ends (the trigger hold_gap).
// A sighting reads the highest visible position, and then the holders of the lock:
//   - A transaction that is not among the holders has ended, or will draw only positions behind the
//     highest visible one.
//   - Therefore the open events of a holder are behind the highest visible position of the last
//     sighting in which it was not a holder.
//
// Rows are read after the sighting, with a newer snapshot. They include the events of all
// transactions that had ended.

const (
	// onBranch differs after a restart, a failover or a restore, and after the table was rewritten.
	onBranch = `pg_postmaster_start_time()::text || ' ' || pg_relation_filepath('kinora.events')`

	// The plan of max(position) for a small table reads all of it.
	lastPosition = `(select position from kinora.events order by position desc limit 1)`

	// The fourth column is the last position before the first gap in the 500 events behind $1.
	headSQL = `
select ` + onBranch + `, pg_is_in_recovery(), coalesce(` + lastPosition + `, 0), coalesce((
		select max(position) from (
			select position, row_number() over (order by position) n
			from (select position from kinora.events where position > $1::bigint order by position limit 500) e) e
		where position = $1::bigint + n), $1::bigint),
	exists (select from pg_subscription_rel where srrelid = 'kinora.events'::regclass),
	exists (select from pg_trigger where tgrelid = 'kinora.events'::regclass and tgname = 'hold_gap' and tgenabled = 'A'),
	coalesce((
		select seqcache = 1 and seqincrement = 1 and not seqcycle from pg_sequence
		where seqrelid = pg_get_serial_sequence('kinora.events', 'position')::regclass), false)`

	// The gap lock of this database: see migration 1.
	gapLock = `
l.locktype = 'advisory' and l.classid = 1802661487 and l.objid = 'kinora.events'::regclass and l.objsubid = 2 and l.granted
	and l.database = (select oid from pg_database where datname = current_database())`

	// Of a prepared transaction the process has gone. pg_stat_activity shows the rest only to roles that may see it.
	lockHolders = `
from pg_locks l
	left join pg_stat_activity a on a.pid = l.pid
	left join pg_locks x on l.pid is null and x.pid is null and x.locktype = 'transactionid' and x.virtualtransaction = l.virtualtransaction
	left join pg_prepared_xacts p on p.transaction = x.transactionid`

	holdersSQL = `select distinct l.virtualtransaction from pg_locks l where ` + gapLock

	openAppendsSQL = `
select distinct coalesce(l.pid::text, 'prepared transaction ' || p.gid, 'prepared transaction'), coalesce(a.xact_start, p.prepared)` + lockHolders + `
where l.virtualtransaction = any($1::text[]) and ` + gapLock + ` order by 1`
)

// sighting is the result of reading the head and the holders once.
type sighting struct {
	branch  string
	from    int64 // the argument of headSQL
	head    int64 // the highest visible position
	whole   int64 // no position from from to this one is missing
	holders []string
}

func (db *Provider) sight(ctx context.Context, from int64) (s sighting, err error) {
	s.from = from
	var replica, subscriber, trigger, sequence bool
	b := &pgx.Batch{}
	hidden := db.queueByIndex(b)
	queueRow(b, []any{&s.branch, &replica, &s.head, &s.whole, &subscriber, &trigger, &sequence}, db.q(headSQL), from)
	queueAll(b, &s.holders, pgx.RowTo[string], db.q(holdersSQL))
	if err := db.pool.SendBatch(ctx, b).Close(); err != nil {
		return s, cmp.Or(hidden(), explain(err))
	}
	reason := ""
	switch {
	case replica:
		reason = "the server is a replica: connect to the primary (target_session_attrs=read-write)"
	case subscriber:
		reason = "a logical subscription writes kinora.events: read the log on the publisher, or drop the subscription"
	case !trigger:
		reason = "the trigger hold_gap of kinora.events is missing, disabled, or off in some sessions: alter table kinora.events enable always trigger hold_gap"
	case !sequence:
		reason = "the sequence of kinora.events draws positions out of order: alter table kinora.events alter position " +
			"set cache 1 set increment 1 set no cycle, and end the sessions that have appended"
	default:
		return s, nil
	}
	return s, fmt.Errorf("%w: %s", eventstore.ErrUnsafeLog, db.q(reason))
}

// queueByIndex queues byIndexSQL. After the batch, hidden returns an error if a policy hides events from the session's role.
func (db *Provider) queueByIndex(b *pgx.Batch) (hidden func() error) {
	var active bool
	queueRow(b, []any{nil, nil, nil, &active}, db.q(byIndexSQL))
	return func() error {
		if !active {
			return nil
		}
		return db.hides([]string{"events"})
	}
}

// hides returns the error for tables with row level security that applies to the session's role.
func (db *Provider) hides(tables []string) error {
	return fmt.Errorf("%w: row level security of %s.%s hides rows from the session's role, so they would be skipped: alter role … bypassrls, or disable row level security",
		eventstore.ErrUnsafeLog, db.cfg.Schema, strings.Join(tables, ", "))
}

// settled has facts about the positions of the log that stay true on one branch.
type settled struct {
	branch   string
	position int64            // every event at or before it is visible, or never becomes visible
	head     int64            // the highest visible position of the last sighting
	holders  map[string]int64 // of the last sighting: the events of each that are not visible are behind this position
}

// settling keeps these facts from sighting to sighting. Sightings do not overlap.
type settling struct {
	turn chan struct{} // of capacity 1
	mu   sync.Mutex
	is   settled
}

func (s *settling) known() settled {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.is
}

// forget drops the facts about a branch that the server has left.
func (s *settling) forget(branch string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.is.branch == branch {
		s.is = settled{}
	}
}

// add adds a sighting, and returns the facts that follow.
func (s *settling) add(now sighting) settled {
	s.mu.Lock()
	defer s.mu.Unlock()
	is := s.is
	if is.branch != now.branch || now.head < is.position {
		is = settled{branch: now.branch}
		now.whole = 0 // it began at a position of the other branch
	}
	holders, position := make(map[string]int64, len(now.holders)), now.head
	for _, h := range now.holders {
		behind, known := is.holders[h]
		if !known {
			behind = is.head
		}
		holders[h], position = behind, min(position, behind)
	}
	is.head, is.holders, is.position = now.head, holders, max(is.position, position)
	if now.from <= is.position {
		is.position = max(is.position, now.whole)
	}
	s.is = is
	return is
}

// look adds a sighting. The returned position is settled for a reader that has read up to after.
func (db *Provider) look(ctx context.Context, after int64) (is settled, position int64, err error) {
	if !take(ctx, db.log.turn) {
		return is, 0, ctx.Err()
	}
	defer func() { <-db.log.turn }()
	from := max(after, db.log.known().position)
	now, err := db.sight(ctx, from)
	if err != nil {
		return is, 0, err
	}
	is = db.log.add(now)
	position = is.position
	if from == after { // no position is missing between that of the reader and this one
		position = max(position, now.whole)
	}
	return is, position, nil
}

const settleLimit = 20 * time.Millisecond // how long a page waits for open appends

// settle waits until the events that are visible at its beginning are settled, at most settleLimit.
// Then it returns the settled position, and the appends that are still open.
func (db *Provider) settle(ctx context.Context, after int64) (is settled, position int64, open []provider.OpenAppend, err error) {
	limit, cancel := context.WithTimeout(ctx, settleLimit)
	defer cancel()
	wanted := int64(-1)
	for pause := (pauses.Doubling{First: 500 * time.Microsecond, Longest: 4 * time.Millisecond}); ; {
		if is, position, err = db.look(ctx, after); err != nil {
			return is, 0, nil, err
		}
		if wanted < 0 {
			wanted = is.head
		}
		if position >= wanted {
			return is, position, nil, nil
		}
		if pauses.Wait(limit, pause.Next(), nil); limit.Err() != nil {
			open, err = db.openAppends(ctx, is, wanted)
			return is, position, open, err
		}
	}
}

// openAppends names the open appends that may add events before a position.
func (db *Provider) openAppends(ctx context.Context, is settled, before int64) ([]provider.OpenAppend, error) {
	var holders []string
	for h, behind := range is.holders {
		if behind < before {
			holders = append(holders, h)
		}
	}
	columns := func(o *provider.OpenAppend) []any { return []any{&o.Backend, scanTime(&o.Since)} }
	return collect(ctx, db.pool, into(columns), db.q(openAppendsSQL), holders)
}

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

// LogID implements provider.Log. The branch is the oid of the database and the timeline of the server, or
// empty if the role may not read them, or the server does not show them.
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
	return id, wrap("identify the log", explain(err))
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
