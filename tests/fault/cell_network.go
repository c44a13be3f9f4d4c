package main

import "time"

var networkCell = &cell{
	// Promise: G6.1, G9.3
	name: "network", number: 6, summary: "every connection to the database with latency, resets, half-open states and sliced packets",
	full: 80 * time.Second, short: 3 * time.Second, redelivers: true,
	requires: []string{"reset_runner", "reset_relay", "reset_producer", "half_open_runner"}, run: runNetwork,
}

// userTimeout is the time after which the kernel closes a half-open connection on which
// TCP_USER_TIMEOUT is set.
const userTimeout = 2 * time.Second

func runNetwork(r *run) {
	r.server(brokerConfig{Duplicate: 0.02}, idleLimit)
	ways := map[role]*proxy{}
	for _, as := range []role{producing, relaying, running} {
		ways[as] = r.through(nil)
	}
	r.startAll(2, 2, func(s *settings) {
		s.DSN, s.Timeout = ways[s.Role].dsn, 4*time.Second
	})
	heals := 4*lease + userTimeout
	r.prove(func() {
		r.during(func() {
			as := []role{producing, relaying, running}[r.intn(3)]
			if disturb(r, as, ways[as]) {
				// Statements of relays and producers have a limit of 30 s.
				heals = 4*lease + 35*time.Second
			}
			r.sleep(r.between(50*time.Millisecond, 300*time.Millisecond))
		})
		for _, p := range ways {
			p.delay.Store(0)
			p.slices.Store(false)
		}
		r.waitDrained(heals)
	})
	r.judge()
}

// disturb disturbs the connections of a role once. It reports whether only the role's own timeouts
// end the disturbance.
func disturb(r *run, as role, way *proxy) (endless bool) {
	kind, c := "", way.some(r.intn(1<<20))
	switch n := r.intn(10); {
	case n < 2:
		kind = "latency"
		way.delay.Store(int64(r.between(0, 10*time.Millisecond)))
	case n < 4:
		kind = "slicing"
		way.slices.Store(!way.slices.Load())
	case c == nil:
		return false
	case n < 7:
		kind = "reset"
		c.reset()
	default:
		kind = "half_open"
		if endless = !r.suite.short && r.intn(10) == 0; endless {
			kind = "half_open_for_good"
			c.halfOpen(0)
		} else {
			c.halfOpen(userTimeout)
		}
	}
	r.inject(kind+"_"+string(as), 1)
	r.trace.printf("disturb %s %s", as, kind)
	return endless
}
