package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
)

const (
	visibleRate    = 500 // events a second
	visibleWriters = 4
	visibleFor     = 5 * time.Second
)

// sent is an event with the time at which its append began.
type sent struct {
	ProductID string `json:"product_id"`
	At        int64  `json:"at"` // Unix nanoseconds
}

// visible measures the time from the begin of an append to the commit of the read model, in one
// process that was never idle.
func (p *projectorBed) visible(ctx context.Context, rounds int) (result, error) {
	var ours, peer []time.Duration
	for range rounds {
		one, err := p.visibleFromLog(ctx)
		if err != nil {
			return result{}, err
		}
		other, err := p.visibleToPeer(ctx)
		if err != nil {
			return result{}, err
		}
		ours, peer = append(ours, one...), append(peer, other...)
	}
	r := result{Name: "latency/append-to-visible p99", Unit: "ms", PeerName: "watermill-sql polling every 10 ms, and a marker by hand", Rounds: rounds,
		Ours: percentile(ours, 0.99), Peer: percentile(peer, 0.99)}
	r.VsPeer = r.Ours / r.Peer
	return r, nil
}

func percentile(times []time.Duration, share float64) float64 {
	slices.Sort(times)
	return float64(times[int(share*float64(len(times)-1))].Microseconds()) / 1000
}

// write calls add at the rate, and returns after the given time.
func (p *projectorBed) write(ctx context.Context, long time.Duration, add func(ctx context.Context, data []byte) error) error {
	var all sync.WaitGroup
	errs := make(chan error, visibleWriters)
	began := time.Now()
	for range visibleWriters {
		all.Go(func() {
			tick := time.NewTicker(visibleWriters * time.Second / visibleRate)
			defer tick.Stop()
			for time.Since(began) < long {
				<-tick.C
				_, product := p.next()
				data, err := json.Marshal(sent{product, time.Now().UnixNano()})
				if err == nil {
					err = add(ctx, data)
				}
				if err != nil {
					errs <- err
					return
				}
			}
		})
	}
	all.Wait()
	select {
	case err := <-errs:
		return err
	default:
		return nil
	}
}

func (p *projectorBed) visibleFromLog(ctx context.Context) (times []time.Duration, err error) {
	if _, err := p.pool.Exec(ctx, "truncate kinora.checkpoints, model.totals"); err != nil {
		return nil, err
	}
	var pending []int64 // of the unit that runs
	read := projector.Define("visible", eventstore.NewTypes(eventstore.Type[sent]("sent")), projector.Options{From: eventstore.From{Now: true}},
		projector.On("sent", func(_ context.Context, b *pgx.Batch, e eventstore.Event[sent]) error {
			pending = append(pending, e.Data.At)
			b.Queue(addOne, e.Data.ProductID)
			return nil
		}))
	cfg := projector.RunnerConfig{Logger: slog.New(slog.DiscardHandler), Observer: projector.RunnerObserver{
		Unit: func(_ string, _ int, _ time.Duration, err error) {
			for _, at := range pending {
				if err == nil {
					times = append(times, time.Duration(time.Now().UnixNano()-at))
				}
			}
			pending = pending[:0]
		},
	}}
	runner, err := projector.NewRunner(p.db.Batched(), projector.FromLog(p.db), cfg, read)
	if err != nil {
		return nil, err
	}
	running, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- runner.Run(running) }()
	<-runner.Running()
	err = p.write(ctx, visibleFor, func(ctx context.Context, data []byte) error {
		id := uuid.Must(uuid.NewV7()).String()
		_, err := p.db.Append(ctx, "sent-"+id, eventstore.NoStream, []eventstore.Draft{{ID: id, Type: "sent", Schema: 1, Data: data}})
		return err
	})
	time.Sleep(100 * time.Millisecond)
	stop()
	if e := <-ended; err == nil {
		err = e
	}
	return times, err
}

func (p *projectorBed) visibleToPeer(ctx context.Context) (times []time.Duration, err error) {
	schema := wsql.PublisherConfig{SchemaAdapter: wsql.DefaultPostgreSQLSchema{}, AutoInitializeSchema: true}
	pub, err := wsql.NewPublisher(p.sql, schema, watermill.NopLogger{})
	if err != nil {
		return nil, err
	}
	sub, err := wsql.NewSubscriber(p.sql, wsql.SubscriberConfig{
		ConsumerGroup: "visible", SchemaAdapter: wsql.DefaultPostgreSQLSchema{}, OffsetsAdapter: wsql.DefaultPostgreSQLOffsetsAdapter{},
		InitializeSchema: true, PollInterval: 10 * time.Millisecond,
	}, watermill.NopLogger{})
	if err != nil {
		return nil, err
	}
	to, err := sub.Subscribe(ctx, "visible")
	if err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() {
		for m := range to {
			var e sent
			if err := json.Unmarshal(m.Payload, &e); err != nil {
				ended <- err
				return
			}
			if err := p.applyByHand(ctx, m.UUID, e.ProductID); err != nil {
				ended <- err
				return
			}
			times = append(times, time.Duration(time.Now().UnixNano()-e.At))
			m.Ack()
		}
		ended <- nil
	}()
	err = p.write(ctx, visibleFor, func(_ context.Context, data []byte) error {
		return pub.Publish("visible", message.NewMessage(uuid.NewString(), data))
	})
	time.Sleep(time.Second)
	closed := sub.Close()
	for _, e := range []error{closed, <-ended} {
		if err == nil && e != nil {
			err = fmt.Errorf("peer: %w", e)
		}
	}
	return times, err
}
