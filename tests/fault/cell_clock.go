package main

import (
	"errors"
	"math/rand/v2"
	"time"
)

var clockCell = &cell{
	// Promise: G3.1, G4.1, G8.1
	name: "clock", number: 7, summary: "relays and runners whose clocks are an hour fast or slow, under kills",
	full: 75 * time.Second, short: 3 * time.Second, redelivers: true, byFault: true,
	requires: []string{"kill_relay", "kill_runner", "backoff"}, run: runClock,
}

var errRefused = errors.New("refused")

// firstBackoff is the shortest wait before a failed entry is tried again; see relay.
const firstBackoff = 50 * time.Millisecond

// skew returns about an hour, fast or slow, plus a few leases, so that no two clocks agree.
func skew(r *run) time.Duration {
	by := time.Hour + time.Duration(r.intn(20))*time.Second
	if r.intn(2) == 0 {
		return -by
	}
	return by
}

func runClock(r *run) {
	r.must(r.suite.buildSkewed())
	r.server(brokerConfig{Duplicate: 0.02, Slow: 4 * time.Millisecond, LoseReply: 0.005, Refuse: func(rnd *rand.Rand, _ string) error {
		if rnd.IntN(30) == 0 {
			return errRefused
		}
		return nil
	}})
	_, relays, runners := r.startAll(2, 2, func(s *settings) {
		if s.Role != producing {
			s.Skew = skew(r)
		}
	})
	r.gauge("backoff", func() int {
		_, waited, err := judgeBackoffs(r.dir, firstBackoff)
		r.must(err)
		return waited
	})
	r.prove(func() {
		r.during(func() {
			r.sleep(r.between(300*time.Millisecond, 1200*time.Millisecond))
			p := append(relays, runners...)[r.intn(4)]
			p.Skew = skew(r)
			p.restart()
			p.awaitReady()
			if !isSkewed(p) {
				r.fail("the clock of %s is off by %d half seconds, want %s", p.Name, p.status.get(wordSkew), p.Skew)
			}
			r.inject("clock_off", 1)
		})
		r.waitDrained(2 * lease)
	})
	early, _, err := judgeBackoffs(r.dir, firstBackoff)
	r.must(err)
	if early > 0 {
		r.fail("%d entries were tried again before their backoff ended", early)
	}
	r.judge()
}

// judgeBackoffs counts the failed entries that were claimed again, and how many of them too early.
func judgeBackoffs(dir string, least time.Duration) (early, waited int, err error) {
	entries, err := claimsIn(dir)
	if err != nil {
		return 0, 0, err
	}
	for _, e := range entries {
		for _, m := range e.marks {
			if m.outcome != "marked" || m.to != "failed" {
				continue
			}
			next := int64(0)
			for _, c := range e.claims {
				if c.at > m.asked && c.token != m.token && (next == 0 || c.at < next) {
					next = c.at
				}
			}
			if next == 0 {
				continue
			}
			waited++
			if next < m.asked+int64(least) {
				early++
			}
		}
	}
	return early, waited, nil
}
