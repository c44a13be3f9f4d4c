package main

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
)

const (
	// Idle relays at a time, each with its own outbox, to shorten the measurement.
	latencyRelays = 8
	latencyBursts = 9  // bursts per relay
	burst         = 20 // events in one append
	idleFor       = 2500 * time.Millisecond
)

// latencies measures the time from a commit to the end of Publish, in bursts after a relay was idle
// long enough to poll only once a second (it does so after 1.3 s). It also counts the statements
// per second of an idle relay.
func latencies(ctx context.Context, b *bed) ([]result, error) {
	var all []result
	for _, across := range []bool{false, true} {
		for _, notify := range []bool{false, true} {
			name := "latency/commit-to-publish in process"
			if across {
				name = "latency/commit-to-publish across"
			}
			if notify {
				name += ", NOTIFY"
			}
			var mu sync.Mutex
			var times []time.Duration
			var queries float64
			group := make(chan error, latencyRelays)
			for range latencyRelays {
				go func() {
					took, perSecond, err := idleRelay(ctx, b, across, notify)
					mu.Lock()
					defer mu.Unlock()
					times, queries = append(times, took...), queries+perSecond/latencyRelays
					group <- err
				}()
			}
			for range latencyRelays {
				if err := <-group; err != nil {
					return nil, fmt.Errorf("%s: %w", name, err)
				}
			}
			slices.Sort(times)
			ms := func(share float64) float64 {
				return float64(times[int(share*float64(len(times)-1))].Microseconds()) / 1000
			}
			all = append(all,
				result{Name: name + " p50", Unit: "ms", Ours: ms(0.5), Rounds: len(times) / burst},
				result{Name: name + " p99", Unit: "ms", Ours: ms(0.99), Rounds: len(times) / burst},
				result{Name: name + ": idle", Unit: "statements/s", Ours: queries, Rounds: latencyRelays})
		}
	}
	return all, nil
}

// counter counts statements.
type counter struct{ n atomic.Int64 }

func (c *counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.n.Add(1)
	return ctx
}

func (*counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// arrival is a publisher that sends the time when each message arrives.
type arrival struct{ at chan time.Time }

func (a arrival) Publish(_ string, ms ...*message.Message) error {
	for range ms {
		a.at <- time.Now()
	}
	return nil
}

func (arrival) Close() error { return nil }

// idleRelay runs a relay on its own outbox, waits until it is idle, and measures the latency of new
// entries. They are appended through the same DB, or with across through another DB that shares
// only the database.
func idleRelay(ctx context.Context, b *bed, across, notify bool) (times []time.Duration, queries float64, err error) {
	cfg, err := pgxpool.ParseConfig(b.dsn + "&pool_max_conns=4")
	if err != nil {
		return nil, 0, err
	}
	statements := &counter{}
	cfg.ConnConfig.Tracer = statements
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, 0, err
	}
	defer pool.Close()
	schema := "latency_" + uuid.NewString()[:8]
	there, err := postgres.New(pool, &postgres.Config{Schema: schema, Route: outbox.ByCategory, Notify: notify})
	if err != nil {
		return nil, 0, err
	}
	if err := there.Migrate(ctx); err != nil {
		return nil, 0, err
	}
	here := there
	if across {
		if here, err = postgres.New(b.pool, &postgres.Config{Schema: schema, Route: outbox.ByCategory, Notify: notify}); err != nil {
			return nil, 0, err
		}
		defer here.Close()
	}
	quiet := slog.New(slog.DiscardHandler)
	published := arrival{make(chan time.Time, burst)}
	relay, err := outbox.NewRelay(there, published, &outbox.RelayConfig{OrderedPublisher: true, Logger: quiet})
	if err != nil {
		return nil, 0, err
	}
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 2)
	services := []func(context.Context) error{relay.Run}
	if notify {
		listener, err := postgres.NewListener(there, &postgres.ListenerConfig{Logger: quiet})
		if err != nil {
			stop()
			return nil, 0, err
		}
		services = append(services, listener.Run)
	}
	for _, run := range services {
		go func() { ended <- run(running) }()
	}
	defer func() {
		stop()
		for range services {
			if e := <-ended; err == nil {
				err = e
			}
		}
	}()
	time.Sleep(idleFor)
	before := statements.n.Load()
	time.Sleep(10 * time.Second)
	queries = float64(statements.n.Load()-before) / 10
	for range latencyBursts {
		time.Sleep(idleFor + rand.N(time.Second))
		if _, err := here.Append(ctx, "review-"+uuid.NewString(), eventstore.NoStream, posted(burst)); err != nil {
			return nil, 0, err
		}
		committed := time.Now()
		for range burst {
			times = append(times, (<-published.at).Sub(committed))
		}
	}
	return times, queries, nil
}
