package main

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
)

const (
	pruneMarkers = 1_000_000
	pruneRounds  = 3
	pruneLanes   = 4
)

// pruning measures the 99th percentile of the delivery time while the runner prunes a million
// markers, and without pruning. Lower is better.
func pruning(ctx context.Context, b *bed) (result, error) {
	db, err := postgres.New(b.pool, nil)
	if err != nil {
		return result{}, err
	}
	p := &projectorBed{bed: b, db: db}
	var usual, busy, took []float64
	for range pruneRounds {
		for _, markers := range []int{0, pruneMarkers} {
			if err := p.empty(ctx); err != nil {
				return result{}, err
			}
			_, err := b.pool.Exec(ctx, `insert into kinora.markers (handler, generation, message_id, processed_at)
				select 'pruned/rated', 1, gen_random_uuid()::text, now() - interval '30 days' + n * interval '1 second' from generate_series(1, $1::int) n`, markers)
			if err != nil {
				return result{}, err
			}
			if _, err := b.pool.Exec(ctx, "vacuum analyze kinora.markers"); err != nil {
				return result{}, err
			}
			p99, length, err := p.prune(ctx, markers)
			if err != nil {
				return result{}, err
			}
			if markers == 0 {
				usual = append(usual, p99)
			} else {
				busy, took = append(busy, p99), append(took, length.Seconds())
			}
		}
	}
	r := result{Name: "prune/delivery-p99-beside-1M", Unit: "ms (lower is better)", Ours: median(busy), Limit: median(usual), Rounds: pruneRounds}
	r.VsLimit = r.Ours / r.Limit
	slog.Info("pruned", "markers", pruneMarkers, "seconds", median(took))
	return r, nil
}

// prune runs a runner until it has pruned that many markers, and for at least ten seconds.
func (p *projectorBed) prune(ctx context.Context, markers int) (p99 float64, length time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	var mu sync.Mutex
	var times []time.Duration
	pruned := make(chan struct{})
	cfg := projector.RunnerConfig{Concurrency: pruneLanes, Logger: slog.New(slog.DiscardHandler), Observer: projector.RunnerObserver{
		Unit: func(_ string, _ int, took time.Duration, _ error) {
			mu.Lock()
			defer mu.Unlock()
			times = append(times, took)
		},
		Pruned: func(int) { close(pruned) },
	}}
	of := projector.Define("pruned", ratings, projector.Options{Markers: true},
		projector.On("rated", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[rated]) error {
			_, err := tx.Exec(ctx, addOne, e.Data.ProductID)
			return err
		}))
	runner, err := projector.NewRunner(p.db, projector.Subscribe(&supply{projectorBed: p, most: pruneLanes, ended: make(chan struct{})}, "rated"), cfg, of)
	if err != nil {
		return 0, 0, err
	}
	begin := time.Now()
	run, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- runner.Run(run) }()
	if markers > 0 {
		select {
		case <-pruned:
		case err := <-done:
			stop()
			return 0, 0, err
		}
		length = time.Since(begin)
	} else {
		select {
		case <-time.After(10 * time.Second):
		case <-ctx.Done():
		}
	}
	stop()
	if err := <-done; err != nil {
		return 0, 0, err
	}
	mu.Lock()
	defer mu.Unlock()
	slices.Sort(times)
	return float64(times[len(times)*99/100].Microseconds()) / 1000, length, nil
}
