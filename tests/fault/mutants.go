package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// mutants are the mechanisms that are taken out of the children (internal/mutant), and the cells that should notice, the
// likeliest first.
var mutants = []struct {
	tag   string
	cells []*cell
}{
	{"no_marker", []*cell{stormCell, killCell}},
	{"marker_apart", []*cell{conflictsCell, killCell}},
	{"no_fence", []*cell{zombieCell}},
	{"worker_clock", []*cell{clockCell}},
	{"clock_per_row", []*cell{clockCell, zombieCell}},
	{"half_guard", []*cell{clockCell, killCell}},
	{"held_no_barrier", []*cell{poisonCell}},
	{"no_version_guard", []*cell{killCell}},
	{"ack_early", []*cell{killCell}},
	{"batch_on_conflict", []*cell{stormCell, killCell}},
	{"two_transactions", []*cell{conflictsCell, backendsCell}},
}

// mutantBudget is how long the cells may try, one after another and again.
const mutantBudget = time.Minute

// caught is what came of a mutant.
type caught struct {
	Mutant  string  `json:"mutant"`
	Caught  bool    `json:"caught"`
	Cell    string  `json:"cell,omitempty"`
	Seconds float64 `json:"seconds"`
	Why     string  `json:"why,omitempty"`
	Seed    uint64  `json:"seed"`
}

// catchAll runs each mutant, or one, until a cell is lost.
func (s *suite) catchAll(only, report string) (ok bool, err error) {
	var all []caught
	ok = true
	for _, m := range mutants {
		if only != "" && only != m.tag {
			continue
		}
		one, err := s.catch(m.tag, m.cells)
		if err != nil {
			return false, err
		}
		all = append(all, one)
		ok = ok && one.Caught
	}
	if len(all) == 0 {
		return false, errors.New("there is no such mutant")
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, "mutant\tcaught by\tseconds\twhy")
	for _, c := range all {
		_, _ = fmt.Fprintf(w, "%s\t%s\t%.0f\t%.100s\n", c.Mutant, cmp.Or(c.Cell, "NOBODY"), c.Seconds, c.Why)
	}
	_ = w.Flush()
	if report == "" {
		return ok, nil
	}
	text, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return false, err
	}
	return ok, os.WriteFile(report, append(text, '\n'), 0o644)
}

func (s *suite) catch(tag string, by []*cell) (caught, error) {
	c := caught{Mutant: tag}
	child := &suite{ctx: s.ctx, short: true, length: s.length}
	if err := child.place("mutant_"+tag, false); err != nil {
		return c, err
	}
	defer func() { _ = os.RemoveAll(child.dir) }()
	fmt.Printf("mutant %s\n", tag)
	begin := time.Now()
	for try := 0; !c.Caught && time.Since(begin) < mutantBudget && s.ctx.Err() == nil; try++ {
		child.seed = s.seed + uint64(try)
		if s.seed == 0 {
			child.seed = rand.Uint64N(1<<32-1) + 1
		}
		r := child.run(by[try%len(by)])
		c.Seconds = time.Since(begin).Seconds()
		_ = os.RemoveAll(child.dir + "/" + r.Cell)
		if i := slices.IndexFunc(r.Failures, tells); i >= 0 {
			c.Caught, c.Cell, c.Why, c.Seed = true, r.Cell, r.Failures[i], child.seed
		}
	}
	return c, nil
}

// tells tells whether a failure is about what is wrong, and not about how long something took, or what was not tried.
func tells(failure string) bool {
	for _, other := range []string{"settled in", "not settled", "gave up", "no ", "too few", "the control arm"} {
		if strings.HasPrefix(failure, other) {
			return false
		}
	}
	return true
}
