package main

import (
	"context"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/cmd/kinora/commands"
)

// operated is a store that operators look after.
type operated interface {
	admin.Store
	Migrate(ctx context.Context) error
}

// openOps opens a database for the commands of kinora, with the handlers of this program. So a dry run, a
// replay and a verification need no running service.
func openOps(ctx context.Context, d commands.Database) (*commands.Session, error) {
	db := database{kind: d.Kind, path: d.Address}
	s, err := db.open(ctx)
	if err != nil {
		return nil, err
	}
	store := s.operated()
	return &commands.Session{
		Store: store, Migrate: store.Migrate, SQL: s.migrationSQL, Handlers: []commands.Handlers{s.handlers()}, Close: s.Close,
	}, nil
}
