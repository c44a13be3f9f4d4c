//go:build unix

package decode_test

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/kinora-go/kinora/decode"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// shopScript is a program in another language that publishes plain JSON to a topic of Watermill's SQL
// pub/sub. It publishes each order twice, with another UUID, all of them once more at the end, and one
// message without an id.
const shopScript = `
place() {
	printf "insert into watermill_orders (uuid, payload, metadata, transaction_id) values (gen_random_uuid(), '%s', '{\"type\": \"order.placed\"}', pg_current_xact_id());\n" \
		"{\"order\": {\"id\": $1, \"customer\": \"c$(($1 % 3))\", \"at\": \"2026-03-01T12:00:00Z\"}, \"Stars\": $1}"
}
{
	for n in $(seq 1 60); do place "$n"; place "$n"; done
	printf "insert into watermill_orders (uuid, payload, metadata, transaction_id) values (gen_random_uuid(), '{}', '{}', pg_current_xact_id());\n"
	for n in $(seq 1 60); do place "$n"; done
} | psql -X -q -v ON_ERROR_STOP=1 "$SHOP"
`

// ordersLock is the class of the locks of orders.
const ordersLock = 1010

// runProjector projects the orders until the process is killed.
func runProjector(dsn string) error {
	ctx := context.Background()
	slog.SetLogLoggerLevel(slog.LevelError)
	db, err := postgres.Open(ctx, dsn, nil)
	if err != nil {
		return err
	}
	sub, err := subscriber(stdlib.OpenDBFromPool(db.Pool()))
	if err != nil {
		return err
	}
	decoder, err := decode.NewJSON(decode.JSONConfig{
		Type: decode.Place{Header: "type"}, ID: decode.Place{Field: "order.id"}, Key: decode.Place{Field: "order.customer"},
		Time: decode.Place{Field: "order.at"},
	})
	if err != nil {
		return err
	}
	p := projector.Define("orders", orderTypes, projector.Options{Markers: true, BrokerOnly: true},
		projector.On("list", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[orderPlaced]) error {
			_, err := tx.Exec(ctx, `insert into orders values ($1, $2) on conflict (customer) do update set list = orders.list || $2`,
				e.Stream, fmt.Sprint(e.Data.Stars, " "))
			if err == nil { // the test holds a lock until the process is killed
				_, err = tx.Exec(ctx, `select pg_advisory_xact_lock_shared($1, $2)`, ordersLock, e.Data.Stars)
			}
			return err
		}))
	r, err := projector.NewRunner(db, projector.Subscribe(sub, "orders"), projector.RunnerConfig{Decode: decoder, Concurrency: 2}, p)
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

func subscriber(topics *sql.DB) (*wsql.Subscriber, error) {
	return wsql.NewSubscriber(topics, wsql.SubscriberConfig{
		ConsumerGroup: "orders", SchemaAdapter: wsql.DefaultPostgreSQLSchema{}, OffsetsAdapter: wsql.DefaultPostgreSQLOffsetsAdapter{},
		InitializeSchema: true, PollInterval: 10 * time.Millisecond, ResendInterval: 10 * time.Millisecond,
	}, watermill.NopLogger{})
}

// A program in another language publishes JSON, with duplicates, and the process of the projector is
// killed again and again.
// Promise: G10.1
func TestJSONOfAnotherProgramIsProjectedExactly(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"sh", "psql"} {
		_, err := exec.LookPath(program)
		require.NoError(t, err, "%s is missing: install it", program)
	}
	dsn := postgrestest.DSN(t, nil, `create table orders (customer text primary key, list text not null)`)
	db, err := postgres.Open(t.Context(), dsn, nil)
	require.NoError(t, err)
	t.Cleanup(func() { db.Close() })
	topics := stdlib.OpenDBFromPool(db.Pool())
	sub, err := subscriber(topics)
	require.NoError(t, err)
	require.NoError(t, sub.SubscribeInitialize("orders"))
	require.NoError(t, sub.Close())
	require.NoError(t, topics.Close())

	shop := exec.CommandContext(t.Context(), "sh", "-c", shopScript)
	shop.Env = append(os.Environ(), "SHOP="+dsn)
	var failed strings.Builder
	shop.Stderr = &failed
	require.NoError(t, shop.Start())
	count := func(query string) (n int) {
		require.NoError(t, db.Pool().QueryRow(t.Context(), query).Scan(&n))
		return n
	}
	holder, err := db.Pool().Acquire(t.Context())
	require.NoError(t, err)
	defer holder.Release()
	for _, until := range []int{5, 20, 35, 50, 60} {
		if until < 60 { // so that it is killed in the middle
			_, err = holder.Exec(t.Context(), `select pg_advisory_lock($1, $2)`, ordersLock, until+5)
			require.NoError(t, err)
		}
		child := exec.CommandContext(t.Context(), os.Args[0])
		child.Env = append(os.Environ(), "KINORA_TEST_CHILD="+dsn)
		child.Stderr = os.Stderr
		require.NoError(t, child.Start())
		patience.Until(t, func() bool { return count(`select count(*) from kinora.markers`) >= until }, "%d markers", until)
		if until == 60 { // until it has read all duplicates
			patience.Until(t, func() bool {
				return count(`select count(*) from watermill_orders where "offset" > (select offset_acked from watermill_offsets_orders)`) == 0
			}, "the offset of the last order")
		}
		require.NoError(t, child.Process.Kill())
		_ = child.Wait()
		if until < 60 {
			require.Less(t, count(`select count(*) from kinora.markers`), 60)
			_, err = holder.Exec(t.Context(), `select pg_advisory_unlock($1, $2)`, ordersLock, until+5)
			require.NoError(t, err)
		}
	}
	require.NoError(t, shop.Wait(), failed.String())
	require.Equal(t, 181, count(`select count(*) from watermill_orders`))
	for c := range 3 {
		var want strings.Builder
		for n := 1; n <= 60; n++ {
			if n%3 == c {
				fmt.Fprint(&want, n, " ")
			}
		}
		var list string
		require.NoError(t, db.Pool().QueryRow(t.Context(), `select list from orders where customer = $1`, fmt.Sprint("c", c)).Scan(&list))
		require.Equal(t, want.String(), list)
	}
	parked, err := db.Parked(t.Context(), projector.ParkedFilter{})
	require.NoError(t, err)
	require.Len(t, parked, 1)
	require.Equal(t, "malformed", parked[0].Code)
}
