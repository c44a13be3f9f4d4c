package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
)

const (
	backlog = 60_000 // entries at the start of a round, unless the line's name says otherwise
	// Messages at the start of the peer's round; the peer is slower with a larger backlog.
	forwards   = 20_000
	relayKeys  = 10_000
	relayBatch = 500
)

// relayBed is the environment of the relays.
type relayBed struct {
	*bed
	db     *postgres.DB
	sql    *sql.DB // the peer's connections, from the same pool
	topic  message.Publisher
	schema string // schema of db
	batch  int    // entries per claim
	keep   bool   // keep published entries
	keys   int
}

func relayLines(ctx context.Context, b *bed) ([]line, error) {
	db, err := postgres.New(b.pool, nil)
	if err != nil {
		return nil, err
	}
	r := &relayBed{bed: b, db: db, sql: stdlib.OpenDBFromPool(b.pool), schema: "kinora", batch: relayBatch, keys: relayKeys}
	schema := wsql.PublisherConfig{SchemaAdapter: wsql.DefaultPostgreSQLSchema{}, AutoInitializeSchema: true}
	if r.topic, err = wsql.NewPublisher(r.sql, schema, watermill.NopLogger{}); err != nil {
		return nil, err
	}
	for _, name := range []string{"reviews", "relayed"} { // so that the tables exist
		if err := r.topic.Publish(name, message.NewMessage(watermill.NewUUID(), []byte(payload))); err != nil {
			return nil, err
		}
	}
	const name = "Watermill forwarder"
	count, topic := r.count, r.toTopic
	kept, few := *r, *r
	kept.keep, few.keys = true, 1000
	lines := []line{
		{"relay/count", "messages/s", name,
			program{r.filled("kinora", backlog), r.relays(1, count)},
			program{r.filledForward, r.forward(count)},
			program{r.filled("lim", backlog), r.limit}},
		{"relay/count-kept", "messages/s", name,
			program{r.filled("kinora", backlog), kept.relays(1, count)},
			program{r.filledForward, r.forward(count)},
			program{r.filled("lim", backlog), kept.limit}},
		{"relay/count-1M-backlog", "messages/s", "",
			program{r.filled("kinora", 1_000_000), r.relays(1, count)}, program{},
			program{r.filled("kinora", 10_000), r.relays(1, count)}},
		{"relay/sql-topic", "messages/s", name,
			program{r.filled("kinora", backlog), r.relays(1, topic)},
			program{r.filledForward, r.forward(topic)}, program{}},
		{"relay/four-relays", "messages/s", "",
			program{r.filled("kinora", 2*backlog), r.relays(4, count)}, program{},
			program{r.filled("kinora", 2*backlog), r.relays(1, count)}},
		{"relay/four-relays-few-keys", "messages/s", "", // as many keys as entries in two batches
			program{few.filled("kinora", 2*backlog), r.relays(4, count)}, program{},
			program{few.filled("kinora", 2*backlog), r.relays(1, count)}},
	}
	for _, n := range []int{10, 50, 200, 500, 2000} {
		one := *r
		one.batch = n
		lines = append(lines, line{fmt.Sprintf("relay/batch size=%d", n), "messages/s", "",
			program{r.filled("kinora", backlog), one.relays(1, count)}, program{},
			program{r.filled("lim", backlog), one.limit}})
	}
	for _, n := range []int{1000, 10_000, 100_000, 1_000_000} {
		lines = append(lines, line{fmt.Sprintf("relay/backlog=%d", n), "messages/s", "",
			program{r.filled("kinora", n), r.relays(1, count)}, program{},
			program{r.filled("lim", n), r.limit}})
	}
	flat, err := r.flatLines(ctx)
	if err != nil {
		return nil, err
	}
	choices, err := r.choiceLines(ctx)
	return append(append(lines, flat...), choices...), err
}

// sink counts published messages and closes done when all have arrived.
type sink struct {
	inner message.Publisher // nil only counts
	n     atomic.Int64
	all   int64
	once  sync.Once
	done  chan struct{}
}

