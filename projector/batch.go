package projector

import (
	"cmp"
	"context"

	"github.com/kinora-go/kinora/provider"
)

// batch has the events that a handler of OnBatch gets in its next call.
type batch struct {
	handler  *provider.Handler
	replayed bool // see Replaying
	events   []any
	messages []int           // of each event: its message in the unit
	handlers []int           // of each event: the index of the handler in its message
	keys     map[string]bool // of the messages
}

// flushBefore runs the handlers of OnBatch that wait, if one of them has an event with the key of message
// i, and h is another one, or one of them has been replayed and the other has not.
func (u *unit) flushBefore(ctx context.Context, call caller, i int, m *inbound, h *provider.Handler) error {
	for _, b := range u.batches {
		if b.keys[m.orderedBy()] && (b.handler.Name != h.Name || b.replayed != m.replayed) {
			if err := u.flush(ctx, call); err != nil {
				return err
			}
			u.at.Store(int64(i))
			u.begin(i)
			return nil
		}
	}
	return nil
}

// orderedBy returns the key whose messages keep their order: for a message without a key, its id.
func (m *inbound) orderedBy() string { return cmp.Or(m.key, "\x00"+m.id) }

// collect adds the event of message i to the batch of its handler j.
func (u *unit) collect(ctx context.Context, i int, m *inbound, j int, take taker) error {
	each := u.runner.cfg.Timeout
	if !u.timer.Reset(sum(each, each)) {
		return errBegin
	}
	u.handler.Store(&m.handlers[j]) // a decoder that does not return is the fault of the message
	u.over.Store(true)
	e, err := take(u.types, m)
	u.over.Store(ctx.Err() != nil)
	u.timer.Reset(u.limit())
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return err
	}
	var b *batch
	for _, one := range u.batches {
		if one.handler.Name == m.handlers[j].Name && one.replayed == m.replayed {
			b = one
		}
	}
	if b == nil {
		b = &batch{handler: &m.handlers[j], replayed: m.replayed, keys: map[string]bool{}}
		u.batches = append(u.batches, b)
	}
	b.events, b.messages, b.handlers = append(b.events, e), append(b.messages, i), append(b.handlers, j)
	b.keys[m.orderedBy()] = true
	return nil
}

// noMessage is the argument of Found.Begin for statements that belong to several messages.
const noMessage = -1

// flush runs the handlers of OnBatch that wait, in the order of their first events.
func (u *unit) flush(ctx context.Context, call caller) error {
	for _, b := range u.batches {
		at := noMessage
		if len(b.messages) == 1 {
			at = b.messages[0]
		}
		u.at.Store(int64(at))
		u.begin(at)
		_, took, err := u.call(ctx, call, b.handler, b.replayed, nil, b.events)
		if err != nil {
			return err
		}
		for k, i := range b.messages {
			u.note(u.msgs[i], b.handlers[k], false, took)
		}
	}
	u.batches = nil
	u.at.Store(-1)
	u.handler.Store(nil)
	return nil
}
