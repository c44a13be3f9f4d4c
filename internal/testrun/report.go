package main

import (
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
)

// report counts results and prints them as they come.
type report struct {
	out, log io.Writer
	begin    time.Time
	all      int // packages
	ended    int
	compiled int // packages of the first build
	cells    int // that have ended
	packages map[string]*state
	running  map[string]time.Time // cells
	loose    []string             // output that belongs to no package
	failures []string             // output of what failed
	skips    []string
	passed   int
	failed   int
	skipped  int
}

// state is a package whose tests run.
type state struct {
	begin   time.Time
	tests   map[string]*result // that run
	output  []string           // of the package itself
	passed  int
	failed  int
	skipped int
}

type result struct {
	begin  time.Time // zero while the test waits for its turn
	output []string
}

func newReport(out, log io.Writer, packages int) *report {
	return &report{out: out, log: log, begin: time.Now(), all: packages, packages: map[string]*state{}, running: map[string]time.Time{}}
}

// say prints a line with the time since the beginning.
func (r *report) say(format string, args ...any) {
	_, _ = fmt.Fprintf(r.out, "%7s  %s\n", time.Since(r.begin).Round(time.Second), fmt.Sprintf(format, args...))
}

// text records output that belongs to no package.
func (r *report) text(line string) {
	_, _ = io.WriteString(r.log, line)
	r.loose = append(r.loose, line)
}

// built takes a line of go build -v: the name of a package that is compiled, or an error.
func (r *report) built(line string) {
	r.compiled++
	r.text(line + "\n")
}

func (r *report) take(e event) {
	if e.Action == "build-output" {
		r.text(e.Output)
		return
	}
	if e.Package == "" {
		return
	}
	p := r.packages[e.Package]
	if p == nil {
		p = &state{begin: time.Now(), tests: map[string]*result{}}
		r.packages[e.Package] = p
	}
	_, _ = io.WriteString(r.log, e.Output)
	if e.Test == "" {
		r.takePackage(p, e)
		return
	}
	t := p.tests[e.Test]
	if t == nil {
		t = &result{begin: time.Now()}
		p.tests[e.Test] = t
	}
	switch e.Action {
	case "pause":
		t.begin = time.Time{}
	case "cont":
		t.begin = time.Now()
	case "output":
		t.output = append(t.output, e.Output)
	case "pass":
		p.passed++
		delete(p.tests, e.Test)
	case "skip":
		p.skipped++
		r.skips = append(r.skips, fmt.Sprintf("%s %s: %s", short(e.Package), e.Test, reason(t.output)))
		delete(p.tests, e.Test)
	case "fail":
		p.failed++
		r.failure(fmt.Sprintf("%s %s", short(e.Package), e.Test), t.output)
		delete(p.tests, e.Test)
	}
}

// takePackage takes an event of a package itself. A package that fails without a test that failed counts as one.
func (r *report) takePackage(p *state, e event) {
	if e.Action == "output" {
		p.output = append(p.output, e.Output)
		return
	}
	if !slices.Contains([]string{"pass", "fail", "skip"}, e.Action) {
		return
	}
	if e.Action == "fail" && p.failed == 0 {
		p.failed++
		output := p.output
		if e.FailedBuild != "" {
			output = slices.Concat(r.loose, output)
		}
		for _, name := range slices.Sorted(maps.Keys(p.tests)) { // a panic is in the output of a test that has not ended
			output = append(output, p.tests[name].output...)
		}
		r.failure(short(e.Package), output)
	}
	r.passed += p.passed
	r.failed += p.failed
	r.skipped += p.skipped
	r.ended++
	word := "ok"
	if e.Action == "fail" {
		word = "FAILED"
	}
	r.say("%-6s %6.1fs  %-40s %d passed, %d failed, %d skipped", word, e.Elapsed, short(e.Package), p.passed, p.failed, p.skipped)
	delete(r.packages, e.Package)
}

// failure prints what failed at once. The lines are printed again at the end.
func (r *report) failure(name string, output []string) {
	var text strings.Builder
	fmt.Fprintf(&text, "--- FAILED: %s\n", name)
	for _, line := range output {
		if !noise.MatchString(line) {
			text.WriteString(line)
		}
	}
	r.failures = append(r.failures, text.String())
	_, _ = io.WriteString(r.out, text.String())
}