func (r *relayBed) count(all int64) *sink { return &sink{all: all, done: make(chan struct{})} }

func (r *relayBed) toTopic(all int64) *sink {
	return &sink{inner: r.topic, all: all, done: make(chan struct{})}
}

func (s *sink) Publish(topic string, ms ...*message.Message) error {
	if s.inner != nil {
		if err := s.inner.Publish(topic, ms...); err != nil {
			return err
		}
	}
	if s.n.Add(int64(len(ms))) >= s.all {
		s.once.Do(func() { close(s.done) })
	}
	return nil
}

func (s *sink) Close() error { return nil }

// filled empties an outbox and fills it with n entries. It only tops up a large outbox.
func (r *relayBed) filled(schema string, n int) func(context.Context) error {
	return func(ctx context.Context) error {
		if n <= 100_000 {
			if _, err := r.pool.Exec(ctx, "truncate "+schema+".outbox"); err != nil {
				return err
			}
		}
		return r.filledUp(schema, n)(ctx)
	}
}

// filledUp tops up an outbox until n entries can be claimed.
func (r *relayBed) filledUp(schema string, n int) func(context.Context) error {
	table := schema + ".outbox"
	return func(ctx context.Context) error {
		var missing int
		if err := r.pool.QueryRow(ctx, "select greatest(0, $1 - count(*)) from "+table+" where open and topic = 'relayed'", n).Scan(&missing); err != nil {
			return err
		}
		if err := r.add(ctx, table, missing); err != nil {
			return err
		}
		for _, stmt := range []string{"truncate watermill_relayed", "vacuum analyze " + table, "checkpoint"} {
			if _, err := r.pool.Exec(ctx, stmt); err != nil {
				return err
			}
		}
		return nil
	}
}

func (r *relayBed) add(ctx context.Context, table string, n int) error {
	_, err := r.pool.Exec(ctx, fmt.Sprintf(`
		insert into %s (message_id, topic, key, payload, headers, next_attempt_at, created_at)
		select gen_random_uuid()::text, 'relayed', 'review-' || g %% %d, '%s', '%s', now(), now() from generate_series(1, $1::int) g`,
		table, r.keys, payload, headers), n)
	return err
}

// relays runs Kinora: n relays until all entries are published.
func (r *relayBed) relays(n int, to func(all int64) *sink) work {
	return func(ctx context.Context, _ *bed) (int64, error) {
		var all int64
		if err := r.pool.QueryRow(ctx, "select count(*) from "+r.schema+".outbox where open and topic = 'relayed'").Scan(&all); err != nil {
			return 0, err
		}
		s := to(all)
		running, stop := context.WithCancel(context.WithoutCancel(ctx))
		defer stop()
		ended := make(chan error, n)
		for range n {
			cfg := &outbox.RelayConfig{Batch: r.batch, OrderedPublisher: true, Logger: slog.New(slog.DiscardHandler)}
			if r.keep {
				cfg.Keep.Published = time.Hour
			}
			relay, err := outbox.NewRelay(r.db, s, cfg)
			if err != nil {
				return 0, err
			}
			go func() { ended <- relay.Run(running) }()
		}
		select {
		case <-s.done:
		case <-ctx.Done():
		}
		stop()
		var err error
		for range n {
			if e := <-ended; e != nil {
				err = e
			}
		}
		return s.n.Load(), err
	}
}

// The limit keeps the same order and fences its marks.
const (
	limitClaim = `
with ck as materialized (select clock_timestamp() t),
picked as materialized (
	select o.id, o.topic, o.key from lim.outbox o, ck
	where o.open and o.next_attempt_at <= ck.t
	order by o.id limit $2 for update of o skip locked),
safe as materialized (
	select p.id from picked p where not exists (
		select from lim.outbox e where e.open and e.topic = p.topic and e.key = p.key and e.id < p.id
			and not exists (select from picked q where q.id = e.id)))
update lim.outbox o set status = 'claimed', token = $1, attempts = attempts + 1, next_attempt_at = ck.t + interval '5 min'
from safe, ck where o.id = safe.id returning o.id, o.message_id, o.topic, o.key, o.payload, o.headers`

	limitMark   = `update lim.outbox set status = 'published', open = false, published_at = now() where id = any($1) and token = $2`
	limitDelete = `delete from lim.outbox where id = any($1) and token = $2`
)

