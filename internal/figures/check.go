package main

import (
	"fmt"
	"regexp"
	"strings"
)

// setting is a number with a unit that was chosen, not measured.
type setting struct{ page, text, why string }

// units follow a measured number.
const units = `%|µs|ms|s|seconds?|minutes?|hours?|bytes|KB|MB|GB|TB|times|levels|[a-z]+/s|[a-z]+(?: [a-z]+)? (?:a|per) (?:second|minute|hour)`

var (
	// measured matches a number with a unit or decimals, and numbers that are not round. A round number
	// without a unit, such as 10,000 events, is how much a measurement was given.
	measured = regexp.MustCompile(`\d[\d,.]* ?(?:` + units + `)(?:\W|$)|\d\.\d|\d,\d\d[1-9]|\d,\d[1-9]\d|\d,[1-9]\d\d`)
	// compared matches a measurement in words.
	compared = regexp.MustCompile(`(?i)\b(?:half|twice|double|(?:one|an?|two|three) (?:third|quarter|fifth|sixth|seventh|eighth|ninth|tenth)s?|times)\b[^.|;]{0,30}\b(?:fast|faster|slow|slower|throughput|cost|costs|limit|peer)\b`)

	blockForm   = regexp.MustCompile("(?ms)^```.*?^```$")
	commentForm = regexp.MustCompile(`(?s)<!--.*?-->`)
	linkForm    = regexp.MustCompile(`\]\([^)]*\)|<[^>]*>|https?://\S+`)
	goalForm    = regexp.MustCompile(`# \([^)]*\)|\(goal[^)]*\)`)
)

// unknown has "#" for each figure, and no text that is made.
type unknown struct{ source }

func (unknown) figure(string, string) (string, error) { return "#", nil }
func (unknown) made(string) (string, error)           { return "", nil }

// unrecorded returns the figures of a page that have no record and are not settings, and the settings that
// the page does not have.
func unrecorded(page, text string, s source, settings []setting) (findings []string, err error) {
	text = blockForm.ReplaceAllStringFunc(text, func(block string) string { return strings.Repeat("\n", strings.Count(block, "\n")) })
	if text, err = rewrite(text, unknown{s}); err != nil {
		return nil, err
	}
	for _, form := range []*regexp.Regexp{commentForm, codeForm, linkForm, goalForm} {
		text = form.ReplaceAllString(text, "")
	}
	text = strings.Join(strings.Fields(text), " ") // a line may end between a number and its unit
	for _, s := range settings {
		if s.page != page {
			continue
		}
		if !strings.Contains(text, s.text) {
			findings = append(findings, fmt.Sprintf("%s has no setting %q: delete it from the list", page, s.text))
		}
		text = strings.ReplaceAll(text, s.text, "")
	}
	for _, form := range []*regexp.Regexp{measured, compared} {
		for _, at := range form.FindAllStringIndex(text, -1) {
			findings = append(findings, fmt.Sprintf("%s has a figure without a record, see internal/figures: … %s …", page,
				text[max(0, at[0]-40):min(len(text), at[1]+20)]))
		}
	}
	return findings, nil
}
