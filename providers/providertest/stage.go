package providertest

import (
	"context"
	"reflect"
	"testing"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

// patience is how long a case may take: what hangs fails with the rule that it breaks, not with the program.
const patience = 2 * time.Minute

// testCase is a row of a suite.
type testCase struct {
	name    string
	rule    string     // in the contract's words; printed where the case fails
	options Options    // of the provider that the case plays on
	unless  Difference // the case is not for a provider that declares this,
	only    Difference // or only for one that does
	long    bool       // the case watches its own progress, and may take longer than patience
	play    func(s *stage)
}

// contracts are all of Provider but the unit of work, so that cases need no type parameter.
type contracts interface {
	eventstore.Store
	outbox.Store
	outbox.Inspector
	outbox.Keeper
	marker.Keeper
	projector.ParkedInspector
	projector.Journal
	projector.State
	Records() projector.Records
}

// stage is what a case plays on: a fixture whose transaction type is forgotten.
type stage struct {
	*testing.T
	ctx     context.Context // ends when the case does, or when patience is over
	db      contracts
	claims  claimFunc
	inTx    func(ctx context.Context, fn func(view TxView, add Add) error) error
	do      func(ctx context.Context, w projector.Work, apply func(u unit) ([]outbox.Message, error)) error
	advance func(time.Duration)
	total   func(key string) int
	canEnd  bool
	reopen  func() *stage
	another func() *stage // a second provider, opened like this one
}

// unit is what apply is given.
type unit struct {
	ctx   context.Context
	fresh []int
	add   func(key string, n int) error
	end   func()
}

type claimFunc func(context.Context, outbox.Store, outbox.Query, claim.Terms) ([]outbox.Entry, error)

// run plays the cases, each on a provider of its own.
func run[Tx any](t *testing.T, open Open[Tx], differences []Difference, claims claimFunc, cases []testCase) {
	for _, d := range differences {
		if d != Volatile && d != Deferred {
			t.Fatalf("difference %q is not in the list", d)
		}
	}
	for _, c := range cases {
		if c.unless != "" && knows(differences, c.unless) || c.only != "" && !knows(differences, c.only) {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			limit := patience
			if c.long {
				limit *= 4
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			t.Cleanup(cancel)
			f := open(t, c.options)
			t.Cleanup(func() {
				if t.Failed() {
					t.Logf("the rule: %s", c.rule)
				}
			})
			if (f.Reopen == nil) != knows(differences, Volatile) {
				t.Fatal("a provider has Fixture.Reopen, or declares Volatile")
			}
			s := newStage(ctx, t, f, claims)
			s.another = func() *stage { return newStage(ctx, t, open(t, c.options), claims) }
			c.play(s)
		})
	}
}

func newStage[Tx any](ctx context.Context, t *testing.T, f Fixture[Tx], claims claimFunc) *stage {
	s := &stage{
		T: t, ctx: ctx, db: f.Provider, claims: claims,
		inTx: f.InTx, advance: f.Advance, total: f.Total, canEnd: f.End != nil,
	}
	s.do = func(ctx context.Context, w projector.Work, apply func(unit) ([]outbox.Message, error)) error {
		if apply == nil {
			return f.Provider.Do(ctx, w, nil)
		}
		return f.Provider.Do(ctx, w, func(ctx context.Context, tx Tx, fresh []int) ([]outbox.Message, error) {
			return apply(unit{
				ctx: ctx, fresh: fresh,
				add: func(key string, n int) error { return f.Add(ctx, tx, key, n) },
				end: func() { f.End(ctx, tx) },
			})
		})
	}
	if f.Reopen != nil {
		s.reopen = func() *stage { return newStage(ctx, t, f.Reopen(), claims) }
	}
	return s
}

// ok ends the case if err is not nil.
func (s *stage) ok(err error, doing string) {
	s.Helper()
	if err != nil {
		s.Fatalf("%s: %v", doing, err)
	}
}

// same ends the case if got is not want.
func same[V any](s *stage, what string, got, want V) {
	s.Helper()
	if !reflect.DeepEqual(got, want) {
		s.Fatalf("%s: got %+v, want %+v", what, got, want)
	}
}

// holds ends the case if what should be true is not.
func (s *stage) holds(is bool, format string, args ...any) {
	s.Helper()
	if !is {
		s.Fatalf("not so: "+format, args...)
	}
}

// together runs fn n times at once and waits for all of them. fn must not end the test.
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
