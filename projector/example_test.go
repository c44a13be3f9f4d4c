package projector_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
)

type Priced struct{ Cents int }

var priceTypes = eventstore.NewTypes(eventstore.Type[Priced]("product.priced"))

// prices is a projector with a fault, or mended.
func prices(mended bool) *projector.Projector[*memory.Model] {
	return projector.Define("prices", priceTypes, projector.Options{Markers: true},
		projector.On("priced", func(_ context.Context, tx *memory.Model, e eventstore.Event[Priced]) error {
			if e.Data.Cents == 0 && !mended {
				return projector.Permanent(errors.New("nothing is free"))
			}
			tx.Put("prices", e.Stream, e.Data.Cents)
			return nil
		}))
}

// A message cannot be applied, and the next one of its key waits behind it. The fault is mended, the replay rehearsed, and
// done: both take effect, in order.
func ExampleRunner_Replay() {
	ctx := context.Background()
	db, err := memory.New(&memory.Config{Route: outbox.ByCategory}) // or sqlite.Open, postgres.Open
	check(err)
	broker := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	defer func() { check(broker.Close()) }()
	priceAll(ctx, db, broker, projector.Subscribe(broker, "product"))

	list, err := db.ParkedMessages(ctx, projector.ParkedFilter{Projector: "prices"})
	check(err)
	for _, p := range list {
		fmt.Printf("%d: %s of %s, %s after %d attempts: %s\n", p.Seq, p.Handler, p.Key, p.Class, p.Attempts, p.Payload)
	}

	runner, err := projector.NewRunner(db, projector.Source{}, nil, prices(true)) // to replay, and not to run
	check(err)
	tea := projector.ParkedFilter{Projector: "prices", Key: "product-tea"}
	would, err := runner.Rehearse(ctx, tea, false)
	check(err)
	for _, c := range would.Changes {
		fmt.Printf("%s: %s becomes %s\n", c.Table, c.Before, c.After)
	}
	fmt.Println(would.Messages, "would be replayed,", len(would.Failures), "would fail")

	done, err := runner.Replay(ctx, tea, projector.ReplayConfig{
		Rate:     50, // messages a second at most
		Decision: projector.Decision{By: "ann", Reason: "products may be free since 1.4"},
	})
	check(err)
	fmt.Println(done.Replayed, "replayed,", done.Failed, "failed")
	left, err := db.ParkedCount(ctx, "prices")
	check(err)
	fmt.Println(left, "parked")

	// Output:
	// 1: prices/priced of product-tea, permanent after 1 attempts: {"Cents":0}
	// 2: prices/priced of product-tea, held after 0 attempts: {"Cents":250}
	// prices:  becomes {"key":"product-tea","value":250}
	// 2 would be replayed, 0 would fail
	// 2 replayed, 0 failed
	// 0 parked
}

// What can never be applied is given up on, by somebody and for a reason. What waits behind it comes back by itself, once
// there is a runner.
func ExampleParkedInspector() {
	ctx := context.Background()
	db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
	check(err)
	broker := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	defer func() { check(broker.Close()) }()
	source := projector.Subscribe(broker, "product")
	priceAll(ctx, db, broker, source)

	skipped, err := db.SkipParked(ctx, projector.ParkedFilter{Seqs: []int64{1}},
		projector.Decision{By: "ann", Reason: "a typing error, corrected since"})
	check(err)
	fmt.Println(skipped, "skipped")
	list, err := db.ParkedMessages(ctx, projector.ParkedFilter{State: projector.Skipped})
	check(err)
	for _, p := range list {
		fmt.Printf("%d: %s by %s: %s\n", p.Seq, p.State, p.By, p.Reason)
	}

	back := make(chan string, 1)
	service := serve(ctx, db, broker, source, prices(false), projector.Observer{
		Replayed: func(_, handler string, err error) { back <- fmt.Sprint(handler, " error: ", err) },
	})
	fmt.Println(<-back)
	check(service.Stop())
	db.View(func(m *memory.Model) {
		cents, _ := m.Get("prices", "product-tea")
		fmt.Println("tea is", cents)
	})

	// Output:
	// 1 skipped
	// 1: skipped by ann: a typing error, corrected since
	// prices/priced error: <nil>
	// tea is 250
}

// priceAll runs the program with the fault until all prices are set aside.
func priceAll(ctx context.Context, db *memory.DB, broker *gochannel.GoChannel, source projector.Source) {
	p := prices(false)
	service := serve(ctx, db, broker, source, p, projector.Observer{})
	defer func() { check(service.Stop()) }()
	for i, cents := range []int{0, 250} {
		drafts, err := priceTypes.Encode(ctx, Priced{cents})
		check(err)
		at, err := db.Append(ctx, "product-tea", eventstore.Expected(i), drafts)
		check(err)
		if err := p.Wait(ctx, db, at); !errors.Is(err, projector.ErrParked) {
			panic(err)
		}
	}
}

// serve starts a runner and a relay.
func serve(ctx context.Context, db *memory.DB, broker *gochannel.GoChannel, source projector.Source,
	p *projector.Projector[*memory.Model], told projector.Observer,
) *kinora.Group {
	quiet := slog.New(slog.DiscardHandler)
	runner, err := projector.NewRunner(db, source, &projector.RunnerConfig{Logger: quiet, Observer: told}, p)
	check(err)
	relay, err := outbox.NewRelay(db, broker, &outbox.RelayConfig{Logger: quiet})
	check(err)
	service, err := kinora.Start(ctx, runner, relay)
	check(err)
	return service
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
