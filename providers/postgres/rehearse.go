package postgres

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

func (db *DB) rehearse(ctx context.Context, s *seat, tx pgx.Tx, w projector.Work, fresh []int, apply func(context.Context, pgx.Tx, []int) ([]outbox.Message, error)) error {
	return errors.ErrUnsupported
}
