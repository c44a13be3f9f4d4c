package postgres_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

const addNotes = `
insert into lists (key, items) select key, array_agg(n order by o) from unnest($1::text[], $2::int[]) with ordinality u(key, n, o) group by key
on conflict (key) do update set items = lists.items || excluded.items`

func keysAndNumbers(events []eventstore.Event[noted]) (keys []string, ns []int) {
	for _, e := range events {
		keys, ns = append(keys, e.Data.Key), append(ns, e.Data.N)
	}
	return keys, ns
}

// TestOnBatchAppliesManyEventsInOneStatement: the statement of a batch fails because of one event, which
// is parked alone.
// Promise: G4.10
func TestOnBatchAppliesManyEventsInOneStatement(t *testing.T) {
	t.Parallel()
	t.Run("pgx.Tx", func(t *testing.T) {
		t.Parallel()
		setBased(t, func(db *postgres.DB) provider.Units[pgx.Tx] { return db },
			func(ctx context.Context, tx pgx.Tx, keys []string, ns []int) error {
				_, err := tx.Exec(ctx, addNotes, keys, ns)
				return err
			})
	})
	t.Run("pgx.Batch", func(t *testing.T) {
		t.Parallel()
		setBased(t, func(db *postgres.DB) provider.Units[*pgx.Batch] { return db.Batched() },
			func(_ context.Context, tx *pgx.Batch, keys []string, ns []int) error {
				tx.Queue(addNotes, keys, ns)
				return nil
			})
	})
}

func setBased[Tx any](t *testing.T, of func(*postgres.DB) provider.Units[Tx], apply func(ctx context.Context, tx Tx, keys []string, ns []int) error) {
	db := postgrestest.Open(t, nil, noteTables, `alter table lists add check (not 666 = any (items))`)
	var at eventstore.Appended
	post := func(key string, n int) {
		drafts, err := notes.Encode(t.Context(), noted{key, n})
		require.NoError(t, err)
		at, err = db.Append(t.Context(), "note-"+key, eventstore.Any, drafts)
		require.NoError(t, err)
	}
	for n := range 30 {
		for k := range 10 {
			post(fmt.Sprint(k), n)
		}
	}
	post("3", 666)
	post("3", 30)
	post("4", 30)
	var calls atomic.Int64
	p := projector.Define("p", notes, projector.Options{}, projector.OnBatch("noted", func(ctx context.Context, tx Tx, events []eventstore.Event[noted]) error {
		calls.Add(1)
		keys, ns := keysAndNumbers(events)
		return apply(ctx, tx, keys, ns)
	}))
	runner, err := projector.NewRunner(of(db), projector.FromLog(db), projector.RunnerConfig{Logger: slog.New(slog.DiscardHandler)}, p)
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- runner.Run(ctx) }()
	require.NoError(t, p.Wait(t.Context(), db, at))
	stop()
	require.NoError(t, <-done)
	for k := range 10 {
		want := make([]int, 30, 31)
		for n := range want {
			want[n] = n
		}
		if k == 4 {
			want = append(want, 30)
		}
		var got []int
		require.NoError(t, db.Pool().QueryRow(t.Context(), `select items from lists where key = $1`, fmt.Sprint(k)).Scan(&got))
		require.Equal(t, want, got, "key %d", k)
	}
	rows, err := db.Parked(t.Context(), projector.ParkedFilter{Projector: "p", Limit: 10})
	require.NoError(t, err)
	require.Len(t, rows, 2)
	require.Equal(t, "23514", rows[0].Code)
	require.Equal(t, provider.ClassHeld, rows[1].Class)
	require.Less(t, calls.Load(), int64(60))
}
