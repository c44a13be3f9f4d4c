package projectortest_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	. "github.com/kinora-go/kinora/projector/projectortest"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/sqlite"
)

func TestGivenAppliesEventsFromTheLogAndFromABroker(t *testing.T) {
	t.Parallel()
	applied := New(openSQLite, ratings, readSQLite).Given(t, ten...).Then("42 | 3 | 11", "7 | 2 | 5")
	applied.Redeliver().Then("42 | 3 | 11", "7 | 2 | 5")
	out := applied.Emitted()
	require.Len(t, out, 1)
	require.Equal(t, "alerts one star by bob", out[0].Topic+" "+string(out[0].Payload))
	New(openPostgres, ratingsPG, readPostgres).Given(t, ten...).Then("42 | 3 | 11", "7 | 2 | 5")
	New(openSQLite, ratings, readSQLite).Given(t).Then()
}

func TestGivenReportsOtherRows(t *testing.T) {
	t.Parallel()
	kit := New(openSQLite, ratings, readSQLite)
	text := failure(t, func(t testing.TB) { kit.Given(t, ten...).Then("42 | 3 | 11", "7 | 2 | 6") })
	for _, src := range []string{"read from the log", "delivered by a broker"} {
		require.Contains(t, text, "projector ratings, events "+src+": the rows differ\nwant:\n  42 | 3 | 11\n  7 | 2 | 6\ngot:\n  42 | 3 | 11\n  7 | 2 | 5")
	}
	require.Contains(t, failure(t, func(t testing.TB) { kit.Given(t).Then("42 | 3 | 11") }), "no rows")
	fails := define(marked, projector.On("posted", func(context.Context, txn, eventstore.Event[posted]) error {
		return projector.Permanent(fmt.Errorf("no such author"))
	}))
	text = failure(t, func(t testing.TB) { New(openSQLite, fails, readSQLite).Given(t, ten...) })
	require.Contains(t, text, "ratings/posted failed for this event: permanent: no such author")
	require.Contains(t, text, "review-42-ann")
}

// A redelivery without markers would take effect again.
func TestRedeliverRequiresMarkers(t *testing.T) {
	t.Parallel()
	plain := define(projector.Options{}, projector.On("posted", onPosted))
	text := failure(t, func(t testing.TB) {
		New(openSQLite, plain, readSQLite).Given(t, ten...).Then("42 | 3 | 11", "7 | 2 | 5").Redeliver()
	})
	require.Contains(t, text, "projector ratings cannot get events twice: it has no Options.Markers")
}

func TestRightProjectorsPass(t *testing.T) {
	t.Parallel()
	posted := projector.On("posted", onPosted)
	noted := projector.On("noted", func(ctx context.Context, tx txn, e eventstore.Event[any]) error { // every event
		_, err := tx.ExecContext(ctx, `insert into latest (product, author, stars) values ($1, $2, $3)`, e.ID, e.Stream, e.Version)
		return err
	})
	for name, p := range map[string]*projector.Projector[txn]{
		"with output":           ratings,
		"without markers":       define(projector.Options{}, posted),
		"from a broker alone":   define(projector.Options{Markers: true, BrokerOnly: true}, posted),
		"ordered":               define(projector.Options{Markers: true, Ordered: true}, posted),
		"events that come":      define(projector.Options{Markers: true, From: eventstore.From{Now: true}}, posted),
		"two handlers":          define(marked, posted, noted),
		"message by message":    define(projector.Options{Markers: true, Parking: projector.ParkMessage}, posted),
		"emptied before":        define(projector.Options{Markers: true, Tables: []string{"ratings"}}, posted),
		"with tables by itself": rebuilt,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			open := openSQLite
			if p == rebuilt {
				open = openEmpty
			}
			New(open, p, readSQLite).ExactlyOnce(t, ten...)
		})
	}
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		New(openPostgres, ratingsPG, readPostgres).ExactlyOnce(t, ten...)
	})
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		New(openMemory, inMemory, readMemory).ExactlyOnce(t, ten...)
		New(openMemory, inMemory, readMemory).Commutes(t, ten...)
	})
	t.Run("Commutes", func(t *testing.T) {
		t.Parallel()
		New(openSQLite, ratings, readSQLite).Commutes(t, ten...)
	})
}

// rebuilt has tables of its own for each generation.
var rebuilt = define(projector.Options{Markers: true, Tables: []string{"ratings"}},
	projector.OnCreate(func(ctx context.Context, tx txn) error {
		_, err := tx.ExecContext(ctx, `create table `+projector.Table(ctx, "ratings")+` (product text primary key, reviews bigint not null, stars bigint not null)`)
		return err
	}),
	projector.On("posted", func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
		return add(ctx, tx, e.Data.Product, 1, e.Data.Stars)
	}))

func openEmpty(t testing.TB) *sqlite.DB {
	db := openSQLite(t)
	_, err := db.SQL().ExecContext(t.Context(), `drop table ratings`)
	require.NoError(t, err)
	return db
}

func openMemory(t testing.TB) *memory.DB {
	db, err := memory.New(nil)
	require.NoError(t, err)
	return db
}

