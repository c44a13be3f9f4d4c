package postgres_test

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
)

// delivery returns a message in a separate lane for the handler p/a, with a marker.
func delivery(id string) provider.Message {
	return provider.Message{ID: id, Lane: provider.LaneOfMessage(id), Handlers: []provider.Handler{{Name: "p/a"}}, Mark: true}
}

// marked returns a unit of deliveries with these ids.
func marked(ids ...string) provider.Unit {
	u := provider.Unit{Projector: "p"}
	for _, id := range ids {
		u.Messages = append(u.Messages, delivery(id))
	}
	return u
}

// isFresh reports whether a handler of the unit is to run. It is true for a unit without
// messages.
func isFresh(found provider.Found) bool {
	return len(found.Fresh) == 0 || slices.ContainsFunc(found.Fresh, func(f []bool) bool { return slices.Contains(f, true) })
}

// do runs a unit that calls f if a message is fresh.
func do(ctx context.Context, db *postgres.DB, u provider.Unit, f func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error)) error {
	return db.Do(ctx, u, func(ctx context.Context, tx pgx.Tx, found provider.Found) (c provider.Closing, err error) {
		if f != nil && isFresh(found) {
			c.Output, err = f(ctx, tx)
		}
		return c, err
	})
}

// queue is do for handlers that queue statements.
func queue(ctx context.Context, db *postgres.DB, u provider.Unit, f func(ctx context.Context, b *pgx.Batch) ([]outbox.Message, error)) error {
	return db.Batched().Do(ctx, u, func(ctx context.Context, b *pgx.Batch, found provider.Found) (c provider.Closing, err error) {
		if f != nil && isFresh(found) {
			c.Output, err = f(ctx, b)
		}
		return c, err
	})
}
