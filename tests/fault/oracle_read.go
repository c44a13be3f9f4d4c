package main

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

func readEvents(ctx context.Context, pool *pgxpool.Pool) ([]stored, error) {
	rows, err := pool.Query(ctx, `select data->>'command', stream, (data->>'n')::int, coalesce(data->>'amount', data->>'delta')::bigint, version, id::text from kinora.events`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[stored])
}

// readModel reads the read model whose table names begin with prefix.
func readModel(ctx context.Context, pool *pgxpool.Pool, prefix string) (model, error) {
	return readTables(ctx, pool, prefix+"sums", prefix+"lists")
}

func readTables(ctx context.Context, pool *pgxpool.Pool, sums, lists string) (model, error) {
	m := model{map[string]int64{}, map[string][]int{}}
	rows, err := pool.Query(ctx, `select stream, total from `+sums)
	if err != nil {
		return m, err
	}
	var stream string
	var total int64
	if _, err = pgx.ForEachRow(rows, []any{&stream, &total}, func() error { m.Totals[stream] = total; return nil }); err != nil {
		return m, err
	}
	if rows, err = pool.Query(ctx, `select stream, items from `+lists); err != nil {
		return m, err
	}
	var items []int
	_, err = pgx.ForEachRow(rows, []any{&stream, &items}, func() error { m.Lists[stream] = append([]int(nil), items...); return nil })
	return m, err
}
