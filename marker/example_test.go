package marker_test

import (
	"context"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
)

// A broker that redelivers for 14 days needs markers for at least 15.
func ExampleRetention_WithDefaults() {
	const day = 24 * time.Hour
	kept, err := marker.Retention{Horizon: 14 * day}.WithDefaults()
	check(err)
	fmt.Println(kept.Window)

	_, err = marker.Retention{Horizon: 14 * day, Window: 14 * day}.WithDefaults()
	fmt.Println(err)

	// Output:
	// 360h0m0s
	// unsafe marker retention: window 336h0m0s: set it to at least the horizon (336h0m0s) and a day
}

// The handler "ratings/old" was removed from the program. Its markers are found and deleted.
func ExampleOrphans() {
	ctx := context.Background()
	db := applied(ctx, "ratings/posted", "ratings/old")

	gone, err := marker.Orphans(ctx, db, "ratings/posted") // Projector.Handlers of all projectors
	check(err)
	for _, handler := range gone {
		n, err := marker.Drop(ctx, db, handler)
		check(err)
		fmt.Println(handler, n)
	}

	// Output: ratings/old 1
}

// A runner prunes by itself. A tool may do it while no runner is running.
func ExamplePrune() {
	ctx := context.Background()
	db := applied(ctx, "ratings/posted")

	n, err := marker.Prune(ctx, db, marker.Retention{}, "ratings", "ratings/posted")
	check(err)
	fmt.Println(n, "older than 8 days")

	// Output: 0 older than 8 days
}

// applied returns a store in which each handler has applied one message.
func applied(ctx context.Context, handlers ...string) *memory.DB {
	db, err := memory.New(nil)
	check(err)
	u := provider.Unit{Projector: "ratings", Messages: []provider.Message{{ID: "m-1", Mark: true}}}
	for _, name := range handlers {
		u.Messages[0].Handlers = append(u.Messages[0].Handlers, provider.Handler{Name: name})
	}
	nothing := func(context.Context, *memory.Model, provider.Found) (provider.Closing, error) {
		return provider.Closing{}, nil
	}
	check(db.Do(ctx, u, nothing))
	return db
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
