package main

import "time"

var killCell = &cell{
	// Promise: G3.1, G4.1, G4.11
	name: "kill", number: 2, summary: "random kill -9 of producer, relays and runners under load",
	full: 3 * time.Minute, short: 4 * time.Second, alone: true, redelivers: true, byFault: true,
	requires: []string{"kill_relay", "kill_runner", "kill_unit_of_many"}, requiresLong: []string{"kill_producer"}, run: runKill,
}

func runKill(r *run) {
	r.server(brokerConfig{Duplicate: 0.02, Slow: 4 * time.Millisecond, LoseReply: 0.005})
	producer, relays, runners := r.startAll(2, 2, func(s *settings) { s.Alone, s.Slow = false, 2*time.Millisecond })
	// rival issues commands for the same streams.
	rival := r.child(producing, func(s *settings) { s.Workers, s.Alone = 2, false })
	rival.awaitReady()
	r.prove(func() {
		r.during(func() {
			r.sleep(r.between(200*time.Millisecond, 900*time.Millisecond))
			switch n := r.intn(40); {
			case n == 0:
				producer.restart()
			case n == 1:
				rival.restart()
			case n < 18:
				relays[r.intn(2)].restart()
			default:
				runners[r.intn(2)].restart()
			}
		})
		r.waitDrained(2 * lease)
	})
	r.judge()
}
