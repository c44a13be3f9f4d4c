package main

import (
	"slices"
	"strings"
	"time"
)

var replyCell = &cell{
	name: "reply", number: 5, what: "the reply to a commit lost: of appends, units of work, one-trip units, and marks of relays",
	full: 75 * time.Second, short: 5 * time.Second, redelivers: true, byFault: true,
	wants: []string{"lost_append", "lost_mark", "lost_unit", "lost_one_trip"}, run: runReply,
}

// has tells whether one of the statements has all of these in it.
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
}

func runReply(r *run) {
	r.ahead = 200
	r.server(brokerConfig{Duplicate: 0.02})
	losers := map[string]*loser{}
	for name, is := range commits {
		losers[name] = &loser{pick: func(said []string) bool { return is(said) && r.intn(50) == 0 }}
	}
	r.crew(2, 2, func(s *settings) {
		name := map[role]string{producing: "append", relaying: "mark", running: "unit"}[s.Role]
		if s.Batched {
			name = "one_trip"
		}
		s.DSN = r.through(losers[name].serve).dsn
	})
	counted := map[string]int{}
	count := func() {
		for name, l := range losers {
			n := int(l.lost.Load())
			r.inject("lost_"+name, n-counted[name])
			counted[name] = n
		}
	}
	r.during(func() { r.sleep(50 * time.Millisecond); count() }, r.cell.wants...)
	r.settle(3 * lease)
	count()
	r.judge()
}
