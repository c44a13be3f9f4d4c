// Command steady runs the whole again and again, each time from a clean clone of one commit: warm, cold, and under
// load. A suite that fails by chance proves nothing when it passes.
//
//	go run ./internal/steady [-commit HEAD] [-runs warm,warm,cold,load] [-record FILE] [-logs DIR]
//
// A run is `make test` in the clone. A cold run has an empty build cache and module cache; as root on Debian it runs in a
// fresh Debian system, which debootstrap makes, with nothing but Go, git and make. A run under load has four loops that
// are busy all the time. The record gets each run as it ends, with the seed of its fault suite and what failed, so an
// interrupted command continues with the runs that are left. It exits with 1 if a run failed.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Run is a run on record.
type Run struct {
	Commit   string    `json:"commit"`
	Kind     string    `json:"kind"` // warm, cold or load
	Began    time.Time `json:"began"`
	Seconds  float64   `json:"seconds"`
	Seed     uint64    `json:"seed"` // of the fault suite
	Passed   int       `json:"passed"`
	Failed   int       `json:"failed"`
	Skipped  int       `json:"skipped"`
	Last     string    `json:"last"` // the line of the numbers, which make may follow; without one the last line
	Failures []string  `json:"failures,omitempty"`
	On       string    `json:"on,omitempty"` // the system of a cold run
}

// usual are six warm runs, two cold ones, and two under load. The runs that find most begin.
const usual = "warm,load,cold,warm,warm,load,cold,warm,warm,warm"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	commit := flag.String("commit", "HEAD", "the commit that is run")
	runs := flag.String("runs", usual, "the kinds of the runs, in order")
	record := flag.String("record", "tests/steady.json", "the file that gets each run")
	logs := flag.String("logs", ".bin/steady", "the directory that gets the output of each run")
	flag.Parse()
	forgetMake()
	ok, err := steady(ctx, *commit, strings.Split(*runs, ","), *record, *logs)
	if err != nil {
		fmt.Fprintln(os.Stderr, "steady:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

func steady(ctx context.Context, commit string, kinds []string, record, logs string) (ok bool, err error) {
	out, err := exec.CommandContext(ctx, "git", "rev-parse", "--short=12", commit+"^{commit}").Output()
	if err != nil {
		return false, fmt.Errorf("find the commit %s: %w", commit, err)
	}
	commit = strings.TrimSpace(string(out))
	if err := os.MkdirAll(logs, 0o755); err != nil {
		return false, err
	}
	all, err := read(record)
	if err != nil {
		return false, err
	}
	ok = true
	for i, kind := range left(all, commit, kinds) {
		log := filepath.Join(logs, fmt.Sprintf("%s-%d-%s.log", commit, len(all)+1, kind))
		fmt.Printf("run %d: %s; its output is in %s\n", i+1, kind, log)
		r, err := one(ctx, commit, kind, log)
		if err != nil {
			return false, err
		}
		fmt.Printf("%s, %.0f s, seed %d\n", r.Last, r.Seconds, r.Seed)
		all = append(all, r)
		if err := write(record, all); err != nil {
			return false, err
		}
		ok = ok && r.ok()
	}
	return ok, nil
}

func (r *Run) ok() bool { return r.Passed > 0 && r.Failed == 0 && len(r.Failures) == 0 }

// left returns the kinds that the commit has not passed since its last failure.
func left(all []Run, commit string, kinds []string) (rest []string) {
	done := map[string]int{}
	for _, r := range all {
		switch {
		case r.Commit != commit:
		case r.ok():
			done[r.Kind]++
		default:
			clear(done)
		}
	}
	for _, kind := range kinds {
		if done[kind]--; done[kind] < 0 {
			rest = append(rest, kind)
		}
	}
	return rest
}

func read(record string) (all []Run, err error) {
	text, err := os.ReadFile(record)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	return all, err
}

func write(record string, all []Run) error {
	text, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(record+".new", append(text, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(record+".new", record)
}

// forgetMake removes what make hands on to the makes that it starts: the arguments of this command are not those of the
// tests.
func forgetMake() {
	for _, name := range []string{"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS"} {
		_ = os.Unsetenv(name) // never fails: the name is valid
	}
}

// one runs the whole once, in a clean clone.
func one(ctx context.Context, commit, kind, log string) (r Run, err error) {
	r = Run{Commit: commit, Kind: kind, Began: time.Now().UTC().Truncate(time.Second)}
	dir, err := os.MkdirTemp("", "kinora-steady-")
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, remove(dir)) }()
	clone := filepath.Join(dir, "kinora")
	text, err := exec.CommandContext(ctx, "sh", "-c", `git clone -q --no-local . "$1" && git -C "$1" checkout -q "$2"`, "sh", clone, commit).CombinedOutput()
	if err != nil {
		return r, fmt.Errorf("clone: %w\n%s", err, text)
	}
	cmd := exec.CommandContext(ctx, "make", "-C", clone, "test")
	switch kind {
	case "warm":
	case "cold":
		if cmd, r.On, err = cold(ctx, dir, clone); err != nil {
			return r, err
		}
	case "load":
		stop := load()
		defer stop()
	default:
		return r, fmt.Errorf("unknown kind of run %q: want warm, cold or load", kind)
	}
	to, err := os.Create(log)
	if err != nil {
		return r, err
	}
	defer func() { _ = to.Close() }()
	cmd.Stdout, cmd.Stderr = to, to
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	begin := time.Now()
	ended := cmd.Run()
	r.Seconds = time.Since(begin).Round(time.Second).Seconds()
	if ctx.Err() != nil {
		return r, ctx.Err()
	}
	if err := r.readLog(log); err != nil {
		return r, err
	}
	if ended != nil && r.Failed == 0 {
		r.Failures = append(r.Failures, ended.Error())
	}
	if !r.ok() { // the whole output of its tests, which the clone takes with it
		for _, from := range []string{clone, filepath.Join(dir, "debian", "kinora")} {
			if text, err := os.ReadFile(filepath.Join(from, ".bin", "test.log")); err == nil {
				return r, os.WriteFile(log+".whole", text, 0o600)
			}
		}
	}
	return r, nil
}

var (
	lastForm = regexp.MustCompile(`^(\d+) passed, (\d+) failed, (\d+) skipped$`)
	seedForm = regexp.MustCompile(`the fault suite, .* with seed (\d+)$`)
	failForm = regexp.MustCompile(`^--- FAILED: (.*)$`)
)

// readLog reads the last line, the seed, and what failed.
func (r *Run) readLog(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	seen := map[string]bool{}
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		line := lines.Text()
		if m := seedForm.FindStringSubmatch(line); m != nil {
			r.Seed, _ = strconv.ParseUint(m[1], 10, 64)
		}
		if m := failForm.FindStringSubmatch(line); m != nil && !seen[m[1]] {
			seen[m[1]] = true
			r.Failures = append(r.Failures, m[1])
		}
		if m := lastForm.FindStringSubmatch(line); m != nil {
			r.Last = line
			r.Passed, _ = strconv.Atoi(m[1])
			r.Failed, _ = strconv.Atoi(m[2])
			r.Skipped, _ = strconv.Atoi(m[3])
		} else if r.Passed == 0 {
			r.Last = line
		}
	}
	return lines.Err()
}
