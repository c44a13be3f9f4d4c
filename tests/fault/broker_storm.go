package main

import (
	"maps"
	"time"
)

// storm delivers l Storm times, to all consumers in turn. No earlier message of its key is unacked.
// Half of the copies have no key, so that the copies in one process do not wait for each other.
// Other groups get it twice.
func (g *group) storm(l letter, first *consumer) {
	times := g.cfg.Storm
	g.letters[l.ID].copied = true
	if !g.first {
		times = min(times, 2)
	}
	bare := letter{l.ID, l.Payload, maps.Clone(l.Meta)}
	delete(bare.Meta, keyHeader)
	delete(bare.Meta, "kinora_stream")
	to := 0
	for i, c := range g.consumers {
		if c == first {
			to = i
		}
	}
	for i := 1; i < times; i++ {
		one := l
		if i%4 >= 2 {
			one = bare
		}
		g.open++
		g.counts["storm"]++
		g.consumers[(to+i)%len(g.consumers)].deliver(&delivery{letter: one})
	}
}

// isBusy reports whether no further message of the key may be delivered now.
func (q *queue) isBusy(cfg *brokerConfig) bool {
	return (cfg.Storm > 0 || cfg.Serial) && len(q.out) > 0
}

// copies returns the ids of the messages that the broker itself delivered more than once.
func (b *broker) copies() map[string]bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	ids := map[string]bool{}
	for id, f := range b.letters {
		if f.copied {
			ids[id] = true
		}
	}
	return ids
}

// leastDelivered returns the smallest number of deliveries of a message to the first group.
func (b *broker) leastDelivered() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	least := -1
	for _, f := range b.letters {
		if least < 0 || f.delivered < least {
			least = f.delivered
		}
	}
	return least
}

// delay schedules a queue after a random delay.
func (g *group) delay(q *queue) {
	g.counts["delayed"]++
	time.AfterFunc(time.Duration(g.rnd.Int64N(int64(300*time.Millisecond))), func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if q.owner != nil && q.owner.left {
			q.owner = nil
		}
		g.scheduleNow(q)
	})
}
