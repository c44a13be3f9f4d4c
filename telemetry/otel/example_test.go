package otel_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/telemetry/otel"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	promexport "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/sdk/metric"
)

// A service that serves its metrics to Prometheus, and replies to probes.
func ExampleNew() {
	must := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	registry := prometheus.NewRegistry()
	exporter, err := promexport.New(promexport.WithRegisterer(registry), promexport.WithoutScopeInfo())
	must(err)
	tel, err := otel.New(otel.Config{MeterProvider: metric.NewMeterProvider(metric.WithReader(exporter)), System: "kafka"})
	must(err)

	ctx := context.Background()
	db, err := memory.New(nil) // or postgres.Open, sqlite.Open
	must(err)
	repo, err := eventstore.NewRepository(db, types, "review", func(string) *review { return &review{} },
		&eventstore.RepositoryConfig{OnUpdate: tel.Update})
	must(err)
	ratings := projector.Define("ratings", types, projector.Options{}, projector.On("posted",
		func(context.Context, *memory.Model, eventstore.Event[posted]) error { return nil }))
	runner, err := projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{Observer: tel.Runner()}, ratings)
	must(err)
	stop, err := tel.Watch(db, ratings)
	must(err)

	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.Handle("/healthz", kinora.Healthy(0, runner))
	ready, err := kinora.Ready(kinora.ReadyConfig{Store: db, Projectors: []kinora.Projector{ratings}})
	must(err)
	mux.Handle("/readyz", ready)

	group, err := kinora.Start(ctx, runner)
	must(err)
	appended, err := repo.Update(ctx, "1", post("good"))
	must(err)
	must(ratings.Wait(ctx, db, appended))

	fmt.Print(get(mux, "/readyz"))
	for line := range strings.Lines(get(mux, "/metrics")) {
		if strings.HasPrefix(line, "kinora_append_events") || strings.HasPrefix(line, "kinora_projector_lag_events") {
			fmt.Print(line)
		}
	}
	must(stop())
	must(group.Stop())

	// Output:
	// {"ok":true,"checks":[{"name":"database","ok":true},{"name":"schema","ok":true},{"name":"log","ok":true},{"name":"lag ratings","ok":true}]}
	// kinora_append_events_total{kinora_category="review"} 1
	// kinora_projector_lag_events{kinora_projector="ratings"} 0
}

func get(h http.Handler, path string) string {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return w.Body.String()
}
