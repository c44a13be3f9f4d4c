package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"runtime/metrics"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
)

// rebuildBed has a log of its own, in the schema with this name, and a read model that counts the
// events of each product.
type rebuildBed struct {
	*projectorBed
	schema string
	events int
}

const (
	builtTables = `
drop schema if exists built cascade;
create schema built;
create table built.totals (product text primary key, n bigint not null) with (fillfactor = 50);
insert into built.totals select 'p' || g, 0 from generate_series(0, 999) g`

	createBuilt = `create table %s (product text primary key, n bigint not null) with (fillfactor = 50)`
	addBuilt    = `insert into %s as t (product, n) values ($1, 1) on conflict (product) do update set n = t.n + 1`
)

func newRebuildBed(ctx context.Context, b *bed, schema string, events int) (*rebuildBed, error) {
	db, err := postgres.New(b.pool, &postgres.Config{Schema: schema})
	if err != nil {
		return nil, err
	}
	if err := db.Migrate(ctx); err != nil {
		return nil, err
	}
	id, err := db.LogID(ctx)
	if err != nil {
		return nil, err
	}
	return &rebuildBed{&projectorBed{bed: b, db: db, log: id.String()}, schema, events}, nil
}

// filled makes a live generation that has applied the whole log, as far as its checkpoint says.
func (r *rebuildBed) filled(ctx context.Context, mode provider.Mode) error {
	tables := []string{"checkpoints", "generations", "markers", "parked", "holds", "in_flight", "runners", "leases"}
	stmt := "truncate " + r.schema + "." + strings.Join(tables, ", "+r.schema+".")
	for _, sql := range []string{stmt, builtTables} {
		if _, err := r.pool.Exec(ctx, sql); err != nil {
			return err
		}
	}
	tag, err := r.pool.Exec(ctx, strings.ReplaceAll(fillLog, "kinora.", r.schema+"."), r.events, len(payload))
	if err == nil && tag.RowsAffected() > 0 {
		_, err = r.pool.Exec(ctx, "vacuum analyze "+r.schema+".events")
	}
	if err != nil {
		return err
	}
	head, err := r.db.LogPosition(ctx, eventstore.From{Now: true})
	if err != nil {
		return err
	}
	live := provider.Checkpoint{Place: provider.LogPlace{Position: head}, Mode: mode,
		Handlers: []provider.Began{{Handler: "built/totals", Type: "review.posted"}}}
	_, err = r.db.SetCheckpoint(ctx, provider.Build{Projector: "built"}, provider.Checkpoint{}, live)
	return errors.Join(err, exec(ctx, r.bed, "checkpoint"))
}

func exec(ctx context.Context, b *bed, sql string) error {
	_, err := b.pool.Exec(ctx, sql)
	return err
}

// built defines the projector. do executes or queues a statement.
func built[Tx any](opts projector.Options, do func(ctx context.Context, tx Tx, sql string, args ...any) error) *projector.Projector[Tx] {
	opts.Tables = []string{"built.totals"}
	return projector.Define("built", eventstore.NewTypes(eventstore.Type[sent]("review.posted")), opts,
		projector.OnCreate(func(ctx context.Context, tx Tx) error {
			return do(ctx, tx, fmt.Sprintf(createBuilt, projector.Table(ctx, "built.totals")))
		}),
		projector.On("totals", func(ctx context.Context, tx Tx, e eventstore.Event[sent]) error {
			return do(ctx, tx, fmt.Sprintf(addBuilt, projector.Table(ctx, "built.totals")), e.Data.ProductID)
		}))
}

func queue(_ context.Context, b *pgx.Batch, sql string, args ...any) error {
	b.Queue(sql, args...)
	return nil
}

func execute(ctx context.Context, tx pgx.Tx, sql string, args ...any) error {
	_, err := tx.Exec(ctx, sql, args...)
	return err
}

func rebuildLines(ctx context.Context, b *bed) ([]line, error) {
	r, err := newRebuildBed(ctx, b, "rebuilt", logEvents)
	if err != nil {
		return nil, err
	}
	few, err := newRebuildBed(ctx, b, "rebuilt_few", logEvents/10)
	if err != nil {
		return nil, err
	}
	batched, marked := built(projector.Options{}, queue), built(projector.Options{Markers: true}, queue)
	one := func(of string, r *rebuildBed, ours work) line {
		fill := func(ctx context.Context) error { return r.filled(ctx, provider.ModeCatchUp) }
		return line{"rebuild/" + of, "events/s", "", program{fill, ours}, program{}, program{fill, r.byHand(500)}}
	}
	return []line{
		one("1M", r, rebuilds(r, r.db.Batched(), projector.BlueGreen, batched)),
		one("1M-in-place", r, rebuilds(r, r.db.Batched(), projector.InPlace, batched)),
		one("1M-markers", r, rebuilds(r, r.db.Batched(), projector.BlueGreen, marked)),
		one("100k-pgx.Tx", few, rebuilds(few, few.db, projector.BlueGreen, built(projector.Options{}, execute))),
	}, nil
}

