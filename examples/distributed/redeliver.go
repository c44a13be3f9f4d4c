package main

import (
	"context"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
)

// redelivering nacks each message number every, twice every, and so on, after the runner has applied
// and acked it. So the broker delivers it again. Zero means never.
type redelivering struct {
	message.Subscriber
	every int
}

func (r redelivering) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	in, err := r.Subscriber.Subscribe(ctx, topic)
	if err != nil || r.every == 0 {
		return in, err
	}
	out := make(chan *message.Message)
	go func() {
		defer close(out)
		var waiting sync.WaitGroup
		defer waiting.Wait()
		n := 0
		for m := range in {
			n++
			given := m.Copy()
			given.SetContext(m.Context())
			select {
			case out <- given:
			case <-m.Context().Done():
				continue
			case <-ctx.Done():
				continue
			}
			again := n%r.every == 0
			waiting.Go(func() { answer(m, given, again) })
		}
	}()
	return out, nil
}

// answer passes the ack of the copy to the broker, or a nack if the message is to be delivered again.
func answer(m, given *message.Message, again bool) {
	select {
	case <-given.Acked():
		if again {
			m.Nack()
		} else {
			m.Ack()
		}
	case <-given.Nacked():
		m.Nack()
	case <-m.Context().Done():
	}
}
