package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/internal/mutant"
)

const beginning = `# Evidence

This page is written by ` + "`make evidence`" + `, so do not edit it. It lists for each promise of
[guarantees.md](guarantees.md):

- the tests that prove it, by package. Those of "every provider" are cases of the
  [conformance suites](../providers/providertest), which each provider runs as its ` + "`TestConformance`" + `
- the cells of the [fault suite](reliability.md#cells) that attack it
- the [mutants](reliability.md#mutants) that these tests detect: Kinora with one mechanism removed

The comments of the tests name their promises: see [CONTRIBUTING.md](../CONTRIBUTING.md#how-a-change-is-proven).

| promise | tests | cells | mutants |
|---|---|---|---|
`

// evidence returns the text of docs/evidence.md. Its error names everything that is wrong.
func evidence(root string) (string, error) {
	promises, wrong := readPromises(root)
	mentions, err := readMentions(root)
	wrong = errors.Join(wrong, err)
	byNumber := map[string][]test{}
	for _, m := range mentions {
		if !slices.ContainsFunc(promises, func(p promise) bool { return p.number == m.number }) {
			wrong = errors.Join(wrong, fmt.Errorf("%s: %q is not a promise of %s", m.place, m.number, promisesPage))
		}
		byNumber[m.number] = append(byNumber[m.number], m.test)
	}
	page := strings.Builder{}
	page.WriteString(beginning)
	for _, p := range promises {
		tests, cells := byPackage(byNumber[p.number])
		if len(tests) == 0 {
			wrong = errors.Join(wrong, fmt.Errorf("%s:%d: no test names %s: name it in one, or state a limit without a number", promisesPage, p.line, p.number))
		}
		fmt.Fprintf(&page, "| [%s](guarantees.md#%s) %s | %s | %s | %s |\n", p.number, p.anchor, p.words,
			strings.Join(tests, "<br>"), code(cells), code(detected(byNumber[p.number])))
	}
	return page.String(), wrong
}

// byPackage returns a line for each package with its tests, suites first, and the names of the cells.
func byPackage(all []test) (lines, cells []string) {
	names := map[string][]string{}
	for _, t := range all {
		if t.isCell {
			cells = append(cells, t.name)
		} else {
			names[t.pkg] = append(names[t.pkg], t.name)
		}
	}
	if cases := names[suites]; len(cases) > 0 {
		lines = append(lines, "every provider: "+code(cases))
		delete(names, suites)
	}
	for _, pkg := range slices.Sorted(maps.Keys(names)) {
		lines = append(lines, pkg+": "+code(names[pkg]))
	}
	return lines, cells
}

// detected returns the mutants that one of the tests detects.
func detected(tests []test) (names []string) {
	for _, m := range mutant.All {
		for _, part := range m.Tests {
			if slices.ContainsFunc(tests, func(t test) bool { return t.includes(part) }) {
				names = append(names, m.Name)
			}
		}
	}
	return names
}

func code(names []string) string {
	slices.Sort(names)
	if len(names) == 0 {
		return ""
	}
	return "`" + strings.Join(slices.Compact(names), "`, `") + "`"
}
