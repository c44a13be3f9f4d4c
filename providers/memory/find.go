package memory

import (
	"context"
	"fmt"
	"strings"

	"github.com/kinora-go/kinora/eventstore"
)

// FindEvent implements provider.EventFinder.
func (db *DB) FindEvent(ctx context.Context, id string) (eventstore.Appended, error) {
	return db.committed.Load().find(id, db.lineage), ctx.Err()
}

// FindEvent implements provider.EventFinder. It also finds events that the transaction has appended.
func (t *Tx) FindEvent(ctx context.Context, id string) (eventstore.Appended, error) {
	if err := t.usable(ctx); err != nil {
		return eventstore.Appended{}, fmt.Errorf("find an event: %w", err)
	}
	return t.tx.staged.find(id, t.db.lineage), nil
}

func (s *state) find(id, log string) eventstore.Appended {
	at, ok := s.places.get(strings.ToLower(id))
	if !ok {
		return eventstore.Appended{}
	}
	return eventstore.Appended{Stream: at.stream, Version: at.version, Position: at.position, Count: 1, Log: log}
}
