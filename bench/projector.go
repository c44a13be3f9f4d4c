package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
)

// The read model is a count for each product, of a thousand; every program adds one in the marker's transaction.
const (
	totalTables = `
create schema model;
create table model.totals (product text primary key, n bigint not null) with (fillfactor = 50);
create table model.markers (handler text collate "C" not null, generation int not null, message_id text collate "C" not null,
	processed_at timestamptz not null default now(), primary key (handler, generation, message_id))`

	addOne = `insert into model.totals as t (product, n) values ($1, 1) on conflict (product) do update set n = t.n + 1`

	products = 1000
	messages = 20_000 // for the peer to begin a round with
)

type rated struct {
	ProductID string `json:"product_id"`
	Rating    int    `json:"rating"`
}

var ratings = eventstore.NewTypes(eventstore.Type[rated]("review.posted"))

// projectorBed is what the projectors run on.
type projectorBed struct {
	*bed
	db  *postgres.DB
	sql *sql.DB
	n   atomic.Int64 // so that no message is one of an earlier round
}

func projectorLines(ctx context.Context, b *bed) ([]line, error) {
	db, err := postgres.New(b.pool, nil)
	if err != nil {
		return nil, err
	}
	if _, err := b.pool.Exec(ctx, totalTables); err != nil {
		return nil, err
	}
	p := &projectorBed{bed: b, db: db, sql: stdlib.OpenDBFromPool(b.pool)}
	schema := wsql.PublisherConfig{SchemaAdapter: wsql.DefaultPostgreSQLSchema{}, AutoInitializeSchema: true}
	pub, err := wsql.NewPublisher(p.sql, schema, watermill.NopLogger{})
	if err != nil {
		return nil, err
	}
	if err := pub.Publish("rated", message.NewMessage(watermill.NewUUID(), []byte(payload))); err != nil { // so that the table is there
		return nil, err
	}
	const name = "watermill-sql subscriber and a marker by hand"
	writes := projector.Define("written", ratings, projector.Options{Markers: true},
		projector.On("rated", func(_ context.Context, b *pgx.Batch, e eventstore.Event[rated]) error {
			b.Queue(addOne, e.Data.ProductID)
			return nil
		}))
	runs := projector.Define("run", ratings, projector.Options{Markers: true},
		projector.On("rated", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[rated]) error {
			_, err := tx.Exec(ctx, addOne, e.Data.ProductID)
			return err
		}))
	written := projects(p, p.db.Batched(), writes)
	unnamed := projects(p, unjournaled{p.db.Batched()}, writes) // what the journal costs
	run := projects(p, p.db, runs)
	return []line{
		{"projector/message", "messages/s", name, program{p.empty, written(1)}, program{p.filledTopic, p.peer}, program{p.empty, p.limit}},
		{"projector/message-pgx.Tx", "messages/s", name, program{p.empty, run(1)}, program{p.filledTopic, p.peer}, program{p.empty, p.limitTx}},
		{"projector/message-journal", "messages/s", "", program{p.empty, written(1)}, program{}, program{p.empty, unnamed(1)}},
		{"projector/message-8-lanes-journal", "messages/s", "", program{p.empty, written(8)}, program{}, program{p.empty, unnamed(8)}},
		{"projector/message-8-lanes", "messages/s", "", program{p.empty, written(8)}, program{}, program{p.empty, written(1)}},
	}, nil
}

// unjournaled says nothing of what is under way.
type unjournaled struct{ *postgres.Batched }

func (unjournaled) Begin(_ context.Context, _ string, attempts, _ []projector.Attempt) ([]projector.Verdict, error) {
	return make([]projector.Verdict, len(attempts)), nil
}

func (u unjournaled) Do(ctx context.Context, w projector.Work, apply func(context.Context, *pgx.Batch, []int) ([]outbox.Message, error)) error {
	w.Done = nil
	return u.Batched.Do(ctx, w, apply)
}

func (p *projectorBed) empty(ctx context.Context) error {
	for _, stmt := range []string{"truncate model.totals, model.markers, kinora.markers, kinora.inflight, kinora.runners", "vacuum analyze", "checkpoint"} {
		if _, err := p.pool.Exec(ctx, stmt); err != nil {
			return err
		}
	}
	return nil
}

// next is a message of the usual kind; each is new.
func (p *projectorBed) next() (id, product string) {
	n := p.n.Add(1)
	return uuid.NewString(), fmt.Sprintf("p%d", n%products)
}

// supply is a subscriber that always has so many messages in flight.
type supply struct {
	*projectorBed
	most int
	done atomic.Int64
}

func (s *supply) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	to := make(chan *message.Message)
	for range s.most {
		go func() {
			for {
				id, product := s.next()
				m := message.NewMessage(id, fmt.Appendf(nil, `{"product_id":%q,"rating":5}`, product))
				m.Metadata[outbox.HeaderType], m.Metadata[outbox.HeaderSchema] = "review.posted", "1"
				m.Metadata[outbox.HeaderStream], m.Metadata[outbox.HeaderKey] = "review-"+id, "review-"+id
				select {
				case to <- m:
				case <-ctx.Done():
					return
				}
				select {
				case <-m.Acked():
					s.done.Add(1)
				case <-ctx.Done():
					return
				}
			}
		}()
	}
	return to, nil
}

