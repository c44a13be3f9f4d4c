package main

import (
	"maps"
	"slices"
	"time"
)

var restartCell = &cell{
	// Promise: G6.1
	name: "restart", number: 4, summary: "the server stopped with -m immediate and started again, under load",
	full: 80 * time.Second, short: 3 * time.Second, alone: true, redelivers: true, requires: []string{"restart"}, run: runRestart,
}

// healLimit is the time in which every process must work again after the server is back, in the full form.
const healLimit = 5 * time.Second

func runRestart(r *run) {
	r.server(brokerConfig{Duplicate: 0.02})
	r.startAll(2, 2, nil)
	r.prove(func() {
		r.during(func() {
			r.sleep(r.between(time.Second, 4*time.Second))
			r.trace.printf("restart")
			r.must(r.pg.Restart("QUIT"))
			r.inject("restart", 1)
			healed(r)
		})
		r.waitDrained(2 * lease)
	})
	r.judge()
}

// healed waits until commands, publications and acks continue, and measures the time.
func healed(r *run) {
	r.trace.printf("back")
	back := time.Now()
	waiting := map[string]func() int{
		"heal_append_ms":  func() int { return int(r.sum(producing, wordAcked)) },
		"heal_publish_ms": func() int { return r.broker.count("published") },
		"heal_apply_ms":   func() int { return r.broker.count("acked") },
	}
	before := map[string]int{}
	for what, n := range waiting {
		before[what] = n()
	}
	for len(waiting) > 0 {
		for what, n := range waiting {
			if n() > before[what] {
				r.within(what, what, time.Since(back), healLimit)
				delete(waiting, what)
			}
		}
		if len(waiting) > 0 && time.Since(back) > r.suite.patience() {
			r.fail("%s after the server came back, these have not continued: %v", r.suite.patience(), slices.Sorted(maps.Keys(waiting)))
			return
		}
		r.sleep(5 * time.Millisecond)
	}
}
