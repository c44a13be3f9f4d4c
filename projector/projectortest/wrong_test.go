package projectortest_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	. "github.com/kinora-go/kinora/projector/projectortest"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/providers/sqlite"
)

func readLatest(ctx context.Context, db *sqlite.DB) ([]string, error) {
	return Rows(ctx, db.SQL().QueryContext, `select product, author, stars, at from latest order by product`)
}

// latest returns a handler that stores the last review of each product, with a text that the test chooses.
func latest(text func(eventstore.Event[posted]) string) projector.Handler[txn] {
	return projector.On("posted", func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
		_, err := tx.ExecContext(ctx, `
			insert into latest (product, author, stars, at) values ($1, $2, $3, $4)
			on conflict (product) do update set author = excluded.author, stars = excluded.stars, at = excluded.at`,
			e.Data.Product, e.Data.Author, e.Data.Stars, text(e))
		return err
	})
}

// oneStream has events without two streams, so that their order is always the same.
var oneStream = []Event{
	In("review-42-ann", posted{"42", "ann", 5}), In("review-42-ann", posted{"43", "ann", 1}), In("review-42-ann", posted{"44", "ann", 2}),
	In("review-42-ann", posted{"45", "ann", 3}), In("review-42-ann", posted{"46", "ann", 3}),
}

func onlyPosted(opts projector.Options, h projector.Handler[txn]) *projector.Projector[txn] {
	return projector.Define("ratings", types, opts, h)
}

// shortest requires that a failure shows a history of n events. It reports false if the machine was too busy to find
// it in time.
func shortest(t *testing.T, text string, n, of int) bool {
	t.Helper()
	require.Regexp(t, `KINORA_TEST_SEED=\d+$`, text)
	if strings.Contains(text, "the shortest history found in time") {
		return false
	}
	require.Contains(t, text, fmt.Sprintf("the shortest history found (%d of %d events)", n, of))
	return true
}

func TestFindsACounterInMemory(t *testing.T) {
	t.Parallel()
	var count atomic.Int64
	p := onlyPosted(marked, latest(func(eventstore.Event[posted]) string { return fmt.Sprint(count.Add(1)) }))
	text := failure(t, func(t testing.TB) { New(openSQLite, p, readLatest).ExactlyOnce(t, oneStream...) })
	shortest(t, text, 1, 5)
	require.Contains(t, text, "a second clean pass gives other rows")
	require.Contains(t, text, "a variable of the program")
}

// The variable is right in the first passes, because it is kept by database. It is wrong after a rollback.
func TestFindsACounterInMemoryThatStartsAgainWithTheDatabase(t *testing.T) {
	t.Parallel()
	kit := New(openSQLite, nil, readLatest)
	kit.Projector = func(*sqlite.DB) *projector.Projector[txn] {
		count := 0
		return onlyPosted(marked, latest(func(eventstore.Event[posted]) string { count++; return fmt.Sprint(count) }))
	}
	text := failure(t, func(t testing.TB) { kit.ExactlyOnce(t, oneStream...) })
	complete := shortest(t, text, 1, 5)
	require.Contains(t, text, "the transaction is rolled back after the handlers, and they run again")
	if complete {
		require.NotContains(t, text, "the process ends", "the other faults are not needed")
		require.NotContains(t, text, "the reply is lost, and")
	}
	require.Contains(t, text, "- 42 | ann | 5 | 1")
	require.Contains(t, text, "+ 42 | ann | 5 | 2")
	require.Contains(t, text, "a variable of the program")
}

func TestFindsRandomIDs(t *testing.T) {
	t.Parallel()
	p := onlyPosted(marked, latest(func(eventstore.Event[posted]) string { return uuid.NewString() }))
	text := failure(t, func(t testing.TB) { New(openSQLite, p, readLatest).ExactlyOnce(t, oneStream...) })
	shortest(t, text, 1, 5)
	require.Contains(t, text, "a random value or id")
}

func TestFindsTheTimeOfDay(t *testing.T) {
	t.Parallel()
	for _, layout := range []string{time.RFC3339Nano, time.DateTime} {
		t.Run(layout, func(t *testing.T) {
			t.Parallel()
			p := onlyPosted(marked, latest(func(eventstore.Event[posted]) string { return time.Now().Format(layout) }))
			text := failure(t, func(t testing.TB) { New(openSQLite, p, readLatest).ExactlyOnce(t, oneStream...) })
			require.Contains(t, text, "clock")
			require.Contains(t, text, "e.RecordedAt")
		})
	}
}

