package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"log/slog"
	"strconv"
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
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
)

// The read model counts messages for each of a thousand products. Every program adds one in the
// marker's transaction.
const (
	totalTables = `
create schema model;
create table model.totals (product text primary key, n bigint not null) with (fillfactor = 50);
create table model.markers (handler text collate "C" not null, generation int not null, message_id text collate "C" not null,
	processed_at timestamptz not null default now(), primary key (handler, generation, message_id))`

	addOne = `insert into model.totals as t (product, n) values ($1, 1) on conflict (product) do update set n = t.n + 1`

	products = 1000
	messages = 20_000 // messages in the peer's topic when a round begins
)

type rated struct {
	ProductID string `json:"product_id"`
	Rating    int    `json:"rating"`
}

var ratings = eventstore.NewTypes(eventstore.Type[rated]("review.posted"))

// projectorBed is the environment of the projectors.
type projectorBed struct {
	*bed
	db  *postgres.DB
	sql *sql.DB
	log string       // identifies the log, as in the headers of published events
	n   atomic.Int64 // distinguishes the messages of all rounds
}

func newProjectorBed(ctx context.Context, b *bed) (*projectorBed, error) {
	db, err := postgres.New(b.pool, nil)
	if err != nil {
		return nil, err
	}
	if _, err := b.pool.Exec(ctx, totalTables); err != nil {
		return nil, err
	}
	id, err := db.LogID(ctx)
	if err != nil {
		return nil, err
	}
	return &projectorBed{bed: b, db: db, sql: stdlib.OpenDBFromPool(b.pool), log: id.String()}, nil
}

func (p *projectorBed) lines() ([]line, error) {
	schema := wsql.PublisherConfig{SchemaAdapter: wsql.DefaultPostgreSQLSchema{}, AutoInitializeSchema: true}
	pub, err := wsql.NewPublisher(p.sql, schema, watermill.NopLogger{})
	if err != nil {
		return nil, err
	}
	// So that the table exists.
	if err := pub.Publish("rated", message.NewMessage(watermill.NewUUID(), []byte(payload))); err != nil {
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
	written, run := projects(p, p.db.Batched(), writes), projects(p, p.db, runs)
	peer := program{p.filledTopic, p.peer}
	one := func(of string, ours, limit work) line {
		return newLine("projector/"+of, name, program{p.empty, ours}, peer, program{p.empty, limit})
	}
	return []line{
		one("message", written(1, false), p.limit(1)),
		one("message-pgx.Tx", run(1, false), p.limitTx(1)),
		one("in-flight-32", written(32, false), p.limit(32)),
		one("in-flight-32-pgx.Tx", run(32, false), p.limitTx(32)),
		one("batch-markers", written(500, false), p.limit(500)),
		newLine("projector/batch-checkpoint", name, program{p.begun, p.reads}, peer, program{p.begun, p.limitAdvance(500)}),
		newLine("catchup/1M", "", program{p.begun, p.reads}, program{}, program{p.begun, p.readsByHand(500)}),
		newLine("projector/segments-4", "", program{p.begun, p.readsWaiting(4)}, program{}, program{p.begun, p.readsWaiting(1)}),
		newLine("projector/message-careful", "", program{p.empty, written(1, true)}, program{}, program{p.empty, written(1, false)}),
		newLine("projector/in-flight-32-careful", "", program{p.empty, written(32, true)}, program{}, program{p.empty, written(32, false)}),
	}, nil
}

func newLine(name, peerName string, ours, peer, limit program) line {
	return line{name: name, unit: "messages/s", peerName: peerName, ours: ours, peer: peer, limit: limit}
}

// empty makes the projectors live at the end of the log.
func (p *projectorBed) empty(ctx context.Context) error {
	for _, stmt := range []string{"truncate kinora.checkpoints, kinora.segments, model.totals, model.markers, kinora.markers, kinora.parked, kinora.holds, kinora.in_flight, kinora.runners", "vacuum analyze", "checkpoint"} {
		if _, err := p.pool.Exec(ctx, stmt); err != nil {
			return err
		}
	}
	head, err := p.db.LogPosition(ctx, eventstore.From{Now: true})
	if err != nil {
		return err
	}
	live := provider.Checkpoint{Place: provider.LogPlace{Position: head}, Mode: provider.ModeLive}
	for _, name := range []string{"written", "run"} {
		if _, err := p.db.SetCheckpoint(ctx, provider.Build{Projector: name}, provider.Checkpoint{}, live); err != nil {
			return err
		}
	}
	return nil
}

// next returns a new message's id and product.
func (p *projectorBed) next() (id, product string) {
	n := p.n.Add(1)
	return uuid.NewString(), fmt.Sprintf("p%d", n%products)
}

// supply is a subscriber that always has this many messages in flight, recorded at the current
// time.
type supply struct {
	*projectorBed
	most  int
	done  int64
	ended chan struct{}
}

func (s *supply) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	to := make(chan *message.Message)
	go func() {
		defer close(s.ended)
		// A ring, because messages are acked almost in order.
		inFlight := make([]*message.Message, s.most)
		for n := 0; ; n++ {
			place := &inFlight[n%s.most]
			if *place != nil {
				select {
				case <-(*place).Acked():
					s.done++
				case <-ctx.Done():
					return
				}
			}
			id, product := s.next()
			m := message.NewMessage(id, fmt.Appendf(nil, `{"product_id":%q,"rating":5}`, product))
			m.Metadata[provider.HeaderType], m.Metadata[provider.HeaderSchema] = "review.posted", "1"
			m.Metadata[provider.HeaderStream], m.Metadata[outbox.HeaderKey] = "review-"+id, "review-"+id
			m.Metadata[provider.HeaderPosition], m.Metadata[provider.HeaderLog] = strconv.FormatInt(1<<40+s.n.Load(), 10), s.log
			m.Metadata[provider.HeaderRecordedAt] = time.Now().UTC().Format(time.RFC3339Nano)
			*place = m
			select {
			case to <- m:
			case <-ctx.Done():
				return
			}
		}
	}()
	return to, nil
}

