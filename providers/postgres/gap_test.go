package postgres_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// gapLoad writes events in ways that make gaps, or fill them late.
type gapLoad struct {
	db       *postgres.DB
	prepares bool // the server has prepared transactions

	committed, rolledBack, toSavepoint, killed, prepared, wide atomic.Int64
}

// write runs random transactions until ctx ends. Errors are part of the load: deadlocks, and
// connections that were ended.
func (g *gapLoad) write(ctx context.Context, w int) {
	for n := 0; ctx.Err() == nil; n++ {
		if rand.IntN(3) == 0 {
			if _, err := g.append(ctx, g.db, 1+rand.IntN(3)); err == nil {
				g.committed.Add(1)
			}
			continue
		}
		_ = g.transaction(ctx, fmt.Sprintf("gap-%d-%d", w, n))
	}
}

func (*gapLoad) append(ctx context.Context, to eventstore.Store, n int) (eventstore.Appended, error) {
	ds := make([]eventstore.Draft, n)
	for i := range ds {
		ds[i] = eventstore.Draft{ID: uuid.NewString(), Type: fmt.Sprint("t", rand.IntN(3)), Schema: 1, Data: []byte(`{}`)}
	}
	return to.Append(ctx, fmt.Sprintf("c%d-%d", rand.IntN(3), rand.IntN(15)), eventstore.Any, ds)
}

// transaction appends some times, with delays and savepoints between, and ends in one of several
// ways.
func (g *gapLoad) transaction(ctx context.Context, name string) error {
	conn, err := g.db.Pool().Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	for range 1 + rand.IntN(3) {
		if err := g.step(ctx, tx); err != nil {
			return err
		}
		if rand.IntN(3) == 0 {
			sleepUpTo(ctx, 20*time.Millisecond)
		}
	}
	switch end := rand.IntN(40); {
	case end < 8:
		g.rolledBack.Add(1)
		return tx.Rollback(ctx)
	case end == 8:
		g.killed.Add(1)
		_, err := tx.Exec(ctx, "select pg_terminate_backend(pg_backend_pid())")
		return err
	case end < 12 && g.prepares:
		return g.prepare(ctx, tx, name)
	}
	g.committed.Add(1)
	return tx.Commit(ctx)
}

func (g *gapLoad) step(ctx context.Context, tx pgx.Tx) error {
	switch rand.IntN(30) {
	case 0: // positions that nothing uses
		g.wide.Add(1)
		_, err := tx.Exec(ctx, `select nextval('kinora.events_position_seq') from generate_series(1, $1::int)`, 1+rand.IntN(10_000))
		return err
	case 1: // a bulk insert that is rolled back
		g.wide.Add(1)
		return g.savepoint(ctx, tx, func(nested pgx.Tx) error {
			_, err := nested.Exec(ctx, `
				insert into kinora.events (stream, version, id, type, schema_version, data, metadata, recorded_at)
				select 'bulk-' || gen_random_uuid(), 1, gen_random_uuid(), 't', 1, '{}', '{}', clock_timestamp() from generate_series(1, $1::int)`, 1+rand.IntN(1000))
			return err
		}, false)
	case 2, 3, 4, 5, 6, 7, 8:
		return g.savepoint(ctx, tx, func(nested pgx.Tx) error {
			_, err := g.append(ctx, g.db.InTx(nested), 1+rand.IntN(3))
			return err
		}, rand.IntN(2) == 0)
	}
	_, err := g.append(ctx, g.db.InTx(tx), 1+rand.IntN(3))
	return err
}

// savepoint runs write in a savepoint, and rolls back to the savepoint unless keep is set.
func (g *gapLoad) savepoint(ctx context.Context, tx pgx.Tx, write func(pgx.Tx) error, keep bool) error {
	nested, err := tx.Begin(ctx)
	if err != nil {
		return err
	}
	if err := write(nested); err != nil {
		return err
	}
	if keep {
		return nested.Commit(ctx)
	}
	g.toSavepoint.Add(1)
	return nested.Rollback(ctx)
}

