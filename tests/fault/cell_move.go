package main

import (
	"slices"
	"time"
)

var moveCell = &cell{
	// Promise: G7b.3
	name: "move", number: 32,
	summary: "a projector that is moved between a broker and the log at random moments, one process at a time, under kill -9",
	full:    2 * time.Minute, short: 4 * time.Second, redelivers: true, byFaultLong: true,
	requires: []string{"kill_runner", "moved_to_log", "moved_to_broker", "all_on_log"}, run: runMove,
}

func runMove(r *run) {
	r.ahead = 20_000 // while all runners read the log, nothing is acked
	r.server(brokerConfig{Duplicate: 0.05})
	_, relays, runners := r.startAll(2, 2, func(s *settings) {
		s.Rate, s.Grace, s.Arms = 300, time.Second, []string{orderedName}
	})
	onLog := 0
	r.prove(func() {
		r.during(func() {
			r.sleep(r.between(300*time.Millisecond, 2*lease))
			// Until all have read the log at the same time once, each life moves one more, and none goes back: a slow
			// machine has few lives.
			meets := r.has("all_on_log")
			p := runners[r.intn(2)]
			if !meets && p.Log {
				p = runners[1-slices.Index(runners, p)]
			}
			if r.intn(5) == 0 {
				relays[r.intn(2)].restart()
			}
			clean := r.intn(4) == 0
			if clean {
				p.stop()
			} else {
				p.kill()
			}
			if !meets || r.intn(4) > 0 {
				r.move(p, !p.Log, &onLog)
			}
			r.must(p.begin())
		})
		for _, p := range runners {
			if p.Log && r.has("all_on_log") {
				p.kill()
				r.move(p, false, &onLog)
				r.must(p.begin())
			}
			p.awaitReady()
		}
		if !r.has("all_on_log") { // a projector does not go live while a runner that stays on the log reads for it
			r.waitDrained(10 * lease)
			return
		}
		r.waitCompleted(10*lease, exactName)
	})
	r.judge()
}

// move sets what the next life of a runner reads. onLog is the number of runners that read the log.
func (r *run) move(p *process, toLog bool, onLog *int) {
	if p.Log = toLog; toLog {
		*onLog++
		r.inject("moved_to_log", 1)
	} else {
		*onLog--
		r.inject("moved_to_broker", 1)
	}
	if *onLog == len(r.of(running)) {
		r.inject("all_on_log", 1)
	}
}
