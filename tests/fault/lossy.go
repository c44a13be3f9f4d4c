package main

import (
	"context"
	"hash/fnv"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// What a lossy broker does to deliveries, in percent of the messages, and for how long.
const (
	lossyLoses   = 5
	lossyDelays  = 10
	lossyDoubles = 30
	lossyGrace   = time.Second // of the runners
	lossyLeast   = 3 * lossyGrace / 2
	lossyMost    = 5 * lossyGrace / 2
)

// lossy is a subscriber between the broker and a runner. It loses some messages: the broker gets
// their acks. It delays others until the reader of the log has completed them, and delivers some
// twice. The message's id decides, so a redelivery to another process suffers the same.
type lossy struct {
	w   *work
	sub *subscriber
	all sync.WaitGroup
}

func newLossy(w *work, sub *subscriber) *lossy { return &lossy{w: w, sub: sub} }

// Subscribe implements message.Subscriber.
func (l *lossy) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	from, err := l.sub.Subscribe(ctx, topic)
	if err != nil {
		return nil, err
	}
	to := make(chan *message.Message)
	l.all.Go(func() {
		defer close(to)
		var late sync.WaitGroup
		defer late.Wait()
		send := func(m *message.Message) {
			select {
			case to <- m:
			case <-ctx.Done():
			}
		}
		for m := range from {
			switch fate := fateOf(m.UUID, "once"); {
			case fate < lossyLoses:
				l.w.trace.printf("lost %s", m.UUID)
				m.Ack()
				continue
			case fate < lossyLoses+lossyDelays:
				l.w.trace.printf("delayed %s", m.UUID)
				late.Go(func() {
					pause(ctx, lossyLeast+rand.N(lossyMost-lossyLeast))
					send(m)
				})
			default:
				send(m)
			}
			if fateOf(m.UUID, "twice") < lossyDoubles {
				again := m.Copy()
				l.w.trace.printf("doubled %s", m.UUID)
				late.Go(func() {
					pause(ctx, rand.N(lossyMost))
					send(again)
				})
			}
		}
	})
	return to, nil
}

// Close implements message.Subscriber.
func (l *lossy) Close() error {
	l.all.Wait()
	return l.sub.Close()
}

// fateOf returns a number below 100.
func fateOf(id, salt string) int {
	h := fnv.New32a()
	_, _ = h.Write([]byte(salt + id))
	return int(h.Sum32() % 100)
}
