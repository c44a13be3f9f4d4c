package admin

import (
	"context"
	"errors"
	"iter"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// Store is what a provider has for operators. *postgres.DB, *sqlite.DB and *memory.DB implement it. If
// the read models are in Redis, it is the second store of provider.Combine.
type Store interface {
	provider.Operations
	provider.Inspector
	provider.Parking
	provider.Progress
	provider.Builds
	provider.Log
	provider.TaskInspector
	provider.EntryMaintainer
	provider.MarkerMaintainer
	provider.Records
	// ReadStream is that of eventstore.Store.
	ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error]
}

// Admin reads facts and carries out acts. Create it with New. Its methods are safe for concurrent use.
type Admin struct{ store Store }

// New returns an Admin of a store. It sends no statement.
func New(store Store) (*Admin, error) {
	if store == nil {
		return nil, errors.New("admin: the store is nil: give one")
	}
	return &Admin{store: store}, nil
}