// All passes of one event end within a second, so only a pass that waits shows this clock.
func TestFindsAClockOfWholeSeconds(t *testing.T) {
	t.Parallel()
	began := sync.OnceValue(time.Now)
	p := projector.Define("seconds", types, projector.Options{},
		projector.On("posted", func(_ context.Context, tx *memory.Model, _ eventstore.Event[posted]) error {
			tx.Put("stars", "seconds", int(time.Since(began()).Seconds()))
			return nil
		}))
	text := failure(t, func(t testing.TB) { New(openMemory, p, readMemory).ExactlyOnce(t, oneStream[0]) })
	require.Contains(t, text, "a later pass gives other rows")
	require.Contains(t, text, "- {Product:seconds Stars:")
}

// Times and ids of the event are the same in each pass.
func TestTimesOfEventsAreRight(t *testing.T) {
	t.Parallel()
	p := onlyPosted(marked, latest(func(e eventstore.Event[posted]) string {
		return fmt.Sprint(e.ID, e.RecordedAt, e.Stream, e.Version, e.Metadata.Actor)
	}))
	at := time.Date(2020, 2, 29, 12, 0, 0, 123, time.FixedZone("Sydney", 36000))
	events := append([]Event{{Stream: "review-1", Data: posted{"1", "ann", 3}, RecordedAt: at, Metadata: eventstore.Metadata{Actor: "ann"}}}, oneStream...)
	New(openSQLite, p, readLatest).ExactlyOnce(t, events...)
}

// outsidePG writes with another connection of the database.
func outsidePG(db *postgres.DB, statement string) *projector.Projector[pgx.Tx] {
	return projector.Define("ratings", types, marked,
		projector.On("posted", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[posted]) error {
			if e.Data.Stars != 2 {
				_, err := tx.Exec(ctx, addRating, e.Data.Product, 1, e.Data.Stars)
				return err
			}
			_, err := db.Pool().Exec(ctx, statement, e.Data.Product, 1, e.Data.Stars)
			return err
		}))
}

func TestFindsAWriteOutsideOfTheTransaction(t *testing.T) {
	t.Parallel()
	for name, statement := range map[string]string{
		"counts": addRating,
		// It gives the same rows if it runs again.
		"the same again": `insert into ratings (product, reviews, stars) values ($1, $2, $3) on conflict (product) do nothing`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			kit := New(openPostgres, nil, readPostgres)
			kit.Projector = func(db *postgres.DB) *projector.Projector[pgx.Tx] { return outsidePG(db, statement) }
			text := failure(t, func(t testing.TB) { kit.ExactlyOnce(t, oneStream...) })
			shortest(t, text, 1, 5)
			require.Contains(t, text, "Product:44")
			require.Contains(t, text, "after the transaction was rolled back, this is left of it:\n  + 44 | 1 | 2")
			require.Contains(t, text, "A handler writes outside of its transaction")
		})
	}
}

// A rollback does not give back the numbers of a sequence.
func TestFindsNumbersOfASequence(t *testing.T) {
	t.Parallel()
	p := projector.Define("ratings", types, marked,
		projector.On("posted", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[posted]) error {
			_, err := tx.Exec(ctx, `insert into numbered (product) values ($1)`, e.Data.Product)
			return err
		}))
	read := func(columns string) func(ctx context.Context, db *postgres.DB) ([]string, error) {
		return func(ctx context.Context, db *postgres.DB) ([]string, error) {
			return Rows(ctx, db.Pool().Query, `select `+columns+` from numbered order by id`)
		}
	}
	open := func(t testing.TB) *postgres.DB {
		return postgrestest.Open(t, nil, `create table numbered (id bigint generated always as identity, product text)`)
	}
	text := failure(t, func(t testing.TB) { New(open, p, read("id, product")).ExactlyOnce(t, oneStream...) })
	if shortest(t, text, 1, 5) {
		require.Contains(t, text, "- 1 | 42\n  + 2 | 42")
	}
	require.Contains(t, text, "numbers of a sequence")
	New(open, p, read("product")).ExactlyOnce(t, oneStream...)
}

// On SQLite the second writer waits for the first one, which waits for the handler.
func TestFindsAWriteOutsideOfTheTransactionOnSQLite(t *testing.T) {
	t.Parallel()
	kit := New(openSQLite, nil, readSQLite)
	kit.Projector = func(db *sqlite.DB) *projector.Projector[txn] {
		return onlyPosted(marked, projector.On("posted", func(ctx context.Context, _ txn, e eventstore.Event[posted]) error {
			_, err := db.SQL().ExecContext(ctx, addRating, e.Data.Product, 1, e.Data.Stars)
			return err
		}))
	}
	text := failure(t, func(t testing.TB) { kit.ExactlyOnce(t, oneStream...) })
	require.Contains(t, text, "a handler waits, and does not return")
	require.Contains(t, text, "it waits for its own transaction")
}

type review struct{ n int }

func (r *review) Apply(any) { r.n++ }

