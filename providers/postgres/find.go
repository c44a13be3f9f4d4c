package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
)

const findEventSQL = `select stream, version, position from kinora.events where id = $1::uuid`

// FindEvent implements provider.EventFinder. An id that is no UUID is that of no event.
func (db *DB) FindEvent(ctx context.Context, id string) (eventstore.Appended, error) {
	return db.findEvent(ctx, db.pool, id)
}

// FindEvent implements provider.EventFinder. It also finds events that the transaction has appended.
func (t *Tx) FindEvent(ctx context.Context, id string) (eventstore.Appended, error) {
	var at eventstore.Appended
	err := t.in(ctx, func(q session) (err error) {
		at, err = t.db.findEvent(ctx, q, id)
		return err
	})
	return at, err
}

func (db *Provider) findEvent(ctx context.Context, q querier, id string) (eventstore.Appended, error) {
	of, err := uuid.Parse(id)
	if err != nil {
		return eventstore.Appended{}, nil
	}
	log, err := db.logName(ctx, q)
	if err != nil {
		return eventstore.Appended{}, fmt.Errorf("find an event: %w", err)
	}
	at := eventstore.Appended{Count: 1}
	at.Log, _, _ = strings.Cut(log, "/")
	err = q.QueryRow(ctx, db.q(findEventSQL), of.String()).Scan(&at.Stream, &at.Version, &at.Position)
	if errors.Is(err, pgx.ErrNoRows) {
		return eventstore.Appended{}, nil
	}
	if err != nil {
		return eventstore.Appended{}, fmt.Errorf("find an event: %w", explain(err))
	}
	return at, nil
}
