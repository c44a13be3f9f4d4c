package main

import "time"

// operatorScale is how much shorter this cell's times are than those of an operator whose runners have the default lease of
// 15 s: the leases here have 1 s.
const operatorScale = 15

// Ten minutes of kills, one every 2 s, while some handlers take 10 s, scaled.
const (
	operatorLength = 10 * time.Minute / operatorScale
	operatorPause  = 2 * time.Second / operatorScale
	operatorSlow   = 10 * time.Second / operatorScale
	operatorLimit  = 30 * time.Second / operatorScale // a handler's deadline
	operatorOneIn  = 100                              // messages are slow
)

var operatorCell = &cell{
	name: "operator", number: 23, what: "ten minutes (scaled) of random SIGKILLs while some handlers are slower than the pauses between them: no innocent message is stuck",
	full: operatorLength, short: 8 * time.Second, redelivers: true, byFault: true,
	wants: []string{"kill_runner", "suspects", "attempts", "attempts_killed"}, run: runOperator,
}

// runOperator gives messages the default budget of 5 attempts. A message is stuck only if each attempt met a kill, and the
// last one comes 73 leases after the first: so none is stuck, however many kills there are in 40 s.
func runOperator(r *run) {
	r.server(brokerConfig{Duplicate: 0.02})
	_, _, runners := r.crew(1, 4, func(s *settings) {
		if s.Role == running {
			s.Lease, s.Timeout, s.Attempts = time.Second, operatorLimit, 5
			s.SlowOneIn, s.Least, s.Slow = operatorOneIn, operatorSlow, operatorSlow+operatorSlow/10
		}
	})
	r.during(func() {
		r.sleep(r.between(operatorPause/2, 3*operatorPause/2))
		runners[r.intn(len(runners))].restart()
	}, "kill_runner")
	r.settle(10 * lease)
	r.judge()
}
