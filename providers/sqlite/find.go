package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"github.com/kinora-go/kinora/eventstore"
)

const findEvent = `select stream, version, position from kinora_events where id = ?1`

// FindEvent implements provider.EventFinder.
func (d *DB) FindEvent(ctx context.Context, id string) (eventstore.Appended, error) {
	return d.findEvent(ctx, d.reads, id)
}

// FindEvent implements provider.EventFinder. It also finds events that the transaction has appended.
func (t *Tx) FindEvent(ctx context.Context, id string) (eventstore.Appended, error) {
	return t.db.findEvent(ctx, t.session, id)
}

func (d *Provider) findEvent(ctx context.Context, q querier, id string) (eventstore.Appended, error) {
	log, err := d.logName(ctx, q)
	if err != nil {
		return eventstore.Appended{}, fmt.Errorf("find an event: %w", err)
	}
	at := eventstore.Appended{Count: 1}
	at.Log, _, _ = strings.Cut(log, "/")
	err = one(ctx, q, []any{&at.Stream, &at.Version, &at.Position}, findEvent, strings.ToLower(id))
	if errors.Is(err, sql.ErrNoRows) {
		return eventstore.Appended{}, nil
	}
	return result(at, "find an event", err)
}
