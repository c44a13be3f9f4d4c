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
	"github.com/kinora-go/kinora/projector"
)

// One writer, a stream and an entry for each event.
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

// The caller's own transaction: nothing is prepared beforehand.
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

// A unit of work with a marker and one upsert.
func BenchmarkDo(b *testing.B) {
	db := open(b, nil)
	for i := 0; b.Loop(); i++ {
		err := db.Do(context.Background(), marks(fmt.Sprintf("01a1f84d-1bb0-703b-aedd-%012d", i)), adds(fmt.Sprint("p", i%1000)))
		require.NoError(b, err)
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "units/s")
}

// 500 messages in one unit of work.
func BenchmarkDo500(b *testing.B) {
	db := open(b, nil)
	for i := 0; b.Loop(); i++ {
		w := projector.Work{Projector: "totals"}
		for j := range 500 {
			w.Marks = append(w.Marks, marks(fmt.Sprintf("01a1f84d-1bb0-703b-aedd-%012d", i*500+j)).Marks...)
		}
		err := db.Do(context.Background(), w, func(ctx context.Context, tx *sql.Tx, fresh []int) ([]message, error) {
			add, err := tx.PrepareContext(ctx, addToTotal)
			for _, i := range fresh {
				if err == nil {
					_, err = add.ExecContext(ctx, fmt.Sprint("p", i), 1)
				}
			}
			return nil, err
		})
		require.NoError(b, err)
	}
	b.ReportMetric(500*float64(b.N)/b.Elapsed().Seconds(), "messages/s")
}

// Claim 50 and mark them published, over a backlog.
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
				entries, err := db.ClaimEntries(context.Background(), outbox.Query{Attempts: 8}, claim.Terms{})
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

// A claim that finds nothing, beside 100,000 entries that wait behind one that is abandoned.
func BenchmarkClaimBesideHeld(b *testing.B) {
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
				require.Empty(b, claimAll(b, db, outbox.Query{}))
			}
		})
	}
}

// A message's attempt, before its unit of work: both, and each by itself.
func BenchmarkBegin(b *testing.B) {
	for _, bench := range []struct{ begins, does bool }{{false, true}, {true, true}, {true, false}} {
		b.Run(fmt.Sprintf("begin=%t,do=%t", bench.begins, bench.does), func(b *testing.B) {
			ctx := context.Background()
			db := open(b, nil)
			var done []projector.Attempt
			for i := 0; b.Loop(); i++ {
				a := projector.Attempt{
					Projector: "totals", Handler: handler, Key: fmt.Sprint("p", i%1000), Takes: []string{"review.posted"},
					MessageID: fmt.Sprintf("01a1f84d-1bb0-703b-aedd-%012d", i),
				}
				if bench.begins {
					verdicts, err := db.Begin(ctx, "runner", []projector.Attempt{a}, done)
					require.NoError(b, err)
					require.Equal(b, []projector.Verdict{projector.Clear}, verdicts)
					done = []projector.Attempt{a}
				}
				if bench.does {
					require.NoError(b, db.Do(ctx, marks(a.MessageID), adds(a.Key)))
				}
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "messages/s")
		})
	}
}

// 500 attempts at once, and those before them taken back.
func BenchmarkBegin500(b *testing.B) {
	db := open(b, nil)
	var done []projector.Attempt
	for i := 0; b.Loop(); i++ {
		attempts := make([]projector.Attempt, 500)
		for j := range attempts {
			attempts[j] = projector.Attempt{
				Projector: "totals", Handler: handler, Key: fmt.Sprint("p", j), Takes: []string{"review.posted"},
				MessageID: fmt.Sprintf("01a1f84d-1bb0-703b-aedd-%012d", i*500+j),
			}
		}
		_, err := db.Begin(context.Background(), "runner", attempts, done)
		require.NoError(b, err)
		done = attempts
	}
	b.ReportMetric(500*float64(b.N)/b.Elapsed().Seconds(), "messages/s")
}
