package postgres_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// The message that commits second is published second, however it is enqueued. Without OrderedKey
// it may come first.
// Promise: G3.2
func TestAnOrderedKeyFollowsTheOrderOfCommits(t *testing.T) {
	t.Parallel()
	work := marked("m")
	second := map[string]func(ctx context.Context, db *postgres.DB, m outbox.Message) error{
		"enqueue": func(ctx context.Context, db *postgres.DB, m outbox.Message) error {
			return pgx.BeginFunc(ctx, db.Pool(), func(tx pgx.Tx) error { return db.InTx(tx).Enqueue(ctx, m) })
		},
		"a handler's output": func(ctx context.Context, db *postgres.DB, m outbox.Message) error {
			return do(ctx, db, work, func(context.Context, pgx.Tx) ([]outbox.Message, error) { return []outbox.Message{m}, nil })
		},
		"in one round trip": func(ctx context.Context, db *postgres.DB, m outbox.Message) error {
			return queue(ctx, db, work, func(context.Context, *pgx.Batch) ([]outbox.Message, error) { return []outbox.Message{m}, nil })
		},
	}
	for name, enqueue := range second {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, nil, totals)
			message := outbox.Message{Topic: "t", Key: "k", OrderedKey: true}
			first := begin(t, db)
			mine, others, unordered := message, message, message
			mine.ID, others.ID, unordered.ID, unordered.OrderedKey = "1", "2", "unordered", false
			other := message
			other.Key = "a"
			require.NoError(t, db.InTx(first).Enqueue(t.Context(), mine, other))
			done := make(chan error, 1)
			go func() { done <- enqueue(t.Context(), db, others) }()
			waiting(t, db, 1)
			require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool(), func(tx pgx.Tx) error { return db.InTx(tx).Enqueue(t.Context(), unordered) }))
			require.Equal(t, []string{"unordered"}, ids(claimAll(t, db)), "the first one should have preceded it")
			_, err := db.Pool().Exec(t.Context(), `update kinora.outbox set status = 'published', open = false`)
			require.NoError(t, err)
			require.NoError(t, first.Commit(t.Context()))
			require.NoError(t, <-done)
			require.Equal(t, 2, count(t, db, `select count(*) from kinora.outbox where key = 'k' and status = 'pending'`))
			require.Less(t, count(t, db, `select id from kinora.outbox where message_id = '1'`), count(t, db, `select id from kinora.outbox where message_id = '2'`))
		})
	}
}

func ids(entries []outbox.Entry) []string {
	var all []string
	for _, e := range entries {
		all = append(all, e.ID)
	}
	return all
}

// Two calls use the same keys in opposite orders, and both succeed.
func TestOrderedKeysAreTakenInOneOrder(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	a, b := outbox.Message{Topic: "t", Key: "a", OrderedKey: true}, outbox.Message{Topic: "t", Key: "b", OrderedKey: true}
	done := make(chan error)
	for _, ms := range [][]outbox.Message{{a, b}, {b, a}} {
		go func() {
			for range 200 {
				err := pgx.BeginFunc(t.Context(), db.Pool(), func(tx pgx.Tx) error { return db.InTx(tx).Enqueue(t.Context(), ms...) })
				if err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	require.NoError(t, <-done)
	require.NoError(t, <-done)
}

// Two relays delete at once: neither waits, and each skips the rows that the other has locked.
func TestTwoRelaysDeleteAtOnce(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	_, err := db.Pool().Exec(t.Context(), `
		insert into kinora.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at, status, open, held, published_at)
		select g, 't', g, '', '{}', now() - interval '60 days', now() - interval '60 days', s, s in ('pending', 'claimed', 'failed'), s in ('held', 'abandoned'),
			case when s = 'published' then now() - interval '60 days' end
		from (select g, ('{published,pending,claimed,failed,held,abandoned,skipped}'::text[])[g % 7 + 1] s from generate_series(1, 7000) g) e`)
	require.NoError(t, err)
	keep, err := outbox.EntryRetention{Published: 7 * 24 * time.Hour}.WithDefaults()
	require.NoError(t, err)
	other := begin(t, db)
	_, err = other.Exec(t.Context(), constants(t)["deleteEntriesSQL"], 0, 700, keep.Published.Microseconds(), keep.Skipped.Microseconds())
	require.NoError(t, err)
	n, err := outbox.Prune(t.Context(), db, keep)
	require.NoError(t, err)
	require.Equal(t, 2000-200, n)
	require.NoError(t, other.Commit(t.Context()))
	require.Zero(t, count(t, db, `select count(*) from kinora.outbox where status in ('published', 'skipped')`))
	require.Equal(t, 5000, count(t, db, `select count(*) from kinora.outbox`))
}

// If all entries of a window are too young, later ones are not scanned.
func TestADeleteEndsAtYoungEntries(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	fill(t, db, 5000, 10)
	n, next, err := db.DeleteEntries(t.Context(), outbox.EntryRetention{Published: time.Hour, Skipped: 2 * time.Hour}, 0)
	require.NoError(t, err)
	require.Equal(t, []int64{0, 0}, []int64{int64(n), next})
	_, err = db.Pool().Exec(t.Context(), `update kinora.outbox set created_at = created_at - interval '61 min' where id = 2000`)
	require.NoError(t, err)
	_, next, err = db.DeleteEntries(t.Context(), outbox.EntryRetention{Published: time.Hour, Skipped: 2 * time.Hour}, 0)
	require.NoError(t, err)
	require.EqualValues(t, 2000, next)
}
