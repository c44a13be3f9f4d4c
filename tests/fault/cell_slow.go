package main

import "time"

var slowCell = &cell{
	name: "slow", number: 17, what: "handlers and publications that take far longer than the leases of runners and relays, and duplicates meanwhile",
	full: time.Minute, short: time.Second, redelivers: true,
	wants: []string{"slow_handler", "slow_publish", "twin"}, run: runSlow,
}

// runSlow gives runners attempts to lose: one that is taken for dead costs an attempt, and the last one parks.
func runSlow(r *run) {
	slow := 10 * time.Second
	if r.suite.short {
		slow = 4 * time.Second
	}
	r.ahead = 60
	r.server(brokerConfig{Duplicate: 0.5, Slow: 2 * lease, Least: lease})
	_, err := r.pool.Exec(r.suite.ctx, countAttempts)
	r.must(err)
	r.crew(2, 2, func(s *settings) {
		s.Streams, s.Hot, s.Timeout, s.Attempts = 900, 0, 3*slow, 5
		s.Conns, s.Lanes, s.Slow, s.Least = 80, 64, slow, slow*3/4
	})
	r.during(func() {
		r.sleep(lease / 10)
		watchLeases(r)
	})
	r.settle(10 * slow)
	watchLeases(r)
	if counted := r.attemptsCounted(); counted > 0 {
		r.fail("%d messages have attempts against them: a runner that lived was taken for dead", counted)
	}
	r.inject("slow_handler", int(r.sum(running, wordDone)))
	r.inject("slow_publish", r.broker.count("outlived"))
	r.judge()
}

// watchLeases looks for a name of a runner that lives and whose lease has run out.
func watchLeases(r *run) {
	var late int
	r.must(r.pool.QueryRow(r.suite.ctx, `
		select count(distinct i.runner) from kinora.inflight i left join kinora.runners n using (runner)
		where n.expires_at is null or n.expires_at < clock_timestamp()`).Scan(&late))
	if late > 0 {
		r.fail("%d runners with messages under way have let their leases run out", late)
	}
}
