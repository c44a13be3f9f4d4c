package providertest

import (
	"context"
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
)

// testCase is one case of a suite.
type testCase struct {
	name    string
	rule    string     // in the contract's words; printed if the case fails
	options Options    // of the provider that the case opens
	unless  Difference // not for a provider that declares this
	only    Difference // only for a provider that declares this
	play    func(s *stage)
}

func (c *testCase) isFor(differences []Difference) bool {
	return (c.unless == "" || !knows(differences, c.unless)) && (c.only == "" || knows(differences, c.only))
}

// group is a list of cases that share a database, because creating one takes time. They run one
// after another, each with a separate projector and totals.
type group struct {
	name  string
	cases []testCase
	needs func(provider.Keeps) bool // nil: nothing
	// of the provider that the group opens
	options Options
}

// projectorContracts is Projectors without Events and provider.Units.Do, so that cases need no type
// parameter.
type projectorContracts interface {
	provider.MarkerMaintainer
	provider.Parking
	provider.Liveness
	provider.Records
	provider.Progress
	provider.Builds
	provider.Leases
	Keeps() provider.Keeps
}

// contracts are the contracts of a provider. Those of projectors are nil in TierEvents.
type contracts struct {
	Events
	projectorContracts
}

// stage is the environment of a case: a fixture without its type parameter.
type stage struct {
	*testing.T
	ctx  context.Context // ends with the case, or after patience.Limit: a case that hangs fails with its rule
	name string          // name of the case's projector, and domain of its tasks
	// of the units, checkpoints and questions of the case
	generation int
	prefix     string // of the keys of its totals
	deferred   bool   // the provider is Deferred
	store      any    // the provider, for its capabilities
	db         contracts
	inTx       func(ctx context.Context, fn func(view TxView, add Add) error) error
	transact   func(ctx context.Context, fn func(view TxView, add Add) error) error // nil if the provider has none
	do         func(ctx context.Context, u provider.Unit, run func(o opened) (provider.Closing, error)) error
	advance    func(time.Duration)
	total      func(key string) int
	canEnd     bool
	insert     func(...Foreign) error                                 // nil if the store has no other writers
	rowsOf     func(ctx context.Context, table string) ([]Row, error) // nil if the provider has no tables
	reopen     func() *stage
	another    func() *stage // a second provider, opened like this one

	// of a provider.TaskProvider, else nil
	tasks  taskStore
	inTask func(ctx context.Context, fn func(v taskView) error) error
}

// opened is the argument of a unit's function.
type opened struct {
	provider.Found
	ctx  context.Context
	unit provider.Unit
	add  func(key string, n int) error
	// nil if the provider has no tasks
	tasks provider.TaskTx
	// nil if the provider has no tables
	create func(table string) error
	put    func(table string, row Row) error
	remove func(table, key string) error
	// by a statement of the transaction, if its type has statements
	fail func() error
	end  func()
}

// run runs the cases in parallel, each on a separate provider.
func run[Tx any](t *testing.T, open Open[Tx], differences []Difference, cases []testCase) {
	checkDifferences(t, differences)
	for _, c := range cases {
		if !c.isFor(differences) {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := openFixture(t, open, c.options, differences)
			s := newStage(t, &c, f, differences)
			s.another = func() *stage { return newStage(t, &c, open(t, c.options), differences) }
			c.play(s)
		})
	}
}

// runGroups runs groups in parallel, and the cases of a group in order.
func runGroups[Tx any](t *testing.T, open Open[Tx], differences []Difference, groups []group) {
	runStages(t, open, differences, groups, func(*stage) {})
}

// runTasks is runGroups with the tasks of the provider.
func runTasks[Tx any](t *testing.T, open Open[Tx], differences []Difference, groups []group) {
	runStages(t, open, differences, groups, func(s *stage) {
		if s.tasks == nil || s.inTask == nil {
			s.Fatal("the provider is a provider.TaskProvider and a provider.TaskInspector, and the fixture has Owned")
		}
	})
}

func runStages[Tx any](t *testing.T, open Open[Tx], differences []Difference, groups []group, prepare func(*stage)) {
	checkDifferences(t, differences)
	for _, g := range groups {
		t.Run(g.name, func(t *testing.T) {
			t.Parallel()
			f := openFixture(t, open, g.options, differences)
			if keeps := keepsOf(f.Provider); g.needs != nil && !g.needs(keeps) {
				t.Logf("not for a provider that keeps %+v", keeps)
				return
			}
			for i, c := range g.cases {
				if c.isFor(differences) {
					t.Run(c.name, func(t *testing.T) {
						s := newStage(t, &c, f, differences)
						s.use(fmt.Sprint("p", i))
						prepare(s)
						c.play(s)
					})
				}
			}
		})
	}
}

func checkDifferences(t *testing.T, differences []Difference) {
	for _, d := range differences {
		if d != Volatile && d != Deferred {
			t.Fatalf("difference %q is not in the list", d)
		}
	}
}

func openFixture[Tx any](t *testing.T, open Open[Tx], o Options, differences []Difference) Fixture[Tx] {
	f := open(t, o)
	if (f.Reopen == nil) != knows(differences, Volatile) {
		t.Fatal("a provider has Fixture.Reopen or declares Volatile")
	}
	if (f.Tables != nil) != keepsOf(f.Provider).Tables {
		t.Fatal("Fixture.Tables is set if the provider's Keeps has Tables, and only then")
	}
	return f
}