func countInMemory(tx *memory.Model, product string, stars int) {
	n, _ := tx.Get("stars", product)
	sum, _ := n.(int)
	tx.Put("stars", product, sum+stars)
}

var inMemory = projector.Define("stars", types, marked,
	projector.On("posted", func(_ context.Context, tx *memory.Model, e eventstore.Event[posted]) error {
		countInMemory(tx, e.Data.Product, e.Data.Stars)
		return nil
	}),
	projector.On("edited", func(_ context.Context, tx *memory.Model, e eventstore.Event[edited]) error {
		countInMemory(tx, e.Data.Product, e.Data.Stars-e.Data.Was)
		return nil
	}))

type total struct {
	Product string
	Stars   any
}

func readMemory(_ context.Context, db *memory.DB) (rows []total, err error) {
	db.View(func(m *memory.Model) {
		all := maps.Collect(m.All("stars"))
		for _, product := range slices.Sorted(maps.Keys(all)) {
			rows = append(rows, total{product, all[product]})
		}
	})
	return rows, nil
}

// batched is a store whose units only queue statements.
type batched struct {
	provider.Provider[*pgx.Batch]
	eventstore.Store
	provider.Log
	db *postgres.DB
}

func TestStoreOfSeveralParts(t *testing.T) {
	t.Parallel()
	p := projector.Define("ratings", types, marked,
		projector.On("posted", func(_ context.Context, b *pgx.Batch, e eventstore.Event[posted]) error {
			b.Queue(addRating, e.Data.Product, 1, e.Data.Stars)
			return nil
		}),
		projector.On("edited", func(_ context.Context, b *pgx.Batch, e eventstore.Event[edited]) error {
			b.Queue(addRating, e.Data.Product, 0, e.Data.Stars-e.Data.Was)
			return nil
		}))
	kit := New(func(t testing.TB) batched {
		db := openPostgres(t)
		return batched{db.Batched(), db, db, db}
	}, p, func(ctx context.Context, s batched) ([]string, error) { return readPostgres(ctx, s.db) })
	kit.Given(t, ten...).Then("42 | 3 | 11", "7 | 2 | 5").Redeliver().Then("42 | 3 | 11", "7 | 2 | 5")
	kit.ExactlyOnce(t, ten...)
}

// A rebuild must empty all that the handlers write.
func TestFindsRowsThatARebuildLeaves(t *testing.T) {
	t.Parallel()
	p := define(projector.Options{Markers: true, Tables: []string{"latest"}}, projector.On("posted", onPosted))
	text := failure(t, func(t testing.TB) { New(openSQLite, p, readSQLite).ExactlyOnce(t, ten...) })
	shortest(t, text, 1, 10)
	require.Contains(t, text, "rows before and after the in-place rebuild (- before, + after):")
	require.Contains(t, text, "a table that is not in Options.Tables")
}

func TestFindsOutputThatDiffers(t *testing.T) {
	t.Parallel()
	n := 0
	p := onlyPosted(projector.Options{}, projector.OnEmit("posted", func(context.Context, txn, eventstore.Event[posted]) ([]outbox.Message, error) {
		n++
		return []outbox.Message{{Topic: "alerts", Payload: []byte(fmt.Sprint("number ", n))}}, nil
	}))
	text := failure(t, func(t testing.TB) { New(openSQLite, p, readSQLite).ExactlyOnce(t, oneStream...) })
	shortest(t, text, 1, 5)
	require.Regexp(t, `- message .* to alerts, key review-42-ann, .*: number \d+`, text)
}

// forgetful is a store without markers.
type forgetful struct{ *memory.DB }

func (forgetful) Keeps() provider.Keeps { return provider.Keeps{Atomic: true, Output: true} }

func TestRefusesWhatIsNotExact(t *testing.T) {
	t.Parallel()
	open := func(t testing.TB) forgetful { return forgetful{openMemory(t)} }
	kit := New(open, inMemory, func(ctx context.Context, db forgetful) ([]total, error) { return readMemory(ctx, db.DB) })
	kit.Given(t, ten...).Then(total{"42", 11}, total{"7", 5})
	text := failure(t, func(t testing.TB) { kit.ExactlyOnce(t, ten...) })
	require.Contains(t, text, "projector stars: this store keeps no markers, so it does not promise that each event takes effect once")

	p := define(projector.Options{BrokerOnly: true}, projector.On("posted", onPosted))
	text = failure(t, func(t testing.TB) { New(openSQLite, p, readSQLite).ExactlyOnce(t, ten...) })
	require.Contains(t, text, "projector ratings has Options.BrokerOnly and no Options.Markers")
	require.Contains(t, failure(t, func(t testing.TB) { New(openSQLite, ratings, readSQLite).Commutes(t, oneStream...) }), "at least two streams")
	require.Contains(t, failure(t, func(t testing.TB) { New(openSQLite, ratings, readSQLite).Given(t, In("nothing", posted{})) }), `event 1, nothing: `)
	require.Contains(t, failure(t, func(t testing.TB) { New(openSQLite, ratings, readSQLite).Given(t, In("review-1", 5)) }), `event type is not registered`)
}