// rebuilds runs Kinora: a runner that reads the log rebuilds the read model. It does not end before
// all events are applied.
func rebuilds[Tx any](r *rebuildBed, u provider.Units[Tx], how projector.RebuildHow, of *projector.Projector[Tx]) work {
	return func(ctx context.Context, _ *bed) (int64, error) {
		ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
		defer stop()
		runner, err := projector.NewRunner(u, projector.FromLog(r.db), projector.RunnerConfig{Logger: slog.New(slog.DiscardHandler)}, of)
		if err != nil {
			return 0, err
		}
		ended := make(chan error, 1)
		go func() { ended <- runner.Run(ctx) }()
		<-runner.Running()
		err = runner.Rebuild(ctx, "built", asked(how))
		stop()
		return int64(r.events), errors.Join(err, <-ended, r.check(context.WithoutCancel(ctx)))
	}
}

func asked(how projector.RebuildHow) projector.Rebuild {
	return projector.Rebuild{How: how, Decision: projector.Decision{By: "bench", Reason: "measurement"}}
}

// check returns an error unless the read model has each event once.
func (r *rebuildBed) check(ctx context.Context) error {
	var n int
	if err := r.pool.QueryRow(ctx, "select sum(n) from built.totals").Scan(&n); err != nil {
		return err
	}
	if n != r.events {
		return fmt.Errorf("the rebuilt read model has %d events of %d", n, r.events)
	}
	return nil
}

// byHand fills a new table: each page of the log in one round trip, with the fence and the
// checkpoint, while the next page is read. Then it shows the new table in the place of the old one.
func (r *rebuildBed) byHand(size int) work {
	return func(ctx context.Context, _ *bed) (int64, error) {
		ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
		defer stop()
		conn, err := r.pool.Acquire(ctx)
		if err != nil {
			return 0, err
		}
		defer conn.Release()
		for _, sql := range []string{
			fmt.Sprintf(createBuilt, "built.totals_new"),
			`create table built.checkpoints (projector text primary key, position bigint not null, token uuid) with (fillfactor = 50)`,
			`insert into built.checkpoints values ('built', 0, null)`,
		} {
			if _, err := conn.Exec(ctx, sql); err != nil {
				return 0, err
			}
		}
		pages, failed := make(chan []string, 1), make(chan error, 1)
		go func() {
			defer close(pages)
			failed <- r.pagesByHand(ctx, r.schema, size, pages)
		}()
		add := fmt.Sprintf(addBuilt, "built.totals_new")
		for page := range pages {
			b := &pgx.Batch{}
			b.Queue(limitFence)
			b.Queue(`update built.checkpoints set position = position + $1 where projector = 'built' and token is null`, len(page))
			for _, product := range page {
				b.Queue(add, product)
			}
			if err := conn.SendBatch(ctx, b).Close(); err != nil {
				return 0, err
			}
		}
		if err := <-failed; err != nil {
			return 0, err
		}
		b := &pgx.Batch{}
		b.Queue(`select pg_advisory_xact_lock(78, 1)`)
		b.Queue(`alter table built.totals rename to totals_old`)
		b.Queue(`create view built.totals as select * from built.totals_new`)
		err = conn.SendBatch(ctx, b).Close()
		return int64(r.events), errors.Join(err, r.check(ctx))
	}
}

// rebuildHeap compares the heap of a process while it rebuilds the read model of 1,000,000
// events with that of 100,000 events.
func rebuildHeap(ctx context.Context, b *bed, rounds int) (result, error) {
	var peaks [2][]float64
	for i, events := range []int{logEvents / 10, logEvents} {
		r, err := newRebuildBed(ctx, b, fmt.Sprintf("rebuilt_%d", i), events)
		if err != nil {
			return result{}, err
		}
		rebuild := rebuilds(r, r.db.Batched(), projector.BlueGreen, built(projector.Options{}, queue))
		for range rounds {
			if err := r.filled(ctx, provider.ModeCatchUp); err != nil {
				return result{}, err
			}
			runtime.GC()
			end := peakHeap()
			_, err := rebuild(ctx, b)
			peaks[i] = append(peaks[i], end())
			if err != nil {
				return result{}, err
			}
		}
	}
	res := result{Name: "rebuild/heap-1M", Unit: "MB (lower is better)", Ours: median(peaks[1]), Limit: median(peaks[0]), Rounds: rounds}
	res.VsLimit = res.Ours / res.Limit
	return res, nil
}

// peakHeap samples the size of the heap until the returned function is called, which returns the 99th
// percentile in MB: of more garbage collections, some are later.
func peakHeap() (end func() float64) {
	stop, most := make(chan struct{}), make(chan float64)
	go func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		sample, sizes := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}, []uint64{}
		for {
			metrics.Read(sample)
			sizes = append(sizes, sample[0].Value.Uint64())
			select {
			case <-tick.C:
			case <-stop:
				slices.Sort(sizes)
				most <- float64(sizes[len(sizes)*99/100]) / 1e6
				return
			}
		}
	}()
	return func() float64 {
		close(stop)
		return <-most
	}
}
