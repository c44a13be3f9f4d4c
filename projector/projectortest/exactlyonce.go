package projectortest

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// most is the largest number of events that have faults in one pass.
const most = 12

// tick is longer than a second: times that differ by it differ in a column of whole seconds.
const tick = 1100 * time.Millisecond

// Why the rows may differ.
const (
	hintPure = "Two clean passes of the same events differ, so a handler uses something other than its event and its tables:\n" +
		"the clock, a random value or id, or a variable of the program. Use times and ids of the event (e.RecordedAt, e.ID),\n" +
		"keep state in tables, and leave columns that the database fills by itself out of Rows. Fresh must open an empty database."
	hintClock = "The second pass began more than a second later, so a handler, or a default of a column, uses the clock.\n" +
		"Use e.RecordedAt, or a time in the event, or leave the column out of Rows."
	hintAgain = "A handler has an effect that a rollback does not undo, so it takes effect again when the handler runs again:\n" +
		"a variable of the program, or a write outside of its transaction. A rollback does not give numbers of a sequence\n" +
		"back either: leave such columns out of Rows."
	hintTwice = "An event takes effect more than once. Handlers must write only through their transaction."
	hintOrder = "The projector depends on the order of events of different streams. A broker keeps only the order of each stream,\n" +
		"so let the projector read the log alone (projector.FromLog, Kit.LogOnly), or write rows that do not depend on it."
	hintRebuild = "Does Rows read a table that is not in Options.Tables, or does OnReset leave rows?"
)

// ExactlyOnce applies events to a projector, each time in an empty database, with duplicates, concurrent
// duplicates, rolled back transactions, lost replies, crashes before and after the handlers and the
// commit, from the log and from a broker, with the streams in another order, and with a rebuild. The rows and
// the output must be those of one clean pass. It fails the test with the shortest history that it finds.
//
// A projector without Options.Markers, or with LogOnly, is exact only from the log: then there are no
// duplicates and no other orders. The test ends if the store keeps no markers.
//
// Ten events take about two seconds on SQLite, and five on PostgreSQL.
func (k *Kit[Tx, DB, Row]) ExactlyOnce(t testing.TB, events ...Event) {
	t.Helper()
	sub := k.prepare(t, true, events)
	if len(events) == 0 {
		t.Fatalf("ExactlyOnce requires events")
	}
	began := time.Now()
	order := make([]int, len(events))
	for i := range order {
		order[i] = i
	}
	clean := inOrder(sub.sources[0], order)
	first, err := k.play(t, sub.events, clean)
	if err != nil {
		t.Fatalf("ExactlyOnce: projector %s: %v", sub.name, err)
	}
	if first.problem != nil {
		first.problem.clean = true
		k.report(t, "ExactlyOnce", sub, check{what: "the events cannot be applied", clean: clean, got: clean}, first.problem)
		return
	}
	all := exactlyOnce(sub, clean)
	later := &all[len(all)-1]
	for i := range all {
		later.got.pause = max(tick-time.Since(began), 0)
		found, err := k.judge(t, sub.events, all[i], &first)
		if err != nil {
			t.Fatalf("ExactlyOnce: projector %s: %s: %v", sub.name, all[i].what, err)
		}
		if found == nil {
			continue
		}
		c := all[i]
		if i > 0 && found.isDifference() { // a clock changes the rows of any pass
			later.got.pause = max(tick-time.Since(began), 0)
			if differs, err := k.judge(t, sub.events, *later, &first); err == nil && differs != nil {
				c, found = *later, differs
				c.got.pause = tick
			}
		}
		k.report(t, "ExactlyOnce", sub, c, found)
		return
	}
}

// exactlyOnce returns the checks of ExactlyOnce, those with the clearest failures first. The last one is a clean
// pass that begins later than the first one.
func exactlyOnce(sub *subject, clean history) []check {
	all := []check{{what: "a second clean pass gives other rows", hint: hintPure, clean: clean, got: clean}}
	random := rand.New(rand.NewPCG(sub.seed, 1))
	for _, src := range sub.sources {
		h := inOrder(src, clean.events())
		all = append(all,
			check{what: "the rows differ after rolled back transactions, a crash before the handlers, or a lost reply", hint: hintAgain,
				clean: clean, got: faulty(h, random, rolledBack, crashBefore, lostReply)},
			check{what: "the rows differ after a crash right before or after the commit", hint: hintAgain,
				clean: clean, got: faulty(h, random, crashBeforeCommit, crashAfterCommit)})
	}
	if slices.Contains(sub.sources, fromBroker) {
		all = append(all, deliveries(sub, clean)...)
	}
	if sub.sources[0] == fromLog && !sub.from {
		together := clean
		together.atOnce, together.rebuild = true, true
		all = append(all, check{what: "events that are applied in one transaction, or again by a rebuild, give other rows", hint: hintPure, clean: clean, got: together})
	}
	return append(all, check{what: "a later pass gives other rows", hint: hintClock, clean: clean, got: clean})
}

// deliveries returns the checks of a projector that has a broker.
func deliveries(sub *subject, clean history) (all []check) {
	order := clean.events()
	delivered, again, both := inOrder(fromBroker, order), history{source: fromBroker}, inOrder(fromBroker, order)
	for i, s := range delivered.steps {
		again.steps = append(again.steps, s, s)
		both.steps[i].faults = []fault{twice}
	}
	again.steps = append(again.steps, delivered.steps...)
	if clean.source != fromBroker {
		all = append(all, check{what: "events from a broker give other rows than those from the log", hint: hintPure, clean: clean, got: delivered})
	}
	all = append(all,
		check{what: "a redelivery changes the rows", hint: hintTwice, clean: clean, got: again},
		check{what: "a concurrent duplicate changes the rows", hint: hintTwice, clean: clean, got: both})
	for _, o := range orders(sub.events, sub.seed, 2) {
		all = append(all, check{what: "another order of the streams gives other rows", hint: hintOrder, clean: clean, got: inOrder(fromBroker, o)})
	}
	return all
}

// faulty returns h with faults at each step, or at some of many.
func faulty(h history, random *rand.Rand, faults ...fault) history {
	h.steps = slices.Clone(h.steps)
	for _, i := range random.Perm(len(h.steps))[:min(most, len(h.steps))] {
		h.steps[i].faults = faults
	}
	return h
}
