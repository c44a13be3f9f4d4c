package postgres_test

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// BenchmarkWaking measures the time from the end of an append in another process until relays of
// this one are woken. Run it with -benchtime=200x.
func BenchmarkWaking(b *testing.B) {
	dsn := postgrestest.DSN(b, nil)
	here, there := notifying(b, dsn, false), notifying(b, dsn, true)
	listen(b, here, nil, true)
	took := make([]time.Duration, 0, b.N)
	for b.Loop() {
		// so that each append has its own notification
		time.Sleep(15 * time.Millisecond)
		woken := here.Enqueued()
		appendOne(b, there, "review-1")
		begin := time.Now()
		<-woken
		took = append(took, time.Since(begin))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
}

// BenchmarkAppendNotify measures the cost of notifications for appends, eight at a time.
func BenchmarkAppendNotify(b *testing.B) {
	dsn := postgrestest.DSN(b, nil)
	for _, on := range []bool{false, true, false, true} {
		b.Run(fmt.Sprintf("notify=%t", on), func(b *testing.B) {
			db := notifying(b, dsn, on)
			var n atomic.Int64
			b.SetParallelism(4)
			b.RunParallel(func(p *testing.PB) {
				stream := fmt.Sprintf("review-%d", n.Add(1))
				for p.Next() {
					appendOne(b, db, stream)
				}
			})
		})
	}
}

// BenchmarkModes compares the modes of pgx that work through a pooler in transaction mode, and
// without one also the default.
func BenchmarkModes(b *testing.B) {
	dsn := postgrestest.DSN(b, nil)
	p := pgtest.NewPooler(b, pgtest.Shared(b))
	open := func(dsn string) *postgres.DB {
		db, err := postgres.Open(context.Background(), dsn, &postgres.Config{Route: outbox.ByCategory})
		require.NoError(b, err)
		b.Cleanup(db.Close)
		return db
	}
	dbs := map[string]*postgres.DB{"direct": open(dsn)}
	for _, mode := range poolerModes {
		dbs["direct "+mode] = open(dsn + "&default_query_exec_mode=" + mode)
		dbs["pooler "+mode] = open(p.DSN(b, dsn, "default_query_exec_mode="+mode))
	}
	for _, name := range []string{"direct", "direct cache_describe", "direct exec", "direct simple_protocol", "pooler cache_describe", "pooler exec", "pooler simple_protocol"} {
		db := dbs[name]
		b.Run(name+"/append", func(b *testing.B) {
			for b.Loop() {
				appendOne(b, db, "review-1")
			}
		})
		b.Run(name+"/claim", func(b *testing.B) {
			for b.Loop() {
				_, err := provider.ClaimEntries(context.Background(), db, provider.EntryQuery{Topics: []string{"none"}}, claim.Terms{})
				require.NoError(b, err)
			}
		})
	}
}