// prepare leaves the transaction prepared for some time, and then commits it on another connection.
// The end of ctx does not interrupt it: the transaction would stay prepared.
func (g *gapLoad) prepare(ctx context.Context, tx pgx.Tx, name string) error {
	whole := context.WithoutCancel(ctx)
	if _, err := tx.Exec(whole, "prepare transaction '"+name+"'"); err != nil {
		return err
	}
	sleepUpTo(ctx, 20*time.Millisecond)
	g.prepared.Add(1)
	_, err := g.db.Pool().Exec(whole, "commit prepared '"+name+"'")
	return err
}

func sleepUpTo(ctx context.Context, most time.Duration) { wait(ctx, rand.N(most)) }

// wait lets time pass until ctx ends.
func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// reading collects the positions that a reader got, and checks the order of each stream.
type reading struct {
	filter    eventstore.LogFilter
	positions []int64
	versions  map[string]int64
	waits     int // pages that named open appends
	err       error
}

func (r *reading) take(e eventstore.Raw) error {
	if n := len(r.positions); n > 0 && e.Position <= r.positions[n-1] {
		return fmt.Errorf("position %d came after %d", e.Position, r.positions[n-1])
	}
	r.positions = append(r.positions, e.Position)
	if r.filter.Types == nil && e.Version != r.versions[e.Stream]+1 {
		return fmt.Errorf("version %d of %s came after %d", e.Version, e.Stream, r.versions[e.Stream])
	}
	r.versions[e.Stream] = e.Version
	return nil
}

// live reads page after page until ctx has ended, the log has no more, and no append is open: the
// server may still be ending those of connections that were closed.
func (r *reading) live(ctx context.Context, db *postgres.DB, q provider.LogQuery) error {
	q.Filter = r.filter
	for {
		last, hint := ctx.Err() != nil, db.Appended()
		page, err := db.LogPage(context.WithoutCancel(ctx), q)
		if err != nil {
			return err
		}
		for _, e := range page.Events {
			if err := r.take(e); err != nil {
				return err
			}
		}
		r.waits += min(len(page.Waiting), 1)
		q.After = page.End.Position
		switch {
		case last && !page.More && len(page.Waiting) == 0:
			return nil
		case !page.More:
			select {
			case <-hint:
			case <-time.After(time.Millisecond): // the hint may be of another process
			case <-ctx.Done():
			}
		}
	}
}

// again reads the whole log until ctx has ended, each time from the beginning.
func (r *reading) again(ctx context.Context, db *postgres.DB) error {
	for last := false; !last; {
		last = ctx.Err() != nil
		r.positions, r.versions = nil, map[string]int64{}
		for e, err := range db.ReadLog(context.WithoutCancel(ctx), eventstore.From{}, r.filter) {
			if err != nil {
				return err
			}
			if err := r.take(e); err != nil {
				return err
			}
		}
	}
	return nil
}

// plain reads behind its last position, as a reader without a proof does.
func (r *reading) plain(ctx context.Context, pool *pgxpool.Pool) error {
	for after, last := int64(0), false; ; {
		rows, err := pool.Query(context.WithoutCancel(ctx), `select position from kinora.events where position > $1 order by position limit 500`, after)
		if err != nil {
			return err
		}
		page, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		if err != nil {
			return err
		}
		r.positions = append(r.positions, page...)
		if len(page) > 0 {
			after = page[len(page)-1]
			continue
		}
		if last {
			return nil
		}
		last = ctx.Err() != nil
		sleepUpTo(ctx, time.Millisecond)
	}
}

