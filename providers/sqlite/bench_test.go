package sqlite_test

import (
	"context"
	"database/sql"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// One writer; each event has its own stream and one entry.
func BenchmarkAppend(b *testing.B) {
	db := open(b, routed())
	for i := 0; b.Loop(); i++ {
		_, err := db.Append(context.Background(), fmt.Sprint("review-", i), eventstore.NoStream, drafts(1))
		require.NoError(b, err)
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "appends/s")
}

func BenchmarkAppend10(b *testing.B) {
	db := open(b, routed())
	for i := 0; b.Loop(); i++ {
		_, err := db.Append(context.Background(), fmt.Sprint("review-", i), eventstore.NoStream, drafts(10))
		require.NoError(b, err)
	}
	b.ReportMetric(10*float64(b.N)/b.Elapsed().Seconds(), "events/s")
}

// A transaction of the caller: no statement is prepared beforehand.
func BenchmarkAppendInTx(b *testing.B) {
	db := open(b, routed())
	for i := 0; b.Loop(); i++ {
		tx, err := db.SQL().Begin()
		require.NoError(b, err)
		_, err = db.InTx(tx).Append(context.Background(), fmt.Sprint("review-", i), eventstore.NoStream, drafts(1))
		require.NoError(b, err)
		require.NoError(b, tx.Commit())
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "appends/s")
}

// A unit with one marker and one upsert.
func BenchmarkDo(b *testing.B) {
	db := open(b, nil)
	for i := 0; b.Loop(); i++ {
		err := db.Do(context.Background(), delivery(fmt.Sprintf("01a1f84d-1bb0-703b-aedd-%012d", i)), adds(fmt.Sprint("p", i%1000)))
		require.NoError(b, err)
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "units/s")
}

// addAll adds to 500 totals.
func addAll(ctx context.Context, tx *sql.Tx) error {
	stmt, err := tx.PrepareContext(ctx, addToTotal)
	for i := range 500 {
		if err == nil {
			_, err = stmt.ExecContext(ctx, fmt.Sprint("p", i), 1)
		}
	}
	return err
}

// 500 events in one unit that moves the checkpoint, compared with the effects and one update.
func BenchmarkAdvance500(b *testing.B) {
	ctx := context.Background()
	for _, marked := range []bool{false, true} {
		b.Run(fmt.Sprintf("kinora/marked=%v", marked), func(b *testing.B) {
			db := open(b, nil)
			_, err := db.SetCheckpoint(ctx, totals, provider.Checkpoint{}, live(0))
			require.NoError(b, err)
			if marked {
				require.NoError(b, db.Do(ctx, placed(1<<60), nil0))
			}
			for i := int64(0); b.Loop(); i++ {
				u := provider.Unit{Projector: "totals", Advance: &provider.Advance{
					From: 500 * i, To: provider.LogPlace{Position: 500 * (i + 1)}, Mode: provider.ModeLive,
				}}
				handlers := []provider.Handler{{Name: handler}}
				for j := range int64(500) {
					id := fmt.Sprintf("01a1f84d-1bb0-703b-aedd-%012d", i*500+j)
					u.Messages = append(u.Messages, provider.Message{
						ID: id, Lane: provider.LaneOfKey(id), Handlers: handlers, Mark: true, Position: i*500 + j + 1,
					})
				}
				err := db.Do(ctx, u, func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
					return provider.Closing{}, addAll(ctx, tx)
				})
				require.NoError(b, err)
			}
			b.ReportMetric(500*float64(b.N)/b.Elapsed().Seconds(), "events/s")
		})
	}
	b.Run("by hand", func(b *testing.B) {
		db := open(b, nil)
		_, err := db.SetCheckpoint(ctx, totals, provider.Checkpoint{}, live(0))
		require.NoError(b, err)
		for i := 0; b.Loop(); i++ {
			tx, err := db.SQL().BeginTx(ctx, nil)
			require.NoError(b, err)
			require.NoError(b, addAll(ctx, tx))
			_, err = tx.ExecContext(ctx, `update kinora_checkpoints set position = ?1 where projector = 'totals' and generation = 1`, 500*(i+1))
			require.NoError(b, err)
			require.NoError(b, tx.Commit())
		}
		b.ReportMetric(500*float64(b.N)/b.Elapsed().Seconds(), "events/s")
	})
}

