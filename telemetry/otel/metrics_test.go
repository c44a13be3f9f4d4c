package otel_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/task"
	"github.com/kinora-go/kinora/telemetry/otel"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.yaml.in/yaml/v3"
)

// expressions returns the PromQL expressions of the dashboard and of the alert rules, and the links to
// runbooks.
func expressions(t *testing.T) (all, runbooks []string) {
	t.Helper()
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	text, err := os.ReadFile("../grafana/kinora.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &dashboard))
	for _, p := range dashboard.Panels {
		require.NotEmpty(t, p.Targets, p.Title)
		for _, target := range p.Targets {
			all = append(all, strings.ReplaceAll(target.Expr, "$__rate_interval", "1m"))
		}
	}
	var alerts struct {
		Groups []struct {
			Rules []struct {
				Alert, Expr, For string
				Labels           map[string]string
				Annotations      map[string]string
			}
		}
	}
	text, err = os.ReadFile("../prometheus/alerts.yaml")
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(text, &alerts))
	for _, g := range alerts.Groups {
		for _, r := range g.Rules {
			all = append(all, r.Expr)
			require.NotEmpty(t, r.Annotations["summary"], r.Alert)
			require.NotEmpty(t, r.Labels["severity"], r.Alert)
			runbooks = append(runbooks, r.Annotations["runbook_url"])
			for _, m := range regexp.MustCompile(`\$labels\.(\w+)`).FindAllStringSubmatch(r.Annotations["summary"], -1) {
				require.Contains(t, r.Expr, m[1], "%s: the label of the summary", r.Alert)
			}
		}
	}
	return all, runbooks
}

// series has the values of the labels of each series of a metric, as Prometheus names it.
type series map[string][]map[string]string

func seriesOf(families []*dto.MetricFamily) series {
	all := series{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			values := map[string]string{}
			for _, l := range m.GetLabel() {
				values[l.GetName()] = l.GetValue()
			}
			if m.GetHistogram() == nil {
				all[f.GetName()] = append(all[f.GetName()], values)
				continue
			}
			for _, part := range []string{"_sum", "_count"} {
				all[f.GetName()+part] = append(all[f.GetName()+part], values)
			}
			bucket := maps.Clone(values)
			bucket["le"] = "1"
			all[f.GetName()+"_bucket"] = append(all[f.GetName()+"_bucket"], bucket)
		}
	}
	return all
}

// hasLabel reports whether a series of a metric has a label, with a value unless that is empty.
func (s series) hasLabel(metric, name, value string) bool {
	return slices.ContainsFunc(s[metric], func(values map[string]string) bool {
		is, ok := values[name]
		return ok && (value == "" || is == value)
	})
}

// missing returns what an expression uses and the series do not have.
func (s series) missing(t *testing.T, expression string) (missing []string) {
	t.Helper()
	e, err := parser.NewParser(parser.Options{}).ParseExpr(expression)
	require.NoError(t, err, expression)
	metrics := func(n parser.Node) (names []string) {
		parser.Inspect(n, func(n parser.Node, _ []parser.Node) error {
			if v, ok := n.(*parser.VectorSelector); ok {
				names = append(names, v.Name)
			}
			return nil
		})
		return names
	}
	parser.Inspect(e, func(n parser.Node, _ []parser.Node) error {
		switch n := n.(type) {
		case *parser.VectorSelector:
			if len(s[n.Name]) == 0 {
				missing = append(missing, n.Name)
			}
			for _, m := range n.LabelMatchers {
				value := ""
				if m.Type == labels.MatchEqual {
					value = m.Value
				}
				if m.Name != model.MetricNameLabel && !s.hasLabel(n.Name, m.Name, value) {
					missing = append(missing, n.Name+"{"+m.String()+"}")
				}
			}
		case *parser.AggregateExpr:
			for _, metric := range metrics(n) {
				for _, name := range n.Grouping {
					if !s.hasLabel(metric, name, "") {
						missing = append(missing, metric+"{"+name+"}")
					}
				}
			}
		}
		return nil
	})
	return missing
}

