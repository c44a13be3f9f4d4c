package main

import (
	"strings"
	"time"
)

var stormCell = &cell{
	// Promise: G4.1
	name: "storm", number: 11, summary: "every message delivered 100 times, through two runners at once",
	full: 75 * time.Second, short: 3 * time.Second, alone: true, redelivers: true,
	requires: []string{"copies", "concurrent", "units_of_many"}, run: runStorm,
}

// waitLimit is how long a statement may wait for the pool during the storm.
const waitLimit = 2 * time.Second

func runStorm(r *run) {
	times := 100
	if r.suite.short {
		times = 20
	}
	r.ahead = 2000 / times // few messages at a time, so that they finish soon
	r.server(brokerConfig{Groups: []string{"readers", "control"}, Storm: times})
	r.startAll(1, 2, func(s *settings) {
		s.Streams, s.Hot, s.Length, s.Control = 60, 0, 20, false
		if strings.HasPrefix(s.Name, string(running)) {
			s.More = map[string]string{"probe": "yes"}
		}
	})
	control := r.child(running, func(s *settings) { s.Group, s.More = "control", map[string]string{"arm": controlName} })
	control.awaitReady()
	begin := time.Now()
	r.gauge("copies", func() int { return r.broker.count("storm") })
	r.prove(func() {
		r.during(func() { r.acks(20) })
		r.waitDrained(15 * lease) // no lease expires here, but the copies take time
	})
	n := r.broker.count("delivered")
	r.say("%d deliveries, %d a second", n, int(float64(n)/time.Since(begin).Seconds()))
	for _, p := range r.of(running) {
		r.atMost("pool_wait_ms", int(p.status.get(wordWait)/1000), int(waitLimit.Milliseconds()))
	}
	if least := r.broker.leastDelivered(); least < times {
		r.fail("a message was delivered only %d times: the storm did not reach it", least)
	}
	r.judge()
}
