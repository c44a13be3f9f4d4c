package main

import (
	"encoding/json"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// brokerConfig configures the broker's behaviour towards its clients.
type brokerConfig struct {
	// Groups are the consumer groups; each receives every message.
	Groups []string
	// Window limits the unacked deliveries to one consumer. Zero means 64.
	Window int
	// Duplicate is the fraction of deliveries that are repeated: half of them at once to another
	// consumer, half some time after the ack.
	Duplicate float64
	// LoseReply is the fraction of successful publications whose reply is not sent.
	LoseReply float64
	Slow      time.Duration // upper bound of a publication's delay
	// Least is the lower bound of a publication's delay; less than Slow.
	Least time.Duration
	// Reorder redelivers in random order, so handlers are promised no order.
	Reorder bool
	// Tap replaces a letter on delivery. It returns the letter last, preceded by letters that are
	// never redelivered.
	Tap func(rnd *rand.Rand, l letter) []letter
	// Storm is how often each message is delivered at once.
	Storm int
	// Serial delivers the next message of a key only after the ack of the previous one.
	Serial  bool
	Shuffle bool // serve the keys in random order
	// Delay is the fraction of each key's next messages that are delayed. It requires Serial.
	Delay float64
	// RefuseOne returns true if a publication with this letter fails.
	RefuseOne func(l letter) bool
	// Refuse returns the error of a publication that fails, with nothing published, or nil.
	Refuse func(rnd *rand.Rand, topic string) error
	// Own, if not empty, is what the keys of the workload begin with. Letters with other keys are counted as "foreign", and
	// not delivered.
	Own string
}

// broker keeps messages in order by key and delivers each to every group at least once. Messages
// that are unacked when their consumer disconnects are redelivered in order to other consumers. The
// broker traces its work and records violations.
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
	letters map[string]*messageState
	last    map[string]int // by stream: the highest published n
	number  int64
	counts  map[string]int
	wrong   []string // messages published out of order
	late    int      // scheduled copies that are not yet delivered
	ended   bool
}

// messageState records the progress of one message.
type messageState struct {
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
		links: map[*link]string{}, letters: map[string]*messageState{}, last: map[string]int{}, counts: map[string]int{},
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

// serve serves one connection. When it ends, the consumer's unacked messages go to other consumers.
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

// publish accepts letters and replies. It returns false if the publisher must get no reply.
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

// accept checks that first publications are in order, according to the letter's payload, and
// enqueues the letter in every group.
func (b *broker) accept(from string, l letter) {
	if !strings.HasPrefix(l.Meta[keyHeader], b.cfg.Own) {
		b.counts["foreign"]++
		return
	}
	f := b.letters[l.ID]
	if f == nil {
		f = &messageState{}
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

// disconnect closes the connections of a process, as a broker does to a client that it has not
// heard from for too long. The process's unacked messages go to other consumers.
func (b *broker) disconnect(name string) {
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

// unacked returns the ids of the messages that a process has not acked.
func (b *broker) unacked(name string) (ids []string) {
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

// areAcked reports whether all these messages are acked, by any process.
func (b *broker) areAcked(ids []string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !slices.ContainsFunc(ids, func(id string) bool { f := b.letters[id]; return f == nil || !f.acked })
}

// idle returns the number of messages, and whether all of them and their copies are acked.
func (b *broker) idle() (messages int, idle bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	idle = b.late == 0
	for _, g := range b.groups {
		idle = idle && g.open == 0
	}
	return len(b.letters), idle
}

// count returns how often an event has happened; "acked" counts each message once.
func (b *broker) count(what string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.counts[what]
}
