// The fault suite kills, stops and disconnects processes that use Kinora while they work. An oracle
// that does not use Kinora judges whether any event was lost, doubled, made up or out of order.
//
// go run ./tests/fault [-cell name,…] [-seed N] [-short] [-for D] [-report FILE] [-again] [-keep DIR]
// go run ./tests/fault -mutants [-mutant NAME] [-again]
// go run ./tests/fault -long [-cell name,…] [-again]
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

	"github.com/kinora-go/kinora/internal/fingerprint"
	"github.com/kinora-go/kinora/internal/mutant"
)

// suite is one run of the program.
type suite struct {
	ctx      context.Context
	seed     uint64
	short    bool
	again    bool          // also run what the record has
	code     string        // the fingerprint of the code
	parallel int           // mutants at a time
	length   time.Duration // of each cell, unless zero
	dir      string
	mutant   bool   // the children lack a mechanism
	kept     bool   // dir is never removed
	binary   string // the children's program
	skewed   string // the program of children with a wrong clock, once it is built
	skewing  sync.Mutex
	flags    []string          // flags for go build
	edited   map[string]string // file contents that builds use instead of the sources, by path
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
	names := flag.String("cell", "", "run only these cells (or parts, with -long), a comma-separated list of names")
	report := flag.String("report", "", "write the record to this file (default the one in tests/fault, if the form is full)")
	name := flag.String("mutant", "", "build children as this mutant (see internal/mutant); with -mutants, try this one only")
	mutants := flag.Bool("mutants", false, "run the tests and the cells of every mutant")
	long := flag.Bool("long", false, "run the long form of tests")
	flag.IntVar(&s.parallel, "parallel", 3, "with -mutants, how many mutants that only tests notice run at a time")
	race := flag.Bool("race", false, "build children with the race detector")
	flag.BoolVar(&s.again, "again", false, "also run what the record has for the present code")
	flag.Uint64Var(&s.seed, "seed", 0, "seed of every random decision; 0 draws one")
	flag.BoolVar(&s.short, "short", false, "run each cell for a few seconds")
	flag.DurationVar(&s.length, "for", 0, "time to inject faults in each cell")
	flag.StringVar(&s.dir, "keep", "", "directory for the history, which is kept even if all cells pass")
	flag.Usage = usage
	flag.Parse()
	isSet := false
	flag.Visit(func(f *flag.Flag) { isSet = isSet || f.Name == "report" })
	path := func(file string) string {
		if !isSet && !s.short && s.length == 0 && (*mutants || *name == "") {
			return "tests/fault/" + file
		}
		return *report
	}
	root, err := mutant.Root(ctx)
	if err != nil {
		return false, err
	}
	if s.code, err = fingerprint.Of(ctx, root, *mutants || *long); err != nil && !s.short { // there is no record
		return false, err
	}
	switch {
	case *long:
		return s.runLong(*names, path("long.json"))
	case *mutants:
		return s.catchAll(*name, path("mutants.json"))
	}
	if *name != "" {
		if s.edited, err = edits(ctx, *name); err != nil {
			return false, err
		}
	}
	return s.runCells(*names, path("report.json"), *race)
}

// runCells runs the named cells, or those that the record lacks.
func (s *suite) runCells(names, report string, race bool) (ok bool, err error) {
	chosen, err := choose(names)
	if err != nil {
		return false, err
	}
	rec, err := openRecord[result](report, cellNames(cells), s.codeOf)
	if err != nil {
		return false, err
	}
	recorded := 0
	if names == "" && !s.short && !s.again {
		chosen = slices.DeleteFunc(slices.Clone(chosen), func(c *cell) bool { return rec.has(c.name) })
		recorded = len(cells) - len(chosen)
		fmt.Printf("the record has %d of %d cells for the code %s\n", recorded, len(cells), s.code)
	}
	if s.seed == 0 {
		s.seed = rand.Uint64N(1<<32-1) + 1
	}
	if err := s.place(race); err != nil {
		return false, err
	}
	fmt.Printf("seed %d\n", s.seed)
	results, err := s.runAll(chosen, rec)
	ok = !slices.ContainsFunc(results, func(r result) bool { return !r.OK })
	table(os.Stdout, results)
	defer tally(os.Stdout, results, recorded)
	switch {
	case !ok || s.kept:
		fmt.Printf("the history is in %s; to repeat: -cell %s -seed %d\n", s.dir, names, s.seed)
	default:
		err = errors.Join(err, os.RemoveAll(s.dir))
	}
	if s.ctx.Err() != nil {
		err = errors.Join(err, errors.New("interrupted"))
	}
	return ok, err
}

// runAll runs cells at the same time, because most of them mostly wait: three of the short form, and two of the full form.
// There, cells that limit times run first, alone.
func (s *suite) runAll(chosen []*cell, rec *record[result]) (results []result, err error) {
	var mu sync.Mutex
	one := func(c *cell) {
		r := result{Cell: c.name, Seed: s.seed, Failures: []string{"interrupted"}}
		if s.ctx.Err() == nil {
			begin := time.Now()
			r = s.run(c)
			r.ranOnce = rec.ended(r.Cell, r.OK, begin)
		}
		r.line(os.Stdout)
		mu.Lock()
		defer mu.Unlock()
		results = append(results, r)
		if s.ctx.Err() == nil {
			err = errors.Join(err, rec.put(r))
		}
	}
	places := make(chan struct{}, 2)
	if s.short {
		places = make(chan struct{}, 3)
	}
	var all sync.WaitGroup
	defer all.Wait()
	for _, c := range chosen {
		if c.alone && !s.short {
			one(c)
		}
	}
	longestFirst := slices.SortedStableFunc(slices.Values(chosen), func(a, b *cell) int { return int(b.full - a.full) })
	for _, c := range longestFirst {
		if c.alone && !s.short {
			continue
		}
		places <- struct{}{}
		all.Go(func() {
			defer func() { <-places }()
			one(c)
		})
	}
	all.Wait()
	return results, err
}

func cellNames(all []*cell) (names []string) {
	for _, c := range all {
		names = append(names, c.name)
	}
	return names
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
	res.Cell, res.Seed, res.Note = c.name, s.seed, r.note
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