// Every metric, label and value that the dashboard and the alert rules use is one that a running
// service reports, and every runbook is a section of operations.md.
func TestDashboardAndAlertsUseMetricsThatExist(t *testing.T) {
	t.Parallel()
	all, runbooks := expressions(t)
	require.Greater(t, len(all), 25)
	run(t, func(m *measured) bool {
		families, err := m.registry.Gather()
		require.NoError(t, err)
		reported, lacks := seriesOf(families), []string(nil)
		for _, e := range all {
			lacks = append(lacks, reported.missing(t, e)...)
		}
		m.lacks = fmt.Sprint(lacks)
		return len(lacks) == 0
	})
	for _, link := range runbooks {
		page, anchor, ok := strings.Cut(strings.TrimPrefix(link, "https://github.com/kinora-go/kinora/blob/main/"), "#")
		require.True(t, ok && strings.HasPrefix(page, "docs/"), link)
		text, err := os.ReadFile("../../" + page)
		require.NoError(t, err)
		var anchors []string
		for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(string(text), -1) {
			plain := regexp.MustCompile(`[^a-z0-9 -]`).ReplaceAllString(strings.ToLower(heading[1]), "")
			anchors = append(anchors, strings.ReplaceAll(plain, " ", "-"))
		}
		require.Contains(t, anchors, anchor)
	}
}

// A check of an expression finds names, labels and values that no service reports.
func TestMissingMetricsAreFound(t *testing.T) {
	t.Parallel()
	s := series{"a_total": {{"topic": "x"}, {"topic": "y", "error": "z"}}}
	require.Empty(t, s.missing(t, `sum by (topic) (rate(a_total{error!="", topic="y"}[5m])) > 1`))
	require.Equal(t, []string{"b_total"}, s.missing(t, `rate(b_total[5m])`))
	require.Equal(t, []string{`a_total{stream}`}, s.missing(t, `sum by (stream) (a_total)`))
	require.Equal(t, []string{`a_total{topic="w"}`}, s.missing(t, `a_total{topic="w"}`))
}

// The table in telemetry.md has what is reported: a running service, and the calls of observers that are
// rare.
func TestTheTableOfMetricsIsComplete(t *testing.T) {
	t.Parallel()
	var table string
	run(t, func(m *measured) bool {
		found := m.collect(t)
		if found["kinora.projector.completed"].Data == nil || found["kinora.projector.parkings"].Data == nil ||
			found["kinora.relay.pauses"].Data == nil || found["kinora.projector.retries"].Data == nil {
			return false
		}
		relay, runner, worker := m.tel.Relay(), m.tel.Runner(), m.tel.Worker()
		relay.Claimed(nil, 0, projector.Permanent(os.ErrClosed))
		relay.Claimed([]outbox.Entry{{OutboxMessage: provider.OutboxMessage{Topic: "posted"}, Suspect: true}}, 0, nil)
		worker.Claimed([]task.Task{{Kind: "mail/send", Vanished: 1}}, 0, nil)
		relay.Marked([]outbox.Mark{{To: outbox.Published}}, 1, 0, nil)
		relay.Marked(nil, 0, 0, projector.Permanent(os.ErrClosed))
		relay.Held(1)
		relay.Deleted(1)
		runner.Replayed("ratings")
		runner.Pruned(1)
		runner.Unmarked("ratings/posted")
		worker.Claimed(nil, 0, os.ErrClosed)
		worker.Changed(1, 0, 0, os.ErrClosed)
		worker.Step("mail/send", "deliver", 0, os.ErrClosed)
		worker.Ended("mail/send", "abandoned", "permanent", 0)
		worker.Fenced("mail/send")
		worker.Counted("mail/all", 0)
		worker.Deleted(1)
		table = tableOf(m.collect(t))
		return true
	})
	const page, begin, end = "../../docs/telemetry.md", "<!-- metrics -->\n", "<!-- end of metrics -->"
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	before, rest, ok := strings.Cut(string(text), begin)
	require.True(t, ok)
	is, after, ok := strings.Cut(rest, end)
	require.True(t, ok)
	if os.Getenv("KINORA_UPDATE") != "" {
		require.NoError(t, os.WriteFile(page, []byte(before+begin+table+end+after), 0o644))
		return
	}
	require.Equal(t, table, is, "run it with KINORA_UPDATE=1")
}

// Claims without a result, and claims that take over what an earlier claim has left, are counted. A claim that fails is
// neither.
func TestClaimsAreCounted(t *testing.T) {
	t.Parallel()
	m := newMeasured(t)
	relay, worker := m.tel.Relay(), m.tel.Worker()
	for _, entries := range [][]outbox.Entry{nil, {}, {{}}, {{Suspect: true}}} {
		relay.Claimed(entries, 0, nil)
	}
	relay.Claimed(nil, 0, os.ErrClosed)
	for _, tasks := range [][]task.Task{nil, {{Kind: "k"}, {Kind: "k", Vanished: 2}}} {
		worker.Claimed(tasks, 0, nil)
	}
	worker.Claimed(nil, 0, os.ErrClosed)
	for name, want := range map[string]int64{
		"kinora.relay.empty_claims": 2, "kinora.relay.suspects": 1, "kinora.task.empty_claims": 1, "kinora.task.vanished": 1, "kinora.task.claimed": 2,
	} {
		sum, ok := m.collect(t)[name].Data.(metricdata.Sum[int64])
		require.True(t, ok, name)
		require.Len(t, sum.DataPoints, 1, name)
		require.Equal(t, want, sum.DataPoints[0].Value, name)
	}
}