func flagger(t testing.TB, store eventstore.Store) *eventstore.Repository[*review] {
	repo, err := eventstore.NewRepository(store, types, "flag", func(string) *review { return &review{} }, nil)
	require.NoError(t, err)
	return repo
}

func flag(*review) ([]any, error) { return []any{flagged{"42"}}, nil }

func TestFindsARepositoryOutsideOfTheTransaction(t *testing.T) {
	t.Parallel()
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		kit := New(openPostgres, nil, readPostgres)
		kit.Projector = func(db *postgres.DB) *projector.Projector[pgx.Tx] {
			repo := flagger(t, db)
			return projector.Define("flags", types, marked,
				projector.On("posted", func(ctx context.Context, _ pgx.Tx, e eventstore.Event[posted]) error {
					_, err := repo.Update(ctx, e.Data.Product, flag)
					return err
				}))
		}
		text := failure(t, func(t testing.TB) { kit.ExactlyOnce(t, oneStream...) })
		shortest(t, text, 1, 5)
		require.Contains(t, text, "+ event review.flagged in the stream flag-")
		require.Contains(t, text, "a repository instead of\nInTx(tx) and UpdateTx")
	})
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		kit := New(openSQLite, nil, readSQLite)
		kit.Projector = func(db *sqlite.DB) *projector.Projector[txn] {
			repo := flagger(t, db)
			return onlyPosted(marked, projector.On("posted", func(ctx context.Context, _ txn, e eventstore.Event[posted]) error {
				_, err := repo.Update(ctx, e.Data.Product, flag)
				return err
			}))
		}
		text := failure(t, func(t testing.TB) { kit.Given(t, oneStream...) })
		require.Contains(t, text, "ctx: is that of an open transaction, for which the call would wait: use the transaction")
	})
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		kit := New(openMemory, nil, readMemory)
		kit.Projector = func(db *memory.DB) *projector.Projector[*memory.Model] {
			repo := flagger(t, db)
			return projector.Define("flags", types, marked,
				projector.On("posted", func(ctx context.Context, _ *memory.Model, e eventstore.Event[posted]) error {
					_, err := repo.Update(ctx, e.Data.Product, flag)
					return err
				}))
		}
		text := failure(t, func(t testing.TB) { kit.Given(t, oneStream...) })
		require.Contains(t, text, "ctx: is that of an open transaction, for which the call would wait: use the transaction")
	})
	t.Run("right", func(t *testing.T) {
		t.Parallel()
		kit := New(openPostgres, nil, readPostgres)
		kit.Projector = func(db *postgres.DB) *projector.Projector[pgx.Tx] {
			repo := flagger(t, db)
			return projector.Define("flags", types, marked,
				projector.On("posted", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[posted]) error {
					_, err := repo.UpdateTx(ctx, db.InTx(tx), e.Data.Product, flag)
					return err
				}),
				projector.On("flagged", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[flagged]) error {
					_, err := tx.Exec(ctx, addRating, e.Data.Product, 1, 1)
					return err
				}))
		}
		kit.ExactlyOnce(t, oneStream...)
	})
}

// byLast depends on the order of streams: the last review of a product wins.
var byLast = onlyPosted(marked, latest(func(eventstore.Event[posted]) string { return "" }))

var posts = []Event{
	In("review-1", posted{"1", "ann", 5}), In("review-2", posted{"2", "bob", 1}), In("review-3", posted{"3", "cid", 2}),
	In("review-4", posted{"2", "dan", 3}), In("review-5", posted{"5", "eve", 3}), In("review-6", posted{"6", "fay", 4}),
}

func TestFindsADependenceOnTheOrderAcrossStreams(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]func(testing.TB){
		"Commutes":    func(t testing.TB) { New(openSQLite, byLast, readLatest).Commutes(t, posts...) },
		"ExactlyOnce": func(t testing.TB) { New(openSQLite, byLast, readLatest).ExactlyOnce(t, posts...) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			text := failure(t, test)
			if shortest(t, text, 2, 6) {
				require.Regexp(t, `1\. review-4 .*\n  2\. review-2 .*\ncompared with this order:\n  1\. review-2 .*\n  2\. review-4 `, text)
			}
			require.Contains(t, text, "depends on the order of events of different streams")
		})
	}
}

