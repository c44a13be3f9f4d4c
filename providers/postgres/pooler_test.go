package postgres_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// poolerModes are the modes of pgx that work through a pooler in transaction mode without support
// for prepared statements.
var poolerModes = []string{"cache_describe", "exec", "simple_protocol"}

// behindPooler returns a new database and a pooler for its server.
func behindPooler(t *testing.T, settings ...string) (*pgtest.Pooler, string) {
	t.Helper()
	return pgtest.NewPooler(t, pgtest.Shared(t), settings...), postgrestest.DSN(t, nil, totals)
}

// Through a pooler LISTEN has no effect and returns no error. The listener logs that once; relays
// poll, and no channel stays on the pooler's connections.
func TestAListenerBehindAPoolerWarnsOnce(t *testing.T) {
	t.Parallel()
	p, dsn := behindPooler(t, "default_pool_size=2")
	here, there := notifying(t, p.DSN(t, dsn, "default_query_exec_mode=exec"), false), notifying(t, p.DSN(t, dsn, "default_query_exec_mode=exec"), true)
	said := &logs{}
	listen(t, here, &postgres.ListenerConfig{Probe: 300 * time.Millisecond, Logger: said.logger()}, false)
	patience.Until(t, func() bool { return said.count("notifications do not arrive") > 2 }, "three attempts to listen")

	published := make(chan struct{}, 10)
	relay, err := outbox.NewRelay(here, publish(func() { published <- struct{}{} }), &outbox.RelayConfig{Poll: 50 * time.Millisecond})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- relay.Run(ctx) }()
	for range 10 {
		appendOne(t, there, "review-1")
		patience.Receive(t, published, "a relay that polls")
	}
	stop()
	require.NoError(t, <-done)
	require.Equal(t, 1, said.count("level=WARN"), said.text.String())

	for range 10 { // on any connection of the pooler
		require.Zero(t, count(t, here, `select count(*) from pg_listening_channels() c where c like 'kinora_outbox%'`))
	}
}

func TestAListenerPastAPoolerReceivesNotificationsSentThroughIt(t *testing.T) {
	t.Parallel()
	p, dsn := behindPooler(t)
	for _, mode := range poolerModes {
		t.Run(mode, func(t *testing.T) {
			through := p.DSN(t, dsn, "default_query_exec_mode="+mode)
			here, there := notifying(t, through, false), notifying(t, through, true)
			listen(t, here, &postgres.ListenerConfig{DSN: dsn}, true)
			for range 5 {
				woken := here.Enqueued()
				appendOne(t, there, "review-1")
				patience.Receive(t, woken, "the append of another process")
			}
		})
	}
}

// publish is a publisher that calls a function.
type publish func()

func (p publish) Publish(string, ...*message.Message) error { p(); return nil }
func (publish) Close() error                                { return nil }

// Migrate locks in a transaction, so several migrators work through the pooler too.
func TestMigratorsThroughAPooler(t *testing.T) {
	t.Parallel()
	p := pgtest.NewPooler(t, pgtest.Shared(t))
	for _, mode := range poolerModes {
		t.Run(mode, func(t *testing.T) {
			empty := pgtest.Create(t, pgtest.Shared(t), "empty", func(context.Context, string) error { return nil })
			db, err := postgres.Open(t.Context(), p.DSN(t, empty, "default_query_exec_mode="+mode), nil)
			require.NoError(t, err)
			t.Cleanup(db.Close)
			var all sync.WaitGroup
			for range 4 {
				all.Go(func() {
					if err := db.Migrate(t.Context()); err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			require.NoError(t, db.Ready(t.Context()))
			appendOne(t, db, "review-1")
		})
	}
}

// Sixteen clients share two connections to the server: settings, locks and transactions do not
// leak from one to another.
func TestAppendsClaimsAndUnitsShareAPoolersConnections(t *testing.T) {
	t.Parallel()
	p, dsn := behindPooler(t, "default_pool_size=2")
	for _, mode := range poolerModes {
		t.Run(mode, func(t *testing.T) {
			db, err := postgres.Open(t.Context(), p.DSN(t, dsn, "default_query_exec_mode="+mode, "pool_max_conns=16"), &postgres.Config{Route: outbox.ByCategory})
			require.NoError(t, err)
			t.Cleanup(db.Close)
			direct := notifying(t, dsn, false)
			var all sync.WaitGroup
			for w := range 16 {
				all.Go(func() { share(t, db, mode, w) })
			}
			all.Wait()
			require.Equal(t, 16*10*3, count(t, direct, `select n from totals where key = '`+mode+`'`))
			for {
				entries, err := provider.ClaimEntries(t.Context(), db, provider.EntryQuery{}, claim.Terms{Limit: 50})
				require.NoError(t, err)
				if len(entries) == 0 {
					break
				}
				var marks []outbox.Mark
				for _, e := range entries {
					marks = append(marks, outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Published})
				}
				late, err := db.MarkEntries(t.Context(), marks)
				require.NoError(t, err)
				require.Empty(t, late)
				_, err = db.HoldEntries(t.Context(), time.Minute, 100)
				require.NoError(t, err)
			}
			require.Zero(t, count(t, direct, `select count(*) from kinora.outbox where open or held`))
			require.Equal(t, 16*10, count(t, direct, `select count(*) from kinora.events where stream like 'review-`+mode+`%'`))
			require.Zero(t, count(t, direct, `select count(*) from pg_locks where locktype = 'advisory'
				and database = (select oid from pg_database where datname = current_database())`))
			for range 10 { // units have set it in their transactions
				require.Zero(t, count(t, db, `select count(*) where current_setting('lock_timeout') <> '0'`))
			}
		})
	}
}

// share does the work of a service: each message is handled twice, and counts once. The total is
// 3 a round: one by a unit over pgx.Tx, two by one over *pgx.Batch.
func share(t *testing.T, db *postgres.DB, mode string, w int) {
	ctx := t.Context()
	for i := range 10 {
		if _, err := db.Append(ctx, fmt.Sprintf("review-%s-%d", mode, w), eventstore.Expected(i), drafts(t, i)); err != nil {
			t.Error(err)
		}
		work := func(handler string) provider.Unit { return marked(fmt.Sprintf("%s-%s-%d-%d", handler, mode, w, i)) }
		out := []outbox.Message{{Topic: "out", Key: "shared", OrderedKey: true, Payload: []byte("{}")}}
		for range 2 {
			if err := do(ctx, db, work("tx"), func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
				return out, add(ctx, tx, mode, 1)
			}); err != nil {
				t.Error(err)
			}
			if err := queue(ctx, db, work("batch"), func(_ context.Context, b *pgx.Batch) ([]outbox.Message, error) {
				b.Queue(addSQL, mode, 2)
				return out, nil
			}); err != nil {
				t.Error(err)
			}
		}
	}
}
