package memory_test

import (
	"context"
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

type Posted struct{ Product, Stars int }

var types = eventstore.NewTypes(eventstore.Type[Posted]("review.posted"))

var stars = projector.Define("stars", types, projector.Options{Markers: true},
	projector.On("posted", func(_ context.Context, tx *memory.Model, e eventstore.Event[Posted]) error {
		sum, _ := tx.Get("stars", fmt.Sprint(e.Data.Product))
		n, _ := sum.(int)
		tx.Put("stars", fmt.Sprint(e.Data.Product), n+e.Data.Stars)
		return nil
	}))

type review struct{}

func (*review) Apply(any) {}

// A whole service in one process: events, the outbox, a broker, and a read model.
func Example() {
	ctx := context.Background()
	db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
	check(err)
	broker := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	defer func() { check(broker.Close()) }()
	quiet := slog.New(slog.DiscardHandler)
	runner, err := projector.NewRunner(db, projector.Subscribe(broker, "review"), projector.RunnerConfig{Logger: quiet}, stars)
	check(err)
	relay, err := outbox.NewRelay(db, broker, &outbox.RelayConfig{Logger: quiet})
	check(err)
	service, err := kinora.Start(ctx, runner, relay)
	check(err)
	defer func() { check(service.Stop()) }()

	reviews, err := eventstore.NewRepository(db, types, "review", func(string) *review { return &review{} }, nil)
	check(err)
	for _, user := range []string{"ann", "ben"} {
		at, err := reviews.Update(ctx, eventstore.JoinID("42", user), func(*review) ([]any, error) {
			return []any{Posted{Product: 42, Stars: 4}}, nil
		})
		check(err)
		check(stars.Wait(ctx, db, at))
	}
	db.View(func(m *memory.Model) {
		for product, sum := range m.All("stars") {
			fmt.Println(product, sum)
		}
	})
	// Output: 42 8
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