// tableOf returns the metrics as a table: those of observers first, then the gauges.
func tableOf(found map[string]metricdata.Metrics) string {
	var counters, gauges []string
	for _, name := range slices.Sorted(maps.Keys(found)) {
		m := found[name]
		kind, attributes := "", map[string]bool{}
		add := func(s attribute.Set) {
			for _, kv := range s.ToSlice() {
				attributes["`"+string(kv.Key)+"`"] = true
			}
		}
		switch data := m.Data.(type) {
		case metricdata.Sum[int64]:
			kind = "counter"
			for _, p := range data.DataPoints {
				add(p.Attributes)
			}
		case metricdata.Histogram[float64]:
			kind = "histogram"
			for _, p := range data.DataPoints {
				add(p.Attributes)
			}
		case metricdata.Gauge[int64]:
			kind = "gauge"
			for _, p := range data.DataPoints {
				add(p.Attributes)
			}
		case metricdata.Gauge[float64]:
			kind = "gauge"
			for _, p := range data.DataPoints {
				add(p.Attributes)
			}
		}
		row := fmt.Sprintf("| `%s` | %s, `%s` | %s | %s |\n", name, kind, m.Unit, strings.Join(slices.Sorted(maps.Keys(attributes)), ", "), m.Description)
		if kind == "gauge" {
			gauges = append(gauges, row)
		} else {
			counters = append(counters, row)
		}
	}
	return "| metric | type, unit | attributes | meaning |\n|---|---|---|---|\n" + strings.Join(append(counters, gauges...), "")
}

// Payloads, values of headers, streams, keys and texts of errors are neither in metrics nor in spans nor
// in logs.
// Promise: G13.3
func TestTelemetryShowsNoSecrets(t *testing.T) {
	t.Parallel()
	var reported string
	m := run(t, func(m *measured) bool {
		families, err := m.registry.Gather()
		require.NoError(t, err)
		reported = fmt.Sprint(families, m.collect(t))
		return strings.Contains(reported, "kinora_projector_parkings") && strings.Contains(reported, "kinora_relay_pauses") &&
			strings.Contains(m.logs.String(), `"stuck"`) && strings.Contains(m.logs.String(), `"topic paused`) &&
			strings.Contains(m.logs.String(), `"entry not published"`)
	})
	var spans strings.Builder
	for _, s := range m.spans.Ended() {
		spans.WriteString(spanOf(s).Text)
	}
	for what, text := range map[string]string{"metrics": reported, "spans": spans.String(), "logs": m.logs.String()} {
		require.Greater(t, len(text), 1000, what)
		require.NotContains(t, text, secret, what)
	}
	require.Contains(t, spans.String(), "emit moderation")
}

// stubborn is a store whose queries of the log fail.
type stubborn struct {
	projector.State
	queries int
	fails   bool
}

func (s *stubborn) LogID(ctx context.Context) (provider.LogID, error) {
	if s.queries++; s.fails {
		return provider.LogID{}, context.DeadlineExceeded
	}
	return s.State.LogID(ctx)
}

