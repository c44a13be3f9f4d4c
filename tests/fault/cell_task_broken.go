package main

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/pgtest"
)

var taskBrokenCell = &cell{
	// Promise: T12.1
	name: "task-broken", number: 38,
	summary: "workers with one connection, through pgbouncer, with a wrong clock, and with lost replies; connections ended, the database away, a row locked",
	full:    time.Minute, short: 2 * time.Second,
	requires: []string{"terminated_at_work", "lost_commit", "lost_change", "away", "locked", "ended_while_locked"}, run: runTaskBroken,
}

// brokenAttempts is the limit of attempts. Faults of connections must not use them up.
const brokenAttempts = 4

func runTaskBroken(r *run) {
	r.must(r.suite.buildSkewed())
	r.server(brokerConfig{}, idleLimit)
	_, err := r.pool.Exec(r.suite.ctx, effects)
	r.must(err)
	o := r.systems()
	lost := map[string]*atomic.Int64{"lost_commit": {}, "lost_change": {}, "lost_claim": {}}
	begin := func(name string, change func(s *settings)) *process {
		return r.worker(o, "shop", func(s *settings) {
			s.Attempts, s.More["audit"], s.More["operates"], s.More["breaks"] = brokenAttempts, "yes", "yes", name
			change(s)
		})
	}
	begin("loses replies", func(s *settings) { s.DSN = r.through((&loser{pick: r.pickChange(lost)}).serve).dsn })
	one := begin("pool of one", func(s *settings) { s.Conns = 1 })
	begin("clock", func(s *settings) { s.Skew = skew(r) })
	switch p, err := pgtest.StartPooler(r.dsn, "server_login_retry=1"); {
	case errors.Is(err, pgtest.ErrNoPooler):
		r.note = "ok, without pgbouncer"
	default:
		r.must(err)
		r.cleanup = append(r.cleanup, p.Stop)
		dsn, err := p.Through(r.dsn, "default_query_exec_mode=exec")
		r.must(err)
		begin("pgbouncer", func(s *settings) { s.DSN, s.More["unlistened"] = dsn, "yes" })
	}
	for _, p := range r.of(laboring) {
		p.awaitReady()
		if !isSkewed(p) {
			r.fail("the clock of %s is off by %d half seconds, want %s", p.Name, p.status.get(wordSkew), p.Skew)
		}
	}
	for name, l := range lost {
		r.gauge(name, func() int { return int(l.Load()) })
	}
	n := 0
	r.prove(func() {
		stop := r.orders(n, 15)
		for begin := time.Now(); time.Since(begin) < r.span; {
			r.sleep(r.between(20*time.Millisecond, 200*time.Millisecond))
			terminate(r)
		}
		o.set(func(o *outside) { o.delay = 2 * taskLease }) // so that tasks need renewals
		r.sleep(taskLease)
		r.lockOne(one.Name) // there a change that waits has the only connection
		o.set(func(o *outside) { o.delay = 0 })
		n = stop()
		r.away(10 * taskLease)
		r.awaitEnded()
	})
	r.stopWorkers()
	r.judgeShop(o, n)
}

// pickChange loses replies to commits of units, to changes and to claims.
func (r *run) pickChange(lost map[string]*atomic.Int64) func(statements []string) *atomic.Int64 {
	return func(statements []string) *atomic.Int64 {
		switch {
		case r.intn(20) > 0:
		case has(statements, "kinora.change_tasks"):
			return lost["lost_change"]
		case has(statements, "kinora.claim_tasks") && r.intn(5) == 0:
			return lost["lost_claim"]
		case has(statements[:1], "commit"):
			return lost["lost_commit"]
		}
		return nil
	}
}

// lockOne locks the row of a task, claimed by another worker than but, for four leases, and counts the leases of other tasks
// that end meanwhile. If renewals waited for the row, all leases of its worker would end. On a slow or busy machine
// leases also end without the lock: the same time before it is the control.
func (r *run) lockOne(but string) {
	ctx := r.suite.ctx
	before := r.leasesOf(func(holder string) bool { return holder != but })
	tx, err := r.pool.Begin(ctx)
	r.must(err)
	defer func() { _ = tx.Rollback(ctx) }()
	var id, holder string
	r.await("a claimed task", func() bool {
		return tx.QueryRow(ctx, `select id, claimed_by from kinora.tasks
			where status = 'claimed' and kind = 'shop/order' and claimed_by <> $1 and next_at > clock_timestamp() limit 1 for update skip locked`, but).Scan(&id, &holder) == nil
	})
	r.inject("locked", 1)
	ended := r.countOf(endedTasks)
	locked := r.leasesOf(func(name string) bool { return name == holder }, id)
	r.inject("ended_while_locked", r.countOf(endedTasks)-ended)
	r.trace.printf("locked %s of %s: the leases of %d of %d other tasks ended, and of %d of %d before it", id, holder, locked.over, locked.had, before.over, before.had)
	if locked.over > 2 && locked.most() && !before.most() {
		r.fail("lost %d, doubled 0, phantom 0, misordered 0: leases of %d other tasks of %s, while %s was locked", locked.over, locked.had, holder, id)
	}
}

// endedTasks counts the tasks that have ended.
const endedTasks = `select count(*) from kinora.tasks where status in ('done', 'undone')`

// leases counts tasks, and those whose lease ended.
type leases struct{ had, over int }

func (l leases) most() bool { return 2*l.over > l.had }

// leasesOf watches the claimed tasks of some workers, except some, for four leases.
func (r *run) leasesOf(of func(holder string) bool, except ...string) (l leases) {
	ended := map[string]bool{}
	for begin := time.Now(); time.Since(begin) < 4*taskLease; r.sleep(20 * time.Millisecond) {
		rows, err := r.pool.Query(r.suite.ctx, `select id, claimed_by, next_at < clock_timestamp() from kinora.tasks
			where status = 'claimed' and kind in ('shop/order', 'shop/notify') and not id = any($1)`, append([]string{}, except...))
		r.must(err)
		var id, holder string
		var over bool
		_, err = pgx.ForEachRow(rows, []any{&id, &holder, &over}, func() error {
			if of(holder) {
				ended[id] = ended[id] || over
			}
			return nil
		})
		r.must(err)
	}
	for _, over := range ended {
		l.had++
		if over {
			l.over++
		}
	}
	return l
}

// away ends all connections but those of the suite, and accepts no others, for a while.
func (r *run) away(while time.Duration) {
	ctx := r.suite.ctx
	config := r.pool.Config().ConnConfig.Copy()
	name := config.Database
	config.Database = "template1" // a session cannot close its own database
	conn, err := pgx.ConnectConfig(ctx, config)
	r.must(err)
	defer func() { _ = conn.Close(ctx) }()
	allow := func(word string) {
		_, err := conn.Exec(ctx, `alter database `+pgx.Identifier{name}.Sanitize()+` allow_connections `+word)
		r.must(err)
	}
	allow("false")
	defer allow("true")
	for begin := time.Now(); time.Since(begin) < while; r.sleep(50 * time.Millisecond) {
		_, err := conn.Exec(ctx, `select pg_terminate_backend(pid) from pg_stat_activity
			where backend_type = 'client backend' and application_name <> 'suite'`)
		r.must(err)
	}
	r.inject("away", 1)
}
