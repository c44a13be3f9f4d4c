package main

import (
	"maps"
	"slices"
	"strings"
	"time"
)

// keyHeader is where a message has its ordering key.
const keyHeader = "kinora_key"

// group is consumers that share what is delivered: at one time, a key is one consumer's. The broker's lock guards it.
type group struct {
	*broker
	name      string
	first     bool // of the broker's groups: its acks count
	queues    map[string]*queue
	consumers []*consumer
	orphans   []*queue // nobody's, for want of consumers
	open      int      // messages and copies that are not acked
}

// queue is what waits, and what is out, of one key.
type queue struct {
	key     string
	waiting []letter
	out     []*delivery
	owner   *consumer
	lined   bool // up at its owner
}

type delivery struct {
	letter letter
	queue  *queue // nil of a copy
}

// consumer is one subscription.
type consumer struct {
	group *group
	link  *link
	name  string
	has   map[int64]*delivery
	lined []*queue // of its own, that have something waiting
	left  bool
}

func newGroup(b *broker, name string, first bool) *group {
	return &group{broker: b, name: name, first: first, queues: map[string]*queue{}}
}

func (g *group) join(l *link, name string) *consumer {
	c := &consumer{group: g, link: l, name: name, has: map[int64]*delivery{}}
	g.consumers = append(g.consumers, c)
	orphans := g.orphans
	g.orphans = nil
	for _, q := range orphans {
		q.lined = false
		g.line(q)
	}
	g.counts["joined"]++
	return c
}

func (g *group) enqueue(l letter) {
	key := l.Meta[keyHeader]
	q := g.queues[key]
	if q == nil {
		q = &queue{key: key}
		g.queues[key] = q
	}
	q.waiting = append(q.waiting, l)
	g.open++
	g.line(q)
}

// line lines a queue up at its owner, finding it one if it has none.
func (g *group) line(q *queue) {
	if q.lined || len(q.waiting) == 0 || q.isBusy(&g.cfg) {
		return
	}
	q.lined = true
	if g.cfg.Delay > 0 && g.rnd.Float64() < g.cfg.Delay {
		g.delay(q)
		return
	}
	g.lineNow(q)
}

func (g *group) lineNow(q *queue) {
	if q.owner == nil {
		if len(g.consumers) == 0 {
			g.orphans = append(g.orphans, q)
			return
		}
		q.owner = g.consumers[g.rnd.IntN(len(g.consumers))]
	}
	q.owner.lined = append(q.owner.lined, q)
	q.owner.pump()
}

// pump delivers as much as may be out.
func (c *consumer) pump() {
	for len(c.has) < c.group.cfg.Window && len(c.lined) > 0 {
		i := 0
		if c.group.cfg.Shuffle {
			i = c.group.rnd.IntN(len(c.lined))
		}
		q := c.lined[i]
		c.lined = slices.Delete(c.lined, i, i+1)
		l := q.waiting[0]
		q.waiting = q.waiting[1:]
		d := &delivery{l, q}
		head := len(q.out) == 0 // nothing before it is unacked: a copy cannot overtake
		q.out = append(q.out, d)
		c.deliver(d)
		if q.lined = len(q.waiting) > 0 && !q.isBusy(&c.group.cfg); q.lined {
			c.lined = append(c.lined, q)
		}
		if head && c.group.rnd.Float64() < c.group.cfg.Duplicate/2 {
			c.group.copy(l, "twin", c)
		}
		if c.group.cfg.Storm > 0 {
			c.group.storm(l, c)
		}
	}
}

func (c *consumer) deliver(d *delivery) {
	g := c.group
	letters := []letter{d.letter}
	if g.cfg.Tap != nil && d.queue != nil {
		letters = g.cfg.Tap(g.rnd, d.letter)
	}
	for i, l := range letters {
		g.number++
		if i == len(letters)-1 { // the letter itself, which its key waits for
			c.has[g.number] = d
		} else {
			g.open++
			c.has[g.number] = &delivery{letter: l}
		}
		g.counts["delivered"]++
		if f := g.letters[l.ID]; f != nil && g.first {
			if f.delivered++; f.delivered > 1 {
				g.counts["redelivered"]++
			}
		}
		g.trace.printf("deliver %s %s %s %d", l.ID, g.name, c.name, g.number)
		c.link.send(packet{Verb: deliver, Numbers: []int64{g.number}, Letters: []letter{l}})
	}
}

// copy delivers l once more, to another consumer if there is one, out of the order of its key: whoever is delivered it
// has to have nothing before it. Nobody misses a copy that is not acked.
func (g *group) copy(l letter, kind string, except *consumer) {
	others := slices.DeleteFunc(slices.Clone(g.consumers), func(c *consumer) bool { return c == except })
	if len(others) == 0 {
		others = g.consumers
	}
	if len(others) == 0 {
		return
	}
	l.Meta = maps.Clone(l.Meta)
	g.open++
	g.counts[kind]++
	if f := g.letters[l.ID]; f != nil {
		f.copied = true
	}
	others[g.rnd.IntN(len(others))].deliver(&delivery{letter: l})
}

// ack is an ack of a delivery; of one that is not the consumer's any more it comes too late, and nothing happens.
func (c *consumer) ack(number int64) {
	g := c.group
	d := c.has[number]
	g.trace.printf("ack %s %d", c.name, number)
	if d == nil || c.left {
		g.counts["late_ack"]++
		return
	}
	delete(c.has, number)
	g.open--
	defer c.pump()
	if d.queue == nil {
		return
	}
	q := d.queue
	q.out = slices.DeleteFunc(q.out, func(o *delivery) bool { return o == d })
	if len(q.out) == 0 && len(q.waiting) == 0 {
		q.owner = nil
		delete(g.queues, q.key)
	}
	g.line(q)
	if f := g.letters[d.letter.ID]; g.first && f != nil && !f.acked {
		f.acked = true
		g.counts["acked"]++
	}
	if g.rnd.Float64() < g.cfg.Duplicate/2 {
		g.late++
		time.AfterFunc(time.Duration(g.rnd.Int64N(int64(500*time.Millisecond))), func() {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.late--
			g.copy(d.letter, "again", nil)
		})
	}
}

// leave gives what the consumer has not acked to others, in order.
func (c *consumer) leave() {
	if c.left {
		return
	}
	c.left = true
	g := c.group
	g.consumers = slices.DeleteFunc(g.consumers, func(o *consumer) bool { return o == c })
	queues := map[*queue]bool{}
	for _, q := range c.lined {
		queues[q] = true
	}
	for _, d := range c.has {
		if d.queue == nil {
			g.open--
			continue
		}
		queues[d.queue] = true
	}
	g.counts["left_unacked"] += len(c.has)
	clear(c.has)
	// in an order that the seed repeats
	for _, q := range slices.SortedFunc(maps.Keys(queues), func(a, b *queue) int { return strings.Compare(a.key, b.key) }) {
		again := make([]letter, len(q.out), len(q.out)+len(q.waiting))
		for i, d := range q.out {
			again[i] = d.letter
		}
		if g.cfg.Reorder {
			g.rnd.Shuffle(len(again), func(i, j int) { again[i], again[j] = again[j], again[i] })
		}
		q.waiting, q.out, q.owner, q.lined = append(again, q.waiting...), nil, nil, false
		g.line(q)
	}
}
