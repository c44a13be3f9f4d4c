package projectortest

import "testing"

// interleavings is the largest number of orders that Commutes tries.
const interleavings = 20

// Commutes fails the test if the rows depend on the order of events of different streams: it applies the events
// in other orders, which keep the order of each stream, and compares the rows with those of the
// given order. A projector that passes for histories that show all its cases may be fed by a broker that
// keeps the order of a stream only, and may be split by streams. A failure shows the shortest
// counterexample that was found.
func (k *Kit[Tx, DB, Row]) Commutes(t testing.TB, events ...Event) {
	t.Helper()
	sub := k.prepare(t, false, events)
	all := orders(sub.events, sub.seed, interleavings)
	if len(all) == 0 {
		t.Fatalf("Commutes requires events of at least two streams")
	}
	given := make([]int, len(events))
	for i := range given {
		given[i] = i
	}
	made := func(order []int) history {
		h := inOrder(sub.sources[0], order)
		h.atOnce = sub.sources[0] == fromLog && !sub.from
		return h
	}
	clean := made(given)
	first, err := k.play(t, sub.events, clean)
	if err != nil {
		t.Fatalf("Commutes: projector %s: %v", sub.name, err)
	}
	if first.problem != nil {
		first.problem.clean = true
		k.report(t, "Commutes", sub, check{what: "the events cannot be applied", clean: clean, got: clean}, first.problem)
		return
	}
	checks := []check{{what: "the same order gives other rows", hint: hintPure, clean: clean, got: clean}}
	for _, order := range all {
		checks = append(checks, check{what: "it does not commute: another order of the streams gives other rows", hint: hintOrder, clean: clean, got: made(order)})
	}
	for _, c := range checks {
		found, err := k.judge(t, sub.events, c, &first)
		if err != nil {
			t.Fatalf("Commutes: projector %s: %v", sub.name, err)
		}
		if found != nil {
			k.report(t, "Commutes", sub, c, found)
			return
		}
	}
}
