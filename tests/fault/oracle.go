package main

import (
	"fmt"
	"maps"
	"slices"
)

// The oracle judges by the producers' ledgers and by plain SQL. It does not use the framework.

// stored is an event as read by plain SQL.
type stored struct {
	Command string
	Stream  string
	N       int
	Amount  int64
	Version int64
	ID      string // the id of the event and of its message
}

// model is a read model as read by plain SQL.
type model struct {
	Totals map[string]int64
	Lists  map[string][]int
}

// verdict counts the violations and describes the first ones.
type verdict struct {
	Lost, Doubled, Phantom, Misordered int
	streams                            map[string]bool // the streams with violations
	reasons                            []string
}

func (v *verdict) ok() bool { return v.Lost+v.Doubled+v.Phantom+v.Misordered == 0 }

const maxReasons = 40

func (v *verdict) find(kind *int, stream, format string, args ...any) {
	*kind++
	if v.streams == nil {
		v.streams = map[string]bool{}
	}
	v.streams[stream] = true
	if len(v.reasons) < maxReasons {
		v.reasons = append(v.reasons, stream+": "+fmt.Sprintf(format, args...))
	}
}

// merge adds the violations of a read model.
func (v *verdict) merge(name string, one *verdict) {
	v.Lost, v.Doubled, v.Phantom, v.Misordered = v.Lost+one.Lost, v.Doubled+one.Doubled, v.Phantom+one.Phantom, v.Misordered+one.Misordered
	for _, why := range one.reasons {
		v.reasons = append(v.reasons, name+": "+why)
	}
}

// history is the expected effect: by stream and number, the amount.
type history map[string]map[int]int64

// judgeLog compares the log with the ledger. It returns the expected effect: acknowledged
// commands, and ambiguous ones that were found.
func judgeLog(ledger map[string]*command, events []stored, v *verdict) history {
	found := map[string]int{}
	for _, e := range events {
		found[e.Command]++
		switch c := ledger[e.Command]; {
		case c == nil:
			v.find(&v.Phantom, e.Stream, "event %d has no command: %s", e.N, e.Command)
		case c.outcome == rejected:
			v.find(&v.Phantom, e.Stream, "%d was rejected but is an event: %s", e.N, e.Command)
		case c.Stream != e.Stream || c.N != e.N || c.Amount != e.Amount:
			v.find(&v.Phantom, e.Stream, "event %d differs from its command: %s", e.N, e.Command)
		case e.Version != int64(e.N):
			v.find(&v.Misordered, e.Stream, "event %d has version %d", e.N, e.Version)
		}
	}
	h := history{}
	for _, id := range slices.Sorted(maps.Keys(ledger)) {
		c := ledger[id]
		switch n := found[id]; {
		case n > 1:
			v.find(&v.Doubled, c.Stream, "command %d is %d events: %s", c.N, n, id)
		case n == 0 && c.outcome == acked:
			v.find(&v.Lost, c.Stream, "command %d was acknowledged but is not an event: %s", c.N, id)
		case n == 0 || c.outcome == rejected:
			continue
		}
		if h[c.Stream] == nil {
			h[c.Stream] = map[int]int64{}
		}
		if _, ok := h[c.Stream][c.N]; ok {
			v.find(&v.Doubled, c.Stream, "command %d was accepted twice", c.N)
		}
		h[c.Stream][c.N] += c.Amount
	}
	for stream, ns := range h {
		for n := range len(ns) {
			if _, ok := ns[n+1]; !ok {
				v.find(&v.Lost, stream, "%d events up to number %d: number %d is missing", len(ns), slices.Max(slices.Collect(maps.Keys(ns))), n+1)
			}
		}
	}
	return h
}

// judgeModel compares a read model with the expected effect.
func judgeModel(h history, m model, v *verdict) {
	for _, stream := range slices.Sorted(maps.Keys(h)) {
		judgeStream(stream, h[stream], m, v)
	}
	for stream, items := range m.Lists {
		if h[stream] == nil {
			v.find(&v.Phantom, stream, "%d items of an unknown stream", len(items))
		}
	}
	for stream := range m.Totals {
		if h[stream] == nil {
			v.find(&v.Phantom, stream, "a sum of an unknown stream")
		}
	}
}

// doubledBy counts the items that a read model contains more than once although the broker did not
// copy their message: those that the fault doubled.
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

// judgeStream counts the violations in a list and, if the list is right, in its sum.
func judgeStream(stream string, want map[int]int64, m model, v *verdict) {
	seen := map[int]int{}
	highest, right := 0, true
	for i, n := range m.Lists[stream] {
		seen[n]++
		_, wanted := want[n]
		switch {
		case !wanted:
			v.find(&v.Phantom, stream, "item %d is %d, which is not an event", i+1, n)
		case seen[n] > 1:
			v.find(&v.Doubled, stream, "item %d is a repeated %d", i+1, n)
		case n < highest:
			v.find(&v.Misordered, stream, "item %d is %d, which comes after %d", i+1, n, highest)
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
			v.find(&v.Lost, stream, "item %d is missing", n)
			right = false
		}
	}
	switch got := m.Totals[stream]; {
	case !right || got == total:
	case got < total:
		v.find(&v.Lost, stream, "the sum is %d, want %d", got, total)
	default:
		v.find(&v.Doubled, stream, "the sum is %d, want %d", got, total)
	}
}
