package main

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/examples/distributed/brokers"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
)

// words counts the words that services print.
type words struct {
	mu    sync.Mutex
	count map[string]int
}

func (w *words) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.count[string(bytes.TrimSpace(p))]++
	return len(p), nil
}

func (w *words) printed(word string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.count[word]
}

// inProcess runs relays and runners in this process.
type inProcess struct {
	*testing.T
	*ledger
	broker brokers.Memory
	words
}

// start starts a relay or a runner. The function that it returns ends it, at once and without an error.
func (p *inProcess) start(role string) (stop func()) {
	p.Helper()
	log := slog.New(slog.DiscardHandler)
	var service kinora.Service
	var err error
	if role == relayRole {
		publisher, e := p.broker.Publisher()
		require.NoError(p, e)
		service, err = newRelay(p.db, publisher, "", log, p)
	} else {
		sub, e := p.broker.Subscriber("")
		require.NoError(p, e)
		p.Cleanup(func() { require.NoError(p, sub.Close()) })
		service, err = newRunner(p.db, projector.Subscribe(redelivering{sub, 10}, topic), log, p)
	}
	require.NoError(p, err)
	group, err := kinora.Start(p.Context(), service)
	require.NoError(p, err)
	stop = sync.OnceFunc(func() {
		if err := group.Stop(); err != nil {
			p.Error(err)
		}
	})
	p.Cleanup(stop)
	return stop
}

// await waits until a read model has so many events.
func (p *inProcess) await(table string, events int) {
	p.Helper()
	patience.Until(p, func() bool {
		c, err := p.compare(p.Context(), table)
		return err == nil && c.applied >= events
	}, "%d events in %s", events, table)
}

// TestMemory: a broker without storage loses what no runner has subscribed to, and what a runner that
// ends has not acked. The log has them: balances is exact, and in order.
func TestMemory(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, &postgres.Config{Route: outbox.ByCategory}, tables)
	p := &inProcess{T: t, ledger: &ledger{db: db, amounts: map[string][]int64{}}, broker: brokers.NewMemory(), words: words{count: map[string]int{}}}
	t.Cleanup(func() { require.NoError(t, p.broker.Close()) })
	relay, stopOther := p.start(relayRole), p.start(relayRole)
	defer stopOther()
	require.NoError(t, p.appendTo(t.Context(), 20, 5))
	lost := p.events
	patience.Until(t, func() bool { // without a subscriber
		n, err := db.StatusCounts(t.Context(), outbox.Published)
		return err == nil && n[outbox.Published] == int64(lost)
	}, "%d published messages", lost)

	runner := p.start(runnerRole)
	p.start(runnerRole)
	p.await("balances", lost)
	for round := range 8 {
		require.NoError(t, p.appendTo(t.Context(), 20, 5))
		switch round {
		case 2:
			runner()
			runner = p.start(runnerRole)
		case 4:
			relay()
			relay = p.start(relayRole)
		case 6:
			runner()
		}
	}
	p.await("balances", p.events)
	both, err := p.compare(context.WithoutCancel(t.Context()), "balances")
	require.NoError(t, err)
	require.Equal(t, comparison{applied: p.events}, both)
	require.Positive(t, p.printed(skippedTwice), "messages were delivered again")
	broker, err := p.compare(t.Context(), "deliveries")
	require.NoError(t, err)
	require.LessOrEqual(t, broker.applied, p.events-lost, "the broker has lost what was published to no runner")
	require.Len(t, broker.wrong, 20)
}
