// Command testrun runs the tests and reports its progress: each package as it ends, with its time, and every half a minute
// the packages and tests that are running. Then it runs the fault suite in its short form. Its last line is
//
//	N passed, N failed, N skipped
//
//	go run ./internal/testrun [-race] [-p N] [-fault=false] [-seed N] [-log FILE] [PACKAGE...]
//
// Without packages it runs all of the workspace, those that take longest first. It exits with 1 if
// something failed or nothing ran. The log has the whole output of all tests.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

// first lists the packages that take longest. They begin first, so that the run does not end with one of them alone.
var first = []string{"/providers/postgres", "/examples/reviews", "/docs", "/providers/postgres/pooled", "/internal/mutant", "/providers/redis", "/providers/sqlite"}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	race := flag.Bool("race", false, "run the tests with the race detector")
	parallel := flag.Int("p", 4, "packages whose tests run at the same time; most of them wait for most of their time")
	fault := flag.Bool("fault", true, "run each cell of the fault suite for some seconds after the tests")
	seed := flag.Uint64("seed", 0, "seed of the fault suite; 0 draws one")
	log := flag.String("log", ".bin/test.log", "write the whole output to this file")
	flag.Parse()
	if *seed == 0 {
		*seed = rand.Uint64N(1<<32-1) + 1
	}
	ok, err := run(ctx, options{*race, *parallel, *fault, *seed, *log, flag.Args()}, os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testrun:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

type options struct {
	race     bool
	parallel int
	fault    bool
	seed     uint64
	log      string
	packages []string
}

func run(ctx context.Context, o options, out io.Writer) (ok bool, err error) {
	log, err := os.Create(o.log)
	if err != nil {
		return false, err
	}
	defer func() { _ = log.Close() }()
	packages, programs, err := withTests(ctx, o.packages)
	if err != nil {
		return false, err
	}
	// Without paths, clones in other directories share the build cache.
	if err := os.Setenv("GOFLAGS", strings.TrimSpace(os.Getenv("GOFLAGS")+" -trimpath")); err != nil {
		return false, err
	}
	r := newReport(out, log, len(packages))
	// Tests build programs of their own, at the same time. Shared packages are built once, before them.
	r.say("building %d packages, and what they require", len(packages))
	build := exec.CommandContext(ctx, "go", append([]string{"build", "-v"}, programs...)...)
	if err := r.follow(build, r.built); err != nil || r.failed > 0 {
		return r.end(), err
	}
	r.say("built")
	if err := r.follow(goTest(ctx, o, packages), r.event); err != nil {
		return false, err
	}
	switch {
	case slices.Contains(strings.Split(os.Getenv("KINORA_SKIP"), ","), "postgres"):
		r.skip("the fault suite: KINORA_SKIP=postgres")
	case o.fault:
		r.say("the fault suite, each cell for some seconds, with seed %d", o.seed)
		if err := r.follow(exec.CommandContext(ctx, "go", "run", "./tests/fault", "-short", "-report", ".bin/fault-short.json", "-seed", fmt.Sprint(o.seed)), r.cell); err != nil {
			return false, err
		}
		if r.cells == 0 {
			r.failed++
			r.failure("the fault suite", []string{"no cell has ended\n"})
		}
	}
	return r.end(), ctx.Err()
}

// withTests returns the packages that have tests, and those of them that have more than tests. Without patterns these are
// packages of the whole workspace.
func withTests(ctx context.Context, patterns []string) (packages, programs []string, err error) {
	if len(patterns) == 0 {
		patterns = []string{"work"}
	}
	const form = "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}} {{len .GoFiles}}{{end}}"
	cmd := exec.CommandContext(ctx, "go", append([]string{"list", "-f", form}, patterns...)...)
	cmd.Stderr = os.Stderr
	text, err := cmd.Output()
	if err != nil {
		return nil, nil, fmt.Errorf("list the packages: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		path, files, _ := strings.Cut(strings.TrimSpace(line), " ")
		packages = append(packages, path)
		if files != "0" {
			programs = append(programs, path)
		}
	}
	return order(packages), programs, nil
}

// order moves the packages of first to the front.
func order(packages []string) []string {
	rank := func(path string) int {
		if i := slices.IndexFunc(first, func(end string) bool { return strings.HasSuffix(path, end) }); i >= 0 {
			return i
		}
		return len(first)
	}
	slices.SortStableFunc(packages, func(a, b string) int { return rank(a) - rank(b) })
	return packages
}

// goTest returns the command that runs the tests, also those whose results are in the cache. Vet is a part of make lint. SQLite's own code, which is translated from
// C, runs without the race detector: with it the tests take ten times as long. The driver and Kinora run with it.
func goTest(ctx context.Context, o options, packages []string) *exec.Cmd {
	args := []string{"test", "-json", "-count=1", "-vet=off", "-timeout=2h", fmt.Sprintf("-p=%d", o.parallel)}
	if o.race {
		args = append(args, "-race", "-gcflags=modernc.org/sqlite/lib=-race=false")
	}
	cmd := exec.CommandContext(ctx, "go", append(args, packages...)...)
	// A program with the race detector sleeps for a second before it exits. Tests end programs often, so they sleep less.
	cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=100")
	return cmd
}

// follow runs a command and calls line with each line of its output, and reports its progress every half a minute.
func (r *report) follow(cmd *exec.Cmd, line func(string)) error {
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	failed := r.failed
	read, write := io.Pipe()
	cmd.Stdout, cmd.Stderr = write, write
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() {
		ended <- cmd.Wait()
		_ = write.Close()
	}()
	lines := make(chan string)
	go func() {
		defer close(lines)
		for s := bufio.NewReader(read); ; {
			text, err := s.ReadString('\n')
			if text != "" {
				lines <- strings.TrimSuffix(text, "\n")
			}
			if err != nil {
				return
			}
		}
	}()
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case text, more := <-lines:
			if !more {
				r.commandEnded(strings.Join(cmd.Args[:3], " "), failed, <-ended)
				return nil
			}
			line(text)
		case <-tick.C:
			r.progress()
		}
	}
}

// interval is the time between two reports of progress.
const interval = 30 * time.Second

// event is a line of go test -json.
type event struct {
	Action, Package, Test, Output string
	ImportPath                    string // of build output
	Elapsed                       float64
	FailedBuild                   string
}

func (r *report) event(line string) {
	var e event
	if json.Unmarshal([]byte(line), &e) != nil {
		r.text(line + "\n") // of the go command itself
		return
	}
	r.take(e)
}
