package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/kinora-go/kinora/examples/reviews/review"
)

// againTopic is the topic of repeated messages. It has a runner of its own, as if the broker had
// delivered one message to two consumers of a group.
const againTopic = review.Category + ".again"

// copyHeader is the header with the kind of a repeated message: laterCopy or twinCopy.
const copyHeader = "demo_copy"

const (
	firstCopy = ""      // the message itself
	laterCopy = "later" // a copy, a while after the message was acked
	twinCopy  = "twin"  // a copy, at the same moment
)

const (
	laterMin  = 20 * time.Millisecond
	laterMax  = 200 * time.Millisecond
	laterTick = 5 * time.Millisecond
)

// repeater simulates a bad broker: it publishes a share of the messages twice, half of them at the
// same moment and half later. It is a service, so that it can publish the later copies: it starts
// after the runners and before the relay, and on stop it publishes the remaining copies.
type repeater struct {
	pub     message.Publisher
	share   float64
	running chan struct{}

	mu      sync.Mutex
	rnd     *rand.Rand
	waiting []postponed
}

type postponed struct {
	due time.Time
	msg *message.Message
}

func newRepeater(pub message.Publisher, share float64, seed uint64) *repeater {
	return &repeater{pub: pub, share: share, running: make(chan struct{}), rnd: rand.New(rand.NewPCG(seed, 1))}
}

// Publish returns when each message and each copy that is sent at the same moment is acked.
func (r *repeater) Publish(topic string, messages ...*message.Message) error {
	for _, m := range messages {
		how, after := r.draw()
		twin := make(chan error, 1)
		if how == twinCopy {
			go func() { twin <- r.pub.Publish(againTopic, copyOf(m, twinCopy)) }()
		} else {
			twin <- nil
		}
		if err := errors.Join(r.pub.Publish(topic, m), <-twin); err != nil {
			return err
		}
		if how == laterCopy {
			r.mu.Lock()
			r.waiting = append(r.waiting, postponed{time.Now().Add(after), copyOf(m, laterCopy)})
			r.mu.Unlock()
		}
	}
	return nil
}

// Close implements message.Publisher. The owner of the broker closes the broker.
func (r *repeater) Close() error { return nil }

func (r *repeater) draw() (how string, after time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch n := r.rnd.Float64(); {
	case n < r.share/2:
		return twinCopy, 0
	case n < r.share:
		return laterCopy, laterMin + time.Duration(r.rnd.Int64N(int64(laterMax-laterMin)))
	default:
		return firstCopy, 0
	}
}

func copyOf(m *message.Message, how string) *message.Message {
	c := m.Copy()
	c.Metadata.Set(copyHeader, how)
	return c
}

// Running implements kinora.Service.
func (r *repeater) Running() <-chan struct{} { return r.running }

// Run publishes the later copies when they are due, and the remaining ones when ctx ends.
func (r *repeater) Run(ctx context.Context) error {
	close(r.running)
	tick := time.NewTicker(laterTick)
	defer tick.Stop()
	for {
		select {
		case now := <-tick.C:
			if err := r.publishDue(now); err != nil {
				return err
			}
		case <-ctx.Done():
			return r.publishDue(time.Now().Add(laterMax))
		}
	}
}

func (r *repeater) publishDue(now time.Time) error {
	r.mu.Lock()
	var due []*message.Message
	left := r.waiting[:0]
	for _, p := range r.waiting {
		if p.due.After(now) {
			left = append(left, p)
		} else {
			due = append(due, p.msg)
		}
	}
	r.waiting = left
	r.mu.Unlock()
	if len(due) == 0 {
		return nil
	}
	return r.pub.Publish(againTopic, due...)
}