// Twelve writers commit in any order, roll back, roll back to savepoints, leave wide gaps, prepare
// and lose their backends. Readers get every event once, and each stream in order: those that
// follow the writers, those that begin again and again, through the same DB and through others. A
// reader without a proof skips events meanwhile.
// Promise: G7.1
func TestNoEventIsSkippedWhateverTheOrderOfCommits(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	another := func(conns int32) *postgres.DB {
		return borrowed(t, nil, db.Pool().Config().ConnString(), func(c *pgxpool.Config) {
			c.MaxConns = conns
			c.ConnConfig.RuntimeParams["deadlock_timeout"] = "20ms" // writers take streams in any order
		})
	}
	load := &gapLoad{db: another(30), prepares: count(t, db, `select current_setting('max_prepared_transactions')::int`) >= 10}
	stop, cancel := context.WithCancel(context.Background())
	defer cancel()
	var writers, readers sync.WaitGroup
	for w := range 12 {
		writers.Go(func() { load.write(stop, w) })
	}
	done, end := context.WithCancel(context.Background())
	defer end()
	shared, separate := another(8), another(4)
	readings := map[string]*reading{}
	start := func(name string, f eventstore.LogFilter, read func(r *reading) error) {
		r := &reading{filter: f, versions: map[string]int64{}}
		readings[name] = r
		readers.Go(func() { r.err = read(r) })
	}
	some := eventstore.LogFilter{Types: []string{"t1"}, Categories: []string{"c0", "c2"}}
	start("live", eventstore.LogFilter{}, func(r *reading) error { return r.live(done, load.db, provider.LogQuery{}) })
	start("live, small pages", eventstore.LogFilter{}, func(r *reading) error { return r.live(done, shared, provider.LogQuery{Limit: 7, NoData: true}) })
	start("live, filtered", some, func(r *reading) error { return r.live(done, shared, provider.LogQuery{}) })
	start("live, separate", eventstore.LogFilter{}, func(r *reading) error { return r.live(done, separate, provider.LogQuery{}) })
	start("from 0", eventstore.LogFilter{}, func(r *reading) error { return r.again(done, shared) })
	start("from 0, a new handle each time", some, func(r *reading) error {
		for last := false; !last; {
			last = done.Err() != nil
			fresh, err := postgres.New(separate.Pool(), nil)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithCancel(context.Background())
			cancel() // once
			if err := r.again(ctx, fresh); err != nil {
				return err
			}
		}
		return nil
	})
	start("plain", eventstore.LogFilter{}, func(r *reading) error { return r.plain(done, separate.Pool()) })

	enough := longtest.Or[int64](1_000, 20_000)
	patience.Until(t, func() bool {
		return load.committed.Load() >= enough &&
			min(load.rolledBack.Load(), load.toSavepoint.Load(), load.killed.Load(), load.wide.Load()) > 0
	}, "%d transactions, and some of each kind", enough)
	cancel()
	writers.Wait()
	end()
	readers.Wait()

	oracle := func(where string) []int64 {
		rows, err := db.Pool().Query(t.Context(), `select position from kinora.events `+where+` order by position`)
		require.NoError(t, err)
		all, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		require.NoError(t, err)
		return all
	}
	all, selected := oracle(""), oracle("where type = 't1' and (stream like 'c0-%' or stream like 'c2-%')")
	t.Logf("%d events of %d positions; transactions: %d committed, %d rolled back, %d to a savepoint, %d killed, %d prepared, %d wide gaps",
		len(all), all[len(all)-1], load.committed.Load(), load.rolledBack.Load(), load.toSavepoint.Load(), load.killed.Load(), load.prepared.Load(), load.wide.Load())
	for name, r := range readings {
		require.NoError(t, r.err, name)
		t.Logf("%s: %d events, %d waits", name, len(r.positions), r.waits)
		want := all
		switch {
		case name == "plain":
			require.Less(t, len(r.positions), len(all), "a reader without a proof skips events: the load makes gaps that are filled late")
			continue
		case r.filter.Types != nil:
			want = selected
		}
		require.True(t, slices.Equal(want, r.positions), "%s: %d of %d events, the first difference at %d",
			name, len(r.positions), len(want), firstDifference(want, r.positions))
	}
}

func firstDifference(a, b []int64) int64 {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return min(a[i], b[i])
		}
	}
	return -1
}
