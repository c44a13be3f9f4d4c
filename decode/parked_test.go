package decode_test

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/decode"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if dsn := os.Getenv("KINORA_TEST_CHILD"); dsn != "" {
		fmt.Fprintln(os.Stderr, runProjector(dsn))
		os.Exit(1)
	}
	// The shared server lives as long as the process.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("os/exec.(*Cmd).Wait"),
		goleak.IgnoreAnyFunction("github.com/kinora-go/kinora/internal/testserver.run.func1"))
}

var orderTypes = eventstore.NewTypes(eventstore.Type[orderPlaced]("order.placed"))

// subscription is a subscriber whose messages the test sends itself.
type subscription chan *message.Message

func (s subscription) Subscribe(context.Context, string) (<-chan *message.Message, error) {
	return s, nil
}
func (subscription) Close() error { return nil }

func (s subscription) deliver(t *testing.T, m *message.Message) {
	t.Helper()
	m = m.Copy()
	s <- m
	select {
	case <-m.Acked():
	case <-m.Nacked():
		t.Fatal("nacked")
	case <-time.After(patience.Limit()):
		t.Fatal("not acked")
	}
}

// Headers and payloads that no database stores as text are parked and replayed as they were.
// Promise: G10.2
func TestAnyMessageIsParkedAndReplayed(t *testing.T) {
	t.Parallel()
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		db, err := memory.New(nil)
		require.NoError(t, err)
		anyMessage[*memory.Model](t, db)
	})
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "a.db"), nil)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, db.Close()) })
		require.NoError(t, db.Migrate(t.Context()))
		anyMessage[*sql.Tx](t, db)
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		anyMessage[pgx.Tx](t, postgrestest.Open(t, nil))
	})
}

func anyMessage[Tx any](t *testing.T, db interface {
	provider.Units[Tx]
	provider.Parking
}) {
	long := strings.Repeat("ü", 100_000)
	odd := foreign("", "\x00\xff{", "type", "order.placed", "id", "a\x00", "a\x00b", "c\x00d", "\xff", "\xfe", "", long, long, "", "\ufffdx", "\u0085")
	fails := foreign("", `{"Stars":1}`, "type", "order.placed", "id", "b", "customer", "\x00"+long, "\xff", "\x00")
	for i := range 20_000 {
		odd.Metadata[fmt.Sprint("header-", i)] = "x"
	}
	types := orderTypes
	good, applied := false, []string{}
	p := projector.Define("p", types, projector.Options{Markers: true, BrokerOnly: true},
		projector.On("a", func(_ context.Context, _ Tx, e eventstore.Event[orderPlaced]) error {
			if !good {
				return projector.Permanent(fmt.Errorf("no"))
			}
			applied = append(applied, e.ID)
			return nil
		}))
	d, err := decode.NewJSON(decode.JSONConfig{Type: decode.Place{Header: "type"}, ID: decode.Place{Header: "id"}, Key: decode.Place{Header: "customer"}})
	require.NoError(t, err)
	f, cfg := make(subscription), projector.RunnerConfig{Decode: d, Logger: slog.New(slog.DiscardHandler)}
	r, err := projector.NewRunner(db, projector.Subscribe(f, "orders"), cfg, p)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	<-r.Running()
	f.deliver(t, odd)
	f.deliver(t, fails)
	cancel()
	require.NoError(t, <-done)

	list, err := db.Parked(t.Context(), projector.ParkedFilter{})
	require.NoError(t, err)
	require.Len(t, list, 2)
	for i, m := range []*message.Message{odd, fails} {
		require.Equal(t, projector.StateStuck, list[i].State)
		require.Equal(t, m.Payload, message.Payload(list[i].Payload))
		for name, value := range m.Metadata {
			require.Equal(t, value, list[i].Headers[name])
		}
	}
	require.Equal(t, "malformed", list[0].Code)
	require.Equal(t, "b", list[1].MessageID)
	require.Equal(t, "\x00"+long, list[1].Key)

	good = true
	_, err = projector.Replay(t.Context(), db, projector.ParkedFilter{}, projector.Decision{By: "ann", Reason: "fixed"})
	require.NoError(t, err)
	require.NoError(t, p.ApplyParked(t.Context(), db, &cfg))
	require.Equal(t, []string{"b"}, applied)
	list, err = db.Parked(t.Context(), projector.ParkedFilter{})
	require.NoError(t, err)
	require.Len(t, list, 1)
}
