package main

import (
	"maps"
	"slices"
	"strings"
	"time"
)

// keyHeader is the message header with the ordering key.
const keyHeader = "kinora_key"

// group is a set of consumers that share the deliveries: at any time, one consumer owns a key. The
// broker's lock guards it.
type group struct {
	*broker
	name      string
	first     bool // the broker's first group: its acks count
	queues    map[string]*queue
	consumers []*consumer
	orphans   []*queue // queues without an owner, because the group has no consumers
	open      int      // unacked messages and copies
}

// queue holds the waiting and the unacked messages of one key.
type queue struct {
	key       string
	waiting   []letter
	out       []*delivery
	owner     *consumer
	scheduled bool // is in its owner's ready list
}

type delivery struct {
	letter letter
	queue  *queue // nil for a copy
}

// consumer is one subscription.
type consumer struct {
	group *group
	link  *link
	name  string
	has   map[int64]*delivery
	ready []*queue // its queues with waiting messages
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
		q.scheduled = false
		g.schedule(q)
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
	g.schedule(q)
}

// schedule adds a queue to its owner's ready list, and assigns an owner if it has none.
func (g *group) schedule(q *queue) {
	if q.scheduled || len(q.waiting) == 0 || q.isBusy(&g.cfg) {
		return
	}
	q.scheduled = true
	if g.cfg.Delay > 0 && g.rnd.Float64() < g.cfg.Delay {
		g.delay(q)
		return
	}
	g.scheduleNow(q)
}

func (g *group) scheduleNow(q *queue) {
	if q.owner == nil {
		if len(g.consumers) == 0 {
			g.orphans = append(g.orphans, q)
			return
		}
		q.owner = g.consumers[g.rnd.IntN(len(g.consumers))]
	}
	q.owner.ready = append(q.owner.ready, q)
	q.owner.pump()
}

// pump delivers as many messages as the window permits.
func (c *consumer) pump() {
	for len(c.has) < c.group.cfg.Window && len(c.ready) > 0 {
		i := 0
		if c.group.cfg.Shuffle {
			i = c.group.rnd.IntN(len(c.ready))
		}
		q := c.ready[i]
		c.ready = slices.Delete(c.ready, i, i+1)
		l := q.waiting[0]
		q.waiting = q.waiting[1:]
		d := &delivery{l, q}
		head := len(q.out) == 0 // no earlier message is unacked, so a copy cannot overtake one
		q.out = append(q.out, d)
		c.deliver(d)
		if q.scheduled = len(q.waiting) > 0 && !q.isBusy(&c.group.cfg); q.scheduled {
			c.ready = append(c.ready, q)
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
		if i == len(letters)-1 { // the letter itself, whose ack the key waits for
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

// copy delivers l again, outside the order of its key, to another consumer if there is one. The
// caller ensures that no earlier message of the key is unacked. An unacked copy is not redelivered.
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

// ack handles an ack. An ack of a delivery that the consumer no longer has is late and has no
// effect.
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
	g.schedule(q)
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

// leave passes the consumer's unacked messages to other consumers, in order.
func (c *consumer) leave() {
	if c.left {
		return
	}
	c.left = true
	g := c.group
	g.consumers = slices.DeleteFunc(g.consumers, func(o *consumer) bool { return o == c })
	queues := map[*queue]bool{}
	for _, q := range c.ready {
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
	// in an order that the seed reproduces
	for _, q := range slices.SortedFunc(maps.Keys(queues), func(a, b *queue) int { return strings.Compare(a.key, b.key) }) {
		again := make([]letter, len(q.out), len(q.out)+len(q.waiting))
		for i, d := range q.out {
			again[i] = d.letter
		}
		if g.cfg.Reorder {
			g.rnd.Shuffle(len(again), func(i, j int) { again[i], again[j] = again[j], again[i] })
		}
		q.waiting, q.out, q.owner, q.scheduled = append(again, q.waiting...), nil, nil, false
		g.schedule(q)
	}
}
