package projector_test

import (
	"context"
	"fmt"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
)

// The projector is split into eight shares of its streams. Two runners, which may be in two processes,
// have four of them each.
func ExampleOptions_segments() {
	ctx, stop := context.WithCancel(context.Background())
	db, err := memory.New(nil)
	check(err)
	p := projector.Define("prices", priceTypes, projector.Options{Segments: 8},
		projector.On("priced", func(_ context.Context, tx *memory.Model, e eventstore.Event[Priced]) error {
			tx.Put("prices", e.Stream, e.Data.Cents)
			return nil
		}))
	ended := make(chan error)
	for range 2 {
		r, err := projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{}, p)
		check(err)
		go func() { ended <- r.Run(ctx) }()
	}
	drafts, err := priceTypes.Encode(ctx, Priced{Cents: 250})
	check(err)
	at, err := db.Append(ctx, "product-tea", eventstore.Any, drafts)
	check(err)
	check(p.Wait(ctx, db, at))
	stop()
	check(<-ended)
	check(<-ended)
	db.View(func(m *memory.Model) {
		cents, _ := m.Get("prices", "product-tea")
		fmt.Println(cents)
	})

	// Output:
	// 250
}
