package main

import (
	"cmp"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

var replyCell = &cell{
	name: "reply", number: 5, what: "the reply to a commit lost: of appends, units, units in one trip and in two, and marks of relays",
	full: 75 * time.Second, short: 5 * time.Second, redelivers: true, byFault: true,
	wants: []string{"lost_append", "lost_mark", "lost_unit", "lost_one_trip", "lost_two_trips"}, run: runReply,
}

// has reports whether one of the statements contains all of these parts.
func has(said []string, parts ...string) bool {
	return slices.ContainsFunc(said, func(sql string) bool {
		return !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(sql, part) })
	})
}

// commits are what a round trip commits, by its statements.
var commits = map[string]func(said []string) bool{
	"append": func(said []string) bool { return has(said, "insert into kinora.events") },
	"mark":   func(said []string) bool { return has(said, "o.token = ", "returning o.id") },
	"unit":   func(said []string) bool { return has(said[:1], "commit") },
	"one_trip": func(said []string) bool {
		return has(said, "insert into kinora.markers") && !has(said[:1], "begin")
	},
	"two_trips": func(said []string) bool { return len(said) > 1 && said[len(said)-1] == "commit" },
}

// oneIn is how many replies there are to one that is lost, if it is not 50. Units share commits, so these are fewer; and only
// duplicates, and what waits behind parked messages, need two trips.
var oneIn = map[string]int{"unit": 15, "one_trip": 15, "two_trips": 5}

func runReply(r *run) {
	r.ahead = 200
	r.server(brokerConfig{Duplicate: 0.02})
	lost := map[string]*atomic.Int64{}
	for name := range commits {
		lost[name] = &atomic.Int64{}
	}
	r.crew(2, 2, func(s *settings) {
		names := map[role][]string{producing: {"append"}, relaying: {"mark"}, running: {"unit"}}[s.Role]
		if s.Batched {
			names = []string{"one_trip", "two_trips"}
		}
		l := &loser{pick: func(said []string) *atomic.Int64 {
			for _, name := range names {
				if commits[name](said) && r.intn(cmp.Or(oneIn[name], 50)) == 0 {
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
	r.during(func() { r.sleep(50 * time.Millisecond); count() }, r.cell.wants...)
	r.settle(3 * lease)
	count()
	r.judge()
}
