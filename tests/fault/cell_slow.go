package main

import (
	"sync"
	"time"
)

var slowCell = &cell{
	name: "slow", number: 17, what: "handlers and publications that take far longer than the leases of runners and relays, and duplicates meanwhile",
	full: time.Minute, short: time.Second, redelivers: true,
	wants: []string{"slow_handler", "slow_publish", "twin", "named"}, run: runSlow,
}

// runSlow makes one of the two runners name all that it runs. So a runner that is taken for dead shows: another one becomes
// careful, finds the names, and takes the messages for suspects. If both were careful, twins would be suspects anyway.
func runSlow(r *run) {
	slow := 10 * time.Second
	if r.suite.short {
		slow = 4 * time.Second
	}
	r.ahead = 60
	r.server(brokerConfig{Duplicate: 0.5, Slow: 2 * lease, Least: lease})
	r.crew(2, 2, func(s *settings) {
		s.Streams, s.Hot, s.Timeout, s.Attempts = 900, 0, 3*slow, 5
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
	r.during(func() { r.sleep(lease / 10) })
	r.settle(10 * slow)
	close(done)
	watching.Wait()
	r.blameless()
	r.inject("slow_handler", int(r.sum(running, wordDone)))
	r.inject("slow_publish", r.broker.count("outlived"))
	r.judge()
}

// watchLeases looks for runners whose lease has ended, and for names of a runner that is not alive.
func watchLeases(r *run) {
	var named, ended, nobodys int
	r.must(r.pool.QueryRow(r.suite.ctx, `
		select (select count(*) from kinora.in_flight),
			(select count(*) from kinora.runners where expires_at < clock_timestamp()),
			(select count(*) from kinora.in_flight d left join kinora.runners n using (runner) where n.runner is null)`).Scan(&named, &ended, &nobodys))
	r.inject("named", named)
	if ended+nobodys > 0 {
		r.fail("%d runners that are alive have let their leases end; %d names are of no runner", ended, nobodys)
	}
}
