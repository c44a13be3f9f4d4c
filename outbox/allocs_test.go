package outbox

import (
	"fmt"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/internal/pulse"
	"github.com/stretchr/testify/require"
)

type noPublisher struct{}

func (noPublisher) Publish(string, ...*message.Message) error { return nil }
func (noPublisher) Close() error                              { return nil }

// Without an observer, a Publish call allocates its messages and nothing else.
// Promise: G13.2
func TestAnObserverThatIsOffAllocatesNothing(t *testing.T) {
	r := &Relay{pub: noPublisher{}, pulse: new(pulse.Loop)}
	b := &batch{Relay: r}
	var call []*item
	for n := range 10 {
		call = append(call, &item{Entry: &Entry{OutboxMessage: Message{ID: fmt.Sprint(n), Topic: "t", Key: "k"}}})
	}
	messages := testing.AllocsPerRun(100, func() {
		all := make([]*message.Message, len(call))
		for i, it := range call {
			all[i] = ToWatermill(*it.Entry)
		}
		sink = all
	})
	require.Equal(t, messages, testing.AllocsPerRun(100, func() { _ = b.publishCall(call) }))
}

var sink []*message.Message
