package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
)

// Paid is an event of an order.
type Paid struct{ Cents int }

var orderTypes = eventstore.NewTypes(eventstore.Type[Paid]("order.paid"))

// printer is a Watermill publisher that prints.
type printer struct{ published chan struct{} }

func (p printer) Publish(topic string, messages ...*message.Message) error {
	for _, m := range messages {
		raw, err := outbox.ParseWatermill(m)
		if err != nil {
			return err
		}
		fmt.Printf("%s: %s version %d: %s\n", topic, raw.Stream, raw.Version, raw.Data)
		p.published <- struct{}{}
	}
	return nil
}

func (printer) Close() error { return nil }

// An append writes an entry for each topic of its route. The relay publishes it.
func ExampleRelay() {
	ctx := context.Background()
	db, err := memory.New(&memory.Config{Route: outbox.ByCategory}) // or sqlite.Open, postgres.Open
	must(err)
	broker := printer{make(chan struct{}, 1)} // or any other Watermill publisher
	relay, err := outbox.NewRelay(db, broker, &outbox.RelayConfig{
		Backoff: claim.Backoff{Base: time.Second, Attempts: 5},
		Keep:    outbox.EntryRetention{Published: 24 * time.Hour},
	})
	must(err)
	service, err := kinora.Start(ctx, relay)
	must(err)

	drafts, err := orderTypes.Encode(ctx, Paid{Cents: 1250})
	must(err)
	_, err = db.Append(ctx, "order-7", eventstore.NoStream, drafts)
	must(err)
	<-broker.published
	must(service.Stop())

	// Output: order: order-7 version 1: {"Cents":1250}
}

// Events of VIP customers go to a second topic.
func ExampleRoute() {
	var route outbox.Route = func(stream string, d eventstore.Draft) []string {
		topics := outbox.ByCategory(stream, d)
		if d.Metadata.Extra["customer"] == "vip" {
			topics = append(topics, "vip")
		}
		return topics
	}
	vip := eventstore.Metadata{Extra: map[string]string{"customer": "vip"}}
	fmt.Println(route("order-7", eventstore.Draft{}), route("order-8", eventstore.Draft{Metadata: vip}))

	// Output: [order] [order vip]
}

// A message that is not an event is added in the transaction of the caller.
func ExampleEnqueuer() {
	ctx := context.Background()
	db, err := memory.New(nil)
	must(err)
	err = db.Transact(ctx, func(ctx context.Context, tx *memory.Model) error { // a *sql.Tx with sqlite, a pgx.Tx with postgres
		tx.Put("customers", "ann", "moved")
		return db.InTx(tx).Enqueue(ctx, outbox.Message{Topic: "letters", Key: "ann", Payload: []byte("welcome home")})
	})
	must(err)

	entries, err := db.Entries(ctx, outbox.Filter{Topic: "letters"})
	must(err)
	fmt.Println(entries[0].Status, entries[0].Key, string(entries[0].Payload))

	// Output: pending ann welcome home
}

// Consumers without a runner parse messages themselves. A message that no relay made is malformed.
func ExampleParseWatermill() {
	m := outbox.ToWatermill(outbox.Entry{OutboxMessage: outbox.Message{
		ID: "m-1", Topic: "order", Key: "order-7", Payload: []byte(`{"Cents":1250}`),
		Headers: map[string]string{provider.HeaderType: "order.paid", provider.HeaderStream: "order-7"},
	}})
	raw, err := outbox.ParseWatermill(m)
	must(err)
	fmt.Println(raw.ID, raw.Type, raw.Stream, m.Metadata[outbox.HeaderKey])

	_, err = outbox.ParseWatermill(message.NewMessage("m-2", nil))
	fmt.Println(errors.Is(err, outbox.ErrMalformed), err)

	// Output:
	// m-1 order.paid order-7 order-7
	// true malformed message: header kinora_type is missing
}

// A relay that reports how many messages it publishes, for a metric.
func ExampleRelayObserver() {
	ctx := context.Background()
	db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
	must(err)
	published := make(chan int)
	broker := printer{make(chan struct{}, 1)}
	relay, err := outbox.NewRelay(db, broker, &outbox.RelayConfig{
		Logger: slog.New(slog.DiscardHandler),
		Observer: outbox.RelayObserver{
			Published: func(_ string, messages int, _ time.Duration, _ error) { published <- messages },
		},
	})
	must(err)
	service, err := kinora.Start(ctx, relay)
	must(err)
	drafts, err := orderTypes.Encode(ctx, Paid{Cents: 1250})
	must(err)
	_, err = db.Append(ctx, "order-7", eventstore.NoStream, drafts)
	must(err)
	fmt.Println(<-published, "published")
	must(service.Stop())

	// Output:
	// order: order-7 version 1: {"Cents":1250}
	// 1 published
}

// Relays delete old entries by themselves. Prune does it at once, here with another retention.
func ExamplePrune() {
	ctx := context.Background()
	db, err := memory.New(nil)
	must(err)
	abandon(ctx, db, "invoice-1")
	skipped, err := db.Skip(ctx, outbox.Filter{Status: []outbox.Status{outbox.Abandoned}})
	must(err)

	deleted, err := outbox.Prune(ctx, db, outbox.EntryRetention{Skipped: time.Hour})
	must(err)
	fmt.Println(skipped, "skipped,", deleted, "deleted")

	_, err = outbox.Prune(ctx, db, outbox.EntryRetention{Skipped: -time.Hour})
	fmt.Println(errors.Is(err, claim.ErrTerms))

	// Output:
	// 1 skipped, 0 deleted
	// true
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
