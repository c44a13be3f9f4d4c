package outbox_test

import (
	"context"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
)

// A person decides about abandoned entries: one is published after all, the other never.
func ExampleInspector() {
	ctx := context.Background()
	db, err := memory.New(nil) // or sqlite.Open, postgres.Open
	if err != nil {
		panic(err)
	}
	abandon(ctx, db, "invoice-1", "invoice-2")

	abandoned := outbox.Filter{Status: []outbox.Status{outbox.Abandoned}}
	// Oldest first, at most 100; set After to the last Seq for the next page.
	entries, err := db.Entries(ctx, abandoned)
	if err != nil {
		panic(err)
	}
	for _, e := range entries {
		fmt.Println(e.Topic, e.ID, e.Status, e.Attempts, e.LastError)
	}
	requeued, err := db.Requeue(ctx, outbox.Filter{Seqs: []int64{entries[0].Seq}})
	if err != nil {
		panic(err)
	}
	skipped, err := db.Skip(ctx, abandoned) // all entries that are still abandoned
	if err != nil {
		panic(err)
	}
	counts, err := db.StatusCounts(ctx, outbox.Pending, outbox.Abandoned)
	if err != nil {
		panic(err)
	}
	fmt.Println(requeued, "requeued,", skipped, "skipped:", counts)

	// Output:
	// billing invoice-1 abandoned 1 *net.OpError
	// billing invoice-2 abandoned 1 *net.OpError
	// 1 requeued, 1 skipped: map[abandoned:0 pending:1]
}

// abandon makes entries whose attempts are exhausted.
func abandon(ctx context.Context, db *memory.DB, ids ...string) {
	err := db.Transact(ctx, func(ctx context.Context, tx *memory.Model) error {
		for _, id := range ids {
			if err := db.InTx(tx).Enqueue(ctx, outbox.Message{ID: id, Topic: "billing"}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		panic(err)
	}
	entries, err := provider.ClaimEntries(ctx, db, provider.EntryQuery{}, claim.Terms{})
	if err != nil {
		panic(err)
	}
	for _, e := range entries {
		if _, err := db.MarkEntries(ctx, []outbox.Mark{{Seq: e.Seq, Token: e.Token, To: outbox.Abandoned, Error: "*net.OpError"}}); err != nil {
			panic(err)
		}
	}
}

// A service that stores no events publishes in its own transaction, with a Watermill publisher.
func ExampleNewPublisher() {
	ctx := context.Background()
	db, err := memory.New(nil) // or sqlite.Open, postgres.Open
	if err != nil {
		panic(err)
	}
	err = db.Transact(ctx, func(_ context.Context, tx *memory.Model) error {
		tx.Put("orders", "order-1", "tea")
		shipped := message.NewMessage("order-1", []byte("tea"))
		shipped.Metadata[outbox.HeaderKey] = "customer-ann" // her orders stay in order
		return outbox.NewPublisher(db.InTx(tx)).Publish("orders", shipped)
	})
	if err != nil {
		panic(err)
	}
	entries, err := db.Entries(ctx, outbox.Filter{})
	if err != nil {
		panic(err)
	}
	fmt.Println(entries[0].Topic, entries[0].ID, entries[0].Key, entries[0].Status)

	// Output: orders order-1 customer-ann pending
}
