package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
)

// TestMain is also the main function of the processes that tests start.
func TestMain(m *testing.M) {
	drain = patience.Limit()
	if len(os.Args) > 1 && os.Args[1] == kafkaRole {
		os.Exit(serveKafka(os.Args[2:]))
	}
	if len(os.Args) > 1 && slices.Contains([]string{relayRole, runnerRole, natsRole, demoRole}, os.Args[1]) {
		if os.Args[1] == demoRole {
			os.Args = append(os.Args[:1], os.Args[2:]...)
		}
		os.Exit(command(os.Args[1:]))
	}
	code := m.Run()
	if code == 0 {
		// The tests' PostgreSQL ends with this process.
		if err := goleak.Find(goleak.IgnoreAnyFunction("os/exec.(*Cmd).Wait"), goleak.IgnoreAnyFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// demoRole runs the whole example in a process.
const demoRole = "demo"

// output collects what processes log, for a test that fails.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

// testProcesses ends its processes when the test ends.
func testProcesses(t *testing.T) *processes {
	t.Helper()
	var logs output
	ps, err := newProcesses(&logs)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := ps.stopAll(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			logs.mu.Lock()
			defer logs.mu.Unlock()
			text := logs.text.Bytes()
			t.Logf("the processes logged:\n%s", text[max(0, len(text)-8000):])
		}
	})
	return ps
}

// newScenario returns a scenario with a new database. takeover is the shortest that the broker allows.
func newScenario(t *testing.T, ps *processes, broker string, takeover time.Duration) *scenario {
	t.Helper()
	dsn := postgrestest.DSN(t, &postgres.Config{Route: outbox.ByCategory}, tables)
	return scenarioOn(t, ps, dsn, broker, takeover)
}

func scenarioOn(t *testing.T, ps *processes, dsn, broker string, takeover time.Duration) *scenario {
	t.Helper()
	db, err := openDB(t.Context(), dsn)
	require.NoError(t, err)
	t.Cleanup(db.Close)
	t.Cleanup(func() { _ = ps.stopAll() }) // before the database is dropped
	return &scenario{
		processes: ps, ledger: &ledger{db: db, amounts: map[string][]int64{}}, accounts: 20, services: 2, out: io.Discard,
		options: options{dsn: dsn, broker: broker, takeover: takeover, redeliver: 10},
	}
}

// finish runs a scenario and checks the read models. The one of the broker alone must have each event
// once. If the broker keeps the order of keys, so must it.
func (s *scenario) finish(t *testing.T, ordered bool) {
	t.Helper()
	begin := time.Now()
	require.NoError(t, s.run(patience.Context(t), longtest.Or(1000, 10_000)))
	require.NoError(t, s.stopAll())
	broker, err := s.compare(t.Context(), "deliveries")
	require.NoError(t, err)
	require.Empty(t, broker.wrong)
	t.Logf("%d events in %s; taken over %d, skipped %d, from the log %d; accounts out of order: %d of %d",
		s.events, time.Since(begin).Round(time.Millisecond), s.printed(takenOver), s.printed(skippedTwice), s.printed(fromLog), len(broker.unordered), s.accounts)
	if ordered {
		require.Empty(t, broker.unordered)
	}
	both, err := s.compare(t.Context(), "balances")
	require.NoError(t, err)
	require.Equal(t, comparison{applied: s.events}, both)
	require.Positive(t, s.printed(takenOver), "a relay was killed while it had claimed entries")
	require.Positive(t, s.printed(skippedTwice), "messages were delivered again")
}
