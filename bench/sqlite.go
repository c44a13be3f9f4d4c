package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// sqliteBatch is the number of events of a transaction.
const sqliteBatch = 500

// sqliteBed is a new file. It counts events for each of a thousand products.
type sqliteBed struct {
	dir  string
	db   *sqlite.DB
	last int64 // position of the last event
}

// sqliteLines measures units that move the checkpoint. The limit does the same with one update and
// no lookups, through the same pool.
func sqliteLines() []line {
	ours, limit := &sqliteBed{}, &sqliteBed{}
	return []line{{
		name: "sqlite/projector-batch", unit: "events/s",
		ours: program{ours.empty, ours.units}, limit: program{limit.empty, limit.byHand},
	}}
}

func (s *sqliteBed) empty(ctx context.Context) (err error) {
	if s.dir, err = os.MkdirTemp("", "kinora-bench"); err != nil {
		return err
	}
	if s.db, err = sqlite.Open(ctx, filepath.Join(s.dir, "bench.db"), nil); err != nil {
		return err
	}
	if err := s.db.Migrate(ctx); err != nil {
		return err
	}
	s.last = 0
	_, created := s.db.SQL().ExecContext(ctx, `create table totals (product text primary key, n integer not null) strict`)
	_, set := s.db.SetCheckpoint(ctx, provider.Build{Projector: "written"}, provider.Checkpoint{}, provider.Checkpoint{Mode: provider.ModeCatchUp})
	return errors.Join(created, set)
}

func (s *sqliteBed) close() error { return errors.Join(s.db.Close(), os.RemoveAll(s.dir)) }

// addBatch is the effect of a batch, with one statement for each event.
func (s *sqliteBed) addBatch(ctx context.Context, tx *sql.Tx) error {
	stmt, err := tx.PrepareContext(ctx, `insert into totals (product, n) values (?1, 1) on conflict (product) do update set n = n + 1`)
	if err != nil {
		return err
	}
	defer func() { _ = stmt.Close() }()
	for i := range int64(sqliteBatch) {
		if _, err := stmt.ExecContext(ctx, fmt.Sprintf("p%d", (s.last+i)%products)); err != nil {
			return err
		}
	}
	return nil
}

// whole runs batch until ctx ends.
func (s *sqliteBed) whole(ctx context.Context, batch func(ctx context.Context) error) (int64, error) {
	var err error
	for ; err == nil && ctx.Err() == nil; s.last += sqliteBatch {
		err = batch(context.WithoutCancel(ctx))
	}
	return s.last, errors.Join(err, s.close())
}

func (s *sqliteBed) units(ctx context.Context, _ *bed) (int64, error) {
	handlers := []provider.Handler{{Name: "written/rated"}}
	return s.whole(ctx, func(ctx context.Context) error {
		u := provider.Unit{Projector: "written", Messages: make([]provider.Message, sqliteBatch), Advance: &provider.Advance{
			From: s.last, To: provider.LogPlace{Position: s.last + sqliteBatch}, Mode: provider.ModeCatchUp,
		}}
		for i := range u.Messages {
			position := s.last + int64(i) + 1
			id := fmt.Sprintf("01a1f84d-1bb0-703b-aedd-%012d", position)
			u.Messages[i] = provider.Message{ID: id, Lane: provider.LaneOfKey(id), Handlers: handlers, Mark: true, Position: position}
		}
		return s.db.Do(ctx, u, func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
			return provider.Closing{}, s.addBatch(ctx, tx)
		})
	})
}

func (s *sqliteBed) byHand(ctx context.Context, _ *bed) (int64, error) {
	return s.whole(ctx, func(ctx context.Context) error {
		tx, err := s.db.SQL().BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }()
		if err := s.addBatch(ctx, tx); err != nil {
			return err
		}
		const move = `update kinora_checkpoints set position = ?1 where projector = 'written' and generation = 1 and position = ?2`
		if _, err := tx.ExecContext(ctx, move, s.last+sqliteBatch, s.last); err != nil {
			return err
		}
		return tx.Commit()
	})
}