// Gauges are queried at most once in Config.Every, and have no value after a query has failed.
// Promise: G13.4
func TestWatchQueriesSeldomAndShowsNoOldValues(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, err := memory.New(nil)
		require.NoError(t, err)
		p := projector.Define("ratings", types, projector.Options{}, projector.On("posted",
			func(context.Context, *memory.Model, eventstore.Event[posted]) error { return nil }))
		runner, err := projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{}, p)
		require.NoError(t, err)
		group, err := kinora.Start(t.Context(), runner)
		require.NoError(t, err)
		synctest.Wait()
		require.NoError(t, group.Stop())
		drafts, err := types.Encode(t.Context(), posted{})
		require.NoError(t, err)
		_, err = db.Append(t.Context(), "review-1", eventstore.Any, drafts)
		require.NoError(t, err)

		reader := metric.NewManualReader()
		tel, err := otel.New(otel.Config{MeterProvider: metric.NewMeterProvider(metric.WithReader(reader)), Every: time.Minute})
		require.NoError(t, err)
		store := &stubborn{State: db}
		stop, err := tel.Watch(store, p)
		require.NoError(t, err)
		m := &measured{reader: reader}
		for range 10 {
			time.Sleep(5 * time.Second)
			all := m.collect(t)
			require.EqualValues(t, 1, all["kinora.projector.lag.events"].Data.(metricdata.Gauge[int64]).DataPoints[0].Value)
			require.Positive(t, all["kinora.projector.lag.time"].Data.(metricdata.Gauge[float64]).DataPoints[0].Value)
		}
		require.Equal(t, 1, store.queries)
		store.fails = true
		time.Sleep(time.Minute)
		all := m.collect(t)
		require.NotContains(t, all, "kinora.projector.lag.events")
		require.Contains(t, all, "kinora.watch.errors")
		store.fails = false
		time.Sleep(time.Minute)
		require.Contains(t, m.collect(t), "kinora.projector.lag.events")
		require.Equal(t, 3, store.queries)
		require.NoError(t, stop())
		require.NotContains(t, m.collect(t), "kinora.projector.lag.events")
	})
}

// heldLog is a store with appends that are open, for which readers of the log wait.
type heldLog struct {
	*memory.DB
	since []time.Duration
}

func (s heldLog) Survey(ctx context.Context, limit int) (provider.Survey, error) {
	is, err := s.DB.Survey(ctx, limit)
	is.Waits = []provider.Wait{{What: "lock", Blocker: provider.Backend{Since: is.Now.Add(-time.Hour)}}, {What: "append"}}
	for _, d := range s.since {
		is.Waits = append(is.Waits, provider.Wait{What: "append", Blocker: provider.Backend{Since: is.Now.Add(-d)}})
	}
	return is, err
}

func TestWatchShowsForHowLongTheLogIsHeld(t *testing.T) {
	t.Parallel()
	db, err := memory.New(nil)
	require.NoError(t, err)
	for _, c := range []struct {
		since []time.Duration
		want  float64
	}{{nil, 0}, {[]time.Duration{time.Minute, 3 * time.Minute, time.Second}, 180}} {
		m := newMeasured(t)
		_, err := m.tel.Watch(heldLog{db, c.since})
		require.NoError(t, err)
		require.InDelta(t, c.want, m.collect(t)["kinora.log.held.age"].Data.(metricdata.Gauge[float64]).DataPoints[0].Value, 0)
	}
}

// The age is that of the oldest message of the live generation which waits for a program.
func TestWatchShowsForHowLongMessagesNeedAProgram(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, err := memory.New(nil)
		require.NoError(t, err)
		p := projector.Define("ratings", types, projector.Options{}, projector.On("posted",
			func(context.Context, *memory.Model, eventstore.Event[posted]) error { return nil }))
		reader := metric.NewManualReader()
		tel, err := otel.New(otel.Config{MeterProvider: metric.NewMeterProvider(metric.WithReader(reader)), Every: time.Second})
		require.NoError(t, err)
		stop, err := tel.Watch(db, p)
		require.NoError(t, err)
		ages := func() map[string]float64 {
			time.Sleep(time.Minute)
			found := map[string]float64{}
			for _, p := range (&measured{reader: reader}).collect(t)["kinora.projector.needs.age"].Data.(metricdata.Gauge[float64]).DataPoints {
				needs, _ := p.Attributes.Value("kinora.needs")
				found[needs.AsString()] = math.Round(p.Value)
			}
			return found
		}
		want := map[string]float64{"": 0}
		require.Equal(t, want, ages())
		for i, class := range []provider.Class{provider.ClassPermanent, provider.ClassUnable, provider.ClassUnable} {
			id := fmt.Sprint("m-", i)
			lane, parked := provider.LaneOfKey(id), provider.Parked{MessageID: id, Key: id, Class: class}
			after := time.Duration(-1)
			if parked.Lane = lane; class == provider.ClassUnable {
				parked.Needs, after = provider.NeedEvent("posted", 1+i), 0
			}
			u := provider.Unit{Projector: "ratings", Messages: []provider.Message{{ID: id, Lane: lane}}}
			require.NoError(t, db.Do(t.Context(), u, func(context.Context, *memory.Model, provider.Found) (provider.Closing, error) {
				return provider.Closing{Park: []provider.Aside{{Parked: parked, After: after}}}, nil
			}))
			if needs := parked.Needs; needs != "" {
				delete(want, "")
				for one := range want {
					want[one] += 60
				}
				want[needs] = 60
			}
			require.Equal(t, want, ages(), class.String())
		}
		require.NoError(t, stop())
	})
}

