// Package check has the rules for names and texts that hold in every store. Packages eventstore and
// provider return its reasons in an *eventstore.InvalidError.
package check

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Wrap adds to an error, unless it is nil, what was done. A function defers it: defer check.Wrap(&err, "load %s", name).
func Wrap(err *error, what string, args ...any) {
	if *err != nil {
		*err = fmt.Errorf("%s: %w", fmt.Sprintf(what, args...), *err)
	}
}

// MaxID is the most bytes of stream names, message ids, type names, topics and ordering keys.
const MaxID = 255

// MaxSnapshot is the most bytes of the state of a snapshot.
const MaxSnapshot = 4 << 20

var nameRE = regexp.MustCompile(`^[a-z][a-z0-9_]{0,40}$`)

// Name returns why name does not match ^[a-z][a-z0-9_]{0,40}$, or "".
func Name(name string) string {
	if !nameRE.MatchString(name) {
		return "must match ^[a-z][a-z0-9_]{0,40}$"
	}
	return ""
}

// Text returns why s is empty, longer than limit bytes, not UTF-8, or has control characters, or "".
func Text(s string, limit int) string {
	switch {
	case s == "":
		return "must not be empty"
	case len(s) > limit:
		return fmt.Sprintf("%d bytes: at most %d are allowed", len(s), limit)
	case !utf8.ValidString(s):
		return "must be UTF-8"
	case strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return "must not have control characters"
	}
	return ""
}

// Printable replaces characters that nothing shows, or that change a terminal or the direction of text, except those of also.
func Printable(s, also string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsGraphic(r) && !strings.ContainsRune(also, r) || unicode.Is(unicode.Bidi_Control, r) {
			return '\uFFFD'
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
}

// Stream returns the invalid part of a stream name and the reason, or "", "".
func Stream(stream string) (field, reason string) {
	if reason := Text(stream, MaxID); reason != "" {
		return "stream", reason
	}
	category, id, ok := strings.Cut(stream, "-")
	if !ok || id == "" {
		return "stream", `must be "category-id", and neither part empty`
	}
	if reason := Name(category); reason != "" {
		return "stream category", reason
	}
	return "", ""
}

// ParentsFirst sorts tables: each follows those that it refers to, unless they refer to each other.
func ParentsFirst[T any](tables []T, refers func(child, parent T) bool) (sorted []T) {
	seen := make([]bool, len(tables))
	var add func(i int)
	add = func(i int) {
		if seen[i] {
			return
		}
		seen[i] = true
		for j := range tables {
			if refers(tables[i], tables[j]) {
				add(j)
			}
		}
		sorted = append(sorted, tables[i])
	}
	for i := range tables {
		add(i)
	}
	return sorted
}

// ParseTime parses an RFC 3339 time of the years 1 to 9999 as UTC. Unlike time.Parse, it takes t and z in
// lower case, as RFC 3339 allows, and a leap second: second 60 is the first one of the next minute.
func ParseTime(text string) (time.Time, error) {
	const second = len("2006-01-02T15:04:")
	text, leap := strings.ToUpper(text), time.Duration(0)
	if len(text) > second && strings.HasPrefix(text[second:], "60") {
		text, leap = text[:second]+"59"+text[second+2:], time.Second
	}
	at, err := time.Parse(time.RFC3339Nano, text)
	if at = at.Add(leap).UTC(); err != nil || at.Year() < 1 || at.Year() > 9999 {
		return time.Time{}, errors.New("not an RFC 3339 time of the years 1 to 9999")
	}
	return at, nil
}
