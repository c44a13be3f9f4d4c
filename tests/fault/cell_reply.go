package main

import (
	"cmp"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

var replyCell = &cell{
	// Promise: G1.5, G4.3
	name: "reply", number: 5, summary: "lost replies to commits: of appends, units, units in one and two round trips, and marks of relays",
	full: 60 * time.Second, short: 3 * time.Second, redelivers: true, byFault: true,
	requires: []string{"lost_append", "lost_mark", "lost_unit", "lost_one_trip", "lost_two_trips"}, run: runReply,
}

// has reports whether one of the statements contains all these parts.
func has(statements []string, parts ...string) bool {
	return slices.ContainsFunc(statements, func(sql string) bool {
		return !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(sql, part) })
	})
}

// commits recognizes a kind of commit by the statements of its round trip.
var commits = map[string]func(statements []string) bool{
	"append": func(statements []string) bool { return has(statements, "insert into kinora.events") },
	"mark":   func(statements []string) bool { return has(statements, "o.token = ", "returning o.id") },
	"unit":   func(statements []string) bool { return has(statements[:1], "commit") },
	"one_trip": func(statements []string) bool {
		return has(statements, "insert into kinora.markers") && !has(statements[:1], "begin")
	},
	"two_trips": func(statements []string) bool {
		return len(statements) > 1 && statements[len(statements)-1] == "commit"
	},
}

// oneIn is the number of replies per lost reply, if it is not 50. Units share commits, so there are
// fewer of these; only duplicates and messages behind parked ones need two round trips.
var oneIn = map[string]int{"unit": 15, "one_trip": 15, "two_trips": 5}

func runReply(r *run) {
	r.ahead = 200
	r.server(brokerConfig{Duplicate: 0.02})
	lost := map[string]*atomic.Int64{}
	for name := range commits {
		lost[name] = &atomic.Int64{}
	}
	r.startAll(2, 2, func(s *settings) {
		names := map[role][]string{producing: {"append"}, relaying: {"mark"}, running: {"unit"}}[s.Role]
		if s.Batched {
			names = []string{"one_trip", "two_trips"}
		}
		l := &loser{pick: func(statements []string) *atomic.Int64 {
			for _, name := range names {
				if commits[name](statements) && r.intn(cmp.Or(oneIn[name], 50)) == 0 {
					return lost[name]
				}
			}
			return nil
		}}
		s.DSN = r.through(l.serve).dsn
	})
	counted := map[string]int{}
	count := func() {
		for name, l := range lost {
			n := int(l.Load())
			r.inject("lost_"+name, n-counted[name])
			counted[name] = n
		}
	}
	r.prove(func() {
		r.during(func() { r.acks(20); count() })
		r.waitDrained(3 * lease)
		count()
	})
	r.judge()
}
