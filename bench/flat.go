package main

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
)

// flatLines compare a relay whose outbox also has rows that must cost nothing with a relay without
// them.
func (r *relayBed) flatLines(ctx context.Context) ([]line, error) {
	const behindOne = `insert into %[1]s.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at, status, open, held, stuck)
		select gen_random_uuid()::text, 'other', 'stuck', '', '{}', case when g = 1 then now() + interval '1 h' else now() end, now(),
			case when g = 1 then 'failed' else '%[2]s' end, g = 1 or '%[2]s' = 'pending', g > 1 and '%[2]s' = 'held', g = 1
		from generate_series(1, 100001) g`
	var lines []line
	for _, l := range []struct{ name, schema, extra string }{
		{"relay/beside-1M-published", "kept", `insert into %s.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at, status, open, published_at)
			select gen_random_uuid()::text, 'relayed', 'review-' || g %% 1000, '` + payload + `', '{}', now(), now(), 'published', false, now() from generate_series(1, 1000000) g`},
		{"relay/beside-100k-held", "held", fmt.Sprintf(behindOne, "%[1]s", "held")},
		{"relay/beside-100k-backing-off", "backing", fmt.Sprintf(behindOne, "%[1]s", "pending")},
	} {
		own, err := r.in(ctx, l.schema)
		if err != nil {
			return nil, err
		}
		fill := sync.OnceValue(func() error {
			_, err := r.pool.Exec(ctx, fmt.Sprintf(l.extra, l.schema))
			return err
		})
		lines = append(lines, r.against(l.name, own, fill))
	}
	own, err := r.in(ctx, "opened")
	if err != nil {
		return nil, err
	}
	old := sync.OnceValue(func() error { return own.ageing(ctx, r.open) })
	return append(lines, r.against("relay/beside-open-transaction", own, old)), nil
}

// against returns a line that compares a relay of own, once ready has returned, with one of r.
func (r *relayBed) against(name string, own *relayBed, ready func() error) line {
	fill := own.filledUp(own.schema, backlog)
	prepare := func(ctx context.Context) error {
		if err := ready(); err != nil {
			return err
		}
		return fill(ctx)
	}
	return line{name, "messages/s", "", program{prepare, own.relays(1, own.count)}, program{}, program{r.filled(r.schema, backlog), r.relays(1, r.count)}}
}

// in returns a bed with its own outbox.
func (r *relayBed) in(ctx context.Context, schema string) (*relayBed, error) {
	db, err := postgres.New(r.pool, &postgres.Config{Schema: schema})
	if err != nil {
		return nil, err
	}
	own := *r
	own.db, own.schema = db, schema
	return &own, db.Migrate(ctx)
}

// ageing relays 500 messages a second for the duration long while a transaction stays open whose
// snapshot sees all of them.
func (r *relayBed) ageing(ctx context.Context, long time.Duration) error {
	conn, err := pgx.Connect(ctx, r.dsn) // closed when the program ends
	if err != nil {
		return err
	}
	for _, stmt := range []string{"begin isolation level repeatable read", "select count(*) from " + r.schema + ".outbox"} {
		if _, err := conn.Exec(ctx, stmt); err != nil {
			return err
		}
	}
	relay, err := outbox.NewRelay(r.db, r.count(1<<62), &outbox.RelayConfig{OrderedPublisher: true, Poll: 20 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	running, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(running) }()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for begin := time.Now(); time.Since(begin) < long; <-tick.C {
		if err := r.add(ctx, r.schema+".outbox", 50); err != nil {
			return err
		}
	}
	stop()
	return <-ended
}
