package postgres_test

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
)

// The example is a process that relays the entries of others, which have Config.Notify. Its
// appends go through a pooler; its listener connects to the server.
func ExampleNewListener() {
	relaying := func(ctx context.Context, pooler, server string, publisher message.Publisher) (*kinora.Group, error) {
		db, err := postgres.Open(ctx, pooler+"?default_query_exec_mode=cache_describe", &postgres.Config{Notify: true})
		if err != nil {
			return nil, err
		}
		listener, err := postgres.NewListener(db, &postgres.ListenerConfig{DSN: server})
		if err != nil {
			return nil, err
		}
		relay, err := outbox.NewRelay(db, publisher, nil)
		if err != nil {
			return nil, err
		}
		return kinora.Start(ctx, listener, relay)
	}
	_ = relaying
}
