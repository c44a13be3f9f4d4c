package main

import (
	"bytes"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"
)

var fuzzCell = &cell{
	// Promise: G1.15, G10.2
	name: "fuzz", number: 22, summary: "native fuzzing of decoders, names and configuration",
	full: time.Minute, short: time.Second, run: runFuzz,
}

// fuzzers lists all fuzz tests by package, in the order in which they run.
var fuzzers = [][2]string{
	{"provider", "FuzzCheckJSON"}, {"provider", "FuzzCheckStream"}, {"provider", "FuzzParseHeaders"}, {"eventstore", "FuzzJoinID"},
	{"outbox", "FuzzParseWatermill"}, {"outbox", "FuzzWireRoundTrip"},
	{"claim", "FuzzBackoff"}, {"claim", "FuzzTerms"}, {"marker", "FuzzRetention"}, {"providers/postgres", "FuzzSchemaName"},
	{"decode", "FuzzJSON"}, {"decode", "FuzzCQRS"}, {"decode", "FuzzCloudEventsStructured"}, {"decode", "FuzzCloudEventsBinary"},
	{"projector", "FuzzDecoder"},
}

var execs = regexp.MustCompile(`execs: (\d+)`)

// isOver reports whether Go took the end of the fuzz time for a failure (golang/go#75804, until Go
// 1.27). A real failure has an input, and Go reports where it wrote it.
func isOver(out []byte) bool {
	return bytes.Contains(out, []byte("\n    context deadline exceeded\n")) && !bytes.Contains(out, []byte("Failing input"))
}

// runFuzz runs each fuzz test for its share of the time. Go writes failing inputs to the package's
// testdata.
func runFuzz(r *run) {
	chosen := fuzzers
	if r.suite.short {
		one := r.intn(len(fuzzers))
		chosen = fuzzers[one : one+1]
	}
	each := max(r.length/time.Duration(len(chosen)), 2*time.Second)
	r.needs = append(r.needs, "inputs") // otherwise loading the corpora took all of the time
	r.prove(func() { r.fuzz(chosen, each) })
	r.requireKinds()
	r.result.Judged = true
}

// fuzz runs fuzz tests, each for a time.
func (r *run) fuzz(chosen [][2]string, each time.Duration) {
	for _, f := range chosen {
		out, err := exec.CommandContext(r.suite.ctx, "go", "test", "-run", "^$", "-fuzz", "^"+f[1]+"$", "-fuzztime", each.String(),
			"github.com/kinora-go/kinora/"+f[0]).CombinedOutput()
		r.trace.printf("%s %s", f[1], strings.ReplaceAll(string(out), "\n", " | "))
		if err != nil && !isOver(out) || bytes.Contains(out, []byte("no fuzz tests")) {
			r.fail("%s: %v: %s", f[1], err, out)
		}
		if counts := execs.FindAllSubmatch(out, -1); len(counts) > 0 {
			n, _ := strconv.Atoi(string(counts[len(counts)-1][1]))
			r.inject(f[1], n)
			r.inject("inputs", n)
		}
	}
}
