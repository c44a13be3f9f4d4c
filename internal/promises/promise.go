package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

const (
	promisesPage = "docs/guarantees.md"
	evidencePage = "docs/evidence.md"
)

// promise is a paragraph of docs/guarantees.md that begins with a bold number, such as **G1.3**.
type promise struct {
	number string
	line   int
	anchor string // of the heading above it
	words  string // its first words
}

var (
	promiseForm = regexp.MustCompile(`^\*\*([A-Z]\d+[a-z]?\.\d+)\*\* (.+)$`)
	headingForm = regexp.MustCompile(`^#+ (.+)$`)
	linkForm    = regexp.MustCompile(`\[([^]]*)\]\([^)]*\)`)
)

// readPromises returns the promises of the page in order. Its error names each number that two promises have.
func readPromises(root string) ([]promise, error) {
	text, err := os.ReadFile(filepath.Join(root, promisesPage))
	if err != nil {
		return nil, err
	}
	var all []promise
	var wrong []error
	lineOf, anchor := map[string]int{}, ""
	lines := strings.Split(string(text), "\n")
	for i, line := range lines {
		if m := headingForm.FindStringSubmatch(line); m != nil {
			plain := regexp.MustCompile(`[^a-z0-9 -]`).ReplaceAllString(strings.ToLower(m[1]), "")
			anchor = strings.ReplaceAll(plain, " ", "-")
		}
		m := promiseForm.FindStringSubmatch(line)
		if m == nil {
			if strings.HasPrefix(line, "**") {
				wrong = append(wrong, fmt.Errorf("%s:%d: want \"**G1.3** text\"", promisesPage, i+1))
			}
			continue
		}
		if lineOf[m[1]] > 0 {
			wrong = append(wrong, fmt.Errorf("%s:%d: %s is the number of line %d too", promisesPage, i+1, m[1], lineOf[m[1]]))
		}
		lineOf[m[1]] = i + 1
		paragraph := m[2]
		for _, next := range lines[i+1:] {
			if next == "" {
				break
			}
			paragraph += " " + next
		}
		all = append(all, promise{m[1], i + 1, anchor, firstWords(paragraph)})
	}
	return all, errors.Join(wrong...)
}

// firstWords returns the first sentence of a paragraph without links, or about its first 60 characters.
func firstWords(paragraph string) string {
	sentence, _, _ := strings.Cut(linkForm.ReplaceAllString(paragraph, "$1"), ". ")
	var words string
	for word := range strings.FieldsSeq(sentence) {
		words = strings.TrimSpace(words + " " + word)
		if len(words) >= 60 && strings.Count(words, "`")%2 == 0 {
			break
		}
	}
	if len(words) < len(sentence) {
		return strings.TrimRight(words, ",:;") + " …"
	}
	return strings.TrimRight(words, ".")
}