func (*supply) Close() error { return nil }

// projects is Kinora's: a runner with so many lanes.
func projects[Tx any](p *projectorBed, u projector.UnitOfWork[Tx], of *projector.Projector[Tx]) func(lanes int) work {
	return func(lanes int) work {
		return func(ctx context.Context, _ *bed) (int64, error) {
			from := &supply{projectorBed: p, most: lanes}
			cfg := &projector.RunnerConfig{Concurrency: lanes, Logger: slog.New(slog.DiscardHandler)}
			runner, err := projector.NewRunner(u, projector.Subscribe(from, "rated"), cfg, of)
			if err != nil {
				return 0, err
			}
			err = runner.Run(ctx)
			return from.done.Load(), err
		}
	}
}

const (
	limitFence  = `select pg_advisory_xact_lock_shared(78, 1)`
	limitMarker = `insert into model.markers (handler, generation, message_id)
		values ('written/rated', coalesce((select live from kinora.generations where projector = 'written'), 1), $1)`
)

// limit is one round trip a message: the fence, a marker whose insert fails where it is there already, and the write.
func (p *projectorBed) limit(ctx context.Context, _ *bed) (done int64, err error) {
	conn, err := p.pool.Acquire(context.WithoutCancel(ctx))
	if err != nil {
		return 0, err
	}
	defer conn.Release()
	for ; ctx.Err() == nil; done++ {
		id, product := p.next()
		b := &pgx.Batch{}
		b.Queue(limitFence)
		b.Queue(limitMarker, id)
		b.Queue(addOne, product)
		if err := conn.SendBatch(context.WithoutCancel(ctx), b).Close(); err != nil {
			return done, err
		}
	}
	return done, nil
}

// limitTx is three: one begins, fences and marks, as the handler wants to see what it reads.
func (p *projectorBed) limitTx(ctx context.Context, _ *bed) (done int64, err error) {
	conn, err := p.pool.Acquire(context.WithoutCancel(ctx))
	if err != nil {
		return 0, err
	}
	defer conn.Release()
	hard := context.WithoutCancel(ctx)
	for ; ctx.Err() == nil; done++ {
		id, product := p.next()
		b := &pgx.Batch{}
		b.Queue("begin")
		b.Queue(limitFence)
		b.Queue(limitMarker+" on conflict do nothing", id)
		if err := conn.SendBatch(hard, b).Close(); err != nil {
			return done, err
		}
		if _, err := conn.Exec(hard, addOne, product); err != nil {
			return done, err
		}
		if _, err := conn.Exec(hard, "commit"); err != nil {
			return done, err
		}
	}
	return done, nil
}

func (p *projectorBed) filledTopic(ctx context.Context) error {
	if err := p.empty(ctx); err != nil {
		return err
	}
	for _, stmt := range []string{
		"drop table if exists watermill_offsets_rated",
		"truncate watermill_rated",
		fmt.Sprintf(`insert into watermill_rated (uuid, payload, metadata, transaction_id)
			select gen_random_uuid()::text, json_build_object('product_id', 'p' || g %% %d, 'rating', 5), '{}', pg_current_xact_id() from generate_series(1, %d) g`,
			products, messages),
		"vacuum analyze watermill_rated",
	} {
		if _, err := p.pool.Exec(ctx, stmt); err != nil {
			return err
		}
	}
	return nil
}

// peer is what its users write: a handler that marks by hand, in a transaction of its own.
func (p *projectorBed) peer(ctx context.Context, _ *bed) (done int64, err error) {
	sub, err := wsql.NewSubscriber(p.sql, wsql.SubscriberConfig{
		ConsumerGroup: "rated", SchemaAdapter: wsql.DefaultPostgreSQLSchema{}, OffsetsAdapter: wsql.DefaultPostgreSQLOffsetsAdapter{},
		InitializeSchema: true, PollInterval: 10 * time.Millisecond,
	}, watermill.NopLogger{})
	if err != nil {
		return 0, err
	}
	to, err := sub.Subscribe(context.WithoutCancel(ctx), "rated")
	if err != nil {
		return 0, err
	}
	for ctx.Err() == nil && done < messages {
		m := <-to
		var e struct {
			ProductID string `json:"product_id"`
		}
		if err := json.Unmarshal(m.Payload, &e); err != nil {
			return done, err
		}
		if err := p.applyByHand(context.WithoutCancel(ctx), m.UUID, e.ProductID); err != nil {
			return done, err
		}
		m.Ack()
		done++
	}
	return done, sub.Close()
}

func (p *projectorBed) applyByHand(ctx context.Context, id, product string) error {
	tx, err := p.sql.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	r, err := tx.ExecContext(ctx, `insert into model.markers (handler, generation, message_id) values ('rated', 1, $1) on conflict do nothing`, id)
	if err != nil {
		return err
	}
	if n, err := r.RowsAffected(); err != nil || n == 0 {
		return err
	}
	if _, err := tx.ExecContext(ctx, addOne, product); err != nil {
		return err
	}
	return tx.Commit()
}