// keepsOf returns the Keeps of a provider of projectors, or the zero value.
func keepsOf(store any) (k provider.Keeps) {
	if p, ok := store.(projectorContracts); ok {
		k = p.Keeps()
	}
	return k
}

func newStage[Tx any](t *testing.T, c *testCase, f Fixture[Tx], differences []Difference) *stage {
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the rule: %s", c.rule)
		}
	})
	s := &stage{
		T: t, ctx: patience.Context(t), name: "ratings", generation: 1, store: f.Provider, db: contracts{Events: f.Provider}, deferred: knows(differences, Deferred),
		inTx: f.InTx, transact: f.Transact, advance: f.Advance, total: f.Total, canEnd: f.End != nil, insert: f.Insert,
	}
	if f.Tables != nil {
		s.rowsOf = f.Tables.Rows
	}
	var tasksIn func(Tx) provider.TaskTx
	if p, ok := any(f.Provider).(interface {
		taskStore
		TasksIn(tx Tx) provider.TaskTx
	}); ok && f.Owned != nil {
		s.tasks, tasksIn = p, p.TasksIn
		s.inTask = func(ctx context.Context, fn func(taskView) error) error {
			return f.Owned(ctx, func(tx Tx) error {
				return fn(taskView{TaskTx: tasksIn(tx), add: func(key string, n int) error { return f.Add(ctx, tx, s.prefix+key, n) }})
			})
		}
	}
	prepare := func(ctx context.Context, tx Tx) opened {
		o := opened{
			ctx: ctx,
			add: func(key string, n int) error { return f.Add(ctx, tx, key, n) },
			end: func() { f.End(ctx, tx) },
		}
		if tasksIn != nil {
			o.tasks = tasksIn(tx)
		}
		if f.Tables != nil {
			o.create = func(table string) error { return f.Tables.Create(ctx, tx, table) }
			o.put = func(table string, row Row) error { return f.Tables.Put(ctx, tx, table, row) }
			o.remove = func(table, key string) error { return f.Tables.Delete(ctx, tx, table, key) }
		}
		if o.fail = func() error { return errRefused }; f.Break != nil {
			o.fail = func() error { return f.Break(ctx, tx) }
		}
		return o
	}
	units, _ := f.Provider.(Projectors[Tx])
	if units != nil {
		s.db.projectorContracts = units
	}
	s.do = func(ctx context.Context, u provider.Unit, run func(opened) (provider.Closing, error)) error {
		return units.Do(ctx, u, func(ctx context.Context, tx Tx, found provider.Found) (provider.Closing, error) {
			o := prepare(ctx, tx)
			o.Found, o.unit = found, u
			return run(o)
		})
	}
	if f.Reopen != nil {
		s.reopen = func() *stage {
			again := newStage(t, c, f.Reopen(), differences)
			again.use(s.name)
			again.generation = s.generation
			return again
		}
	}
	return s
}

// use gives the case a separate projector and totals.
func (s *stage) use(name string) {
	total, do := s.total, s.do
	s.name, s.prefix = name, name+" "
	s.total = func(key string) int { return total(name + " " + key) }
	s.do = func(ctx context.Context, u provider.Unit, run func(opened) (provider.Closing, error)) error {
		return do(ctx, u, func(o opened) (provider.Closing, error) {
			add := o.add
			o.add = func(key string, n int) error { return add(name+" "+key, n) }
			return run(o)
		})
	}
}

// in returns the case with another generation.
func (s *stage) in(generation int) *stage {
	other := *s
	other.generation = generation
	return &other
}

// build returns the generation of the case's projector.
func (s *stage) build() provider.Build {
	return provider.Build{Projector: s.name, Generation: s.generation}
}

// ok fails the case if err is not nil.
func (s *stage) ok(err error, doing string) {
	s.Helper()
	if err != nil {
		s.Fatalf("%s: %v", doing, err)
	}
}

// same fails the case if got is not want.
func same[V any](s *stage, what string, got, want V) {
	s.Helper()
	if !reflect.DeepEqual(got, want) {
		s.Fatalf("%s: got %+v, want %+v", what, got, want)
	}
}

// require fails the case if a condition is false. format states the condition.
func (s *stage) require(is bool, format string, args ...any) {
	s.Helper()
	if !is {
		s.Fatalf("violated: "+format, args...)
	}
}

// together runs fn n times concurrently and waits for all. fn must not end the test.
func together(n int, fn func(i int)) {
	start, done := make(chan struct{}), make(chan struct{}, n)
	for i := range n {
		go func() {
			defer func() { done <- struct{}{} }()
			<-start
			fn(i)
		}()
	}
	close(start)
	for range n {
		<-done
	}
}

// unlessBusy calls fn again while it fails with CodeBusy: on a busy machine, what a switch waits for may take longer than
// the second that it waits.
func unlessBusy(fn func() error) error {
	for {
		if err := fn(); provider.CodeOf(err) != provider.CodeBusy {
			return err
		}
	}
}
