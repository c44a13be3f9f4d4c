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

// prices is a projector that refuses a price of zero, unless it is fixed.
func prices(fixed bool) *projector.Projector[*memory.Model] {
	return projector.Define("prices", priceTypes, projector.Options{Markers: true},
		projector.On("priced", func(_ context.Context, tx *memory.Model, e eventstore.Event[Priced]) error {
			if e.Data.Cents == 0 && !fixed {
				return projector.Permanent(errors.New("nothing is free"))
			}
			tx.Put("prices", e.Stream, e.Data.Cents)
			return nil
		}))
}

// A message could not be applied, and the next message of its key waits behind it. An operator
// lists both.
func Example_parked() {
	ctx := context.Background()
	db := priceTea(ctx) // or sqlite.Open, postgres.Open

	list, err := db.Parked(ctx, projector.ParkedFilter{Projector: "prices"})
	check(err)
	for _, p := range list {
		fmt.Printf("%d: %s, %s of %s: %s after %d attempts\n", p.Seq, p.Payload, p.Type, p.Key, p.State, p.Attempts)
	}

	// Output:
	// 1: {"Cents":0}, product.priced of product-tea: stuck after 1 attempts
	// 2: {"Cents":250}, product.priced of product-tea: waiting after 0 attempts
}

// The handler has been fixed. A dry run shows the changes of a replay, and writes nothing.
func ExampleProjector_DryRun() {
	ctx := context.Background()
	db := priceTea(ctx)

	would, err := prices(true).DryRun(ctx, db, projector.ParkedFilter{Key: "product-tea"}, nil)
	check(err)
	for _, c := range would.Changes {
		fmt.Printf("%s: %s becomes %s\n", c.Table, c.Before, c.After)
	}
	fmt.Println(would.Messages, "would be applied,", len(would.Failures), "would fail")

	// Output:
	// prices:  becomes {"key":"product-tea","value":250}
	// 2 would be applied, 0 would fail
}

// A replay makes messages due again, and the projector's runners apply them in order. A tool
// without a service calls ApplyParked.
func ExampleReplay() {
	ctx := context.Background()
	db := priceTea(ctx)

	n, err := projector.Replay(ctx, db, projector.ParkedFilter{Projector: "prices", Key: "product-tea"},
		projector.Decision{By: "ann", Reason: "products may be free since 1.4"})
	check(err)
	fmt.Println(n, "due")

	check(prices(true).ApplyParked(ctx, db, nil))
	left, err := db.ParkedCount(ctx, "prices")
	check(err)
	fmt.Println(left, "parked, tea is", price(db, "product-tea"))

	// Output:
	// 2 due
	// 0 parked, tea is 250
}

// A message that can never be applied is skipped by a person, with a reason. The messages behind it
// become due.
func ExampleSkip() {
	ctx := context.Background()
	db := priceTea(ctx)

	n, err := projector.Skip(ctx, db, projector.ParkedFilter{Seqs: []int64{1}},
		projector.Decision{By: "ann", Reason: "a typing error, corrected since"})
	check(err)
	fmt.Println(n, "skipped")

	check(prices(false).ApplyParked(ctx, db, nil))
	fmt.Println("tea is", price(db, "product-tea"))
	list, err := db.Parked(ctx, projector.ParkedFilter{States: []projector.ParkedState{projector.StateSkipped}})
	check(err)
	for _, p := range list {
		fmt.Printf("%d: %s by %s: %s\n", p.Seq, p.State, p.By, p.Reason)
	}

	// Output:
	// 1 skipped
	// tea is 250
	// 1: skipped by ann: a typing error, corrected since
}

// priceTea runs a service that cannot apply the first price of tea, and returns its store.
func priceTea(ctx context.Context) *memory.DB {
	db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
	check(err)
	quiet := slog.New(slog.DiscardHandler)
	broker := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	p := prices(false)
	runner, err := projector.NewRunner(db, projector.Subscribe(broker, "product"), projector.RunnerConfig{Logger: quiet}, p)
	check(err)
	relay, err := outbox.NewRelay(db, broker, &outbox.RelayConfig{Logger: quiet})
	check(err)
	service, err := kinora.Start(ctx, runner, relay)
	check(err)
	for i, cents := range []int{0, 250} {
		drafts, err := priceTypes.Encode(ctx, Priced{cents})
		check(err)
		at, err := db.Append(ctx, "product-tea", eventstore.Expected(i), drafts)
		check(err)
		if err := p.Wait(ctx, db, at); !errors.Is(err, projector.ErrParked) {
			panic(fmt.Sprint("the message is not parked: ", err))
		}
	}
	check(service.Stop())
	check(broker.Close())
	return db
}

func price(db *memory.DB, product string) (cents any) {
	db.View(func(m *memory.Model) { cents, _ = m.Get("prices", product) })
	return cents
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
