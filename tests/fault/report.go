package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
)

// result is a cell's entry in the report.
type result struct {
	Cell         string         `json:"cell"`
	Seed         uint64         `json:"seed"`
	Injected     map[string]int `json:"injected"`
	Commands     int            `json:"commands"`
	Acked        int            `json:"acked"`
	Ambiguous    int            `json:"ambiguous"`
	Lost         int            `json:"lost"`
	Doubled      int            `json:"doubled"`
	Phantom      int            `json:"phantom"`
	Misordered   int            `json:"misordered"`
	ControlWrong int            `json:"control_wrong"`
	ranOnce

	Rejected int `json:"rejected"`
	// ControlByFault counts items, without those that the broker copied.
	ControlByFault int            `json:"control_doubled_by_fault"`
	Deliveries     int            `json:"deliveries"`
	ClaimsBroken   int            `json:"claims_broken"`
	Parked         int            `json:"parked"`
	Judged         bool           `json:"judged"`             // the oracle has judged it
	Measured       map[string]int `json:"measured,omitempty"` // worst values
	Failures       []string       `json:"failures,omitempty"`
	Note           string         `json:"note,omitempty"`
}

func (r result) name() string { return r.Cell }

// isSkipped reports whether the cell could not run here.
func (r *result) isSkipped() bool { return r.OK && strings.HasPrefix(r.Note, "skipped") }

// line writes the result as a line that programs can read: "ok" or "FAILED", the cell, its seconds, and the first failure.
func (r *result) line(to io.Writer) {
	switch {
	case r.isSkipped():
		_, _ = fmt.Fprintf(to, "%-7s %s  %.1fs  %s\n", "skipped", r.Cell, r.Duration, r.Note)
	case r.OK:
		_, _ = fmt.Fprintf(to, "%-7s %s  %.1fs\n", "ok", r.Cell, r.Duration)
	default:
		why := "not judged"
		if len(r.Failures) > 0 {
			why, _, _ = strings.Cut(r.Failures[0], "\n")
		}
		_, _ = fmt.Fprintf(to, "%-7s %s  %.1fs  %s\n", "FAILED", r.Cell, r.Duration, why)
	}
}

// tally writes how many cells passed, failed and were skipped, those in the record included.
func tally(to io.Writer, results []result, recorded int) {
	passed, failed, skipped := 0, 0, recorded
	for _, r := range results {
		switch {
		case !r.OK:
			failed++
		case r.isSkipped():
			skipped++
		default:
			passed++
		}
	}
	_, _ = fmt.Fprintf(to, "%d passed, %d failed, %d skipped\n", passed, failed, skipped)
}

// table writes the results as a table.
func table(to io.Writer, results []result) {
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, "cell\tseconds\tcommands\tambiguous\tdeliveries\tlost\tdoubled\tphantom\tmisordered\tcontrol wrong\t\tinjected")
	for _, r := range results {
		word := "ok"
		switch {
		case !r.OK:
			word = "FAILED"
		case r.Note != "":
			word = r.Note
		}
		_, _ = fmt.Fprintf(w, "%s\t%.0f\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%s\t%s\n", r.Cell, r.Duration, r.Commands, r.Ambiguous, r.Deliveries,
			r.Lost, r.Doubled, r.Phantom, r.Misordered, r.ControlWrong, word, list(r.Injected))
	}
	_ = w.Flush()
	for _, r := range results {
		for _, f := range r.Failures {
			_, _ = fmt.Fprintf(to, "%s: %s\n", r.Cell, f)
		}
	}
}

func list(counts map[string]int) string {
	var all []string
	for _, kind := range slices.Sorted(maps.Keys(counts)) {
		all = append(all, fmt.Sprintf("%s %d", kind, counts[kind]))
	}
	return strings.Join(all, ", ")
}
