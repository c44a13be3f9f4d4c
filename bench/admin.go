package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/admin/adminpage"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/telemetry/otel"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
)

const (
	operatedReads = 100
	lagging       = 10   // projectors
	laggingBy     = 5000 // events of each
)

// operatedFill adds a million parked messages of 50 projectors, half of them of one, with ten for each key.
// Some projectors lag.
var operatedFill = []string{
	`insert into %[1]s.parked (projector, generation, handler, handlers, message_id, marker_id, topic, key, lane, type, payload, headers,
			class, code, error, attempts, version, state, parked_at)
		select 'crowd-' || p, 1, 'crowd-' || p || '/a', '{}', 'm' || g, 'm' || g, 'review', 'k' || k, sha256(('k' || k)::bytea), 'review.posted', '{}', '{}',
			'unknown', 'P0001', 'refused', 5, '', case when g %% 10 = 0 then 'stuck' else 'waiting' end, now() - g * interval '1 ms'
		from generate_series(1, 1000000) g, lateral (select g / 10 k) l, lateral (select case when k %% 2 = 0 then 1 else k %% 50 + 1 end p) n`,
	`insert into %[1]s.holds select projector, generation, lane, 'infinity' from %[1]s.parked group by 1, 2, 3`,
	`update %[1]s.checkpoints set position = position - $1,
			handlers = jsonb_build_array(jsonb_build_object('type', 'review.posted', 'handler', projector || '/a', 'position', 0))
		where projector in (select 'crowd-' || g from generate_series(1, $2) g)`,
}

// operated measures the 95th percentile of the time of what operators ask, beside the crowd's rows and a
// million parked messages, while the page reads its samples.
func (f *flatBed) operated(ctx context.Context) (all []result, err error) {
	if err := f.ready(ctx); err != nil {
		return nil, err
	}
	for _, stmt := range operatedFill[:2] {
		if err := f.exec(ctx, stmt); err != nil {
			return nil, err
		}
	}
	if err := f.exec(ctx, operatedFill[2], laggingBy, lagging); err != nil {
		return nil, err
	}
	for _, table := range []string{"parked", "holds", "checkpoints"} {
		if err := f.exec(ctx, "vacuum (analyze) %s."+table); err != nil {
			return nil, err
		}
	}
	ops, err := admin.New(f.db)
	if err != nil {
		return nil, err
	}
	page, err := adminpage.New(f.db, adminpage.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	group, err := kinora.Start(ctx, page)
	if err != nil {
		return nil, err
	}
	defer func() { _ = group.Stop() }()
	collect, err := f.metrics()
	if err != nil {
		return nil, err
	}
	for _, ask := range []struct {
		name string
		do   func() error
		rest time.Duration // before each
	}{
		{"status", func() error {
			is, err := ops.Facts(ctx)
			if err == nil && len(is.Projectors) < lagging {
				err = fmt.Errorf("only %d projectors", len(is.Projectors))
			}
			return err
		}, 0},
		// it shares what it has read for a second
		{"overview", func() error { return overview(page) }, 1100 * time.Millisecond},
		{"metrics", func() error { return collect(ctx) }, 0},
		{"doctor", func() error {
			_, err := ops.Doctor(ctx, provider.DiagnosisLimits{Watch: time.Millisecond})
			return err
		}, 0},
	} {
		var times []time.Duration
		for range operatedReads {
			time.Sleep(ask.rest)
			begin := time.Now()
			if err := ask.do(); err != nil {
				return nil, fmt.Errorf("%s: %w", ask.name, err)
			}
			times = append(times, time.Since(begin))
		}
		slog.Info("operated", "name", ask.name, "p50_ms", percentile(times, 0.5), "p95_ms", percentile(times, 0.95), "worst_ms", percentile(times, 1))
		all = append(all, result{Name: "admin/" + ask.name + " p95", Unit: "ms (lower is better)", Ours: percentile(times, 0.95), Rounds: operatedReads})
	}
	return all, nil
}

// overview asks a page for its overview.
func overview(page http.Handler) error {
	to := httptest.NewRecorder()
	page.ServeHTTP(to, httptest.NewRequest(http.MethodGet, "/", nil))
	if to.Code != http.StatusOK || !strings.Contains(to.Body.String(), "crowd-1") {
		return fmt.Errorf("the overview has status %d", to.Code)
	}
	return nil
}

// metrics returns a function that collects the gauges of a thousand projectors. Each collection queries
// the store.
func (f *flatBed) metrics() (collect func(ctx context.Context) error, err error) {
	reader := metric.NewManualReader()
	tel, err := otel.New(otel.Config{MeterProvider: metric.NewMeterProvider(metric.WithReader(reader)), Every: time.Nanosecond})
	if err != nil {
		return nil, err
	}
	var watched []kinora.Projector
	for i := range 1000 {
		watched = append(watched, projector.Define(fmt.Sprintf("crowd-%d", i+1), ratings, projector.Options{},
			projector.On("a", func(context.Context, pgx.Tx, eventstore.Event[rated]) error { return nil })))
	}
	if _, err := tel.Watch(f.db, watched...); err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		var all metricdata.ResourceMetrics
		if err := reader.Collect(ctx, &all); err != nil {
			return err
		}
		if len(all.ScopeMetrics) == 0 || len(all.ScopeMetrics[0].Metrics) < 5 {
			return fmt.Errorf("gauges are missing: %v", all.ScopeMetrics)
		}
		return nil
	}, nil
}
