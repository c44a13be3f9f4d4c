package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kinora-go/kinora/internal/mutant"
)

// mutantBudget is how long the cells of a mutant are tried, repeatedly one after another.
const mutantBudget = time.Minute

// caught is the result of a mutant.
type caught struct {
	Mutant  string  `json:"mutant"`
	Caught  bool    `json:"caught"`
	Cell    string  `json:"cell,omitempty"`
	Test    string  `json:"test,omitempty"`
	Seconds float64 `json:"seconds"`
	Why     string  `json:"why,omitempty"`
	Seed    uint64  `json:"seed"`
}

// catchAll runs each mutant, or only the named one, until one of its cells fails. A mutant without
// cells is caught by its tests.
func (s *suite) catchAll(only, report string) (ok bool, err error) {
	var all []caught
	ok = true
	mutants := mutant.All
	if only != "" {
		m, err := mutant.Named(only)
		if err != nil {
			return false, err
		}
		mutants = []mutant.Mutant{m}
	}
	for _, m := range mutants {
		one, err := s.catch(m)
		if err != nil {
			return false, err
		}
		all = append(all, one)
		ok = ok && one.Caught
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, "mutant\tcaught by\tseconds\twhy")
	for _, c := range all {
		by := "nothing"
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

// edits returns the file contents of a mutant, by path.
func edits(ctx context.Context, name string) (map[string]string, error) {
	m, err := mutant.Named(name)
	if err != nil {
		return nil, err
	}
	root, err := mutant.Root(ctx)
	if err != nil {
		return nil, err
	}
	return m.Apply(root)
}

func (s *suite) catch(m mutant.Mutant) (caught, error) {
	c := caught{Mutant: m.Name}
	files, err := edits(s.ctx, m.Name)
	if err != nil {
		return c, err
	}
	fmt.Printf("mutant %s: %s\n", m.Name, m.What)
	if len(m.Cells) == 0 {
		return s.catchByTest(m, files)
	}
	by, err := choose(strings.Join(m.Cells, ","))
	if err != nil {
		return c, err
	}
	child := &suite{ctx: s.ctx, short: true, mutant: true, length: s.length, edited: files}
	if err := child.place(false); err != nil {
		return c, err
	}
	defer func() { _ = os.RemoveAll(child.dir) }()
	begin := time.Now()
	for try := 0; !c.Caught && time.Since(begin) < mutantBudget && s.ctx.Err() == nil; try++ {
		child.seed = s.seed + uint64(try)
		if s.seed == 0 {
			child.seed = rand.Uint64N(1<<32-1) + 1
		}
		r := child.run(by[try%len(by)])
		c.Seconds = time.Since(begin).Seconds()
		_ = os.RemoveAll(child.dir + "/" + r.Cell)
		if i := slices.IndexFunc(r.Failures, isVerdict); i >= 0 {
			c.Caught, c.Cell, c.Why, c.Seed = true, r.Cell, r.Failures[i], child.seed
		}
	}
	return c, nil
}

// catchByTest runs the tests of m until one fails.
func (s *suite) catchByTest(m mutant.Mutant, files map[string]string) (c caught, err error) {
	root, err := mutant.Root(s.ctx)
	if err != nil {
		return c, err
	}
	dir, err := os.MkdirTemp("", "kinora-mutant-")
	if err != nil {
		return c, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	overlay, err := mutant.Overlay(dir, files)
	if err != nil {
		return c, err
	}
	c.Mutant = m.Name
	begin := time.Now()
	for _, test := range m.Tests {
		if c.Why, _ = test.Run(s.ctx, root, overlay); c.Why != "" {
			c.Caught, c.Test = true, test.Name
			break
		}
	}
	c.Seconds = time.Since(begin).Seconds()
	return c, nil
}

// isVerdict reports whether a failure is the oracle's finding, not a timeout or a fault that was
// not injected.
func isVerdict(failure string) bool { return verdicts.MatchString(failure) }

var verdicts = regexp.MustCompile(`^(.*: )?lost \d+, doubled|claims are broken|before their backoff`)
