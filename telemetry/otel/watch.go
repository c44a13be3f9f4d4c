package otel

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// Watch adds gauges of what waits in a store: the lag of projectors and their parked messages, the outbox
// and the tasks. Call it in one process of the service: each process that watches queries the store.
//
// A collection queries the store, or within Config.Every uses the last values. The queries end after
// Config.Timeout. One that fails is counted by kinora.watch.errors, and its gauge has no value until one succeeds.
//
// With a store of package admin, which a DB of package postgres or sqlite is, the values are those of
// [admin.Admin.Facts]: numbers up to 2,000, lags up to 1,000 events, and exact ages. With another store, such as
// one of [provider.Combine], there are only the lags, and these are counted: a second per million events.
//
// stop removes the gauges. An error: the store or a projector is nil, or an instrument is refused.
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
		{&w.findings, "kinora.doctor.findings", "{finding}", "What the doctor has found within the last minute, by check"},
		{&w.unchecked, "kinora.doctor.unchecked", "{check}", "What the doctor could not check"},
		{&w.services, "kinora.services", "{service}", "Services that are alive, by what they work for"},
	} {
		*g.to, err = meter.Int64ObservableGauge(g.name, metric.WithUnit(g.unit), metric.WithDescription(g.text))
		all, errs = append(all, *g.to), append(errs, err)
	}
	for _, g := range []struct {
		to         *metric.Float64ObservableGauge
		name, text string
	}{
		{&w.lagTime, "kinora.projector.lag.time", "Age of the oldest event that a projector has neither applied nor parked"},
		{&w.needs, "kinora.projector.needs.age", "Age of the oldest message that waits for a program that meets its needs, by these; without them, 0"},
		{&w.oldest, "kinora.outbox.oldest.age", "Age of the oldest entry that is not published"},
		{&w.held, "kinora.log.held.age", "Age of the oldest open append that readers of the log wait for"},
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

	lagEvents, parked, entries, tasks, services metric.Int64ObservableGauge
	findings, unchecked                         metric.Int64ObservableGauge
	lagTime, needs, oldest, held                metric.Float64ObservableGauge

	mu      sync.Mutex
	ops     *admin.Admin
	queried time.Time // when the last queries ended
	asked   time.Time // when the doctor was asked last
	found   *provider.Diagnosis
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
	store, isStore := w.store.(admin.Store)
	if _, ok := w.store.(provider.Operations); ok && isStore {
		w.facts(ctx, store)
		return
	}
	for _, p := range w.projectors {
		lag, err := p.Lag(ctx, w.store)
		if w.succeeded("lag", err) {
			age := 0.0
			if lag.Events > 0 {
				age = max(time.Since(lag.Oldest), 0).Seconds() //nolint:forbidigo // the age, as this process sees it
			}
			w.lag(p.Name(), lag.Events, age)
		}
	}
}

// facts sets the values from the facts of a store.
func (w *watch) facts(ctx context.Context, store admin.Store) {
	var err error
	if w.ops == nil {
		if w.ops, err = admin.New(store); !w.succeeded("facts", err) {
			return
		}
	}
	w.diagnose(ctx)
	f, err := w.ops.Facts(ctx)
	if !w.succeeded("facts", err) {
		return
	}
	for _, p := range w.projectors {
		w.projector(f, p.Name())
	}
	w.programs(f)
	entries, tasks := map[outbox.Status]int64{}, map[provider.TaskStatus]int64{}
	var oldest time.Time
	for _, c := range f.Outbox {
		entries[c.Status] += c.N
		if slices.Contains(toPublish, c.Status) && (oldest.IsZero() || c.Oldest.Before(oldest)) {
			oldest = c.Oldest
		}
	}
	for _, status := range open {
		w.gauge(w.entries, entries[status], attribute.String(attrStatus, string(status)))
	}
	age := 0.0
	if !oldest.IsZero() {
		age = max(f.At.Sub(oldest), 0).Seconds()
	}
	w.values = append(w.values, func(o metric.Observer) { o.ObserveFloat64(w.oldest, age) })
	held := 0.0
	for _, wait := range f.Waits {
		if wait.What == "append" && !wait.Blocker.Since.IsZero() {
			held = max(held, f.At.Sub(wait.Blocker.Since).Seconds())
		}
	}
	w.values = append(w.values, func(o metric.Observer) { o.ObserveFloat64(w.held, held) })
	for _, c := range f.Tasks {
		tasks[c.Status] += c.N
	}
	for _, status := range unended {
		w.gauge(w.tasks, tasks[status], attribute.String(attrStatus, string(status)))
	}
}

