package postgres_test

import (
	"context"
	"fmt"
	"iter"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// pageCounter counts the pages that are read.
type pageCounter struct{ n atomic.Int64 }

func (r *pageCounter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if strings.Contains(q.SQL, "from kinora.events where stream = $1") {
		r.n.Add(1)
	}
	return ctx
}

func (*pageCounter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A page has at most about 4 MiB, so a reader of many large events does not hold all of them. This
// test measures the heap of the process, so it is not parallel.
func TestReadStreamReadsPagesOfLimitedBytes(t *testing.T) {
	const events, size, bound = 60, 1_000_000, 24 << 20
	cfg, err := pgxpool.ParseConfig(postgrestest.DSN(t, nil))
	require.NoError(t, err)
	var pages pageCounter
	cfg.ConnConfig.Tracer = &pages
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	defer pool.Close()
	db, err := postgres.New(pool, nil)
	require.NoError(t, err)
	for i := range events {
		data := fmt.Appendf(nil, `"%d%s"`, i, strings.Repeat("x", size))
		_, err := db.Append(t.Context(), "a-large", eventstore.Expected(i), []eventstore.Draft{
			{ID: uuid.NewString(), Type: "t", Schema: 1, Data: data},
		})
		require.NoError(t, err)
	}
	before := liveHeap()
	check := func(stream iter.Seq2[eventstore.Raw, error]) {
		t.Helper()
		pages.n.Store(0)
		version, most := int64(0), int64(0)
		for e, err := range stream {
			require.NoError(t, err)
			version++
			require.Equal(t, version, e.Version)
			require.Greater(t, len(e.Data), size)
			if version%5 == 1 {
				most = max(most, liveHeap()-before)
			}
		}
		require.EqualValues(t, events, version)
		require.Less(t, most, int64(bound), "bytes held while the stream is read")
		require.LessOrEqual(t, pages.n.Load(), int64(events/4+2), "pages")
	}
	check(db.ReadStream(t.Context(), "a-large", 0))
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		check(db.InTx(tx).ReadStream(t.Context(), "a-large", 0))
		return nil
	}))

	_, err = db.Append(t.Context(), "a-short", eventstore.NoStream, drafts(t, make([]int, 199)...))
	require.NoError(t, err)
	pages.n.Store(0)
	for _, err := range db.ReadStream(t.Context(), "a-short", 0) {
		require.NoError(t, err)
	}
	require.EqualValues(t, 1, pages.n.Load(), "a short stream is one round trip")
}

func liveHeap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
