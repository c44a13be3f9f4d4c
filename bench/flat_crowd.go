package main

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
)

// flatBed is a schema with a DB whose costs are compared with those of an empty schema.
type flatBed struct {
	*relayBed
	// what fills the schema; may be called many times
	ready func(ctx context.Context) error
	// the pages that the server reads for one of a line's units of work, by line, in each round
	pagesRead map[string][]float64
}

const (
	crowdFill  = 1_000_000 // events of one statement
	unitEvents = 20_000    // events that a round's units begin with
	pageEvents = 500
)

// crowd fills a schema: streams of ten events, and a thousand projectors with a thousand markers each.
// UUIDs increase, as those of version 7 do.
var crowd = []string{
	`insert into %[1]s.streams select 'crowd-' || g, 'crowd', 10 from generate_series(0, $1::int / 10 - 1) g`,
	`insert into %[1]s.generations (projector, generation, revision, state, data, created_at, changed_at)
		select 'crowd-' || g, 1, 1, 'live', '{}', now(), now() from generate_series(1, 1000) g where $1::int > 0`,
	`insert into %[1]s.checkpoints (projector, generation, position, event_id, lineage, mode, token, handlers)
		select 'crowd-' || g, 1, $1::int, '', '', 'live', gen_random_uuid(), '[]' from generate_series(1, 1000) g`,
	`insert into %[1]s.markers (handler, generation, message_id, position)
		select 'crowd-' || p || '/a', 1, lpad(to_hex(g), 8, '0') || '-0000-7000-8000-000000000000', g
		from generate_series(1, 1000) p, generate_series($1::int - 999, $1::int) g`,
	`insert into %[1]s.runners select 'runner-' || g, now() + interval '1 day' from generate_series(1, 1000) g where $1::int > 0`,
	`insert into %[1]s.leases select 'crowd/' || g, gen_random_uuid(), 'runner-' || g, now() + interval '1 day' from generate_series(1, 1000) g where $1::int > 0`,
}

const crowdEvents = `insert into %[1]s.events (stream, version, id, type, schema_version, data, metadata, recorded_at)
	select 'crowd-' || g / 10, g %% 10 + 1, (lpad(to_hex(g), 8, '0') || '-0000-7000-8000-000000000000')::uuid, 'review.posted', 1,
		jsonb_build_object('product_id', 'p' || g %% 1000, 'rating', 5, 'title', 'Great'), '{}', clock_timestamp()
	from generate_series($1::int, $2::int - 1) g`

// crowdBeds are the schemas of the lines whose names begin with "flat".
type crowdBeds struct{ lone, crowded, aged *flatBed }

// newCrowdBeds returns an empty schema, one with many events, streams and projectors, and one in which an
// old snapshot keeps dead rows. Each is filled when the first of its lines runs.
func newCrowdBeds(ctx context.Context, b *bed) (*crowdBeds, error) {
	var all [3]*flatBed
	for i, schema := range []string{"lone", "crowded", "aged"} {
		var err error
		if all[i], err = newFlatBed(ctx, b, schema); err != nil {
			return nil, err
		}
	}
	all[1].ready, all[2].ready = onlyOnce(all[1].crowd), onlyOnce(all[2].grow)
	return &crowdBeds{all[0], all[1], all[2]}, nil
}

const crowdName, agedName = "flat/crowd", "flat/old-snapshot"

func (c *crowdBeds) lines() []line {
	return append(c.crowded.lines(crowdName, c.lone), c.aged.lines(agedName, c.lone)...)
}

// others are the results beside those of the lines.
func (c *crowdBeds) others(ctx context.Context, only string) ([]result, error) {
	idle, err := c.idle(ctx, only)
	if err != nil {
		return nil, err
	}
	all := append(c.pageResults(), idle...)
	if !strings.HasPrefix("admin", only) && !strings.HasPrefix(only, "admin") {
		return all, nil
	}
	operated, err := c.crowded.operated(ctx)
	return append(all, operated...), err
}