// diagnosedEvery is the time between two questions to the doctor, which looks at more than the other gauges.
const diagnosedEvery = time.Minute

// diagnose sets the gauges of what the doctor finds.
func (w *watch) diagnose(ctx context.Context) {
	if now := time.Now(); w.asked.IsZero() || now.Sub(w.asked) >= diagnosedEvery { //nolint:forbidigo // as in observe
		w.asked, w.found = now, nil
		d, err := w.ops.Doctor(ctx, provider.DiagnosisLimits{Watch: w.t.cfg.Timeout / 5})
		if w.succeeded("doctor", err) {
			w.found = &d
		}
	}
	if w.found == nil {
		return
	}
	count := map[provider.Urgency]int64{}
	for _, f := range w.found.Findings {
		count[f.Check]++
	}
	for _, check := range provider.Checks() {
		w.gauge(w.findings, count[check], attribute.String(attrCheck, check.String()))
	}
	w.gauge(w.unchecked, int64(len(w.found.Unchecked)))
}

// projector sets the gauges of the live generation of a projector.
func (w *watch) projector(f *admin.Facts, name string) {
	var parked int64
	in := attribute.String(attrProjector, name)
	age := func(needs float64, of ...attribute.KeyValue) {
		w.values = append(w.values, func(o metric.Observer) { o.ObserveFloat64(w.needs, needs, metric.WithAttributes(append(of, in)...)) })
	}
	none := true
	for _, is := range f.Projectors {
		if is.Name != name || is.State != "live" {
			continue
		}
		parked += is.Parked.N
		if is.Mode != "" && !is.OtherLog {
			w.lag(name, is.Lag.N, is.LagSeconds)
		}
		for _, n := range f.Needs {
			if n.Projector == name && n.Number() == is.Generation {
				none = false
				age(f.At.Sub(n.Since).Seconds(), attribute.String(attrNeeds, admin.NeedsText(n.Needs)))
			}
		}
	}
	w.gauge(w.parked, parked, in)
	if none {
		age(0, attribute.String(attrNeeds, ""))
	}
}

// programs sets the gauge of the services that are alive.
func (w *watch) programs(f *admin.Facts) {
	alive := map[attribute.Set]int64{}
	for _, s := range f.Services {
		if !s.ExpiresAt.After(f.At) {
			continue
		}
		count := func(of ...attribute.KeyValue) {
			alive[attribute.NewSet(append(of, attribute.String(attrService, s.Kind), attribute.String(attrVersion, s.Version))...)]++
		}
		for _, c := range s.Can {
			count(attribute.String(attrProjector, c.Projector), attribute.Int(attrModel, c.Version))
		}
		for _, kind := range s.Kinds {
			count(attribute.String(attrKind, kind))
		}
		if len(s.Can)+len(s.Kinds) == 0 {
			count()
		}
	}
	for of, n := range alive {
		w.gauge(w.services, n, of.ToSlice()...)
	}
}

// lag sets the gauges of a projector's lag.
func (w *watch) lag(projector string, events int64, age float64) {
	in := metric.WithAttributes(attribute.String(attrProjector, projector))
	w.values = append(w.values, func(o metric.Observer) {
		o.ObserveInt64(w.lagEvents, events, in)
		o.ObserveFloat64(w.lagTime, age, in)
	})
}

// toPublish are the statuses of entries that relays will publish.
var toPublish = []outbox.Status{outbox.Pending, outbox.Claimed, outbox.Failed}

// open are the statuses of entries that are not published.
var open = slices.DeleteFunc(provider.EntryStatuses(), func(s outbox.Status) bool { return !s.Open() })

// unended are the statuses of tasks that have not ended well.
var unended = slices.DeleteFunc(provider.TaskStatuses(), provider.TaskStatus.Final)

func (w *watch) gauge(to metric.Int64ObservableGauge, n int64, of ...attribute.KeyValue) {
	in := metric.WithAttributes(of...)
	w.values = append(w.values, func(o metric.Observer) { o.ObserveInt64(to, n, in) })
}

// succeeded counts a query that has failed.
func (w *watch) succeeded(query string, err error) bool {
	if err != nil {
		w.t.m.watchErrors.Add(context.Background(), 1, metric.WithAttributes(attribute.String(attrQuery, query)))
	}
	return err == nil
}