func (*supply) Close() error { return nil }

// projects runs Kinora: a runner with one worker on a broker with inFlight messages in flight. If
// that is many, a unit takes half of them, so that the broker delivers while a unit runs.
func projects[Tx any](p *projectorBed, u provider.Units[Tx], of *projector.Projector[Tx]) func(inFlight int, careful bool) work {
	return func(inFlight int, careful bool) work {
		return func(ctx context.Context, _ *bed) (int64, error) {
			from := &supply{projectorBed: p, most: inFlight, ended: make(chan struct{})}
			cfg := projector.RunnerConfig{Batch: inFlight, Careful: careful, Logger: slog.New(slog.DiscardHandler)}
			if inFlight >= 500 {
				from.most = 2 * inFlight
			}
			runner, err := projector.NewRunner(u, projector.Subscribe(from, "rated"), cfg, of)
			if err != nil {
				return 0, err
			}
			err = runner.Run(ctx)
			<-from.ended
			return from.done, err
		}
	}
}

const (
	limitFence  = `select pg_advisory_xact_lock_shared(78, 1)`
	limitMarker = `insert into model.markers (handler, generation, message_id)
		select 'written/rated', 1, m from unnest($1::text[]) m order by 1, 3`
)

// limit applies size messages in one round trip: the fence, the markers, whose insert fails if one
// exists, and the writes.
func (p *projectorBed) limit(size int) work {
	return p.byHand(size, func(ctx context.Context, conn *pgx.Conn, ids, products []string) error {
		b := &pgx.Batch{}
		b.Queue(limitFence)
		b.Queue(limitMarker, ids)
		for _, product := range products {
			b.Queue(addOne, product)
		}
		return conn.SendBatch(ctx, b).Close()
	})
}

// limitTx uses one round trip to begin, fence and mark, one for each write, because the handler
// waits for each result, and one to commit.
func (p *projectorBed) limitTx(size int) work {
	return p.byHand(size, func(ctx context.Context, conn *pgx.Conn, ids, products []string) error {
		b := &pgx.Batch{}
		b.Queue("begin")
		b.Queue(limitFence)
		b.Queue(limitMarker+" on conflict do nothing", ids)
		if err := conn.SendBatch(ctx, b).Close(); err != nil {
			return err
		}
		for _, product := range products {
			if _, err := conn.Exec(ctx, addOne, product); err != nil {
				return err
			}
		}
		_, err := conn.Exec(ctx, "commit")
		return err
	})
}

// begun empties the tables, and fills the log.
func (p *projectorBed) begun(ctx context.Context) error {
	if err := p.empty(ctx); err != nil {
		return err
	}
	for _, stmt := range []string{
		`truncate kinora.checkpoints, kinora.segments, kinora.leases`,
		`drop table if exists model.checkpoints`,
		`create table model.checkpoints (projector text primary key, position bigint not null, token uuid) with (fillfactor = 50)`,
		`insert into model.checkpoints values ('read', 0, null)`,
	} {
		if _, err := p.pool.Exec(ctx, stmt); err != nil {
			return err
		}
	}
	return fillTheLog(ctx, p.bed)
}

