package main

import "time"

var poolCell = &cell{
	name: "pool", number: 15, summary: "one connection per process and more workers than connections: no process blocks itself",
	full: 45 * time.Second, short: 4 * time.Second, redelivers: true,
	requires: []string{"pool_of_one", "twin"}, run: runPool,
}

// stallLimit is how long a process with work in hand may go without finishing any of it.
const stallLimit = 5 * time.Second

func runPool(r *run) {
	r.ahead = 200
	r.server(brokerConfig{Duplicate: 0.1, Slow: 4 * time.Millisecond})
	one := func(s *settings) { s.Conns, s.Slow, s.Workers, s.Concurrency = 1, 5*time.Millisecond, 32, 8 }
	r.startAll(2, 2, one)
	for range 2 { // one of them is batched
		some := r.child(running, func(s *settings) { one(s); s.Conns, s.Concurrency = 3, 16 })
		some.awaitReady(30 * time.Second)
	}
	r.inject("pool_of_one", 5)
	r.inject("pool_of_three", 2)
	r.during(watchProgress(r))
	r.waitDrained(4 * lease)
	r.judge()
}

// watchProgress returns a function to be called repeatedly. It measures, and limits, how long each
// process with work in hand finishes nothing.
func watchProgress(r *run) func() {
	type seen struct {
		done int64
		at   time.Time
	}
	last := map[*process]seen{}
	return func() {
		r.sleep(20 * time.Millisecond)
		for _, p := range r.all {
			word := wordDone
			if p.Role == producing {
				word = wordAcked
			}
			now := seen{p.status.get(word), time.Now()}
			was, known := last[p]
			if !known || was.done != now.done || !p.open() {
				last[p] = now
				continue
			}
			stalled := now.at.Sub(was.at)
			r.measure("stalled_ms", stalled)
			if stalled > stallLimit {
				r.fail("%s has work in hand and finished none of it in %s", p.Name, stalled)
				last[p] = now
			}
		}
	}
}
