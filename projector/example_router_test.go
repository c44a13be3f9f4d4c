package projector_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
)

// A plain handler counts each message once, although the broker delivers it twice.
func ExampleMiddleware() {
	ctx := context.Background()
	db, err := memory.New(nil) // or sqlite.Open, postgres.Open
	check(err)
	broker := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	check(err)
	once, err := projector.Middleware(db, "count-reviews", marker.Retention{})
	check(err)

	router.AddConsumerHandler("count", "reviews", broker, func(m *message.Message) error {
		tx, _ := projector.TxFrom[*memory.Model](m.Context())
		n, _ := tx.Get("counts", "reviews")
		count, _ := n.(int)
		tx.Put("counts", "reviews", count+1)
		return nil
	}).AddMiddleware(once)
	go func() { check(router.Run(ctx)) }()
	<-router.Running()

	review := message.NewMessage(watermill.NewUUID(), nil)
	check(broker.Publish("reviews", review, review.Copy()))
	check(router.Close())
	db.View(func(m *memory.Model) { fmt.Println(m.Get("counts", "reviews")) })

	// Output: 1 true
}

// A router passes its messages to a projector. The runner stops after the router.
func ExampleRunner_Handle() {
	ctx := context.Background()
	db, err := memory.New(&memory.Config{Route: outbox.ByCategory}) // or sqlite.Open, postgres.Open
	check(err)
	broker := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	shop := prices(false)
	runner, err := projector.NewRunner(db, projector.FromRouter(), projector.RunnerConfig{Logger: slog.New(slog.DiscardHandler)}, shop)
	check(err)
	runners, err := kinora.Start(ctx, runner)
	check(err)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	check(err)
	router.AddConsumerHandler("prices", "product", broker, runner.Handle)
	go func() { check(router.Run(ctx)) }()
	<-router.Running()
	relay, err := outbox.NewRelay(db, broker, nil)
	check(err)
	relays, err := kinora.Start(ctx, relay)
	check(err)

	drafts, err := priceTypes.Encode(ctx, Priced{250})
	check(err)
	at, err := db.Append(ctx, "product-tea", eventstore.NoStream, drafts)
	check(err)
	check(shop.Wait(ctx, db, at))
	check(errors.Join(relays.Stop(), router.Close(), runners.Stop()))
	fmt.Println(price(db, "product-tea"))

	// Output: 250
}