// idle compares the statements of a relay and a runner that have nothing to do.
func (c *crowdBeds) idle(ctx context.Context, only string) (all []result, err error) {
	for name, f := range map[string]*flatBed{crowdName: c.crowded, agedName: c.aged} {
		r := result{Name: name + "/idle", Unit: "statements/s", Rounds: 1}
		if !strings.HasPrefix(r.Name, only) {
			continue
		}
		if r.Ours, err = f.idle(ctx); err != nil {
			return nil, err
		}
		if r.Limit, err = c.lone.idle(ctx); err != nil {
			return nil, err
		}
		r.VsLimit = r.Ours / r.Limit
		all = append(all, r)
	}
	return all, nil
}

// onlyOnce returns a function that calls fill the first time, and then returns its error.
func onlyOnce(fill func(ctx context.Context) error) func(ctx context.Context) error {
	var once sync.Once
	var err error
	return func(ctx context.Context) error {
		once.Do(func() { err = fill(ctx) })
		return err
	}
}

func newFlatBed(ctx context.Context, b *bed, schema string) (*flatBed, error) {
	db, err := postgres.New(b.pool, &postgres.Config{Schema: schema, Route: outbox.ByCategory})
	if err != nil {
		return nil, err
	}
	r := &relayBed{bed: b, db: db, schema: schema, batch: relayBatch, keys: relayKeys}
	return &flatBed{r, func(context.Context) error { return nil }, map[string][]float64{}}, db.Migrate(ctx)
}

// lines compares f with an empty schema.
func (f *flatBed) lines(name string, lone *flatBed) []line {
	one := func(of, unit string, program func(f *flatBed) program) line {
		return line{name: name + "/" + of, unit: unit, ours: f.counted(name+"/"+of, program(f)), limit: lone.counted(name+"/"+of, program(lone))}
	}
	return []line{
		one("append", "appends/s", func(f *flatBed) program { return program{f.ready, ours(f.db, 1, 1)} }),
		one("claims", "messages/s", func(f *flatBed) program { return program{f.entries, f.relays(1, f.count)} }),
		one("log-page", "pages/s", func(f *flatBed) program { return program{f.events, f.pages} }),
		one("unit", "units/s", func(f *flatBed) program { return program{f.events, f.units} }),
	}
}

// counted counts the pages that p reads.
func (f *flatBed) counted(line string, p program) program {
	return program{p.prepare, func(ctx context.Context, b *bed) (int64, error) {
		hard := context.WithoutCancel(ctx)
		before, err := f.read(hard)
		if err != nil {
			return 0, err
		}
		done, err := p.work(ctx, b)
		if err != nil {
			return done, err
		}
		after, err := f.read(hard)
		total := 0.0
		perOne := map[string]float64{}
		for table, n := range after {
			perOne[table] = float64(n-before[table]) / float64(max(done, 1))
			total += perOne[table]
		}
		f.pagesRead[line] = append(f.pagesRead[line], total)
		slog.Info("pages", "name", line, "schema", f.schema, "total", total, "tables", perOne)
		return done, err
	}}
}

// read returns the pages that the server has read so far, by table.
func (f *flatBed) read(ctx context.Context) (map[string]int64, error) {
	for _, conn := range f.pool.AcquireAllIdle(ctx) {
		_, err := conn.Exec(ctx, "select pg_stat_force_next_flush()")
		conn.Release()
		if err != nil {
			return nil, err
		}
	}
	rows, err := f.pool.Query(ctx, `select relname::text, heap_blks_hit + heap_blks_read + coalesce(idx_blks_hit + idx_blks_read, 0)
		from pg_statio_user_tables where schemaname = $1`, f.schema)
	if err != nil {
		return nil, err
	}
	all := map[string]int64{}
	var table string
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&table, &n}, func() error {
		all[table] = n
		return nil
	})
	return all, err
}