// 500 messages in one unit, compared with two statements for each message: one for the marker,
// one for the effect.
func BenchmarkDo500(b *testing.B) {
	ids := func(i int) []string {
		all := make([]string, 500)
		for j := range all {
			all[j] = fmt.Sprintf("01a1f84d-1bb0-703b-aedd-%012d", i*500+j)
		}
		return all
	}
	b.Run("kinora", func(b *testing.B) {
		db := open(b, nil)
		for i := 0; b.Loop(); i++ {
			err := db.Do(context.Background(), delivery(ids(i)...), func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
				return provider.Closing{}, addAll(ctx, tx)
			})
			require.NoError(b, err)
		}
		b.ReportMetric(500*float64(b.N)/b.Elapsed().Seconds(), "messages/s")
	})
	b.Run("by hand", func(b *testing.B) {
		db := open(b, nil)
		ctx := context.Background()
		for i := 0; b.Loop(); i++ {
			tx, err := db.SQL().BeginTx(ctx, nil)
			require.NoError(b, err)
			mark, err := tx.PrepareContext(ctx, `insert into kinora_markers (handler, generation, message_id, processed_at) values ('h', 1, ?, 0) on conflict do nothing`)
			require.NoError(b, err)
			for _, id := range ids(i) {
				_, err := mark.ExecContext(ctx, id)
				require.NoError(b, err)
			}
			require.NoError(b, addAll(ctx, tx))
			require.NoError(b, tx.Commit())
		}
		b.ReportMetric(500*float64(b.N)/b.Elapsed().Seconds(), "messages/s")
	})
}

// Claim 50 entries of a backlog and mark them published.
func BenchmarkClaimAndMark50(b *testing.B) {
	for _, keys := range []int{1_000_000, 20} {
		b.Run(fmt.Sprint("keys=", keys), func(b *testing.B) {
			db := open(b, nil)
			enqueue := func(n int) {
				tx, err := db.SQL().Begin()
				require.NoError(b, err)
				ms := make([]outbox.Message, n)
				for i := range ms {
					ms[i] = outbox.Message{Topic: "review", Key: fmt.Sprint(i % keys), Payload: []byte(`{"product_id":"p1","stars":5}`)}
				}
				require.NoError(b, db.InTx(tx).Enqueue(context.Background(), ms...))
				require.NoError(b, tx.Commit())
			}
			enqueue(20_000)
			for i := 0; b.Loop(); i++ {
				if i%400 == 399 {
					b.StopTimer()
					enqueue(20_000)
					b.StartTimer()
				}
				entries, err := db.ClaimEntries(context.Background(), provider.EntryQuery{Attempts: 8}, claim.Terms{})
				require.NoError(b, err)
				require.Len(b, entries, 50)
				published := make([]outbox.Mark, len(entries))
				for j, e := range entries {
					published[j] = outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Published}
				}
				late, err := db.MarkEntries(context.Background(), published)
				require.NoError(b, err)
				require.Empty(b, late)
			}
		})
	}
}

// A claim that finds no entry, with 100,000 entries behind an abandoned one.
func BenchmarkClaimWithHeldBacklog(b *testing.B) {
	for _, held := range []bool{false, true} {
		b.Run(fmt.Sprint("held=", held), func(b *testing.B) {
			db := open(b, nil)
			backlog(b, db, "a", 100_000)
			stick(b, db, outbox.Abandoned, "a")
			for n := 1; held && n > 0; {
				var err error
				n, err = db.HoldEntries(context.Background(), long, 10_000)
				require.NoError(b, err)
			}
			for b.Loop() {
				require.Empty(b, claimAll(b, db, provider.EntryQuery{}))
			}
		})
	}
}
