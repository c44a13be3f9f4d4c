package main

import (
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

var sigtermCell = &cell{
	name: "sigterm", number: 18, what: "SIGTERM to relays and runners in the middle of their work, again and again",
	full: 100 * time.Second, short: 5 * time.Second, redelivers: true,
	wants: []string{"sigterm_relay", "sigterm_runner", "released", "named"}, run: runSigterm,
}

// endLimit is how long a child may take to end: the drain of runners, and some time for the process itself.
const endLimit = 8 * time.Second

func runSigterm(r *run) {
	r.ahead = 100
	r.server(brokerConfig{Duplicate: 0.02, Slow: 120 * time.Millisecond})
	producer, relays, runners := r.crew(2, 2, func(s *settings) { s.Slow = 40 * time.Millisecond })
	r.during(func() {
		relay, runner := relays[r.intn(2)], runners[r.intn(2)]
		var all sync.WaitGroup
		all.Go(func() { r.guard(func() { endRelay(r, relay) }) })
		all.Go(func() { r.guard(func() { endRunner(r, runner) }) })
		if r.intn(10) == 0 {
			all.Go(func() { r.guard(func() { r.terminate(producer); r.begin(producer) }) })
		}
		all.Wait()
		r.sleep(r.between(0, 100*time.Millisecond))
	}, r.cell.wants...)
	r.settle(3 * lease)
	r.judge()
}

// endRelay ends a relay with entries in its hand: when it has ended, none is its any more, and its peer publishes what it
// gave back before a lease is over.
func endRelay(r *run, p *process) {
	p.awaitOpen()
	had := claimedBy(r, p)
	r.terminate(p)
	var kept int
	r.must(r.pool.QueryRow(r.suite.ctx, `select count(*) from kinora.outbox where claimed_by = $1 and status = 'claimed'`, p.Name).Scan(&kept))
	if kept > 0 {
		r.fail("%s has ended, and %d entries are still its own", p.Name, kept)
	}
	ended := time.Now()
	var back int
	r.must(r.pool.QueryRow(r.suite.ctx, `select count(*) from kinora.outbox where id = any($1) and status = 'pending'`, had).Scan(&back))
	r.inject("released", back)
	taken := r.awaitOr(lease, func() bool {
		var left int
		err := r.pool.QueryRow(r.suite.ctx, `select count(*) from kinora.outbox where id = any($1) and status = 'pending'`, had).Scan(&left)
		return err == nil && left == 0
	})
	if back > 0 {
		r.measure("taken_over_ms", time.Since(ended))
	}
	if !taken {
		r.fail("nobody has claimed what %s released %s ago", p.Name, lease)
	}
	r.begin(p)
}

func claimedBy(r *run, p *process) []int64 {
	rows, err := r.pool.Query(r.suite.ctx, `select id from kinora.outbox where claimed_by = $1 and status = 'claimed'`, p.Name)
	r.must(err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	r.must(err)
	return ids
}

// endRunner ends a runner with handlers under way: it leaves no name behind that others would have to wait for, and nobody
// takes it for alive.
func endRunner(r *run, p *process) {
	p.awaitOpen()
	r.inject("named", r.countOf(`select count(*) from kinora.in_flight`))
	r.terminate(p)
	var names int
	r.must(r.pool.QueryRow(r.suite.ctx, `
		select count(*) from kinora.in_flight d left join kinora.runners n using (runner) where n.runner is null`).Scan(&names))
	if names > 0 {
		r.fail("%s has ended, and %d messages are still said to be under way with it", p.Name, names)
	}
	var alive int
	r.must(r.pool.QueryRow(r.suite.ctx, `select count(*) from kinora.runners`).Scan(&alive))
	if others := len(r.of(running)) - 1; alive > others {
		r.fail("%s has ended, and %d runners are still said to live: there are %d", p.Name, alive, others)
	}
	r.begin(p)
}

// awaitOpen waits until it has something in hand, and some time, so that it is never at the same point.
func (p *process) awaitOpen() {
	p.r.awaitOr(time.Second, p.open)
	p.r.sleep(p.r.between(0, 2*time.Millisecond))
}

// terminate ends it with SIGTERM, and measures that.
func (r *run) terminate(p *process) {
	kind := "sigterm_idle"
	if p.open() {
		kind = "sigterm_" + string(p.Role)
	}
	begun := time.Now()
	p.stop(endLimit)
	r.measure("drain_"+string(p.Role)+"_ms", time.Since(begun))
	r.inject(kind, 1)
}

// begin begins the next life of one that has ended.
func (r *run) begin(p *process) {
	r.must(p.begin())
	p.awaitReady(30 * time.Second)
}
