package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
)

var corruptCell = &cell{
	// Promise: G6.2, G6.6
	name: "corrupt", number: 12, summary: "deliveries delayed, reordered between keys, some preceded by a corrupted one",
	full: 40 * time.Second, short: 3 * time.Second, redelivers: true, fails: true,
	requires: []string{"flip", "truncated", "other_type", "empty_id", "delayed"}, run: runCorrupt,
}

// corruptions make the letter that precedes an intact one. Its id is its own, unless the id is
// corrupted.
var corruptions = map[string]func(rnd *rand.Rand, l *letter){
	"flip": func(rnd *rand.Rand, l *letter) {
		// A payload that still parses would be applied.
		for json.Unmarshal(l.Payload, &moved{}) == nil {
			l.Payload[rnd.IntN(len(l.Payload))] ^= 1 << rnd.IntN(8)
		}
	},
	"truncated":   func(rnd *rand.Rand, l *letter) { l.Payload = l.Payload[:rnd.IntN(len(l.Payload))] },
	"other_json":  func(_ *rand.Rand, l *letter) { l.Payload = []byte(`["moved", {"n": null}]`) },
	"other_field": func(_ *rand.Rand, l *letter) { l.Payload = []byte(`{"n": "many"}`) },
	"other_type":  func(_ *rand.Rand, l *letter) { l.Meta["kinora_type"] = "stood" },
	"no_type":     func(_ *rand.Rand, l *letter) { delete(l.Meta, "kinora_type") },
	"type_case":   func(_ *rand.Rand, l *letter) { l.Meta["kinora_type"] = "MOVED" },
	"schema":      func(_ *rand.Rand, l *letter) { l.Meta["kinora_schema"] = "one" },
	"new_schema":  func(_ *rand.Rand, l *letter) { l.Meta["kinora_schema"] = "7" },
	"version":     func(_ *rand.Rand, l *letter) { l.Meta["kinora_version"] = "-1" },
	"time":        func(_ *rand.Rand, l *letter) { l.Meta["kinora_recorded_at"] = "yesterday" },
	"empty_id":    func(_ *rand.Rand, l *letter) { l.ID = "" },
	"nul_in_id":   func(_ *rand.Rand, l *letter) { l.ID += "\x00" },
	"id_not_utf8": func(_ *rand.Rand, l *letter) { l.ID += "\xff" },
	"long_id":     func(_ *rand.Rand, l *letter) { l.ID += strings.Repeat("x", 300) },
	"not_utf8":    func(_ *rand.Rand, l *letter) { l.Meta["actor"] = "\xff\x00"; l.Meta["kinora_type"] = "\x00" },
	"bare":        func(_ *rand.Rand, l *letter) { l.Meta = nil },
}

// perhapsNewer are corruptions that look like an event of a newer program.
var perhapsNewer = []string{"other_type", "type_case", "new_schema"}

// corrupter inserts a corrupted letter before some letters.
type corrupter struct {
	mu    sync.Mutex
	kinds []string
	done  map[string]int
	n     int
	oneIn int
}

func (c *corrupter) tap(rnd *rand.Rand, l letter) []letter {
	if rnd.IntN(c.oneIn) > 0 {
		return []letter{l}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	kind := c.kinds[c.n%len(c.kinds)]
	c.n++
	c.done[kind]++
	bad := letter{fmt.Sprintf("corrupt-%d-%s", c.n, kind), []byte(string(l.Payload)), maps.Clone(l.Meta)}
	corruptions[kind](rnd, &bad)
	return []letter{bad, l}
}

// count returns how many letters were corrupted in a way.
func (c *corrupter) count(kind string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.done[kind]
}

func runCorrupt(r *run) {
	// Held messages are replayed one after another.
	c := &corrupter{done: map[string]int{}, oneIn: 150}
	if r.suite.short {
		c.oneIn = 40
	}
	for kind := range corruptions {
		c.kinds = append(c.kinds, kind)
	}
	r.server(brokerConfig{Duplicate: 0.02, Serial: true, Shuffle: true, Delay: 0.05, Tap: c.tap})
	r.startAll(1, 2, limitAttempts(3))
	db, err := postgres.New(r.pool, nil)
	r.must(err)
	for kind := range corruptions {
		r.gauge(kind, func() int { return c.count(kind) })
	}
	r.gauge("delayed", func() int { return r.broker.count("delayed") })
	r.needy = true
	r.prove(func() {
		r.during(func() { r.acks(50); r.skipCorrupt(db) })
		// plus the time of the held messages, and up to 30 s each that a worker rests while nothing can be applied
		r.waitDrained(4*lease + 30*time.Second)
		r.await("the held messages are replayed", func() bool {
			r.skipCorrupt(db)
			return r.countOf(openParked) == 0
		})
	})
	r.allParked(c)
	r.parked = r.countOf(`select count(*) from kinora.parked`)
	r.judge()
}

// skipCorrupt skips all messages that are parked for their own error, or wait for a newer program.
func (r *run) skipCorrupt(db *postgres.DB) {
	list, err := db.Parked(r.suite.ctx, projector.ParkedFilter{Limit: 10_000})
	r.must(err)
	var seqs []int64
	for _, p := range list {
		if p.Class == provider.ClassHeld {
			continue
		}
		if p.MessageID != "" && !strings.HasPrefix(p.MessageID, "corrupt-") {
			r.fail("%s is parked: %s %s", p.MessageID, p.Class, p.Code)
		}
		own := p.Class == projector.ClassPermanent && p.State == projector.StateStuck
		if _, kind, _ := strings.Cut(strings.TrimPrefix(p.MessageID, "corrupt-"), "-"); slices.Contains(perhapsNewer, kind) {
			own = p.Class == provider.ClassUnable && p.State == projector.StateWaiting
		}
		if !own || p.Code == "" {
			r.fail("%q is %s as %s %q", p.MessageID, p.State, p.Class, p.Code)
		}
		seqs = append(seqs, p.Seq)
	}
	if len(seqs) > 0 {
		_, err = projector.Skip(r.suite.ctx, db, projector.ParkedFilter{Seqs: seqs}, projector.Decision{By: "suite", Reason: "corrupted"})
		r.must(err)
	}
}

// idAsText is SQL for the id of a parked message. An id that is not valid text is stored as U+FFFD
// and base64.
const idAsText = `case when message_id like U&'\FFFD%' then encode(decode(substr(message_id, 2), 'base64'), 'escape') else message_id end`

// allParked checks that each projector parked as many messages of each kind as were delivered.
func (r *run) allParked(c *corrupter) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for kind, n := range c.done {
		for _, name := range []string{exactName, controlName} {
			var got int
			r.must(r.pool.QueryRow(r.suite.ctx, `select count(*) from kinora.parked where projector = $1 and state = 'skipped'
				and case when $2 = 'empty_id' then message_id = '' else `+idAsText+` ~ ('^corrupt-\d+-' || $2) end`, name, kind).Scan(&got))
			if got != n {
				r.fail("%s: %d were delivered, but %d are parked for %s", kind, n, got, name)
			}
		}
	}
}
