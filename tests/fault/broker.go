package main

import (
	"encoding/json"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"
)

// brokerConfig says what a broker does to those who use it.
type brokerConfig struct {
	Groups    []string                                 // each gets every message
	Window    int                                      // deliveries to a consumer that are not acked; zero means 64
	Duplicate float64                                  // share of deliveries that are repeated: half of these at once and elsewhere, half some time after the ack
	LoseReply float64                                  // share of publications that succeed and of which the publisher hears nothing
	Slow      time.Duration                            // each publication takes up to this long
	Least     time.Duration                            // and at least this long, which is less
	Reorder   bool                                     // what is delivered again comes in any order: then none is promised to handlers
	Tap       func(rnd *rand.Rand, l letter) []letter  // what is delivered in place of a letter: the last one; others before it, never again
	Storm     int                                      // each message is delivered so often, at once
	Serial    bool                                     // the next of a key waits for the ack of the one before
	Shuffle   bool                                     // keys are not served in turn
	Delay     float64                                  // share of what comes next of a key that is late; wants Serial
	RefuseOne func(l letter) bool                      // why a publication with this one fails
	Refuse    func(rnd *rand.Rand, topic string) error // why a publication fails, nothing published
}

// broker keeps messages in order by key, and delivers each to every group at least once: what is not acked when its
// consumer goes is delivered again, in order, to others. It writes down what it sees, and what is wrong with it.
type broker struct {
	cfg    brokerConfig
	socket string
	listen net.Listener
	trace  *trace
	all    sync.WaitGroup

	mu      sync.Mutex
	rnd     *rand.Rand
	groups  map[string]*group
	links   map[*link]string
	letters map[string]*fate
	last    map[string]int // by stream: the highest n that is published
	number  int64
	counts  map[string]int
	wrong   []string // what was published out of order
	late    int      // copies that are yet to come
	ended   bool
}

// fate is what became of a message so far.
type fate struct {
	published, delivered int
	acked                bool // by the first group
	copied               bool // by the broker itself
}

func newBroker(socket string, seed uint64, t *trace, cfg brokerConfig) (*broker, error) {
	l, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	if cfg.Window == 0 {
		cfg.Window = 64
	}
	b := &broker{
		cfg: cfg, socket: socket, listen: l, trace: t, rnd: rand.New(rand.NewPCG(seed, 1)), groups: map[string]*group{},
		links: map[*link]string{}, letters: map[string]*fate{}, last: map[string]int{}, counts: map[string]int{},
	}
	for _, name := range cfg.Groups {
		b.groups[name] = newGroup(b, name, len(b.groups) == 0)
	}
	b.all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			b.all.Go(func() { b.serve(newLink(conn)) })
		}
	})
	return b, nil
}

func (b *broker) close() {
	_ = b.listen.Close()
	b.mu.Lock()
	b.ended = true
	for l := range b.links {
		l.close()
	}
	b.mu.Unlock()
	b.all.Wait()
}

// serve serves one connection. What its consumer has not acked when it ends goes to others.
func (b *broker) serve(l *link) {
	defer l.close()
	var consumers []*consumer
	defer func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.links, l)
		for _, c := range consumers {
			c.leave()
		}
	}()
	for {
		p, err := l.read()
		if err != nil {
			return
		}
		switch p.Verb {
		case hello:
			b.mu.Lock()
			b.links[l] = p.Name
			if b.ended {
				l.close()
			}
			b.mu.Unlock()
		case subscribe:
			b.mu.Lock()
			if g := b.groups[p.Group]; g != nil {
				consumers = append(consumers, g.join(l, b.links[l]))
			}
			b.mu.Unlock()
		case done:
			b.mu.Lock()
			for _, c := range consumers {
				for _, n := range p.Numbers {
					c.ack(n)
				}
			}
			b.mu.Unlock()
		case publish:
			if !b.publish(l, p) {
				return
			}
		}
	}
}

// publish takes letters, and answers. It returns false where the publisher is to hear nothing.
func (b *broker) publish(l *link, p packet) bool {
	b.mu.Lock()
	name, lose, slow := b.links[l], b.rnd.Float64() < b.cfg.LoseReply, time.Duration(0)
	var refused error
	if b.cfg.Slow > 0 {
		slow = b.cfg.Least + time.Duration(b.rnd.Int64N(int64(b.cfg.Slow-b.cfg.Least)))
		if slow > lease {
			b.counts["outlived"]++
		}
	}
	if b.cfg.Refuse != nil {
		refused = b.cfg.Refuse(b.rnd, p.Topic)
	}
	if b.cfg.RefuseOne != nil && slices.ContainsFunc(p.Letters, b.cfg.RefuseOne) {
		refused = errRefused
		b.counts["refused"]++
	}
	b.mu.Unlock()
	time.Sleep(slow / 2)
	if refused != nil {
		return false
	}
	b.mu.Lock()
	for _, one := range p.Letters {
		b.accept(name, one)
	}
	if lose {
		b.counts["lost_reply"]++
	}
	b.mu.Unlock()
	time.Sleep(slow / 2)
	if !lose {
		l.send(packet{Verb: published})
	}
	return !lose
}

// accept checks that first publications are in order, by what the letter's payload says, and hands it to the groups.
func (b *broker) accept(from string, l letter) {
	f := b.letters[l.ID]
	if f == nil {
		f = &fate{}
		b.letters[l.ID] = f
		var m moved
		if err := json.Unmarshal(l.Payload, &m); err != nil || m.N != b.last[m.Stream]+1 {
			b.wrong = append(b.wrong, m.Stream)
			b.trace.printf("misordered %s %s %d after %d", l.ID, m.Stream, m.N, b.last[m.Stream])
		}
		b.last[m.Stream] = max(b.last[m.Stream], m.N)
	} else {
		b.counts["republished"]++
	}
	f.published++
	b.counts["published"]++
	b.trace.printf("publish %s %s %s", l.ID, from, l.Meta[keyHeader])
	for _, g := range b.groups {
		g.enqueue(l)
	}
}

// expel hangs up on a process, as a broker does on one that it has not heard of for long: what it has goes to others.
func (b *broker) expel(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for l, who := range b.links {
		if who != name {
			continue
		}
		l.close()
		for _, g := range b.groups {
			for _, c := range slices.Clone(g.consumers) {
				if c.link == l {
					c.leave()
				}
			}
		}
	}
}

// holding are the ids of what a process has not acked.
func (b *broker) holding(name string) (ids []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, g := range b.groups {
		for _, c := range g.consumers {
			if c.name == name {
				for _, d := range c.has {
					ids = append(ids, d.letter.ID)
				}
			}
		}
	}
	return ids
}

// areAcked tells whether all of these are, by whomever.
func (b *broker) areAcked(ids []string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !slices.ContainsFunc(ids, func(id string) bool { f := b.letters[id]; return f == nil || !f.acked })
}

// idle tells how many messages there have been, and whether all of them, and their copies, are acked.
func (b *broker) idle() (messages int, idle bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	idle = b.late == 0
	for _, g := range b.groups {
		idle = idle && g.open == 0
	}
	return len(b.letters), idle
}

// count is how often something has happened so far; "acked" messages count once.
func (b *broker) count(what string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.counts[what]
}
