package projector_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
)

// Sold and Returned are events of a shop.
type (
	Sold     struct{ Cents int }
	Returned struct{ Cents int }
)

// Amount is what both events have in common.
type Amount interface{ Change() int }

func (e Sold) Change() int     { return e.Cents }
func (e Returned) Change() int { return -e.Cents }

var shopTypes = eventstore.NewTypes(
	eventstore.Type[Sold]("shop.sold"), eventstore.Type[Returned]("shop.returned"))

// A projector that sums up a shop. Its handler takes all events that implement Amount.
func ExampleDefine() {
	ctx := context.Background()
	turnover := projector.Define("turnover", shopTypes, projector.Options{Markers: true},
		projector.On("amount", func(_ context.Context, tx *memory.Model, e eventstore.Event[Amount]) error {
			sum, _ := tx.Get("turnover", e.Stream)
			before, _ := sum.(int)
			tx.Put("turnover", e.Stream, before+e.Data.Change())
			return nil
		}))

	db, stop := serve(ctx, turnover)
	defer stop()
	at := sell(ctx, db, "shop-1", Sold{1500}, Sold{500}, Returned{500})
	check(turnover.Wait(ctx, db, at)) // read your own write
	db.View(func(m *memory.Model) { fmt.Println(m.Get("turnover", "shop-1")) })

	// Output: 1500 true
}

// A handler with output: its message commits with the read model, and a relay publishes it.
func ExampleOnEmit() {
	ctx := context.Background()
	bigSales := projector.Define("big-sales", shopTypes, projector.Options{Markers: true},
		projector.OnEmit("sold", func(_ context.Context, tx *memory.Model, e eventstore.Event[Sold]) ([]outbox.Message, error) {
			if e.Data.Cents < 100_000 {
				return nil, nil
			}
			tx.Put("big", e.ID, e.Data.Cents)
			return []outbox.Message{{Topic: "letters", Payload: []byte("thank you")}}, nil
		}))

	db, stop := serve(ctx, bigSales)
	defer stop()
	check(bigSales.Wait(ctx, db, sell(ctx, db, "shop-1", Sold{500}, Sold{200_000})))
	letters, err := db.Entries(ctx, outbox.Filter{Topic: "letters"})
	check(err)
	for _, m := range letters {
		fmt.Println(m.Key, string(m.Payload))
	}

	// Output: shop-1 thank you
}

// The handler was "sold", and its projector "sales". Messages of the broker that it applied under these names are not applied again.
func ExampleHandler_Was() {
	count := func(_ context.Context, tx *memory.Model, e eventstore.Event[Sold]) error {
		tx.Put("sold", e.ID, e.Data.Cents)
		return nil
	}
	turnover := projector.Define("turnover", shopTypes, projector.Options{Markers: true, BrokerOnly: true},
		projector.On("amount", count).Was("sold", "sales/sold"))
	fmt.Println(turnover.Name(), turnover.Handlers())

	// Output: turnover [turnover/amount turnover/sold sales/sold]
}

// A handler marks errors that no retry can help. Other errors are tried again, with a backoff.
func ExamplePermanent() {
	err := projector.Permanent(errors.New("the amount is not a number"))
	fmt.Println(projector.ClassOf(err), projector.ClassOf(errors.New("connection refused")))
	fmt.Println(err)

	// Output:
	// permanent unknown
	// permanent: the amount is not a number
}

// Each projector has its own subscriber, so a slow projector delays no other. With Kafka, each of
// these subscribers has its own consumer group.
func ExampleSubscribeEach() {
	db, err := memory.New(nil)
	check(err)
	broker := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	defer func() { check(broker.Close()) }()
	source := projector.SubscribeEach(func(projector string) (message.Subscriber, error) {
		fmt.Println("consumer group", projector)
		return broker, nil
	}, "product")

	runner, err := projector.NewRunner(db, source, projector.RunnerConfig{Logger: slog.New(slog.DiscardHandler)}, prices(true))
	check(err)
	service, err := kinora.Start(context.Background(), runner)
	check(err)
	check(service.Stop())

	// Output: consumer group prices
}

// Two workers, large units, and three attempts; parked messages are counted for a metric.
func ExampleNewRunner() {
	db, err := memory.New(nil)
	check(err)
	broker := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	defer func() { check(broker.Close()) }()
	var parked atomic.Int64
	cfg := projector.RunnerConfig{
		Concurrency: 2,
		Batch:       100,
		Retry:       claim.Backoff{Base: time.Second, Max: time.Minute, Attempts: 3},
		Observer: projector.RunnerObserver{
			Parked: func(_, _ string, _ projector.Class, _ string) { parked.Add(1) },
		},
	}
	_, err = projector.NewRunner(db, projector.Subscribe(broker, "product"), cfg, prices(true))
	fmt.Println(err)

	cfg.Batch = -1
	_, err = projector.NewRunner(db, projector.Subscribe(broker, "product"), cfg, prices(true))
	fmt.Println(err != nil)

	// Output:
	// <nil>
	// true
}

// Wait says when an event will not be applied without an operator.
func ExampleProjector_Wait() {
	ctx := context.Background()
	refuse := projector.Define("refuse", shopTypes, projector.Options{Markers: true},
		projector.On("sold", func(context.Context, *memory.Model, eventstore.Event[Sold]) error {
			return projector.Permanent(errors.New("closed"))
		}))
	db, stop := serve(ctx, refuse)
	defer stop()

	err := refuse.Wait(ctx, db, sell(ctx, db, "shop-1", Sold{500}))
	fmt.Println(errors.Is(err, projector.ErrParked), err)

	// Output: true wait for refuse: the event is parked: replay or skip it
}

// serve runs a projector of shop events, with a relay and a broker in this process.
func serve(ctx context.Context, p *projector.Projector[*memory.Model]) (db *memory.DB, stop func()) {
	db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
	check(err)
	quiet := slog.New(slog.DiscardHandler)
	broker := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	runner, err := projector.NewRunner(db, projector.Subscribe(broker, "shop"), projector.RunnerConfig{Logger: quiet}, p)
	check(err)
	relay, err := outbox.NewRelay(db, broker, &outbox.RelayConfig{Topics: []string{"shop"}, Logger: quiet})
	check(err)
	service, err := kinora.Start(ctx, runner, relay)
	check(err)
	return db, func() { check(errors.Join(service.Stop(), broker.Close())) }
}

// sell appends events to a shop.
func sell(ctx context.Context, db *memory.DB, stream string, events ...any) eventstore.Appended {
	drafts, err := shopTypes.Encode(ctx, events...)
	check(err)
	at, err := db.Append(ctx, stream, eventstore.Any, drafts)
	check(err)
	return at
}