// noise matches lines of go test -v that say nothing about a failure.
var noise = regexp.MustCompile(`^(=== |\s*--- PASS|redis: )`)

// reason returns the line that says why a test was skipped.
func reason(output []string) string {
	for _, line := range slices.Backward(output) {
		if !noise.MatchString(line) && !strings.Contains(line, "--- SKIP") {
			return strings.TrimSpace(line)
		}
	}
	return "no reason"
}

// short returns a package's path without the module's host and name.
func short(path string) string {
	return strings.TrimPrefix(strings.TrimPrefix(path, "github.com/kinora-go/kinora"), "/")
}

// skip counts a part that does not run.
func (r *report) skip(what string) {
	r.skipped++
	r.skips = append(r.skips, what)
}

// cellForm is the line that the fault suite prints when a cell ends.
var cellForm = regexp.MustCompile(`^(ok|FAILED|skipped)\s+(\S+)\s+(\S+)s\b\s*(.*)$`)

// cell takes a line of the fault suite.
func (r *report) cell(line string) {
	_, _ = fmt.Fprintln(r.log, line)
	m := cellForm.FindStringSubmatch(line)
	if m == nil {
		if begins := cellBegins.FindStringSubmatch(line); begins != nil {
			r.running[begins[1]] = time.Now()
		}
		if line != "" {
			r.loose = append(r.loose, line+"\n")
		}
		return
	}
	delete(r.running, m[2])
	r.say("%-6s %6ss  cell %s", m[1], m[3], m[2])
	r.cells++
	switch m[1] {
	case "ok":
		r.passed++
	case "skipped":
		r.skip("cell " + m[2] + ": " + m[4])
	default:
		r.failed++
		r.failure("cell "+m[2], []string{m[4] + "\n"})
	}
}

// cellBegins is the line that the fault suite prints when a cell begins.
var cellBegins = regexp.MustCompile(`^\s*\d+\.\d+s\s+(\S+)\s+\d+: `)

// commandEnded counts a command that failed without a test or cell that failed. failed is the count before the command.
func (r *report) commandEnded(name string, failed int, err error) {
	if err == nil {
		return
	}
	for _, path := range slices.Sorted(maps.Keys(r.packages)) { // the command was ended
		r.failed++
		r.failure(short(path), []string{"it has not ended\n"})
	}
	clear(r.packages)
	if r.failed == failed {
		r.failed++
		r.failure(name, slices.Concat(r.loose, []string{err.Error() + "\n"}))
	}
}

// progress prints the packages, tests and cells that are running, and for how long.
func (r *report) progress() {
	var long []string
	for path, p := range r.packages {
		name, since := "", time.Now()
		for test, t := range p.tests {
			if !t.begin.IsZero() && t.begin.Before(since) && !strings.Contains(test, "/") {
				name, since = test, t.begin
			}
		}
		line := fmt.Sprintf("%s for %s", short(path), time.Since(p.begin).Round(time.Second))
		if name != "" {
			line += fmt.Sprintf(" (%s for %s)", name, time.Since(since).Round(time.Second))
		}
		long = append(long, line)
	}
	for cell, since := range r.running {
		long = append(long, fmt.Sprintf("cell %s for %s", cell, time.Since(since).Round(time.Second)))
	}
	slices.Sort(long)
	if len(long) == 0 {
		long = append(long, fmt.Sprintf("go build, %d packages compiled", r.compiled))
	}
	r.say("running: %s; %d of %d packages have ended", strings.Join(long, ", "), r.ended, r.all)
}

// end prints the summary, and reports whether all is well.
func (r *report) end() bool {
	if len(r.failures) > 0 {
		_, _ = fmt.Fprintf(r.out, "\nwhat failed, again:\n%s", strings.Join(r.failures, ""))
	}
	if len(r.skips) > 0 {
		_, _ = fmt.Fprintf(r.out, "skipped:\n  %s\n", strings.Join(r.skips, "\n  "))
	}
	r.say("done")
	_, _ = fmt.Fprintf(r.out, "%d passed, %d failed, %d skipped\n", r.passed, r.failed, r.skipped)
	return r.failed == 0 && r.passed > 0
}
