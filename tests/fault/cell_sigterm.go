package main

import (
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

var sigtermCell = &cell{
	// Promise: G6.3, G9.1, G9.2
	name: "sigterm", number: 18, summary: "repeated SIGTERM to relays and runners during their work",
	full: 60 * time.Second, short: 5 * time.Second, alone: true, redelivers: true,
	requires: []string{"sigterm_relay", "sigterm_runner", "released", "in_flight"}, run: runSigterm,
}

// endLimit is how long a child may take to end in the full form: its handlers and some time for the process itself.
const endLimit = 8 * time.Second

func runSigterm(r *run) {
	r.ahead = 300
	r.server(brokerConfig{Duplicate: 0.02, Slow: 120 * time.Millisecond})
	producer, relays, runners := r.startAll(2, 2, func(s *settings) {
		// Many entries of each stream are pending, so that relays hold some that they have not begun to publish.
		s.Slow, s.Workers, s.Streams, s.Hot = 40*time.Millisecond, 24, 24, 0
	})
	r.prove(func() {
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
		})
		r.waitDrained(5 * lease) // one worker may have all that the producers are ahead
	})
	// On a slow or busy machine, a renewal may hold the record at the moment at which its runner deletes it.
	if left, ends := r.kinds()["left_alive"], r.kinds()["sigterm_runner"]+r.kinds()["sigterm_idle"]; left > 0 && (r.isAlone() || 2*left > ends) {
		r.fail("%d of %d runners have ended, but are recorded as alive", left, ends)
	}
	r.judge()
}

// endRelay stops a relay that holds entries. After its end no entry is claimed by it, and the other
// relay claims the released entries, in the full form within a lease.
func endRelay(r *run, p *process) {
	p.awaitOpen()
	had := claimedBy(r, p)
	r.terminate(p)
	var kept int
	r.must(r.pool.QueryRow(r.suite.ctx, `select count(*) from kinora.outbox where claimed_by = $1 and status = 'claimed'`, p.Name).Scan(&kept))
	if kept > 0 {
		r.fail("%s has ended, but %d entries are still claimed by it", p.Name, kept)
	}
	ended := time.Now()
	var back int
	r.must(r.pool.QueryRow(r.suite.ctx, `select count(*) from kinora.outbox where id = any($1) and status = 'pending'`, had).Scan(&back))
	r.inject("released", back)
	r.await("a relay to claim what "+p.Name+" released", func() bool {
		var left int
		err := r.pool.QueryRow(r.suite.ctx, `select count(*) from kinora.outbox where id = any($1) and status = 'pending'`, had).Scan(&left)
		return err == nil && left == 0
	})
	if back > 0 {
		r.within("taken_over_ms", "another relay claimed what "+p.Name+" released", time.Since(ended), lease)
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

// endRunner stops a runner while its handlers run. It leaves no messages recorded as in flight that
// others would have to wait for, and no runner is recorded as alive for it.
func endRunner(r *run, p *process) {
	p.awaitOpen()
	r.inject("in_flight", r.countOf(`select count(*) from kinora.in_flight`))
	r.terminate(p)
	var inFlight int
	r.must(r.pool.QueryRow(r.suite.ctx, `
		select count(*) from kinora.in_flight d left join kinora.runners n using (runner) where n.runner is null`).Scan(&inFlight))
	if inFlight > 0 {
		r.fail("%s has ended, but %d messages are still recorded as in flight in it", p.Name, inFlight)
	}
	var alive int
	r.must(r.pool.QueryRow(r.suite.ctx, `select count(*) from kinora.runners`).Scan(&alive))
	if others := len(r.of(running)) - 1; alive > others {
		r.inject("left_alive", 1)
		r.trace.printf("%s has ended, but %d runners are recorded as alive, want %d", p.Name, alive, others)
	}
	r.begin(p)
}

// awaitOpen waits until the process has work in hand, and a random time more, so that the kill
// points differ.
func (p *process) awaitOpen() {
	p.r.awaitOr(time.Second, p.open)
	p.r.sleep(p.r.between(0, 2*time.Millisecond))
}

// terminate ends the process with SIGTERM and measures how long it takes.
func (r *run) terminate(p *process) {
	kind := "sigterm_idle"
	if p.open() {
		kind = "sigterm_" + string(p.Role)
	}
	began := time.Now()
	p.stop()
	r.within("drain_"+string(p.Role)+"_ms", p.Name+" ended", time.Since(began), endLimit)
	r.inject(kind, 1)
}

// begin starts the next life of a process that has ended.
func (r *run) begin(p *process) {
	r.must(p.begin())
	p.awaitReady()
}
