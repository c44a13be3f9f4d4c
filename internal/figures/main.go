// Command figures writes the measured figures of the pages again, from the records of the measurements:
// bench/results.json, tests/fault/report.json and tests/fault/mutants.json. It fails if a page has a
// figure without a record.
//
//	go run ./internal/figures
//
// A page marks its figures by comments, which readers do not see:
//
//   - Before a number or a date, a comment such as "<!-- =relay/count vs_limit -->" names a record and its
//     field.
//   - Before a table, "<!-- figures: . . ours vs_limit -->" names the field of each column. A dot is a column
//     that people write. The name of a row's record is a code span in its first cell. After the number, a cell
//     keeps its text, such as a goal in parentheses.
//   - Between "<!-- made: cells -->" and "<!-- end -->", the whole text is made from the code and the records.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// claims are the pages in which each measured figure must have a record.
var claims = []string{"README.md", "docs/performance.md", "docs/reliability.md"}

// others are further pages with marked figures.
var others = []string{"docs/mutants.md", "docs/scale.md", "docs/guide/3-the-log.md"}

func main() {
	findings, err := run(".")
	if err != nil {
		fmt.Fprintln(os.Stderr, "figures:", err)
		os.Exit(1)
	}
	for _, f := range findings {
		fmt.Fprintln(os.Stderr, f)
	}
	if len(findings) > 0 {
		os.Exit(1)
	}
}

// run writes the pages under root that change, and returns the figures without a record.
func run(root string) (findings []string, err error) {
	r, err := load(root)
	if err != nil {
		return nil, err
	}
	for _, page := range append(claims, others...) {
		path := filepath.Join(root, page)
		before, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		after, err := rewrite(string(before), r)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", page, err)
		}
		if after == string(before) {
			continue
		}
		if err := os.WriteFile(path, []byte(after), 0o644); err != nil {
			return nil, err
		}
		fmt.Println(page)
	}
	for _, page := range claims {
		text, err := os.ReadFile(filepath.Join(root, page))
		if err != nil {
			return nil, err
		}
		found, err := unrecorded(page, string(text), r, settings)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", page, err)
		}
		findings = append(findings, found...)
	}
	return findings, nil
}

// source returns the figures of the records.
type source interface {
	// has reports whether there is a record with this name.
	has(name string) bool
	// figure returns a field of a record, or "" if the record does not have the field.
	figure(name, field string) (string, error)
	// made returns a text that is made as a whole.
	made(name string) (string, error)
}

const number = `[0-9]+(?:[,.][0-9]+)*`

var (
	spanForm   = regexp.MustCompile(`<!-- =(\S+(?: \S+)*?) (\S+) -->(?:\d{1,2} [A-Z][a-z]+ \d{4}|` + number + `|no record|#)?`)
	tableForm  = regexp.MustCompile(`(?m)^<!-- figures: (.*) -->\n((?:\|.*\n)+)`)
	regionForm = regexp.MustCompile(`(?ms)^<!-- made: (\S+) -->\n(.*?)^<!-- end -->$`)
	codeForm   = regexp.MustCompile("`([^`]+)`")
	numberForm = regexp.MustCompile(`^(?:` + number + `|#)?`)
)

// rewrite returns a page with the figures of s.
func rewrite(text string, s source) (string, error) {
	var first error
	keep := func(value string, err error) string {
		if first == nil {
			first = err
		}
		return value
	}
	text = regionForm.ReplaceAllStringFunc(text, func(region string) string {
		name := regionForm.FindStringSubmatch(region)[1]
		return "<!-- made: " + name + " -->\n" + keep(s.made(name)) + "<!-- end -->"
	})
	text = tableForm.ReplaceAllStringFunc(text, func(table string) string { return keep(fill(table, s)) })
	text = spanForm.ReplaceAllStringFunc(text, func(span string) string {
		m := spanForm.FindStringSubmatch(span)
		value := keep(s.figure(m[1], m[2]))
		if value == "" && first == nil {
			first = fmt.Errorf("the record %q has no field %q", m[1], m[2])
		}
		return "<!-- =" + m[1] + " " + m[2] + " -->" + value
	})
	return text, first
}

// fill returns a table with the figures of s.
func fill(table string, s source) (string, error) {
	lines := strings.Split(strings.TrimSuffix(table, "\n"), "\n")
	columns := strings.Fields(tableForm.FindStringSubmatch(table)[1])
	for i, line := range lines {
		if i < 3 { // the comment, the head and its line
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		if len(cells) != len(columns) {
			return "", fmt.Errorf("%d columns are named, and this row has %d: %s", len(columns), len(cells), line)
		}
		for c, column := range columns {
			if column == "." {
				continue
			}
			// A row may have several records, whose names have the row's as their beginning: p99/ours.
			more, field, ok := strings.Cut(column, "/")
			if !ok {
				more, field = "", column
			}
			value, err := figureOfRow(cells[0], more, field, s)
			if err != nil {
				return "", err
			}
			text := strings.TrimSpace(cells[c])
			text = strings.TrimSpace(strings.TrimPrefix(text, numberForm.FindString(text)))
			if !strings.HasPrefix(text, ",") {
				text = " " + text
			}
			cells[c] = " " + strings.TrimSpace(value+text) + " "
		}
		lines[i] = "|" + strings.Join(cells, "|") + "|"
	}
	return strings.Join(lines, "\n") + "\n", nil
}

// figureOfRow returns a field of the record that a code span in the first cell of a row names, or names with
// more behind it.
func figureOfRow(first, more, field string, s source) (string, error) {
	for _, span := range codeForm.FindAllStringSubmatch(first, -1) {
		if name := strings.TrimSpace(span[1] + " " + more); s.has(name) {
			return s.figure(name, field)
		}
	}
	return "", fmt.Errorf("no record is named in this row: %s", first)
}
