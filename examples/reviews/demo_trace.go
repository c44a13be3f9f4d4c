package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// The trace records the steps of each delivery outside the process that makes them: the worker
// sends each step to the parent before it continues.

type stepKind string

const (
	received stepKind = "received" // a message is handed to a runner
	begun    stepKind = "begun"    // a unit of work begins
	running  stepKind = "running"  // a handler starts, inside the unit's transaction
	ended    stepKind = "ended"    // the unit has ended, committed or not
	acking   stepKind = "acking"   // the runner has acked, the broker has not received the ack yet
	claimed  stepKind = "claimed"  // a relay has claimed an entry
	marking  stepKind = "marking"  // a relay is about to mark the entry
)

// step is one step of a delivery or of an entry of the outbox.
type step struct {
	kind     stepKind
	delivery int64  // number of the delivery, from 1 for each process; claimed, marking: the entry
	what     string // received: the message id; begun, running, ended: the projector
	copy     string // received: the kind of copy, firstCopy for the message itself
}

// trace numbers the deliveries and writes their steps.
type trace struct {
	mu         sync.Mutex
	deliveries int64
	last       map[string]int64 // last delivery by message id
	write      func(step) error
	onError    func(error) // called when write fails
}

func (t *trace) step(s step) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.send(s)
}

func (t *trace) send(s step) {
	if err := t.write(s); err != nil {
		t.onError(err)
	}
}

func (t *trace) receive(m *message.Message) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.deliveries++
	if t.last == nil {
		t.last = map[string]int64{}
	}
	t.last[m.UUID] = t.deliveries
	t.send(step{received, t.deliveries, m.UUID, m.Metadata[copyHeader]})
	return t.deliveries
}

// steps writes one step for each delivery of a unit. A parked message is not a delivery.
func (t *trace) steps(kind stepKind, u provider.Unit) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, m := range u.Messages {
		if m.Parked == nil {
			t.send(step{kind: kind, delivery: t.last[m.ID], what: u.Projector})
		}
	}
}

// writeSteps writes each step as one line with one write, so that a SIGKILL loses no earlier step.
func writeSteps(w io.Writer) func(step) error {
	return func(s step) error {
		_, err := fmt.Fprintf(w, "%s %d %q %q\n", s.kind, s.delivery, s.what, s.copy)
		return err
	}
}

// readSteps reads the output of writeSteps to its end. The last line may be incomplete.
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
			return fmt.Errorf("invalid step %q of a worker: %w", line, err)
		}
		to(s)
	}
}

// tracedSubscriber numbers the messages that it delivers.
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
	handed.SetContext(m.Context())
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

// tracedUnits traces the begin and the end of units of work. It does not change them.
type tracedUnits[Tx any] struct {
	provider.Provider[Tx]
	trace *trace
}

func (u tracedUnits[Tx]) Do(ctx context.Context, of provider.Unit,
	run func(context.Context, Tx, provider.Found) (provider.Closing, error),
) error {
	u.trace.steps(begun, of)
	defer u.trace.steps(ended, of)
	return u.Provider.Do(ctx, of, func(ctx context.Context, tx Tx, found provider.Found) (provider.Closing, error) {
		u.trace.steps(running, of)
		return run(ctx, tx, found)
	})
}

// tracedOutbox traces when entries are claimed and when they are about to be marked.
type tracedOutbox struct {
	provider.Outbox
	trace *trace
}

func (o tracedOutbox) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) ([]outbox.Entry, error) {
	entries, err := provider.ClaimEntries(ctx, o.Outbox, q, t)
	for _, e := range entries {
		o.trace.step(step{kind: claimed, delivery: e.Seq})
	}
	return entries, err
}

func (o tracedOutbox) MarkEntries(ctx context.Context, marks []outbox.Mark) ([]int64, error) {
	for _, m := range marks {
		o.trace.step(step{kind: marking, delivery: m.Seq})
	}
	return o.Outbox.MarkEntries(ctx, marks)
}
