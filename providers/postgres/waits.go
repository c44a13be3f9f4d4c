package postgres

import (
	"context"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/provider"
)

const (
	// The transactions that hold the gap lock, and so delay readers of the log, the oldest first. Of
	// a prepared one the process has gone.
	appendsSQL = `
select distinct coalesce(l.pid, 0), coalesce(p.gid, ''), coalesce(a.application_name, ''), coalesce(a.usename::text, p.owner::text, ''), coalesce(a.state, 'prepared'),
	coalesce(a.query, ''), coalesce(a.xact_start, p.prepared) as since
from pg_locks l
	left join pg_stat_activity a on a.pid = l.pid
	left join pg_locks x on l.pid is null and x.pid is null and x.locktype = 'transactionid' and x.virtualtransaction = l.virtualtransaction
	left join pg_prepared_xacts p on p.transaction = x.transactionid
where ` + gapLock + ` and l.pid is distinct from pg_backend_pid()
order by since limit 20`

	// Sessions of this database that wait for a lock, each with those that it waits for.
	blockedSQL = `
select w.pid, w.application_name, coalesce(w.usename::text, ''), coalesce(w.state, ''), w.query,
	coalesce((select min(l.waitstart) from pg_locks l where l.pid = w.pid and not l.granted), w.query_start) as since,
	coalesce(b.pid, 0), coalesce(p.gid, ''), coalesce(b.application_name, ''), coalesce(b.usename::text, p.owner::text, ''), coalesce(b.state, 'prepared'),
	coalesce(b.query, ''), coalesce(b.xact_start, p.prepared)
from (select * from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' order by query_start limit 50) w,
	unnest(pg_blocking_pids(w.pid)) x(pid)
	left join pg_stat_activity b on b.pid = x.pid
	left join pg_prepared_xacts p on x.pid = 0 and p.database = current_database()
order by since limit 50`
)

// nameBackend returns b with its name and its end: a session, or a prepared transaction if pid is zero.
func nameBackend(b provider.Backend, pid int, gid string) provider.Backend {
	switch {
	case pid != 0:
		b.Name = "pid " + itoa(int64(pid))
		b.End = "select pg_terminate_backend(" + itoa(int64(pid)) + ");"
	case gid != "":
		b.Name = "prepared transaction " + gid
		b.End = "rollback prepared '" + strings.ReplaceAll(gid, "'", "''") + "';"
	default:
		b.Name = "prepared transaction"
		b.End = "select * from pg_prepared_xacts;"
	}
	return b
}

func backendColumns(b *provider.Backend) []any {
	return []any{&b.Application, &b.User, &b.State, &b.Query, scanTime(&b.Since)}
}

// waits returns who keeps others waiting. A role that may not see other sessions gets less.
func (db *Provider) waits(ctx context.Context) (all []provider.Wait, err error) {
	b := &pgx.Batch{}
	var appends, blocked []provider.Wait
	queueAll(b, &appends, func(row pgx.CollectableRow) (w provider.Wait, err error) {
		var pid int
		var gid string
		err = row.Scan(append([]any{&pid, &gid}, backendColumns(&w.Blocker)...)...)
		w.What, w.Blocker = "append", nameBackend(w.Blocker, pid, gid)
		return w, err
	}, db.q(appendsSQL))
	queueAll(b, &blocked, func(row pgx.CollectableRow) (w provider.Wait, err error) {
		var waiter, pid int
		var gid string
		err = row.Scan(slices.Concat([]any{&waiter}, backendColumns(&w.Waiter), []any{&pid, &gid}, backendColumns(&w.Blocker))...)
		w.What, w.Waiter, w.Blocker = "lock", nameBackend(w.Waiter, waiter, ""), nameBackend(w.Blocker, pid, gid)
		return w, err
	}, db.q(blockedSQL))
	err = db.pool.SendBatch(ctx, b).Close()
	return append(appends, blocked...), err
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }
