package projectortest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// check is a comparison of two histories with the same events.
type check struct {
	what       string // happens in the history
	hint       string // why the results may differ
	clean, got history
}

// The kit shortens a history that fails for as long as budget, and on a slow machine as often as leastTries.
const (
	budget     = 10 * time.Second
	leastTries = 50
)

// judge runs both histories of c. clean is the result of its clean history, if it is known.
func (k *Kit[Tx, DB, Row]) judge(t testing.TB, events []prepared, c check, clean *result[Row]) (*problem, error) {
	t.Helper()
	if clean == nil {
		first, err := k.play(t, events, c.clean)
		if err != nil {
			return nil, err
		}
		clean = &first
	}
	if clean.problem != nil {
		p := *clean.problem
		p.clean = true
		return &p, nil
	}
	got, err := k.play(t, events, c.got)
	if err != nil {
		return nil, err
	}
	return compare(*clean, got), nil
}

// report shortens the history of a check that has failed with problem, and fails the test.
func (k *Kit[Tx, DB, Row]) report(t testing.TB, of string, sub *subject, c check, found *problem) {
	t.Helper()
	size, complete, short := "the shortest history found", true, c
	if found.kind == "waits" { // each try would take as long
		size, short = "the history", c.until(sub.events, found.event)
	} else {
		short, found, complete = k.shorten(t, sub.events, c, found)
	}
	if !complete {
		size += " in time"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s: projector %s: %s\n", of, sub.name, titleOf(found, c.what))
	fmt.Fprintf(&b, "%s (%d of %d events), %s:\n%s", size, len(short.got.events()), len(sub.events), short.got.source, describeSteps(sub.events, short.got))
	if !slices.Equal(short.clean.events(), short.got.events()) {
		fmt.Fprintf(&b, "compared with this order:\n%s", describeSteps(sub.events, short.clean))
	}
	b.WriteString(found.text + "\n")
	if hint := hintOf(found, c.hint); hint != "" {
		b.WriteString(hint + "\n")
	}
	fmt.Fprintf(&b, "To repeat it: %s=%d", seedVariable, sub.seed)
	t.Errorf("%s", b.String())
}

// titleOf describes a problem in one line.
func titleOf(p *problem, what string) string {
	switch p.kind {
	case "outside":
		return "a handler writes outside of its transaction"
	case "handler":
		if !p.clean {
			return "a handler fails that does not fail in a clean pass"
		}
		return "a handler fails"
	case "waits":
		return "a handler waits, and does not return"
	}
	return what
}

// hintOf returns advice about a problem.
func hintOf(p *problem, hint string) string {
	switch p.kind {
	case "outside":
		return "A handler writes outside of its transaction: with another connection, a pool, or a repository instead of\n" +
			"InTx(tx) and UpdateTx. Such a write stays after a rollback, and happens again when the handler runs again."
	case "waits":
		return "If the handler uses a repository or a pool, it waits for its own transaction. Read and write through the\n" +
			"transaction that the handler is given (InTx(tx), UpdateTx)."
	case "rows":
		return ""
	case "handler":
		if p.clean {
			return ""
		}
	case "rebuild":
		return hintRebuild
	}
	return hint
}

// shorten removes events, repeated deliveries and faults while the check fails with the same kind of problem.
// complete: nothing more can be removed.
func (k *Kit[Tx, DB, Row]) shorten(t testing.TB, events []prepared, c check, found *problem) (check, *problem, bool) {
	t.Helper()
	begin, tries := time.Now(), 0
	late := func() bool { return tries >= leastTries && time.Since(begin) >= budget }
	try := func(next check) bool {
		if late() || len(next.got.steps) == 0 {
			return false
		}
		tries++
		p, err := k.judge(t, events, next, nil)
		if err != nil || p == nil || p.kind != found.kind || p.clean != found.clean {
			return false
		}
		c, found = next, p
		return true
	}
	if n := slices.IndexFunc(events, func(e prepared) bool { return e.draft.ID == found.event }); n >= 0 {
		_ = try(c.keep(func(e int) bool { return e == n })) ||
			try(c.keep(func(e int) bool { return events[e].Stream == events[n].Stream && e <= n }))
	}
	for again := true; again && !late(); {
		again = false
		list := c.got.events()
		for size := (len(list) + 1) / 2; size > 0 && len(list) > 1; size /= 2 {
			for at := (len(list) - 1) / size * size; at >= 0; at -= size {
				gone := list[at:min(at+size, len(list))]
				again = try(c.keep(func(e int) bool { return !slices.Contains(gone, e) })) || again
			}
			list = c.got.events()
		}
		again = c.simplify(try) || again
	}
	return c, found, !late()
}

// simplify removes steps and faults while try accepts that.
func (c check) simplify(try func(check) bool) (changed bool) {
	for i := len(c.got.steps) - 1; i >= 0; i-- {
		next := c
		next.got.steps = slices.Delete(slices.Clone(c.got.steps), i, i+1)
		if len(next.got.events()) == len(c.got.events()) && try(next) {
			c, changed = next, true
			continue
		}
		for j := len(c.got.steps[i].faults) - 1; j >= 0; j-- {
			next.got.steps = slices.Clone(c.got.steps)
			next.got.steps[i].faults = slices.Delete(slices.Clone(c.got.steps[i].faults), j, j+1)
			if try(next) {
				c, changed = next, true
			}
		}
	}
	return changed
}

// until returns c with the steps up to that of an event.
func (c check) until(events []prepared, id string) check {
	if n := slices.IndexFunc(c.got.steps, func(s step) bool { return events[s.event].draft.ID == id }); n >= 0 {
		c.got.steps = c.got.steps[:n+1]
		c.clean = c.got
	}
	return c
}

// keep returns c with those of its events that f selects.
func (c check) keep(f func(event int) bool) check {
	filter := func(steps []step) []step {
		return slices.DeleteFunc(slices.Clone(steps), func(s step) bool { return !f(s.event) })
	}
	c.clean.steps, c.got.steps = filter(c.clean.steps), filter(c.got.steps)
	return c
}

// orders returns orders of the events that keep the order of each stream: at most limit, without the given
// order. The streams one after another, the last one first, is always among them.
func orders(events []prepared, seed uint64, limit int) (all [][]int) {
	given := make([]int, len(events))
	streams := map[string][]int{}
	var names []string
	for i := range events {
		given[i] = i
		if name := events[i].Stream; streams[name] == nil {
			names = append(names, name)
		}
		streams[events[i].Stream] = append(streams[events[i].Stream], i)
	}
	if len(names) < 2 {
		return nil
	}
	add := func(order []int) {
		if !slices.Equal(order, given) && !slices.ContainsFunc(all, func(o []int) bool { return slices.Equal(o, order) }) {
			all = append(all, order)
		}
	}
	var last []int
	for _, name := range slices.Backward(names) {
		last = append(last, streams[name]...)
	}
	add(last)
	random := rand.New(rand.NewPCG(seed, 0))
	for tries := 0; len(all) < limit && tries < 20*limit; tries++ {
		next := map[string]int{}
		deck := slices.Clone(given)
		random.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
		order := make([]int, 0, len(deck))
		for _, i := range deck { // the stream of the card gives its next event
			name := events[i].Stream
			order = append(order, streams[name][next[name]])
			next[name]++
		}
		add(order)
	}
	return all
}
