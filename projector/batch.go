package projector

import (
	"context"

	"github.com/kinora-go/kinora/provider"
)

// batch has the events that a handler of OnBatch gets in its next call.
type batch struct {
	handler  *provider.Handler
	events   []any
	messages []int           // of each event: its message in the unit
	handlers []int           // of each event: the index of the handler in its message
	keys     map[string]bool // of the messages
}

// flushBefore runs the handlers of OnBatch that wait, if one of them has an event with the key of message
// i, and h is another one.
func (u *unit) flushBefore(ctx context.Context, call caller, i int, m *inbound, h *provider.Handler) error {
	for _, b := range u.batches {
		if b.keys[m.key] && b.handler.Name != h.Name {
			err := u.flush(ctx, call)
			u.at.Store(int64(i))
			u.begin(i)
			return err
		}
	}
	return nil
}

// collect adds the event of message i to the batch of its handler j.
func (u *unit) collect(i int, m *inbound, j int, take taker) error {
	e, err := take(u.types, m)
	if err != nil {
		return err
	}
	var b *batch
	for _, one := range u.batches {
		if one.handler.Name == m.handlers[j].Name {
			b = one
		}
	}
	if b == nil {
		b = &batch{handler: &m.handlers[j], keys: map[string]bool{}}
		u.batches = append(u.batches, b)
	}
	b.events, b.messages, b.handlers = append(b.events, e), append(b.messages, i), append(b.handlers, j)
	if m.key != "" {
		b.keys[m.key] = true
	}
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
		_, took, err := u.call(ctx, call, b.handler, nil, b.events)
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
