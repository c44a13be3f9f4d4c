package postgres

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
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

	// The fourth column is the last position before the first gap behind $1. Only the next 500 events
	// are searched.
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

	holdersSQL = `select distinct l.virtualtransaction from pg_locks l where ` + gapLock

	// The process of a prepared transaction has gone. pg_stat_activity shows the time only to roles
	// that may see it.
	openAppendsSQL = `
select distinct coalesce(l.pid::text, 'prepared transaction ' || p.gid, 'prepared transaction'), coalesce(a.xact_start, p.prepared)
from pg_locks l
	left join pg_stat_activity a on a.pid = l.pid
	left join pg_locks x on l.pid is null and x.pid is null and x.locktype = 'transactionid' and x.virtualtransaction = l.virtualtransaction
	left join pg_prepared_xacts p on p.transaction = x.transactionid
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
	position int64 // every event at or before it is visible, or never becomes visible
	head     int64 // the highest visible position of the last sighting
	// The holders at the last sighting: the events of each that are not visible are behind this
	// position.
	holders map[string]int64
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

// forget drops the facts about a branch. It is called when the server is on another one.
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

const (
	settleLimit    = 20 * time.Millisecond // how long a page waits for open appends
	settlePauseMin = 500 * time.Microsecond
	settlePauseMax = 4 * time.Millisecond
)

// settle waits until the events that are visible at its beginning are settled, at most settleLimit.
// Then it returns the settled position, and the appends that are still open.
func (db *Provider) settle(ctx context.Context, after int64) (is settled, position int64, open []provider.OpenAppend, err error) {
	limit, cancel := context.WithTimeout(ctx, settleLimit)
	defer cancel()
	wanted := int64(-1)
	for pause := (pauses.Doubling{First: settlePauseMin, Longest: settlePauseMax}); ; {
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