// Each service counts for what it works for, in its version, while it is alive.
func TestWatchShowsWhichServicesAreAlive(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, err := memory.New(nil)
		require.NoError(t, err)
		can := func(version int) []provider.Capability {
			return []provider.Capability{{Projector: "ratings", Version: version}}
		}
		for i, r := range []provider.ServiceReport{
			{Kind: "relay", Version: "v1"}, {Kind: "worker", Version: "v1", Kinds: []string{"orders/pay"}},
			{Kind: "runner", Version: "v1", Can: can(1)}, {Kind: "runner", Version: "v1", Can: can(1)}, {Kind: "runner", Version: "v2", Can: can(2)},
		} {
			r.ID, r.Holder, r.Process, r.Clock = fmt.Sprint(i), fmt.Sprint(i), "host/1", time.Now()
			require.NoError(t, db.Report(t.Context(), r, time.Minute))
		}
		reader := metric.NewManualReader()
		tel, err := otel.New(otel.Config{MeterProvider: metric.NewMeterProvider(metric.WithReader(reader)), Every: time.Second})
		require.NoError(t, err)
		stop, err := tel.Watch(db)
		require.NoError(t, err)
		alive := func() map[string]int64 {
			found := map[string]int64{}
			if g, ok := (&measured{reader: reader}).collect(t)["kinora.services"].Data.(metricdata.Gauge[int64]); ok {
				for _, p := range g.DataPoints {
					found[p.Attributes.Encoded(attribute.DefaultEncoder())] = p.Value
				}
			}
			return found
		}
		require.Equal(t, map[string]int64{
			"kinora.service.kind=relay,kinora.service.version=v1":                                                      1,
			"kinora.service.kind=worker,kinora.service.version=v1,kinora.task.kind=orders/pay":                         1,
			"kinora.projector=ratings,kinora.projector.version=1,kinora.service.kind=runner,kinora.service.version=v1": 2,
			"kinora.projector=ratings,kinora.projector.version=2,kinora.service.kind=runner,kinora.service.version=v2": 1,
		}, alive())
		time.Sleep(2 * time.Minute)
		require.Empty(t, alive())
		require.NoError(t, stop())
	})
}

// Each check of the doctor has a value, also without a finding.
func TestWatchShowsWhatTheDoctorFinds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, err := memory.New(nil)
		require.NoError(t, err)
		reader := metric.NewManualReader()
		tel, err := otel.New(otel.Config{MeterProvider: metric.NewMeterProvider(metric.WithReader(reader)), Every: time.Second})
		require.NoError(t, err)
		stop, err := tel.Watch(db)
		require.NoError(t, err)
		found := func() map[string]int64 {
			all := (&measured{reader: reader}).collect(t)
			count := map[string]int64{}
			for _, p := range all["kinora.doctor.findings"].Data.(metricdata.Gauge[int64]).DataPoints {
				check, _ := p.Attributes.Value("kinora.check")
				count[check.AsString()] = p.Value
			}
			require.Zero(t, all["kinora.doctor.unchecked"].Data.(metricdata.Gauge[int64]).DataPoints[0].Value)
			return count
		}
		want := map[string]int64{}
		for _, check := range provider.Checks() {
			want[check.String()] = 0
		}
		require.Equal(t, want, found())
		_, err = db.SetPause(t.Context(), provider.Pause{Kind: provider.PauseTopic, Name: "review", Decision: provider.Decision{By: "ann", Reason: "r"}}, true)
		require.NoError(t, err)
		time.Sleep(30 * time.Second)
		require.Equal(t, want, found(), "the doctor is asked once a minute")
		time.Sleep(30 * time.Second)
		want["paused"] = 1
		require.Equal(t, want, found())
		require.NoError(t, stop())
	})
}

func TestNewAndWatchRefuseWrongArguments(t *testing.T) {
	t.Parallel()
	_, err := otel.New(otel.Config{Every: -1})
	require.ErrorContains(t, err, "must not be negative")
	tel, err := otel.New(otel.Config{})
	require.NoError(t, err)
	_, err = tel.Watch(nil)
	require.ErrorContains(t, err, "the store is nil")
	db, err := memory.New(nil)
	require.NoError(t, err)
	_, err = tel.Watch(db, nil)
	require.ErrorContains(t, err, "a projector is nil")
}