// pageResults are the medians of the pages that were read.
func (c *crowdBeds) pageResults() (all []result) {
	for _, f := range []*flatBed{c.crowded, c.aged} {
		for line, pages := range f.pagesRead {
			r := result{Name: line + " pages", Unit: "pages", Ours: median(pages), Limit: median(c.lone.pagesRead[line]), Rounds: len(pages)}
			r.VsLimit = r.Ours / r.Limit
			all = append(all, r)
		}
	}
	slices.SortFunc(all, func(a, b result) int { return strings.Compare(a.Name, b.Name) })
	return all
}

func (f *flatBed) exec(ctx context.Context, sql string, args ...any) error {
	_, err := f.pool.Exec(ctx, fmt.Sprintf(sql, f.schema), args...)
	return err
}

// crowd fills the schema. It writes a checkpoint after each million events, so that the log of the server
// stays small.
func (f *flatBed) crowd(ctx context.Context) error {
	begin := time.Now()
	for at := 0; at < f.crowded; at += crowdFill {
		if err := f.exec(ctx, crowdEvents, at, min(at+crowdFill, f.crowded)); err != nil {
			return err
		}
		if _, err := f.pool.Exec(ctx, "checkpoint"); err != nil {
			return err
		}
		slog.Info("fill", "schema", f.schema, "events", at+crowdFill, "took", time.Since(begin))
	}
	for _, stmt := range crowd {
		if err := f.exec(ctx, stmt, f.crowded); err != nil {
			return err
		}
	}
	for _, table := range []string{"events", "streams", "markers", "checkpoints", "generations", "runners", "leases"} {
		begin := time.Now()
		if err := f.exec(ctx, "vacuum (freeze, analyze) %s."+table); err != nil {
			return err
		}
		slog.Info("vacuum freeze", "table", table, "took", time.Since(begin))
	}
	return f.sizes(ctx)
}

// sizes logs what docs/scale.md computes with.
func (f *flatBed) sizes(ctx context.Context) error {
	rows, err := f.pool.Query(ctx, `
		select c.relname::text, pg_relation_size(c.oid), greatest(t.reltuples, 1)::bigint
		from pg_class c left join pg_index i on i.indexrelid = c.oid join pg_class t on t.oid = coalesce(i.indrelid, c.oid)
		where c.relnamespace = $1::regnamespace and c.relkind in ('r', 'i') and t.relname in ('events', 'streams', 'markers') order by t.relname, c.relkind desc, c.relname`, f.schema)
	if err != nil {
		return err
	}
	var name string
	var bytes, n int64
	_, err = pgx.ForEachRow(rows, []any{&name, &bytes, &n}, func() error {
		slog.Info("size", "of", name, "bytes", bytes, "rows", n, "bytes_per_row", bytes/n)
		return nil
	})
	return err
}

// grow appends, relays and projects 500 events a second while a transaction stays open whose snapshot sees
// all of the rows.
func (f *flatBed) grow(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, f.dsn) // closed when the program ends
	if err != nil {
		return err
	}
	for _, stmt := range []string{"begin isolation level repeatable read", "select count(*) from " + f.schema + ".outbox"} {
		if _, err := conn.Exec(ctx, stmt); err != nil {
			return err
		}
	}
	running, stop := context.WithCancel(ctx)
	defer stop()
	var units atomic.Int64
	ended := make(chan error, 1)
	go func() { ended <- f.run(running, f.db, 1, &units) }()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for begin, n := time.Now(), 0; time.Since(begin) < f.open; <-tick.C {
		for range 50 {
			if _, err := f.db.Append(ctx, fmt.Sprintf("review-%d", n%perStream), eventstore.Any, posted(1)); err != nil {
				return err
			}
			n++
		}
	}
	stop()
	slog.Info("grown", "schema", f.schema, "units", units.Load())
	return <-ended
}