// A handler may also fail if the order is another one.
func TestFindsAHandlerThatFailsInAnotherOrder(t *testing.T) {
	t.Parallel()
	p := onlyPosted(marked, projector.On("posted", func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
		if e.Data.Product != "2" {
			return onPosted(ctx, tx, e)
		}
		r, err := tx.ExecContext(ctx, `update ratings set stars = stars + 1 where product = '1'`)
		if err != nil {
			return err
		}
		if n, _ := r.RowsAffected(); n == 0 {
			return projector.Permanent(errors.New("product 1 is missing"))
		}
		return nil
	}))
	text := failure(t, func(t testing.TB) { New(openSQLite, p, readSQLite).ExactlyOnce(t, posts...) })
	shortest(t, text, 2, 6)
	require.Contains(t, text, "a handler fails that does not fail in a clean pass")
	require.Contains(t, text, "product 1 is missing")
	require.Contains(t, text, "depends on the order of events of different streams")
	text = failure(t, func(t testing.TB) { New(openSQLite, p, readSQLite).ExactlyOnce(t, posts[1:]...) })
	shortest(t, text, 1, 5)
	require.Contains(t, text, "ExactlyOnce: projector ratings: a handler fails\n")
}

// It is exact if it reads the log alone.
func TestOrderOfTheLogMayMatter(t *testing.T) {
	t.Parallel()
	kit := New(openSQLite, byLast, readLatest)
	kit.LogOnly = true
	kit.ExactlyOnce(t, posts...)
	New(openSQLite, onlyPosted(projector.Options{}, latest(func(eventstore.Event[posted]) string { return "" })), readLatest).ExactlyOnce(t, posts...)
}

func TestFindsAHandlerThatIsMissing(t *testing.T) {
	t.Parallel()
	events := append([]Event{In("review-1", flagged{"42"})}, oneStream...)
	kit := New(openSQLite, ratings, readSQLite)
	for _, test := range []func(testing.TB){
		func(t testing.TB) { kit.Given(t, events...) },
		func(t testing.TB) { kit.ExactlyOnce(t, events...) },
		func(t testing.TB) { kit.Commutes(t, events...) },
	} {
		text := failure(t, test)
		require.Contains(t, text, "projector ratings has no handler for event 1, review-1 of type projectortest_test.flagged (review.flagged)")
		require.Contains(t, text, "add projectortest_test.flagged{} to Kit.Skip")
	}
	skips := New(openSQLite, ratings, readSQLite)
	skips.Skip = []any{flagged{}}
	skips.Given(t, events...).Then("42 | 1 | 5", "43 | 1 | 1", "44 | 1 | 2", "45 | 1 | 3", "46 | 1 | 3")
	skips.ExactlyOnce(t, events...)
	skips.Skip = []any{flagged{}, posted{}}
	require.Contains(t, failure(t, func(t testing.TB) { skips.Given(t, events...) }), "Kit.Skip has projectortest_test.posted, and projector ratings has a handler for it")
}

// markless is a store that forgets its markers.
type markless struct{ *sqlite.DB }

func (s markless) Do(ctx context.Context, u provider.Unit, run func(context.Context, txn, provider.Found) (provider.Closing, error)) error {
	u.Messages = slices.Clone(u.Messages)
	for i := range u.Messages {
		u.Messages[i].Mark = false
	}
	return s.DB.Do(ctx, u, run)
}

// Duplicates, and crashes between the commit and the ack, show in the rows if nothing keeps them out.
func TestFindsEventsThatTakeEffectTwice(t *testing.T) {
	t.Parallel()
	open := func(t testing.TB) markless { return markless{openSQLite(t)} }
	kit := New(open, ratings, func(ctx context.Context, s markless) ([]string, error) { return readSQLite(ctx, s.DB) })
	text := failure(t, func(t testing.TB) { kit.ExactlyOnce(t, oneStream...) })
	require.Regexp(t, `the reply is lost|the process ends after the commit and before the ack`, text)
	if shortest(t, text, 1, 5) {
		require.Contains(t, text, "- 42 | 1 | 5\n  + 42 | 2 | 10")
	}
	text = failure(t, func(t testing.TB) { kit.Given(t, oneStream[:1]...).Then("42 | 1 | 5").Redeliver().Then("42 | 1 | 5") })
	require.Contains(t, text, "got:\n  42 | 2 | 10")
}

// Each fault happens to each event.
func TestFaultsHappen(t *testing.T) {
	t.Parallel()
	var passes []*atomic.Int64
	kit := New(openSQLite, nil, readLatest)
	kit.Projector = func(*sqlite.DB) *projector.Projector[txn] {
		calls := &atomic.Int64{}
		passes = append(passes, calls)
		return onlyPosted(marked, latest(func(eventstore.Event[posted]) string { calls.Add(1); return "" }))
	}
	kit.ExactlyOnce(t, oneStream...)
	var counts []int64
	for _, calls := range passes[1:] { // the first one is not run
		counts = append(counts, calls.Load())
	}
	// The first pass and its repetition; two passes with faults from the log and two from a broker, where the handlers
	// of each event run twice; a broker, duplicates, two runners; all at once; later.
	require.Equal(t, []int64{5, 5, 10, 10, 10, 10, 5, 5, 5, 5, 5}, counts)
}
