package otel

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// Watch adds gauges of what waits in a store: the lag of projectors and their parked messages, and, if
// the store has them, the outbox and the tasks. Call it in one process of the service: each process
// that watches queries the store.
//
// A collection of metrics queries the store, but not again within Config.Every: then it uses the last
// values. The queries end after Config.Timeout. A gauge whose query has failed has no value until one
// succeeds, and kinora.watch.errors counts it. Lag is counted, a second per million events.
//
// stop removes the gauges. Watch returns an error if the store or a projector is nil, or if the
// MeterProvider refuses an instrument.
func (t *Telemetry) Watch(store projector.State, projectors ...kinora.Projector) (stop func() error, err error) {
	if store == nil {
		return nil, errors.New("watch: the store is nil: give one")
	}
	for _, p := range projectors {
		if p == nil {
			return nil, errors.New("watch: a projector is nil: leave it out")
		}
	}
	w := &watch{t: t, store: store, projectors: projectors}
	meter := t.cfg.MeterProvider.Meter(scope)
	var all []metric.Observable
	var errs []error
	for _, g := range []struct {
		to               *metric.Int64ObservableGauge
		name, unit, text string
	}{
		{&w.lagEvents, "kinora.projector.lag.events", "{event}", "Events that a projector has neither applied nor parked"},
		{&w.parked, "kinora.projector.parked", "{message}", "Messages that wait or are stuck"},
		{&w.entries, "kinora.outbox.entries", "{entry}", "Entries that are not published, by status"},
		{&w.tasks, "kinora.task.tasks", "{task}", "Tasks that have not ended well, by status"},
	} {
		*g.to, err = meter.Int64ObservableGauge(g.name, metric.WithUnit(g.unit), metric.WithDescription(g.text))
		all, errs = append(all, *g.to), append(errs, err)
	}
	for _, g := range []struct {
		to         *metric.Float64ObservableGauge
		name, text string
	}{
		{&w.lagTime, "kinora.projector.lag.time", "Age of the oldest event that a projector has neither applied nor parked"},
		{&w.oldest, "kinora.outbox.oldest.age", "Age of the oldest entry that is not published"},
	} {
		*g.to, err = meter.Float64ObservableGauge(g.name, metric.WithUnit("s"), metric.WithDescription(g.text))
		all, errs = append(all, *g.to), append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("watch: %w", err)
	}
	r, err := meter.RegisterCallback(w.observe, all...)
	if err != nil {
		return nil, fmt.Errorf("watch: %w", err)
	}
	return r.Unregister, nil
}

// watch has the gauges of a store.
type watch struct {
	t          *Telemetry
	store      projector.State
	projectors []kinora.Projector

	lagEvents, parked, entries, tasks metric.Int64ObservableGauge
	lagTime, oldest                   metric.Float64ObservableGauge

	mu      sync.Mutex
	queried time.Time // when the last queries ended
	values  []func(metric.Observer)
}

// observe is the callback of a collection. Collections at the same time wait for one another.
func (w *watch) observe(ctx context.Context, o metric.Observer) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.queried.IsZero() || time.Since(w.queried) >= w.t.cfg.Every { //nolint:forbidigo // the time between two collections
		w.query(ctx)
		w.queried = time.Now() //nolint:forbidigo // as above
	}
	for _, report := range w.values {
		report(o)
	}
	return nil
}

// query replaces the values.
func (w *watch) query(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, w.t.cfg.Timeout)
	defer cancel()
	w.values = nil
	for _, p := range w.projectors {
		in := metric.WithAttributes(attribute.String(attrProjector, p.Name()))
		lag, err := p.Lag(ctx, w.store)
		if w.succeeded("lag", err) {
			age := 0.0
			if lag.Events > 0 {
				age = sinceRecorded(lag.Oldest)
			}
			w.values = append(w.values, func(o metric.Observer) {
				o.ObserveInt64(w.lagEvents, lag.Events, in)
				o.ObserveFloat64(w.lagTime, age, in)
			})
		}
		if c, ok := w.store.(interface {
			ParkedCount(ctx context.Context, projector string) (int64, error)
		}); ok {
			n, err := c.ParkedCount(ctx, p.Name())
			w.gauge("parked", w.parked, n, err, in)
		}
	}
	if i, ok := w.store.(outbox.Inspector); ok {
		counts, err := i.StatusCounts(ctx, open...)
		for _, status := range open {
			w.gauge("outbox", w.entries, counts[status], err, metric.WithAttributes(attribute.String(attrStatus, string(status))))
		}
		w.age(ctx, i)
	}
	if i, ok := w.store.(provider.TaskInspector); ok {
		counts, err := i.TaskCounts(ctx, "")
		for _, status := range unended {
			w.gauge("tasks", w.tasks, counts[status], err, metric.WithAttributes(attribute.String(attrStatus, string(status))))
		}
	}
}

// open are the statuses of entries that are not published.
var open = []outbox.Status{outbox.Pending, outbox.Claimed, outbox.Failed, outbox.Held, outbox.Abandoned}

// unended are the statuses of tasks that have not ended well.
var unended = []provider.TaskStatus{provider.TaskPending, provider.TaskClaimed, provider.TaskFailed, provider.TaskWaiting, provider.TaskAbandoned}

// age adds the age of the oldest entry that relays will publish.
func (w *watch) age(ctx context.Context, i outbox.Inspector) {
	first, err := i.Entries(ctx, outbox.Filter{Status: []outbox.Status{outbox.Pending, outbox.Claimed, outbox.Failed}, Limit: 1})
	if !w.succeeded("oldest", err) {
		return
	}
	age := 0.0
	if len(first) > 0 && !first[0].CreatedAt.IsZero() {
		age = sinceRecorded(first[0].CreatedAt)
	}
	w.values = append(w.values, func(o metric.Observer) { o.ObserveFloat64(w.oldest, age) })
}

func (w *watch) gauge(query string, to metric.Int64ObservableGauge, n int64, err error, in metric.MeasurementOption) {
	if w.succeeded(query, err) {
		w.values = append(w.values, func(o metric.Observer) { o.ObserveInt64(to, n, in) })
	}
}

// succeeded counts a query that has failed.
func (w *watch) succeeded(query string, err error) bool {
	if err != nil {
		w.t.m.watchErrors.Add(context.Background(), 1, metric.WithAttributes(attribute.String(attrQuery, query)))
	}
	return err == nil
}

// sinceRecorded returns the seconds since a time on the store's clock.
func sinceRecorded(at time.Time) float64 {
	return max(time.Since(at), 0).Seconds() //nolint:forbidigo // the age, as this process sees it
}
