package postgres_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// inProcess returns Watermill's in-process Pub/Sub. It must wait for acks: otherwise messages
// that it loses when it stops would count as published.
func inProcess(*testing.T, *postgres.DB) (message.Publisher, message.Subscriber) {
	both := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	return both, both
}

// sqlTopics returns Watermill's topics in the same database.
func sqlTopics(t *testing.T, db *postgres.DB) (message.Publisher, message.Subscriber) {
	pool := stdlib.OpenDBFromPool(db.Pool())
	t.Cleanup(func() { _ = pool.Close() })
	schema := wsql.DefaultPostgreSQLSchema{}
	pub, err := wsql.NewPublisher(pool, wsql.PublisherConfig{SchemaAdapter: schema, AutoInitializeSchema: true}, watermill.NopLogger{})
	require.NoError(t, err)
	sub, err := wsql.NewSubscriber(pool, wsql.SubscriberConfig{
		ConsumerGroup: "sums", SchemaAdapter: schema, OffsetsAdapter: wsql.DefaultPostgreSQLOffsetsAdapter{},
		InitializeSchema: true, PollInterval: 10 * time.Millisecond,
	}, watermill.NopLogger{})
	require.NoError(t, err)
	return pub, sub
}

// The path from the append through the outbox, the relay and a broker of Watermill to the read
// model, with everything stopped and restarted in the middle: the sums are exact.
// Promise: G4.1
func TestThroughWatermillsBrokersWithARestart(t *testing.T) {
	t.Parallel()
	const events, keys = 400, 7
	for name, broker := range map[string]func(*testing.T, *postgres.DB) (message.Publisher, message.Subscriber){
		"in-process pub/sub": inProcess, "SQL topics": sqlTopics,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, &postgres.Config{Route: outbox.ByCategory}, noteTables)
			sums := projector.Define("sums", notes, projector.Options{Markers: true, BrokerOnly: true}, projector.On("noted", sum))
			quiet := slog.New(slog.DiscardHandler)
			begin := func() (stop func()) {
				pub, sub := broker(t, db)
				runner, err := projector.NewRunner(db, projector.Subscribe(sub, "note"), projector.RunnerConfig{Logger: quiet}, sums)
				require.NoError(t, err)
				relay, err := outbox.NewRelay(db, pub, &outbox.RelayConfig{Batch: 20, OrderedPublisher: true, Logger: quiet})
				require.NoError(t, err)
				group, err := kinora.Start(t.Context(), runner, relay)
				require.NoError(t, err)
				return func() {
					require.NoError(t, group.Stop())
					require.NoError(t, sub.Close())
					require.NoError(t, pub.Close())
				}
			}
			expected := map[string]int{}
			add := func(from, to int) {
				for n := from; n <= to; n++ {
					key := fmt.Sprint("k", n%keys)
					expected[key] += n
					data, err := json.Marshal(noted{key, n})
					require.NoError(t, err)
					_, err = db.Append(t.Context(), "note-"+key, eventstore.Any,
						[]eventstore.Draft{{ID: uuid.NewString(), Type: "noted", Schema: 1, Data: data}})
					require.NoError(t, err)
				}
			}
			applied := func(n int) {
				patience.Until(t, func() bool { return count(t, db, `select count(*) from kinora.markers`) >= n }, "%d markers", n)
			}
			stop := begin()
			add(1, events/2)
			applied(events / 4)
			stop()
			require.Less(t, count(t, db, `select count(*) from kinora.markers`), events/2, "it stops in the middle")
			add(events/2+1, events)
			stop = begin()
			applied(events)
			stop()
			for key, want := range expected {
				require.Equal(t, want, count(t, db, fmt.Sprintf(`select n from sums where key = '%s'`, key)), key)
			}
			require.Zero(t, count(t, db, `select count(*) from kinora.parked`))
		})
	}
}
