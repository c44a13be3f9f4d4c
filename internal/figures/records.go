package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kinora-go/kinora/internal/mutant"
)

// records are the results of all measurements, by their names: lines of the bench such as "relay/count", cells
// such as "cell/kill", and "bench", "cells" and "mutants" for what concerns all of a kind.
type records struct {
	fields  map[string]map[string]any
	cells   []string            // cells with a result, in the order of the report
	all     []cell              // cells of the suite
	mutants map[string]recorded // by the name of the mutant
}

// cell is a cell of tests/fault as its code declares it.
type cell struct{ name, number, summary string }

// recorded is an entry of tests/fault/mutants.json.
type recorded struct {
	Mutant string `json:"mutant"`
	OK     bool   `json:"ok"` // all its tests failed, and one of its cells
	Date   string `json:"date"`
}

func load(root string) (*records, error) {
	r := &records{fields: map[string]map[string]any{}, mutants: map[string]recorded{}}
	var bench struct {
		Machine, Settings map[string]any
		Results           []map[string]any
	}
	var report []map[string]any
	var mutants []recorded
	err := errors.Join(
		read(filepath.Join(root, "bench/results.json"), &bench),
		read(filepath.Join(root, "tests/fault/report.json"), &report),
		read(filepath.Join(root, "tests/fault/mutants.json"), &mutants))
	if err != nil {
		return nil, err
	}
	days := map[string]any{}
	for _, line := range bench.Results {
		r.fields[line["name"].(string)] = line
		between(days, line["date"])
	}
	r.fields["bench"] = merge(bench.Machine, bench.Settings, days)
	r.addMutants(mutants)
	r.addCells(report)
	r.all, err = readCells(filepath.Join(root, "tests/fault"))
	for _, c := range r.all {
		if name := "cell/" + c.name; !r.has(name) {
			r.fields[name] = map[string]any{}
		}
	}
	return r, err
}

func read(path string, to any) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, to); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

// addMutants adds the record of the mutants.
func (r *records) addMutants(entries []recorded) {
	caught := 0
	for _, e := range entries {
		r.mutants[e.Mutant] = e
		if e.OK {
			caught++
		}
	}
	r.fields["mutants"] = map[string]any{"count": float64(len(mutant.All)), "recorded": float64(len(entries)), "caught": float64(caught)}
}

// addCells adds the cells of a report. The record "cells" has the sums of their fields.
func (r *records) addCells(report []map[string]any) {
	sums := map[string]any{"count": float64(len(report)), "lost": 0.0, "doubled": 0.0, "phantom": 0.0, "misordered": 0.0, "failed": 0.0}
	for _, c := range report {
		injected, _ := c["injected"].(map[string]any)
		measured, _ := c["measured"].(map[string]any)
		name := c["cell"].(string)
		r.cells = append(r.cells, name)
		r.fields["cell/"+name] = merge(measured, injected, c)
		if c["ok"] != true {
			sums["failed"] = sums["failed"].(float64) + 1
		}
		for kind, n := range injected { // a kind may have the name of a field, such as "lost"
			r.fields["cell/"+name]["injected."+kind] = n
		}
		kills := 0.0
		for field, value := range merge(injected, c) {
			n, ok := value.(float64)
			if !ok || field == "seed" {
				continue
			}
			sum, _ := sums[field].(float64)
			sums[field] = sum + n
			if slices.Contains([]string{"kill_producer", "kill_relay", "kill_runner", "kill_worker", "kill_reader", "kill_builder"}, field) {
				kills += n
			}
		}
		r.fields["cell/"+name]["kills"] = kills
		total, _ := sums["kills"].(float64)
		sums["kills"] = total + kills
		between(sums, c["date"])
	}
	r.fields["cells"] = sums
}

// between extends the days from "first" to "last" by that of value, if it is a time or a day.
func between(days map[string]any, value any) {
	text, _ := value.(string)
	if len(text) < len(time.DateOnly) {
		return
	}
	text = text[:len(time.DateOnly)]
	if first, ok := days["first"].(string); !ok || text < first {
		days["first"] = text
	}
	if last, ok := days["last"].(string); !ok || text > last {
		days["last"] = text
	}
}

func merge(all ...map[string]any) map[string]any {
	merged := map[string]any{}
	for _, one := range all {
		for key, value := range one {
			merged[key] = value
		}
	}
	return merged
}

func (r *records) has(name string) bool { return r.fields[name] != nil }

