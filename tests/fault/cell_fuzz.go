package main

import (
	"bytes"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

var fuzzCell = &cell{
	name: "fuzz", number: 22, what: "native fuzzing of decoders, names and configuration",
	full: time.Minute, short: time.Second, run: runFuzz,
}

// fuzzers are all there are, by package; the order is that of running.
var fuzzers = [][2]string{
	{"eventstore", "FuzzCheckJSON"}, {"eventstore", "FuzzCheckStream"}, {"eventstore", "FuzzJoinID"},
	{"outbox", "FuzzParseWatermill"}, {"outbox", "FuzzWireRoundTrip"},
	{"claim", "FuzzBackoff"}, {"claim", "FuzzTerms"}, {"marker", "FuzzRetention"}, {"providers/postgres", "FuzzSchemaName"},
}

var execs = regexp.MustCompile(`execs: (\d+)`)

// isOver tells that Go took the end of the time for a failure (golang/go#75804, until Go 1.27): what fails has an input, which Go
// writes down.
func isOver(out []byte) bool {
	return bytes.Contains(out, []byte("\n    context deadline exceeded\n")) && !bytes.Contains(out, []byte("Failing input"))
}

// runFuzz runs each for its share. What one of them finds, Go leaves in its package's testdata.
func runFuzz(r *run) {
	chosen, all := fuzzers, 0
	if r.suite.short {
		from := r.intn(len(fuzzers))
		chosen = append(slices.Clone(fuzzers[from:]), fuzzers[:from]...)[:3]
	}
	each := max(r.length/time.Duration(len(chosen)), 2*time.Second)
	for _, f := range chosen {
		out, err := exec.CommandContext(r.suite.ctx, "go", "test", "-run", "^$", "-fuzz", "^"+f[1]+"$", "-fuzztime", each.String(),
			"github.com/kinora-go/kinora/"+f[0]).CombinedOutput()
		r.trace.printf("%s %s", f[1], strings.ReplaceAll(string(out), "\n", " | "))
		if err != nil && !isOver(out) {
			r.fail("%s: %v: %s", f[1], err, out)
		}
		if said := execs.FindAllSubmatch(out, -1); len(said) > 0 { // else its corpus took all of its time
			n, _ := strconv.Atoi(string(said[len(said)-1][1]))
			r.inject(f[1], n)
			all += n
		}
	}
	if all == 0 {
		r.fail("nothing was tried")
	}
	r.result.Judged = true
}