// run runs a relay and a projector of the log until ctx ends. batch is the most events of a unit.
func (f *flatBed) run(ctx context.Context, db *postgres.DB, batch int, units *atomic.Int64) error {
	quiet := slog.New(slog.DiscardHandler)
	relay, err := outbox.NewRelay(db, f.count(1<<62), &outbox.RelayConfig{OrderedPublisher: true, Logger: quiet})
	if err != nil {
		return err
	}
	read := projector.Define("read", ratings, projector.Options{},
		projector.On("rated", func(context.Context, *pgx.Batch, eventstore.Event[rated]) error { return nil }))
	runner, err := projector.NewRunner(db.Batched(), projector.FromLog(db), projector.RunnerConfig{Batch: batch, Logger: quiet, Observer: projector.RunnerObserver{
		Unit: func(_ string, _ int, _ time.Duration, err error) {
			if err == nil {
				units.Add(1)
			}
		},
	}}, read)
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(ctx) }()
	err = runner.Run(ctx)
	if e := <-ended; err == nil {
		err = e
	}
	return err
}

// units runs the projector, with one event in each unit.
func (f *flatBed) units(ctx context.Context, _ *bed) (int64, error) {
	var done atomic.Int64
	err := f.run(ctx, f.db, 1, &done)
	return done.Load(), err
}

// events adds events behind the projector's checkpoint.
func (f *flatBed) events(ctx context.Context) error {
	if err := f.ready(ctx); err != nil {
		return err
	}
	head, err := f.db.LogPosition(ctx, eventstore.From{Now: true})
	if err != nil {
		return err
	}
	var exists bool
	if err := f.pool.QueryRow(ctx, "select exists (select from "+f.schema+".checkpoints where projector = 'read')").Scan(&exists); err != nil {
		return err
	}
	if !exists {
		live := provider.Checkpoint{Place: provider.LogPlace{Position: head}, Mode: provider.ModeLive}
		if _, err := f.db.SetCheckpoint(ctx, provider.Build{Projector: "read"}, provider.Checkpoint{}, live); err != nil {
			return err
		}
	}
	if err := f.exec(ctx, `delete from %s.outbox`); err != nil { // those of appends
		return err
	}
	return f.exec(ctx, `insert into %s.events (stream, version, id, type, schema_version, data, metadata, recorded_at)
		select 'unit-' || g || $1::text, 1, gen_random_uuid(), 'review.posted', 1, '{}', '{}', clock_timestamp() from generate_series(1, $2::int) g`, uuid.NewString(), unitEvents)
}

// entries fills the outbox.
func (f *flatBed) entries(ctx context.Context) error {
	if err := f.ready(ctx); err != nil {
		return err
	}
	if err := f.exec(ctx, `delete from %s.outbox where topic <> 'relayed'`); err != nil {
		return err
	}
	return f.filledUp(f.schema, backlog)(ctx)
}

// pages reads the last page of the log.
func (f *flatBed) pages(ctx context.Context, _ *bed) (n int64, err error) {
	head, err := f.db.LogPosition(ctx, eventstore.From{Now: true})
	for ; err == nil && ctx.Err() == nil; n++ {
		_, err = f.db.LogPage(context.WithoutCancel(ctx), provider.LogQuery{After: head - pageEvents})
	}
	return n, err
}

// idle returns the statements per second of a relay and a runner that have nothing to do.
func (f *flatBed) idle(ctx context.Context) (float64, error) {
	if err := f.ready(ctx); err != nil {
		return 0, err
	}
	cfg, err := pgxpool.ParseConfig(f.dsn + "&pool_max_conns=4")
	if err != nil {
		return 0, err
	}
	statements := &counter{}
	cfg.ConnConfig.Tracer = statements
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return 0, err
	}
	defer pool.Close()
	db, err := postgres.New(pool, &postgres.Config{Schema: f.schema, Route: outbox.ByCategory})
	if err != nil {
		return 0, err
	}
	running, stop := context.WithCancel(ctx)
	defer stop()
	var units atomic.Int64
	ended := make(chan error, 1)
	go func() { ended <- f.run(running, db, 0, &units) }()
	for was := int64(-1); was != units.Load(); { // it applies what is left
		was = units.Load()
		time.Sleep(2 * idleFor)
	}
	before := statements.n.Load()
	time.Sleep(20 * time.Second)
	perSecond := float64(statements.n.Load()-before) / 20
	stop()
	return perSecond, <-ended
}
