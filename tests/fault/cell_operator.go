package main

import "time"

// operatorScale divides this cell's times: an operator's runners have the default lease of 15 s,
// the runners here have 1 s.
const operatorScale = 15

// Ten minutes of kills, one every 2 s, while some handlers take 10 s, all divided by operatorScale.
const (
	operatorLength = 10 * time.Minute / operatorScale
	operatorPause  = 2 * time.Second / operatorScale
	operatorSlow   = 10 * time.Second / operatorScale
	operatorLimit  = 30 * time.Second / operatorScale // a handler's deadline
	operatorOneIn  = 100                              // one message in so many is slow
)

var operatorCell = &cell{
	// Promise: G6.12
	name: "operator", number: 23, summary: "ten minutes (scaled) of random SIGKILLs while some handlers are slower than the pauses between the kills: no innocent message is stuck",
	full: operatorLength, short: 4 * time.Second, alone: true, redelivers: true, byFault: true,
	requires: []string{"kill_runner", "suspects", "attempts", "attempts_killed"}, run: runOperator,
}

// runOperator gives messages the default budget of 5 attempts. A message is stuck only if a kill
// ended each attempt, and the last attempt comes 73 leases after the first: 40 s of kills cannot
// make a message stuck.
func runOperator(r *run) {
	r.server(brokerConfig{Duplicate: 0.02})
	_, _, runners := r.startAll(1, 4, func(s *settings) {
		if s.Role == running {
			s.Lease, s.Timeout, s.Attempts = time.Second, operatorLimit, 5
			s.SlowOneIn, s.Least, s.Slow = operatorOneIn, operatorSlow, operatorSlow+operatorSlow/10
		}
	})
	r.prove(func() {
		r.during(func() {
			r.sleep(r.between(operatorPause/2, 3*operatorPause/2))
			runners[r.intn(len(runners))].restart()
		})
		r.waitDrained(10 * lease)
	})
	r.forgive()
	r.judge()
}