// reads runs Kinora: a new projector reads the log.
func (p *projectorBed) reads(ctx context.Context, _ *bed) (int64, error) {
	var done atomic.Int64
	read := projector.Define("read", ratings, projector.Options{},
		projector.On("rated", func(_ context.Context, b *pgx.Batch, e eventstore.Event[rated]) error {
			b.Queue(addOne, e.Data.ProductID)
			return nil
		}))
	cfg := projector.RunnerConfig{Logger: slog.New(slog.DiscardHandler), Observer: projector.RunnerObserver{
		Unit: func(_ string, n int, _ time.Duration, err error) {
			if err == nil {
				done.Add(int64(n))
			}
		},
	}}
	runner, err := projector.NewRunner(p.db.Batched(), projector.FromLog(p.db), cfg, read)
	if err != nil {
		return 0, err
	}
	err = runner.Run(ctx)
	return done.Load(), err
}

// readsWaiting runs Kinora with a number of segments: each handler waits for its own statement, which
// changes the row of its stream.
func (p *projectorBed) readsWaiting(segments int) work {
	return func(ctx context.Context, _ *bed) (int64, error) {
		var done atomic.Int64
		read := projector.Define("waits", ratings, projector.Options{Segments: segments},
			projector.On("rated", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[rated]) error {
				_, err := tx.Exec(ctx, addOne, e.Stream)
				return err
			}))
		cfg := projector.RunnerConfig{Logger: slog.New(slog.DiscardHandler), Observer: projector.RunnerObserver{
			Unit: func(_ string, n int, _ time.Duration, err error) {
				if err == nil {
					done.Add(int64(n))
				}
			},
		}}
		runner, err := projector.NewRunner(p.db, projector.FromLog(p.db), cfg, read)
		if err != nil {
			return 0, err
		}
		err = runner.Run(ctx)
		return done.Load(), err
	}
}

// readsByHand reads a page while it applies the one before, with the checkpoint, in one round trip.
func (p *projectorBed) readsByHand(size int) work {
	return func(ctx context.Context, _ *bed) (done int64, err error) {
		reading, stop := context.WithCancel(context.WithoutCancel(ctx))
		defer stop()
		pages, failed := make(chan []string, 1), make(chan error, 1)
		go func() {
			defer close(pages)
			failed <- p.pagesByHand(reading, "kinora", size, pages)
		}()
		conn, err := p.pool.Acquire(reading)
		if err != nil {
			return 0, err
		}
		defer conn.Release()
		for page := range pages {
			if ctx.Err() != nil {
				return done, nil
			}
			b := &pgx.Batch{}
			b.Queue(limitFence)
			b.Queue(`update model.checkpoints set position = position + $1 where projector = 'read' and token is null`, len(page))
			for _, product := range page {
				b.Queue(addOne, product)
			}
			if err := conn.SendBatch(reading, b).Close(); err != nil {
				return done, err
			}
			done += int64(len(page))
		}
		return done, <-failed
	}
}

// pagesByHand sends the products of each page of the log.
func (p *projectorBed) pagesByHand(ctx context.Context, schema string, size int, pages chan<- []string) error {
	for after := int64(0); ; {
		rows, err := p.pool.Query(ctx, `select position, id, type, data from `+schema+`.events where position > $1 order by position limit $2`, after, size)
		if err != nil {
			return err
		}
		var page []string
		var id uuid.UUID
		var kind string
		var data []byte
		_, err = pgx.ForEachRow(rows, []any{&after, &id, &kind, &data}, func() error {
			var e rated
			if err := json.Unmarshal(data, &e); err != nil {
				return err
			}
			page = append(page, e.ProductID)
			return nil
		})
		if err != nil || len(page) == 0 {
			return err
		}
		select {
		case pages <- page:
		case <-ctx.Done():
			return nil
		}
	}
}

// limitAdvance applies size events in one round trip: the fence, the checkpoint, and the writes.
func (p *projectorBed) limitAdvance(size int) work {
	return p.byHand(size, func(ctx context.Context, conn *pgx.Conn, _, products []string) error {
		b := &pgx.Batch{}
		b.Queue(limitFence)
		b.Queue(`update model.checkpoints set position = position + $1 where projector = 'read' and token is null`, size)
		for _, product := range products {
			b.Queue(addOne, product)
		}
		return conn.SendBatch(ctx, b).Close()
	})
}

// byHand applies messages, size at a time, on one connection.
func (p *projectorBed) byHand(size int, apply func(ctx context.Context, conn *pgx.Conn, ids, products []string) error) work {
	return func(ctx context.Context, _ *bed) (done int64, err error) {
		hard := context.WithoutCancel(ctx)
		conn, err := p.pool.Acquire(hard)
		if err != nil {
			return 0, err
		}
		defer conn.Release()
		ids, products := make([]string, size), make([]string, size)
		for ; ctx.Err() == nil; done += int64(size) {
			for i := range size {
				ids[i], products[i] = p.next()
			}
			if err := apply(hard, conn.Conn(), ids, products); err != nil {
				return done, err
			}
		}
		return done, nil
	}
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

// peer is what its users write: a handler that inserts the marker itself, in its own transaction.
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