func (r *relayBed) limit(ctx context.Context, _ *bed) (int64, error) {
	if r.keep {
		return r.claimAndMark(ctx, limitClaim, limitMark)
	}
	return r.claimAndMark(ctx, limitClaim, limitDelete)
}

func (r *relayBed) claimAndMark(ctx context.Context, claim, mark string) (done int64, err error) {
	conn, err := r.pool.Acquire(context.WithoutCancel(ctx))
	if err != nil {
		return 0, err
	}
	defer conn.Release()
	for ctx.Err() == nil {
		token := uuid.New()
		rows, err := conn.Query(context.WithoutCancel(ctx), claim, token, r.batch)
		if err != nil {
			return done, err
		}
		var ids []int64
		for rows.Next() {
			var id int64
			var message, topic, key string
			var payload, headers []byte
			if err := rows.Scan(&id, &message, &topic, &key, &payload, &headers); err != nil {
				return done, err
			}
			ids = append(ids, id)
		}
		if err := rows.Err(); err != nil {
			return done, err
		}
		if len(ids) == 0 {
			return done, nil
		}
		if _, err := conn.Exec(context.WithoutCancel(ctx), mark, ids, token); err != nil {
			return done, err
		}
		done += int64(len(ids))
	}
	return done, nil
}

// filledForward fills the peer's topic with messages in the envelope that its publisher makes.
func (r *relayBed) filledForward(ctx context.Context) error {
	envelope, err := json.Marshal(map[string]any{
		"destination_topic": "relayed", "uuid": uuid.NewString(), "payload": []byte(payload), "metadata": map[string]string{"kinora_type": "review.posted"},
	})
	if err != nil {
		return err
	}
	for _, stmt := range []string{
		"drop table if exists watermill_offsets_forward",
		"truncate watermill_forward, watermill_relayed",
		fmt.Sprintf(`insert into watermill_forward (uuid, payload, metadata, transaction_id)
			select gen_random_uuid()::text, '%s', '{}', pg_current_xact_id() from generate_series(1, %d) g`, envelope, forwards),
		"vacuum analyze watermill_forward",
		"checkpoint",
	} {
		if _, err := r.pool.Exec(ctx, stmt); err != nil {
			return err
		}
	}
	return nil
}

// forward runs the peer's forwarder as its users do.
func (r *relayBed) forward(to func(all int64) *sink) work {
	return func(ctx context.Context, _ *bed) (int64, error) {
		log := watermill.NopLogger{}
		sub, err := wsql.NewSubscriber(r.sql, wsql.SubscriberConfig{
			ConsumerGroup: "forward", SchemaAdapter: wsql.DefaultPostgreSQLSchema{}, OffsetsAdapter: wsql.DefaultPostgreSQLOffsetsAdapter{},
			InitializeSchema: true, PollInterval: 10 * time.Millisecond,
		}, log)
		if err != nil {
			return 0, err
		}
		s := to(forwards)
		f, err := forwarder.NewForwarder(sub, s, log, forwarder.Config{ForwarderTopic: "forward", CloseTimeout: time.Second})
		if err != nil {
			return 0, err
		}
		ended := make(chan error, 1)
		go func() { ended <- f.Run(context.WithoutCancel(ctx)) }()
		select {
		case <-s.done:
		case <-ctx.Done():
		case err := <-ended:
			return s.n.Load(), err
		}
		n := s.n.Load()
		if err := f.Close(); err != nil {
			return n, err
		}
		return n, <-ended
	}
}
