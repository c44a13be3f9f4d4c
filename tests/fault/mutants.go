package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// mutants are the mechanisms that are taken out of the children (internal/mutant), and the cells that should notice, the
// likeliest first. Where no cell comes to what the mechanism is for, a test of the package does.
var mutants = []struct {
	tag   string
	cells []*cell
	test  string
}{
	{tag: "no_marker", cells: []*cell{stormCell, killCell}},
	{tag: "marker_apart", cells: []*cell{conflictsCell, killCell}},
	{tag: "no_fence", cells: []*cell{zombieCell}},
	{tag: "worker_clock", cells: []*cell{clockCell}},
	{tag: "clock_per_row", cells: []*cell{killCell, clockCell}},
	{tag: "half_guard", cells: []*cell{clockCell, killCell}},
	{tag: "held_no_barrier", cells: []*cell{poisonCell}},
	{tag: "no_version_guard", cells: []*cell{killCell}},
	{tag: "ack_early", cells: []*cell{killCell}},
	{tag: "batch_on_conflict", cells: []*cell{stormCell, killCell}},
	{tag: "two_transactions", cells: []*cell{conflictsCell, backendsCell}},
	{tag: "no_generation_fence", test: "providers/postgres TestUnitsAndASwitchOfGenerationsFenceOneAnother"}, // nothing rebuilds yet
}

// mutantBudget is how long the cells may try, one after another and again.
const mutantBudget = time.Minute

// caught is what came of a mutant.
type caught struct {
	Mutant  string  `json:"mutant"`
	Caught  bool    `json:"caught"`
	Cell    string  `json:"cell,omitempty"`
	Test    string  `json:"test,omitempty"`
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
		one, err := s.catch(m.tag, m.cells, m.test)
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
		by := "NOBODY"
		if c.Caught {
			by = cmp.Or(c.Cell, c.Test)
		}
		_, _ = fmt.Fprintf(w, "%s\t%s\t%.0f\t%.100s\n", c.Mutant, by, c.Seconds, c.Why)
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

func (s *suite) catch(tag string, by []*cell, test string) (caught, error) {
	if test != "" {
		return s.catchByTest(tag, test), nil
	}
	c := caught{Mutant: tag}
	child := &suite{ctx: s.ctx, short: true, mutant: true, length: s.length}
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

// failed is what go test says where a test has failed, and not its build.
var failed = regexp.MustCompile(`(?m)^\s*--- FAIL: .*`)

func (s *suite) catchByTest(tag, test string) caught {
	fmt.Printf("mutant %s\n", tag)
	begin := time.Now()
	pkg, name, _ := strings.Cut(test, " ")
	out, err := exec.CommandContext(s.ctx, "go", "test", "-count=1", "-timeout=2m", "-tags", "mutant_"+tag, "-run", "^"+name+"$",
		"github.com/kinora-go/kinora/"+pkg).CombinedOutput()
	why := failed.FindString(string(out))
	return caught{Mutant: tag, Caught: err != nil && why != "", Test: name, Why: why, Seconds: time.Since(begin).Seconds()}
}

// tells tells whether a failure is the oracle's: about what is wrong, and not about how long something took, or what was not
// tried.
func tells(failure string) bool { return verdicts.MatchString(failure) }

var verdicts = regexp.MustCompile(`^(.*: )?lost \d+, doubled|claims are broken|before their backoff`)
