package main

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kinora-go/kinora/internal/mutant"
)

// mutantBudget is how long the cells of a mutant are tried, repeatedly one after another, and each of them once.
const mutantBudget = time.Minute

// caught is the result of a mutant. It is ok if each of its tests has failed, and one of its cells.
type caught struct {
	Mutant   string   `json:"mutant"`
	Tests    []string `json:"tests,omitempty"`    // that failed
	Survived []string `json:"survived,omitempty"` // tests that passed, or did not run
	Cell     string   `json:"cell,omitempty"`     // that failed
	Why      string   `json:"why,omitempty"`      // the cell failed
	Seed     uint64   `json:"seed,omitempty"`     // of the cell
	Seconds  float64  `json:"cell_s,omitempty"`   // until the cell failed
	ranOnce
}

func (c caught) name() string { return c.Mutant }

// catchAll runs the tests and the cells of each mutant that the record lacks, or only of the named one. Mutants that only
// tests notice run several at a time.
func (s *suite) catchAll(only, report string) (ok bool, err error) {
	var names []string
	for _, m := range mutant.All {
		names = append(names, m.Name)
	}
	rec, err := openRecord[caught](report, names, s.codeOfMutant)
	if err != nil {
		return false, err
	}
	mutants := mutant.All
	if only != "" {
		m, err := mutant.Named(only)
		if err != nil {
			return false, err
		}
		mutants = []mutant.Mutant{m}
	} else if !s.again {
		mutants = slices.DeleteFunc(slices.Clone(mutants), func(m mutant.Mutant) bool { return rec.has(m.Name) })
		fmt.Printf("the record has %d of %d mutants for the code %s\n", len(mutant.All)-len(mutants), len(mutant.All), s.code)
	}
	var mu sync.Mutex
	passed, failed := 0, 0
	one := func(m mutant.Mutant) {
		begin := time.Now()
		c, e := s.catch(m)
		mu.Lock()
		defer mu.Unlock()
		if s.ctx.Err() != nil {
			return
		}
		if e == nil {
			c.ranOnce = rec.ended(m.Name, len(c.Survived) == 0 && (len(m.Cells) == 0 || c.Cell != ""), begin)
			e = rec.put(c)
		}
		if err = errors.Join(err, e); c.OK {
			passed++
		} else {
			failed++
		}
		c.line(os.Stdout)
	}
	places := make(chan struct{}, s.parallel)
	var all sync.WaitGroup
	for _, m := range mutants {
		if len(m.Cells) == 0 {
			places <- struct{}{}
			all.Go(func() {
				defer func() { <-places }()
				one(m)
			})
		}
	}
	all.Wait()
	for _, m := range mutants {
		if len(m.Cells) > 0 {
			one(m)
		}
	}
	fmt.Printf("%d passed, %d failed, %d skipped\n", passed, failed, len(mutant.All)-len(mutants))
	return failed == 0, errors.Join(err, s.ctx.Err())
}

// codeOf returns the fingerprint of the code.
func (s *suite) codeOf(string) string { return s.code }

// codeOfMutant returns the fingerprint of the code with a mutant: its text counts for itself alone.
func (s *suite) codeOfMutant(name string) string {
	m, _ := mutant.Named(name) // the zero Mutant is as good as any
	sum := fnv.New32a()
	_, _ = fmt.Fprintf(sum, "%+v", m)
	return fmt.Sprintf("%s-%08x", s.code, sum.Sum32())
}

// line writes the result as a line that programs can read.
func (c *caught) line(to io.Writer) {
	if c.OK {
		_, _ = fmt.Fprintf(to, "%-7s %s  %.1fs  %s\n", "ok", c.Mutant, c.Duration, strings.Join(append(c.Tests, c.Cell), " "))
		return
	}
	why := "no cell failed"
	if len(c.Survived) > 0 {
		why = "passed, or did not run: " + strings.Join(c.Survived, " ")
	}
	_, _ = fmt.Fprintf(to, "%-7s %s  %.1fs  %s\n", "FAILED", c.Mutant, c.Duration, why)
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

// catch runs the tests of a mutant, and then its cells.
func (s *suite) catch(m mutant.Mutant) (c caught, err error) {
	c.Mutant = m.Name
	files, err := edits(s.ctx, m.Name)
	if err != nil {
		return c, err
	}
	if err := s.catchByTests(m, files, &c); err != nil || len(m.Cells) == 0 {
		return c, err
	}
	return c, s.catchByCells(m, files, &c)
}

// catchByCells runs the cells of a mutant until one fails.
func (s *suite) catchByCells(m mutant.Mutant, files map[string]string, c *caught) error {
	by, err := choose(strings.Join(m.Cells, ","))
	if err != nil {
		return err
	}
	child := &suite{ctx: s.ctx, short: true, mutant: true, length: s.length, edited: files}
	if err := child.place(false); err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(child.dir) }()
	begin := time.Now()
	for try := 0; c.Cell == "" && (try < len(by) || time.Since(begin) < mutantBudget) && s.ctx.Err() == nil; try++ {
		child.seed = s.seed + uint64(try)
		if s.seed == 0 {
			child.seed = rand.Uint64N(1<<32-1) + 1
		}
		r := child.run(by[try%len(by)])
		c.Seconds = time.Since(begin).Seconds()
		_ = os.RemoveAll(child.dir + "/" + r.Cell)
		if i := slices.IndexFunc(r.Failures, isVerdict); i >= 0 {
			c.Cell, c.Why, c.Seed = r.Cell, r.Failures[i], child.seed
		}
	}
	return nil
}

// catchByTests runs the tests of a mutant. Each of them must fail.
func (s *suite) catchByTests(m mutant.Mutant, files map[string]string, c *caught) error {
	root, err := mutant.Root(s.ctx)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "kinora-mutant-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	overlay, err := mutant.Overlay(dir, files)
	if err != nil {
		return err
	}
	for _, test := range m.Tests {
		if failure, _ := test.Run(s.ctx, root, overlay); failure != "" {
			c.Tests = append(c.Tests, test.Name)
		} else {
			c.Survived = append(c.Survived, test.Name)
		}
	}
	return nil
}

// isVerdict reports whether a failure is the oracle's finding, not a timeout or a fault that was
// not injected.
func isVerdict(failure string) bool { return verdicts.MatchString(failure) }

var verdicts = regexp.MustCompile(`^(.*: )?lost \d+, doubled|claims are broken|before their backoff`)
