package projectortest

import (
	"context"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// Store is a database with events and read models: every provider's DB. A read model in another store, such
// as Redis, is a struct of three parts:
//
//	type store struct {
//		provider.Provider[redis.Pipeliner] // provider.Combine(units, db)
//		eventstore.Store                   // db
//		provider.Log                       // db
//	}
type Store[Tx any] interface {
	provider.Provider[Tx]
	eventstore.Store
	provider.Log
}

// Kit tests a projector. New returns one; change its fields before its first use. Its methods may be called
// at the same time.
type Kit[Tx any, DB Store[Tx], Row any] struct {
	// Fresh opens a migrated, empty database, for one pass. Its Cleanup functions run at the end of the
	// pass. It must not use t.Parallel.
	Fresh func(t testing.TB) DB
	// Projector returns the projector of a database. It may depend on the database, for example if the
	// handlers get a repository.
	Projector func(db DB) *projector.Projector[Tx]
	// Rows reads the read model: all that the handlers write, except values that differ each time by
	// intention, such as the time of a write.
	Rows func(ctx context.Context, db DB) ([]Row, error)
	// Skip has a value of each type of event that tests give and that the projector has no handler for,
	// such as ReviewFlagged{}. Other events without a handler fail the test.
	Skip []any
	// LogOnly: the projector reads the log alone. Then events are not delivered by a broker, and
	// ExactlyOnce does not change the order across streams. Without Options.Markers this is always so.
	LogOnly bool
	// Seed chooses the order of events and the places of faults. Zero means the environment variable
	// KINORA_TEST_SEED or, if that is empty, a random number. Failures print it.
	Seed uint64
}

// New returns a kit for p. fresh opens a database, and rows reads the read model: see the fields of Kit.
func New[Tx any, DB Store[Tx], Row any](
	fresh func(t testing.TB) DB, p *projector.Projector[Tx], rows func(ctx context.Context, db DB) ([]Row, error),
) *Kit[Tx, DB, Row] {
	return &Kit[Tx, DB, Row]{Fresh: fresh, Projector: func(DB) *projector.Projector[Tx] { return p }, Rows: rows}
}

// subject is what a kit tests in one test.
type subject struct {
	name    string
	events  []prepared
	sources []source // that the projector may have; the first one is that of clean passes
	from    bool     // it begins behind the events that exist
	seed    uint64
}

// prepare checks the events and the projector, and ends the test if they do not fit. exact: each event must
// take effect once.
func (k *Kit[Tx, DB, Row]) prepare(t testing.TB, exact bool, events []Event) *subject {
	t.Helper()
	if k.Fresh == nil || k.Projector == nil || k.Rows == nil {
		t.Fatalf("the kit has no Fresh, no Projector or no Rows: give all three")
	}
	s := newScope(t)
	defer s.end()
	db := k.Fresh(s)
	p := k.Projector(db)
	if p == nil {
		t.Fatalf("the kit has no projector: it is nil")
	}
	opts, keeps := p.Options(), db.Keeps()
	sub := &subject{name: p.Name(), seed: k.seed(t), from: opts.From != eventstore.From{}}
	sub.events = prepare(t, p.Types(), events)
	k.checkHandlers(t, p, sub.events)
	if exact && !keeps.Markers {
		t.Fatalf("projector %s: this store keeps no markers, so it does not promise that each event takes effect once, "+
			"and ExactlyOnce cannot check that. Use Given, or a store that keeps markers (with Redis: redis.Config.OwnMarkers).", p.Name())
	}
	if exact && opts.BrokerOnly && !opts.Markers {
		t.Fatalf("projector %s has Options.BrokerOnly and no Options.Markers: nothing records which events it has applied, "+
			"so they do not take effect exactly once. Set Options.Markers.", p.Name())
	}
	if !opts.BrokerOnly {
		sub.sources = append(sub.sources, fromLog)
	}
	if opts.BrokerOnly || opts.Markers && keeps.Markers && !k.LogOnly {
		sub.sources = append(sub.sources, fromBroker)
	}
	return sub
}

// checkHandlers ends the test if an event has no handler and is not in Skip.
func (k *Kit[Tx, DB, Row]) checkHandlers(t testing.TB, p *projector.Projector[Tx], events []prepared) {
	t.Helper()
	takes := p.Takes()
	skipped := map[reflect.Type]bool{}
	for _, v := range k.Skip {
		skipped[reflect.TypeOf(v)] = true
		drafts, err := p.Types().Encode(context.Background(), v)
		if err != nil {
			t.Fatalf("Kit.Skip: %v", err)
		}
		if slices.Contains(takes, drafts[0].Type) {
			t.Fatalf("Kit.Skip has %T, and projector %s has a handler for it: remove it from Skip", v, p.Name())
		}
	}
	for i := range events {
		e := &events[i]
		if !slices.Contains(takes, e.draft.Type) && !skipped[reflect.TypeOf(e.Data)] {
			t.Fatalf("projector %s has no handler for event %d, %s of type %T (%s).\nIf that is a mistake, add projector.On or OnEmit "+
				"to Define. If the projector ignores these events, add %T{} to Kit.Skip.", p.Name(), i+1, e.Stream, e.Data, e.draft.Type, e.Data)
		}
	}
}

func (k *Kit[Tx, DB, Row]) seed(t testing.TB) uint64 {
	t.Helper()
	text := os.Getenv(seedVariable)
	switch {
	case k.Seed != 0:
		return k.Seed
	case text == "":
		return uint64(time.Now().UnixNano() % 1_000_000)
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s is %q: want a number", seedVariable, text)
	}
	return n
}

const seedVariable = "KINORA_TEST_SEED"

// Applied is what events have left. Kit.Given returns it.
type Applied[Row any] struct {
	t      testing.TB
	name   string
	events []prepared
	passes []appliedPass[Row]
}

// appliedPass is a pass whose database stays open until the test ends.
type appliedPass[Row any] struct {
	source source
	read   func() (result[Row], error)
	again  func() error // delivers all events again; nil: they were not delivered
}

// Given applies events in order, by a runner, to an empty database: once read from the log and once, in
// another database, delivered by a broker. The test fails if a handler fails, or if an event has no handler
// and is not in Skip.
func (k *Kit[Tx, DB, Row]) Given(t testing.TB, events ...Event) *Applied[Row] {
	t.Helper()
	sub := k.prepare(t, false, events)
	a := &Applied[Row]{t: t, name: sub.name, events: sub.events}
	all := make([]int, len(events))
	for i := range all {
		all[i] = i
	}
	for _, src := range sub.sources {
		w, err := newPass(t, k, sub.events, src)
		if err == nil {
			err = w.runAndStop(inOrder(src, all))
		}
		if err != nil {
			t.Fatalf("projector %s, events %s: %v", sub.name, src, err)
		}
		one := appliedPass[Row]{source: src, read: func() (res result[Row], err error) {
			if res.problem = w.record.problem(); res.problem == nil {
				res.output = w.record.emitted()
				res.rows, err = w.rows(t.Context())
			}
			return res, err
		}}
		if src == fromBroker {
			one.again = func() error { return w.runAndStop(inOrder(src, all)) }
		}
		a.passes = append(a.passes, one)
		a.check()
	}
	return a
}

// runAndStop is run, but no runner is left after an error.
func (w *pass[Tx, DB, Row]) runAndStop(h history) error {
	err := w.run(h)
	if err != nil {
		_ = w.stop()
	}
	return err
}

// check ends the test if a handler has failed.
func (a *Applied[Row]) check() {
	a.t.Helper()
	for _, one := range a.passes {
		if res, _ := one.read(); res.problem != nil {
			res.problem.clean = true
			a.t.Fatalf("projector %s, events %s: %s: %s\n%s\n%s", a.name, one.source, titleOf(res.problem, "the rows differ"),
				a.event(res.problem.event), res.problem.text, hintOf(res.problem, ""))
		}
	}
}

// event describes an event with an id.
func (a *Applied[Row]) event(id string) string {
	for i := range a.events {
		if a.events[i].draft.ID == id {
			return a.events[i].String()
		}
	}
	return "an event of a handler"
}

// Then compares the rows with want, in order.
func (a *Applied[Row]) Then(want ...Row) *Applied[Row] {
	a.t.Helper()
	for _, one := range a.passes {
		res, err := one.read()
		if err != nil {
			a.t.Fatalf("projector %s, events %s: %v", a.name, one.source, err)
		}
		if !reflect.DeepEqual(res.rows, want) && len(res.rows)+len(want) > 0 {
			a.t.Errorf("projector %s, events %s: the rows differ\nwant:\n%s\ngot:\n%s", a.name, one.source,
				list(rowTexts(want)), list(rowTexts(res.rows)))
		}
	}
	return a
}

func list(all []string) string {
	if len(all) == 0 {
		return "  no rows"
	}
	return "  " + strings.Join(all, "\n  ")
}

// Redeliver delivers all events again. It ends the test if the projector cannot have a broker: without
// Options.Markers, a redelivered event would take effect again.
func (a *Applied[Row]) Redeliver() *Applied[Row] {
	a.t.Helper()
	redelivered := false
	for _, one := range a.passes {
		if one.again == nil {
			continue
		}
		if err := one.again(); err != nil {
			a.t.Fatalf("projector %s, events delivered again: %v", a.name, err)
		}
		redelivered = true
	}
	if !redelivered {
		a.t.Fatalf("projector %s cannot get events twice: it has no Options.Markers, the store keeps no markers, or the kit is LogOnly", a.name)
	}
	a.check()
	return a
}

// Emitted returns the messages that handlers of OnEmit have returned, in the order of their events. It ends
// the test if they differ between the log and the broker.
func (a *Applied[Row]) Emitted() []outbox.Message {
	a.t.Helper()
	var first []outbox.Message
	for i, one := range a.passes {
		res, err := one.read()
		if err != nil {
			a.t.Fatalf("projector %s: %v", a.name, err)
		}
		if i == 0 {
			first = res.output
		} else if d := diff(texts(first), texts(res.output)); d != "" {
			a.t.Fatalf("projector %s: the output differs (- %s, + %s):\n%s", a.name, a.passes[0].source, one.source, d)
		}
	}
	return first
}
