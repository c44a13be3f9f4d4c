package unit

import (
	"context"

	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// batch has the events that a handler of OnBatch gets in its next call.
type batch struct {
	handler  *provider.Handler
	replayed bool
	events   []any
	messages []int           // of each event: its message in the unit
	handlers []int           // of each event: the index of the handler in its message
	keys     map[string]bool // of the messages
}

// flushBefore runs the handlers of OnBatch that wait, if one of them has an event with the key of message
// i, and h is another one, or one of them has been replayed and the other has not.
func (a *attempt) flushBefore(ctx context.Context, call model.Call, i int, m *model.Message, h *provider.Handler) error {
	for _, b := range a.batches {
		if b.keys[m.OrderedBy()] && (b.handler.Name != h.Name || b.replayed != m.Replayed) {
			if err := a.flush(ctx, call); err != nil {
				return err
			}
			a.at.Store(int64(i))
			a.begin(i)
			return nil
		}
	}
	return nil
}

// collect adds the event of message i to the batch of its handler j.
func (a *attempt) collect(ctx context.Context, i int, m *model.Message, j int, take model.Take) error {
	each := a.Host.Timeout
	if !a.timer.Reset(Sum(each, each)) {
		return errBegin
	}
	a.handler.Store(&m.Handlers[j]) // a decoder that does not return is the fault of the message
	a.over.Store(true)
	e, err := take(a.Projector.Types, m)
	a.over.Store(ctx.Err() != nil)
	a.timer.Reset(a.limit())
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return err
	}
	var b *batch
	for _, one := range a.batches {
		if one.handler.Name == m.Handlers[j].Name && one.replayed == m.Replayed {
			b = one
		}
	}
	if b == nil {
		b = &batch{handler: &m.Handlers[j], replayed: m.Replayed, keys: map[string]bool{}}
		a.batches = append(a.batches, b)
	}
	b.events, b.messages, b.handlers = append(b.events, e), append(b.messages, i), append(b.handlers, j)
	b.keys[m.OrderedBy()] = true
	return nil
}

// noMessage is the argument of Found.Begin for statements that belong to several messages.
const noMessage = -1

// flush runs the handlers of OnBatch that wait, in the order of their first events.
func (a *attempt) flush(ctx context.Context, call model.Call) error {
	for _, b := range a.batches {
		at := noMessage
		if len(b.messages) == 1 {
			at = b.messages[0]
		}
		a.at.Store(int64(at))
		a.begin(at)
		_, took, err := a.call(ctx, call, b.handler, b.replayed, nil, b.events)
		if err != nil {
			return err
		}
		for k, i := range b.messages {
			a.note(a.unit.Messages[i], b.handlers[k], false, took)
		}
	}
	a.batches = nil
	a.at.Store(-1)
	a.handler.Store(nil)
	return nil
}
