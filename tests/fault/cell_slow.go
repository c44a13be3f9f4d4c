package main

import (
	"sync"
	"time"
)

var slowCell = &cell{
	// Promise: G2.5
	name: "slow", number: 17, summary: "handlers and publications much slower than the leases of runners and relays, with duplicates",
	full: time.Minute, short: time.Second, alone: true, redelivers: true,
	requires: []string{"slow_handler", "slow_publish", "twin", "in_flight"}, run: runSlow,
}

// runSlow makes one of the two runners record everything that it runs as in flight. If the other
// runner takes it for dead, that shows: the other becomes careful, finds the records and makes the
// messages suspects. If both were careful, duplicates would be suspects anyway.
func runSlow(r *run) {
	slow := 10 * time.Second
	if r.suite.short {
		slow = 4 * time.Second
	}
	r.ahead = 60
	r.server(brokerConfig{Duplicate: 0.5, Slow: 2 * lease, Least: lease})
	r.startAll(2, 2, func(s *settings) {
		limitAttempts(5)(s)
		s.Streams, s.Hot, s.Timeout = 900, 0, 3*slow
		s.Conns, s.Concurrency, s.Unit, s.Slow, s.Least = 80, 64, 2, slow, slow*3/4
		s.Careful = !s.Batched
	})
	done := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		r.guard(func() {
			for !isClosed(done) {
				r.sleep(lease / 10)
				watchLeases(r)
			}
		})
	})
	r.gauge("slow_handler", func() int { return int(r.sum(running, wordDone)) })
	r.gauge("slow_publish", func() int { return r.broker.count("outlived") })
	r.prove(func() {
		r.during(func() { r.acks(1) })
		r.waitDrained(10 * slow)
	})
	close(done)
	watching.Wait()
	r.blameless()
	r.forgive()
	// On a slow or busy machine some leases end. Without renewals, most of them do.
	if late := r.kinds()["looks_at_ended_leases"]; late > 0 && (r.isAlone() || 2*late > r.kinds()["looks"]) {
		r.fail("live runners have let their leases expire, or in-flight records belong to no runner, in %d of %d looks", late, r.kinds()["looks"])
	}
	r.judge()
}

// watchLeases looks for runners whose lease has ended, and for in-flight records of runners that
// are not alive.
func watchLeases(r *run) {
	var named, ended, orphaned int
	r.must(r.pool.QueryRow(r.suite.ctx, `
		select (select count(*) from kinora.in_flight),
			(select count(*) from kinora.runners where expires_at < clock_timestamp()),
			(select count(*) from kinora.in_flight d left join kinora.runners n using (runner) where n.runner is null)`).Scan(&named, &ended, &orphaned))
	r.inject("in_flight", named)
	r.inject("looks", 1)
	if ended+orphaned > 0 {
		r.trace.printf("%d leases of runners have ended, %d in-flight records belong to no runner", ended, orphaned)
		r.inject("looks_at_ended_leases", 1)
	}
}
