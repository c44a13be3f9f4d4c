package main

import (
	"fmt"
	"maps"
	"slices"
)

// The oracle judges by what producers wrote down, and by what plain SQL reads. It knows nothing of the framework.

// stored is an event as plain SQL finds it.
type stored struct {
	Command string
	Stream  string
	N       int
	Amount  int64
	Version int64
	ID      string // of the event, and of its message
}

// model is a read model as plain SQL finds it.
type model struct {
	Totals map[string]int64
	Lists  map[string][]int
}

// verdict is what is wrong, and why, as far as that is worth reading.
type verdict struct {
	Lost, Doubled, Phantom, Misordered int
	streams                            map[string]bool // that are wrong
	why                                []string
}

func (v *verdict) ok() bool { return v.Lost+v.Doubled+v.Phantom+v.Misordered == 0 }

const whys = 40

func (v *verdict) find(kind *int, stream, format string, args ...any) {
	*kind++
	if v.streams == nil {
		v.streams = map[string]bool{}
	}
	v.streams[stream] = true
	if len(v.why) < whys {
		v.why = append(v.why, stream+": "+fmt.Sprintf(format, args...))
	}
}

// history is what must have taken effect: of each stream, by number, the amount.
type history map[string]map[int]int64

// judgeLog holds the log against the ledger, and returns what must have taken effect: what was acknowledged, and what
// is ambiguous and was found.
func judgeLog(ledger map[string]*command, events []stored, v *verdict) history {
	found := map[string]int{}
	for _, e := range events {
		found[e.Command]++
		switch c := ledger[e.Command]; {
		case c == nil:
			v.find(&v.Phantom, e.Stream, "%d is an event of no command: %s", e.N, e.Command)
		case c.outcome == rejected:
			v.find(&v.Phantom, e.Stream, "%d was rejected and is an event: %s", e.N, e.Command)
		case c.Stream != e.Stream || c.N != e.N || c.Amount != e.Amount:
			v.find(&v.Phantom, e.Stream, "%d is another event than what was wanted: %s", e.N, e.Command)
		case e.Version != int64(e.N):
			v.find(&v.Misordered, e.Stream, "%d has version %d", e.N, e.Version)
		}
	}
	h := history{}
	for _, id := range slices.Sorted(maps.Keys(ledger)) {
		c := ledger[id]
		switch n := found[id]; {
		case n > 1:
			v.find(&v.Doubled, c.Stream, "%d is %d events: %s", c.N, n, id)
		case n == 0 && c.outcome == acked:
			v.find(&v.Lost, c.Stream, "%d was acknowledged and is no event: %s", c.N, id)
		case n == 0 || c.outcome == rejected:
			continue
		}
		if h[c.Stream] == nil {
			h[c.Stream] = map[int]int64{}
		}
		if _, ok := h[c.Stream][c.N]; ok {
			v.find(&v.Doubled, c.Stream, "%d was accepted twice", c.N)
		}
		h[c.Stream][c.N] += c.Amount
	}
	for stream, ns := range h {
		for n := range len(ns) {
			if _, ok := ns[n+1]; !ok {
				v.find(&v.Lost, stream, "%d of %d commands: there is no %d", len(ns), slices.Max(slices.Collect(maps.Keys(ns))), n+1)
			}
		}
	}
	return h
}

// judgeModel holds a read model against what must have taken effect.
func judgeModel(h history, m model, v *verdict) {
	for _, stream := range slices.Sorted(maps.Keys(h)) {
		judgeStream(stream, h[stream], m, v)
	}
	for stream, items := range m.Lists {
		if h[stream] == nil {
			v.find(&v.Phantom, stream, "%d items of a stream that is none", len(items))
		}
	}
	for stream := range m.Totals {
		if h[stream] == nil {
			v.find(&v.Phantom, stream, "a sum of a stream that is none")
		}
	}
}

// doubledBy counts the items of a read model that are there more than once, although their message is not one of those that were
// copied on purpose: so that it is the fault's doing.
func doubledBy(events []stored, copied map[string]bool, m model) (n int) {
	for _, e := range events {
		times := 0
		for _, item := range m.Lists[e.Stream] {
			if item == e.N {
				times++
			}
		}
		if times > 1 && !copied[e.ID] {
			n++
		}
	}
	return n
}

// judgeStream counts what is wrong with a list, and where that is right, with its sum.
func judgeStream(stream string, want map[int]int64, m model, v *verdict) {
	seen := map[int]int{}
	highest, right := 0, true
	for i, n := range m.Lists[stream] {
		seen[n]++
		_, wanted := want[n]
		switch {
		case !wanted:
			v.find(&v.Phantom, stream, "item %d is a %d, which is none", i+1, n)
		case seen[n] > 1:
			v.find(&v.Doubled, stream, "item %d is %d again", i+1, n)
		case n < highest:
			v.find(&v.Misordered, stream, "item %d is %d, after %d", i+1, n, highest)
		default:
			highest = n
			continue
		}
		right = false
	}
	var total int64
	for n, amount := range want {
		total += amount
		if seen[n] == 0 {
			v.find(&v.Lost, stream, "there is no item %d", n)
			right = false
		}
	}
	switch got := m.Totals[stream]; {
	case !right || got == total:
	case got < total:
		v.find(&v.Lost, stream, "the sum is %d, not %d", got, total)
	default:
		v.find(&v.Doubled, stream, "the sum is %d, not %d", got, total)
	}
}
