package projectortest

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/kinora-go/kinora/eventstore"
)

// History is the past of an aggregate in a test. Given returns it.
type History[A eventstore.Aggregate] struct {
	t    testing.TB
	past []any
	load func() A
}

// Given returns an aggregate with past events. fresh returns a new one, as for
// eventstore.NewRepository; its id is "1". The test fails if Apply gives two aggregates different
// states for the same events.
func Given[A eventstore.Aggregate](t testing.TB, fresh func(id string) A, past ...any) *History[A] {
	t.Helper()
	h := &History[A]{t: t, past: past, load: func() A {
		a := fresh("1")
		for _, e := range past {
			a.Apply(e)
		}
		return a
	}}
	if a, b := h.load(), h.load(); !reflect.DeepEqual(a, b) {
		t.Errorf("Apply gives two aggregates different states for the same events%s\n  once:  %+v\n  again: %+v\n%s",
			describe(past), a, b, "Apply must depend only on its receiver and its argument: no clock, no random values, no variables of the program.")
	}
	return h
}

// Decided is the result of a decision. When returns it.
type Decided struct {
	t    testing.TB
	past []any
	got  []any
	err  error
}

// When calls decide, as Repository.Update does. It calls decide twice, each time for a newly loaded
// aggregate, because Update does so after a conflict: the test fails if the results differ.
func (h *History[A]) When(decide func(A) ([]any, error)) *Decided {
	h.t.Helper()
	got, err := decide(h.load())
	again, errAgain := decide(h.load())
	if !reflect.DeepEqual(got, again) || fmt.Sprint(err) != fmt.Sprint(errAgain) {
		h.t.Errorf("the same decision gives two results%s\n  once:  %s\n  again: %s\n%s", describe(h.past),
			outcome(got, err), outcome(again, errAgain),
			"Update decides again after a conflict: pass times and random ids in as arguments, and let decide change nothing.")
	}
	return &Decided{h.t, h.past, got, err}
}

// Then compares the result with want: the events in order, or one error (errors.Is). Nothing means that
// decide returns no events and no error.
func (d *Decided) Then(want ...any) {
	d.t.Helper()
	if len(want) == 1 {
		if target, ok := want[0].(error); ok {
			if !errors.Is(d.err, target) || len(d.got) > 0 {
				d.t.Errorf("the decision differs%s\n  want: error %v\n  got:  %s", describe(d.past), target, outcome(d.got, d.err))
			}
			return
		}
	}
	if d.err != nil || len(d.got) != len(want) || len(want) > 0 && !reflect.DeepEqual(d.got, want) {
		d.t.Errorf("the decision differs%s\n  want: %s\n  got:  %s", describe(d.past), outcome(want, nil), outcome(d.got, d.err))
	}
}

func outcome(events []any, err error) string {
	var parts []string
	for _, e := range events {
		parts = append(parts, fmt.Sprintf("%T%+v", e, e))
	}
	if err != nil {
		parts = append(parts, "error "+err.Error())
	}
	if len(parts) == 0 {
		return "no events"
	}
	return strings.Join(parts, ", ")
}

func describe(past []any) string {
	if len(past) == 0 {
		return ", without past events"
	}
	return "\n  given: " + outcome(past, nil)
}
