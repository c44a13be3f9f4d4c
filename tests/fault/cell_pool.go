package main

import "time"

var poolCell = &cell{
	// Promise: G4.1
	name: "pool", number: 15, summary: "one connection per process and more workers than connections: no process blocks itself",
	full: 30 * time.Second, short: 3 * time.Second, alone: true, redelivers: true,
	requires: []string{"pool_of_one", "twin"}, run: runPool,
}

// stallLimit is how long a process with work in hand may go without finishing any of it, in the full form. A process that
// blocks itself does not drain in any form.
const stallLimit = 5 * time.Second

func runPool(r *run) {
	r.ahead = 200
	r.server(brokerConfig{Duplicate: 0.1, Slow: 4 * time.Millisecond})
	one := func(s *settings) { s.Conns, s.Slow, s.Workers, s.Concurrency = 1, 5*time.Millisecond, 32, 8 }
	r.startAll(2, 2, one)
	for range 2 { // one of them is batched
		some := r.child(running, func(s *settings) { one(s); s.Conns, s.Concurrency = 3, 16 })
		some.awaitReady()
	}
	r.inject("pool_of_one", 5)
	r.inject("pool_of_three", 2)
	r.prove(func() {
		r.during(watchProgress(r))
		r.waitDrained(4 * lease)
	})
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
			r.within("stalled_ms", p.Name+" has work in hand and finished some of it only", stalled, stallLimit)
		}
	}
}