func (r *records) figure(name, field string) (string, error) {
	if !r.has(name) {
		return "", fmt.Errorf("there is no record %q", name)
	}
	if len(r.fields[name]) == 0 {
		return "no record", nil
	}
	switch v := r.fields[name][field].(type) {
	case nil:
		return "", nil
	case float64:
		return format(v), nil
	case string:
		if day, err := time.Parse(time.DateOnly, v[:min(len(v), len(time.DateOnly))]); err == nil {
			return day.Format("2 January 2006"), nil
		}
		version, _, _ := strings.Cut(v, " ")
		return version, nil
	default:
		return "", fmt.Errorf("the field %q of %q is no figure", field, name)
	}
}

// format returns counts as they are, and other numbers with at least three digits.
func format(x float64) string {
	switch {
	case x == math.Trunc(x), x >= 99.95:
		return thousands(int(math.Round(x)))
	case x >= 9.995:
		return strconv.FormatFloat(x, 'f', 1, 64)
	}
	return strconv.FormatFloat(x, 'f', 2, 64)
}

// thousands returns n with a comma between each three digits.
func thousands(n int) string {
	if n < 1000 {
		return strconv.Itoa(n)
	}
	return fmt.Sprintf("%s,%03d", thousands(n/1000), n%1000)
}

func (r *records) made(name string) (string, error) {
	switch name {
	case "cells":
		return r.cellTable(), nil
	case "results":
		return r.resultTable(), nil
	case "mutants":
		return r.mutantTables(), nil
	}
	return "", fmt.Errorf("nothing is made as %q", name)
}

// cellTable is a table of the cells of the suite.
func (r *records) cellTable() string {
	var b strings.Builder
	b.WriteString("| cell | no. | faults |\n|---|---|---|\n")
	for _, c := range r.all {
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", c.name, c.number, c.summary)
	}
	return b.String()
}

// ordinary are kinds of injected faults and of other counts that nearly all cells have.
var ordinary = []string{"again", "attempts", "concurrent", "redelivered", "republished", "suspects", "twin", "units_of_many", "units_of_one"}

// resultTable is a table of the results of the cells, and of cells that have none.
func (r *records) resultTable() string {
	var b strings.Builder
	b.WriteString("| cell | day, seed | seconds | commands | deliveries | injected and counted |\n|---|---|---|---|---|---|\n")
	for _, name := range r.cells {
		c := r.fields["cell/"+name]
		var kinds []string
		injected, _ := c["injected"].(map[string]any)
		for kind, value := range injected {
			if n, _ := value.(float64); n > 0 && !slices.Contains(ordinary, kind) {
				kinds = append(kinds, strings.ReplaceAll(strings.TrimSuffix(kind, "_"), "_", " ")+" "+format(n))
			}
		}
		slices.Sort(kinds)
		figure := func(field string) string {
			n, _ := c[field].(float64)
			return format(n)
		}
		seed, _ := c["seed"].(float64)
		day, _ := r.figure("cell/"+name, "date")
		run := strings.TrimPrefix(day+", "+strconv.FormatFloat(seed, 'f', 0, 64), ", ")
		length, _ := c["duration_s"].(float64)
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s | %s |\n", name, run, format(math.Round(length)), figure("commands"), figure("deliveries"),
			strings.Join(kinds, ", "))
	}
	for _, c := range r.all {
		if !slices.Contains(r.cells, c.name) {
			fmt.Fprintf(&b, "| `%s` | no record | | | | |\n", c.name)
		}
	}
	return b.String()
}

// mutantTables are tables of the mutants, one for each group.
func (r *records) mutantTables() string {
	var b strings.Builder
	for _, g := range mutant.Groups {
		fmt.Fprintf(&b, "\n## %s\n\n| mutant | then | must be caught by | caught on |\n|---|---|---|---|\n", g.Title)
		for _, m := range g.Mutants {
			var by []string
			for _, t := range m.Tests {
				by = append(by, "`"+t.Name+"`")
			}
			for _, c := range m.Cells {
				by = append(by, "cell `"+c+"`")
			}
			day := "no record"
			if e, ok := r.mutants[m.Name]; ok && e.OK {
				day = e.Date[:len(time.DateOnly)]
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", m.Name, m.What, strings.Join(slices.Compact(by), ", "), day)
		}
	}
	return b.String() + "\n"
}

var cellForm = regexp.MustCompile(`&cell\{\s*(?://.*\n\s*)?name: "(.*?)", number: (\d+),\s*summary: "(.*?)",\s*\n`)

// readCells reads the cells from the code of the suite in dir, in the order of their numbers.
func readCells(dir string) (cells []cell, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "cell_*.go"))
	for _, path := range files {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		for _, m := range cellForm.FindAllStringSubmatch(string(text), -1) {
			cells = append(cells, cell{m[1], m[2], m[3]})
		}
	}
	slices.SortFunc(cells, func(a, b cell) int {
		return cmp.Or(cmp.Compare(len(a.number), len(b.number)), cmp.Compare(a.number, b.number), cmp.Compare(a.name, b.name))
	})
	return cells, err
}
