package postgres_test

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// Pages of a share have the events of its streams, and the shares together have all: SQL and
// provider.SegmentOf agree.
func TestPagesOfAShareHaveItsStreams(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	streams := []string{"a-1", "a-日本", "a-o'hara", "b-2-x"}
	for i := range 100 {
		streams = append(streams, fmt.Sprintf("c-%d", i))
	}
	for _, stream := range streams {
		appendOne(t, db, stream)
	}
	for _, filter := range []eventstore.LogFilter{{}, {Categories: []string{"a", "b", "c"}}} {
		seen := map[string]int{}
		for share := range 5 {
			page, err := db.LogPage(t.Context(), provider.LogQuery{Filter: filter, Share: share, Shares: 5})
			require.NoError(t, err)
			require.EqualValues(t, len(streams), page.End.Position, "the page covers the events of others")
			for _, e := range page.Events {
				require.Equal(t, share, provider.SegmentOf(e.Stream, 5), e.Stream)
				seen[e.Stream]++
			}
		}
		require.Len(t, seen, len(streams))
	}
}

// Runners with both kinds of transaction share the segments of a projector, and the number changes while
// events come.
// Promise: G7.8
func TestSegmentsFromTheLogOfPostgreSQL(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	_, err := db.Pool().Exec(t.Context(), `create table lists (key text primary key, items int[] not null)`)
	require.NoError(t, err)
	const streams, each = 20, 15
	n := 0
	more := func() (at eventstore.Appended) {
		for range each {
			n++
			for i := range streams {
				drafts, err := table.Encode(t.Context(), counted{N: n})
				require.NoError(t, err)
				at, err = db.Append(t.Context(), fmt.Sprintf("k-%d", i), eventstore.Any, drafts)
				require.NoError(t, err)
			}
		}
		return at
	}
	const upsert = `insert into lists as l (key, items) values ($1, array[$2::int])
		on conflict (key) do update set items = l.items || excluded.items`
	batched := func(o projector.Options) *projector.Projector[*pgx.Batch] {
		return projector.Define("listed", table, o, projector.On("list", func(_ context.Context, b *pgx.Batch, e eventstore.Event[counted]) error {
			b.Queue(upsert, e.Stream, e.Data.N)
			return nil
		}))
	}
	cfg := projector.RunnerConfig{Lease: time.Second, Batch: 7}
	var stops []func() error
	for _, count := range []int{4, 3} {
		more()
		o := projector.Options{Segments: count}
		first := listed(o)
		_, stopTx := runListed(t, db, projector.FromLog(db), cfg, first)
		_, stopBatch := runListed[*pgx.Batch](t, db.Batched(), projector.FromLog(db), cfg, batched(o))
		for _, stop := range stops { // both numbers were there for some time
			require.NoError(t, stop())
		}
		stops = []func() error{stopTx, stopBatch}
		at := more()
		require.NoError(t, first.Wait(patience.Context(t), db, at))
		patience.Until(t, func() bool {
			c, err := db.Checkpoint(t.Context(), provider.Build{Projector: "listed"})
			return err == nil && c.Split().Count == count && c.Place.Position == at.Position
		}, "the segments to reach %d", at.Position)
	}
	for _, stop := range stops {
		require.NoError(t, stop())
	}
	for i := range streams {
		var items []int
		require.NoError(t, db.Pool().QueryRow(t.Context(), `select items from lists where key = $1`, fmt.Sprintf("k-%d", i)).Scan(&items))
		want := make([]int, n)
		for at := range want {
			want[at] = at + 1
		}
		require.Equal(t, want, items, "stream %d", i)
	}
}

// Two runners share the segments of a rebuild while events come, next to the live read model and in place.
func TestARebuildOfSegmentsOnPostgreSQL(t *testing.T) {
	t.Parallel()
	for _, how := range []projector.RebuildHow{projector.BlueGreen, projector.InPlace} {
		t.Run(how.String(), func(t *testing.T) {
			t.Parallel()
			db := postgrestest.Open(t, nil)
			n := 0
			more := func(count int) {
				for range count {
					n++
					drafts, err := table.Encode(t.Context(), counted{N: n})
					require.NoError(t, err)
					_, err = db.Append(t.Context(), fmt.Sprint("c-", (n-1)%3), eventstore.Any, drafts)
					require.NoError(t, err)
				}
			}
			applied := func() bool { return maps.EqualFunc(listedUpTo(n), listsOf(t, db), slices.Equal) }
			p := projector.Define("listed", table, projector.Options{Segments: 3, Tables: []string{"lists"}},
				projector.OnCreate(func(ctx context.Context, tx pgx.Tx) error {
					_, err := tx.Exec(ctx, `create table `+projector.Table(ctx, "lists")+` (key text primary key, items int[] not null)`)
					return err
				}),
				projector.On("list", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[counted]) error {
					_, err := tx.Exec(ctx, `insert into `+projector.Table(ctx, "lists")+` as l (key, items) values ($1, array[$2::int])
						on conflict (key) do update set items = l.items || excluded.items`, e.Stream, e.Data.N)
					return err
				}))
			cfg := projector.RunnerConfig{Lease: time.Second, Batch: 7, Logger: slog.New(slog.DiscardHandler)}
			runner, err := projector.NewRunner(db, projector.FromLog(db), cfg, p)
			require.NoError(t, err)
			other, err := projector.NewRunner(db, projector.FromLog(db), cfg, p)
			require.NoError(t, err)
			group, err := kinora.Start(t.Context(), runner, other)
			require.NoError(t, err)
			more(300)
			patience.Until(t, applied, "all events to be applied")
			_, err = db.Pool().Exec(t.Context(), `update lists_g1 set items = '{0}'`) // what the rebuild repairs
			require.NoError(t, err)
			done := make(chan error, 1)
			go func() {
				done <- runner.Rebuild(t.Context(), "listed", projector.Rebuild{How: how, Decision: projector.Decision{By: "ann", Reason: "a bug"}})
			}()
			for n := 0; n < 20 && len(done) == 0; n++ { // not forever: a busy machine might never come to the end of the log
				more(3)
				time.Sleep(50 * time.Millisecond) // time must pass, so that the rebuild reads between the appends
			}
			require.NoError(t, patience.Receive(t, done, "the rebuild"))
			more(30)
			patience.Until(t, applied, "all events to be applied")
			require.NoError(t, group.Stop())
			require.True(t, applied())
		})
	}
}
