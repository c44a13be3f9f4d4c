// The fault suite kills, stops and disconnects processes that use Kinora while they work. An oracle
// that does not use Kinora judges whether any event was lost, doubled, made up or out of order.
//
// go run ./tests/fault [-cell name,…] [-seed N] [-short] [-for D] [-report FILE] [-keep DIR]
//
// It requires Linux and PostgreSQL's binaries.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kinora-go/kinora/internal/mutant"
)

// suite is one run of the program.
type suite struct {
	ctx     context.Context
	seed    uint64
	short   bool
	length  time.Duration // of each cell, unless zero
	dir     string
	mutant  bool   // the children lack a mechanism
	kept    bool   // dir is never removed
	binary  string // the children's program
	skewed  string // the program of children with a wrong clock, once it is built
	skewing sync.Mutex
	flags   []string          // flags for go build
	edited  map[string]string // file contents that builds use instead of the sources, by path
}

func main() {
	if text := os.Getenv(roleEnv); text != "" {
		os.Exit(child(text))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ok, err := runSuite(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "fault:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

func runSuite(ctx context.Context) (ok bool, err error) {
	s := &suite{ctx: ctx}
	names := flag.String("cell", "", "run only these cells, a comma-separated list of names")
	report := flag.String("report", "tests/fault/report.json", "write the report to this file; empty writes none")
	name := flag.String("mutant", "", "build children as this mutant (see internal/mutant); with -mutants, try this one only")
	mutants := flag.Bool("mutants", false, "run every mutant and report which cell catches it")
	race := flag.Bool("race", false, "build children with the race detector")
	flag.Uint64Var(&s.seed, "seed", 0, "seed of every random decision; 0 draws one")
	flag.BoolVar(&s.short, "short", false, "run each cell for a few seconds")
	flag.DurationVar(&s.length, "for", 0, "time to inject faults in each cell")
	flag.StringVar(&s.dir, "keep", "", "directory for the history, which is kept even if all cells pass")
	flag.Usage = usage
	flag.Parse()
	chosen, err := choose(*names)
	if err != nil {
		return false, err
	}
	if s.seed == 0 {
		s.seed = rand.Uint64N(1<<32-1) + 1
	}
	if *mutants {
		return s.catchAll(*name, *report)
	}
	if *name != "" {
		if s.edited, err = edits(ctx, *name); err != nil {
			return false, err
		}
	}
	if err := s.place(*race); err != nil {
		return false, err
	}
	fmt.Printf("seed %d\n", s.seed)
	results := s.runAll(chosen)
	ok = !slices.ContainsFunc(results, func(r result) bool { return !r.OK })
	table(os.Stdout, results)
	if *report != "" {
		err = writeReport(*report, results)
	}
	switch {
	case !ok || s.kept:
		fmt.Printf("the history is in %s; to repeat: -cell %s -seed %d\n", s.dir, *names, s.seed)
	default:
		err = errors.Join(err, os.RemoveAll(s.dir))
	}
	if ctx.Err() != nil {
		err = errors.Join(err, errors.New("interrupted"))
	}
	return ok, err
}

// runAll runs cells one after another, and short cells two at a time, because they mostly wait. With
// three at a time the cell corrupt once took longer than its limit.
func (s *suite) runAll(chosen []*cell) []result {
	results := make([]result, len(chosen))
	places := make(chan struct{}, 1)
	if s.short {
		places = make(chan struct{}, 2)
	}
	var all sync.WaitGroup
	for i, c := range chosen {
		places <- struct{}{}
		all.Go(func() {
			defer func() { <-places }()
			if results[i] = (result{Cell: c.name, Seed: s.seed, Failures: []string{"interrupted"}}); s.ctx.Err() == nil {
				results[i] = s.run(c)
			}
		})
	}
	all.Wait()
	return results
}

func usage() {
	flag.PrintDefaults()
	for _, c := range cells {
		fmt.Fprintf(os.Stderr, "%4d  %-12s %s\n", c.number, c.name, c.summary)
	}
}

func choose(names string) (chosen []*cell, err error) {
	if names == "" {
		return cells, nil
	}
	for name := range strings.SplitSeq(names, ",") {
		i := slices.IndexFunc(cells, func(c *cell) bool { return c.name == name })
		if i < 0 {
			return nil, fmt.Errorf("unknown cell %q: -h lists the cells", name)
		}
		chosen = append(chosen, cells[i])
	}
	return chosen, nil
}

// place creates the directory for the history and builds the children there.
func (s *suite) place(race bool) (err error) {
	if s.kept = s.dir != ""; s.kept {
		if s.dir, err = filepath.Abs(s.dir); err == nil {
			err = os.MkdirAll(s.dir, 0o700)
		}
	} else {
		s.dir, err = os.MkdirTemp("", "kinora-fault-")
	}
	if err != nil {
		return err
	}
	s.binary = filepath.Join(s.dir, "child")
	s.flags = []string{"-tags", "kinora_fault"}
	if race {
		s.flags = append(s.flags, "-race")
	}
	return s.build(s.binary, s.edited)
}

// build builds the children. edited maps paths to file contents that replace the sources.
func (s *suite) build(binary string, edited map[string]string) error {
	args := append([]string{"build", "-o", binary}, s.flags...)
	if len(edited) > 0 {
		dir := binary + "-source"
		if err := os.Mkdir(dir, 0o700); err != nil {
			return err
		}
		overlay, err := mutant.Overlay(dir, edited)
		if err != nil {
			return err
		}
		args = append(args, "-overlay", overlay)
	}
	args = append(args, "github.com/kinora-go/kinora/tests/fault")
	out, err := exec.CommandContext(s.ctx, "go", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("build the children: %w\n%s", err, out)
	}
	return nil
}

// run runs one cell. If the cell fails, its history is kept.
func (s *suite) run(c *cell) result {
	r, err := newRun(s, c)
	if err != nil {
		return result{Cell: c.name, Seed: s.seed, Failures: []string{err.Error()}}
	}
	r.say("%d: %s, for %s", c.number, c.summary, r.length)
	r.guard(func() { c.run(r) })
	res := &r.result
	res.Cell, res.Seed, res.Duration, res.Note = c.name, s.seed, time.Since(r.start).Seconds(), r.note
	res.Injected, res.Failures = r.kinds(), r.failures
	res.OK = res.Judged && len(res.Failures) == 0
	if !res.OK || s.kept {
		r.keepHistory()
	}
	r.end()
	if res.OK && !s.kept {
		_ = os.RemoveAll(r.dir)
	}
	return r.result
}

// guard runs work in a goroutine of the cell. If work gives up, it stops there and the cell fails.
func (r *run) guard(work func()) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case giveUp:
			r.fail("gave up: %v", p.error)
		default:
			panic(p)
		}
	}()
	work()
}
