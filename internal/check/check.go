// Package check holds the rules that names and texts keep in every store. Packages eventstore and provider report
// what it finds as *eventstore.InvalidError.
package check

import (
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"
)

// MaxID is the length limit of stream names, message ids, type names, topics and ordering keys, in bytes.
const MaxID = 255

var nameRE = regexp.MustCompile(`^[a-z][a-z0-9_]{0,40}$`)

// Name returns why name does not match ^[a-z][a-z0-9_]{0,40}$, or "".
func Name(name string) string {
	if !nameRE.MatchString(name) {
		return "want ^[a-z][a-z0-9_]{0,40}$"
	}
	return ""
}

// Text returns why s is empty, longer than limit bytes, not UTF-8, or has a control character; or "".
func Text(s string, limit int) string {
	switch {
	case s == "":
		return "empty"
	case len(s) > limit:
		return fmt.Sprintf("%d bytes: at most %d", len(s), limit)
	case !utf8.ValidString(s):
		return "not UTF-8"
	case strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return "has a control character"
	}
	return ""
}

// Stream returns which part of a stream name is wrong and why, or "", "".
func Stream(stream string) (field, reason string) {
	if reason := Text(stream, MaxID); reason != "" {
		return "stream", reason
	}
	category, id, ok := strings.Cut(stream, "-")
	if !ok || id == "" {
		return "stream", `want "category-id"`
	}
	if reason := Name(category); reason != "" {
		return "stream category", reason
	}
	return "", ""
}
