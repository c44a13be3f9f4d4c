package postgres

import (
	"context"
	"os"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/mutant"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

// mutated takes a mechanism out of a statement where a build tag asks for it. See internal/mutant.
func mutated(statement string) string {
	if mutant.HalfGuard {
		statement = strings.ReplaceAll(statement, "and e.id not in (select id from picked where not spent)", "and false")
	}
	if mutant.ClockPerRow {
		statement = strings.ReplaceAll(statement, "ck.t", "clock_timestamp()")
	}
	if mutant.NoFence {
		statement = strings.ReplaceAll(statement, "o.token = m.token", "m.token is not null")
		statement = strings.ReplaceAll(statement, "o.token = $2::uuid", "$2::uuid is not null")
	}
	if mutant.HeldNoBarrier {
		statement = strings.ReplaceAll(statement, "e.held and e.topic <> ''", "false")
	}
	if mutant.NoVersionGuard {
		statement = strings.ReplaceAll(statement, "and version = $9::bigint", "and $9::bigint is not null")
	}
	if mutant.NoGenerationFence {
		statement = strings.ReplaceAll(statement, "select pg_advisory_xact_lock_shared($1::int, $2::int)", "select $1::int, $2::int")
	}
	if mutant.BatchOnConflict && statement == mustInsertMarkersSQL {
		statement += " on conflict do nothing"
	}
	if mutant.WorkerClock && os.Getenv("KINORA_MUTANT_SKEW") != "" {
		statement = strings.ReplaceAll(statement, "clock_timestamp()", "(clock_timestamp() + interval '"+os.Getenv("KINORA_MUTANT_SKEW")+" us')")
	}
	return statement
}

// markApart marks in a transaction of its own.
func (db *DB) markApart(ctx context.Context, conn *pgx.Conn, w projector.Work) ([]int, error) {
	rows, err := conn.Query(ctx, db.q(insertMarkersSQL), markerArgs(w)...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (int, error) {
		var o int
		err := row.Scan(&o)
		return o - 1, err
	})
}

// appendApart adds the entries in a transaction of their own.
func (db *DB) appendApart(ctx context.Context, stream string, expected eventstore.Expected, events []eventstore.Draft) (eventstore.Appended, error) {
	a, err := (&DB{pool: db.pool, cfg: Config{Schema: db.cfg.Schema}}).newAppend(stream, expected, events)
	if err != nil {
		return eventstore.Appended{}, err
	}
	at, err := a.run(ctx, db.pool)
	if err != nil {
		return at, err
	}
	var out []outbox.Message
	for i, d := range events {
		for _, topic := range db.cfg.Route(stream, d) {
			out = append(out, outbox.FromEvent(stream, at.Version-int64(len(events)-i-1), d, topic))
		}
	}
	return at, pgx.BeginFunc(ctx, db.pool, func(tx pgx.Tx) error { return db.InTx(tx).Enqueue(ctx, out...) })
}
