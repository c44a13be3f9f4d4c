package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

// The trace is what happened to each delivery, written down outside of the process it happened in: a step is
// on its way to the parent before the worker does what comes after it.

type stepKind string

const (
	received stepKind = "received" // a message is handed to a runner
	begun    stepKind = "begun"    // a unit of work begins
	running  stepKind = "running"  // a handler starts, inside of the unit's transaction
	ended    stepKind = "ended"    // the unit is over, committed or not
	acking   stepKind = "acking"   // the runner is done with the message; the broker does not know yet
	claimed  stepKind = "claimed"  // a relay has claimed an entry
	marking  stepKind = "marking"  // and is about to mark it
)

// step is one thing that happened to a delivery, or to an entry of the outbox.
type step struct {
	kind     stepKind
	delivery int64  // counted from 1 in the life of a worker; claimed, marking: the entry
	what     string // received: the message id; begun, running, ended: the projector
	copy     string // received: how the message was repeated, firstCopy for the message itself
}

// trace numbers deliveries and tells write what happens to them.
type trace struct {
	mu         sync.Mutex
	deliveries int64
	write      func(step) error
	broken     func(error) // nobody hears us any more
}

func (t *trace) step(s step) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.send(s)
}

func (t *trace) send(s step) {
	if err := t.write(s); err != nil {
		t.broken(err)
	}
}

func (t *trace) receive(m *message.Message) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.deliveries++
	t.send(step{received, t.deliveries, m.UUID, m.Metadata[copyHeader]})
	return t.deliveries
}

// writeSteps writes a line for each step, in one write each: what was written before a SIGKILL is all there.
func writeSteps(w io.Writer) func(step) error {
	return func(s step) error {
		_, err := fmt.Fprintf(w, "%s %d %q %q\n", s.kind, s.delivery, s.what, s.copy)
		return err
	}
}

// readSteps reads what writeSteps wrote, to the end. The last line may be cut off.
func readSteps(r io.Reader, to func(step)) error {
	in := bufio.NewReader(r)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			if err == io.EOF {
				return nil
			}
			return err
		}
		var s step
		if _, err := fmt.Sscanf(line, "%s %d %q %q\n", &s.kind, &s.delivery, &s.what, &s.copy); err != nil {
			return fmt.Errorf("the worker said %q: %w", line, err)
		}
		to(s)
	}
}

type deliveryKey struct{}

// tracedSubscriber hands messages on with the number of their delivery in their context.
type tracedSubscriber struct {
	message.Subscriber
	trace *trace
}

func (s tracedSubscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	in, err := s.Subscriber.Subscribe(ctx, topic)
	if err != nil {
		return nil, err
	}
	out := make(chan *message.Message)
	go func() {
		defer close(out)
		for m := range in {
			s.deliver(ctx, m, out)
		}
	}()
	return out, nil
}

func (s tracedSubscriber) deliver(ctx context.Context, m *message.Message, out chan<- *message.Message) {
	n := s.trace.receive(m)
	handed := m.Copy()
	handed.SetContext(context.WithValue(m.Context(), deliveryKey{}, n))
	select {
	case out <- handed:
	case <-ctx.Done():
		return
	}
	select {
	case <-handed.Acked():
	case <-handed.Nacked():
		m.Nack()
		return
	case <-ctx.Done(): // a runner acks before it ends its subscription
		select {
		case <-handed.Acked():
		default:
			return
		}
	}
	s.trace.step(step{kind: acking, delivery: n})
	m.Ack()
}

// demoUnit is a unit of work with all that a runner asks of it: a wrapper must not hide any of these.
type demoUnit[Tx any] interface {
	projector.UnitOfWork[Tx]
	projector.Journal
	projector.ParkedInspector
	marker.Keeper
}

// tracedUnit tells when units of work begin and end. It adds nothing to them and passes on what they promise.
type tracedUnit[Tx any] struct {
	demoUnit[Tx]
	trace *trace
}

func (u tracedUnit[Tx]) Do(ctx context.Context, w projector.Work,
	apply func(context.Context, Tx, []int) ([]outbox.Message, error),
) error {
	n, _ := ctx.Value(deliveryKey{}).(int64)
	u.trace.step(step{kind: begun, delivery: n, what: w.Projector})
	defer u.trace.step(step{kind: ended, delivery: n, what: w.Projector})
	if apply == nil {
		return u.demoUnit.Do(ctx, w, nil)
	}
	return u.demoUnit.Do(ctx, w, func(ctx context.Context, tx Tx, fresh []int) ([]outbox.Message, error) {
		u.trace.step(step{kind: running, delivery: n, what: w.Projector})
		return apply(ctx, tx, fresh)
	})
}

// tracedOutbox tells when entries are claimed, and when they are about to be marked.
type tracedOutbox struct {
	outbox.Store
	trace *trace
}

var _ outbox.BatchClaimer = tracedOutbox{}

func (o tracedOutbox) ClaimEntries(ctx context.Context, q outbox.Query, t claim.Terms) ([]outbox.Entry, error) {
	entries, err := outbox.Claim(ctx, o.Store, q, t)
	for _, e := range entries {
		o.trace.step(step{kind: claimed, delivery: e.Seq})
	}
	return entries, err
}

func (o tracedOutbox) MarkEntries(ctx context.Context, marks []outbox.Mark) ([]int64, error) {
	for _, m := range marks {
		o.trace.step(step{kind: marking, delivery: m.Seq})
	}
	return o.Store.MarkEntries(ctx, marks)
}
