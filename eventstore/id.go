package eventstore

import (
	"errors"
	"strings"
)

// JoinID makes one aggregate id of several parts, unambiguously: a "-" inside a part is written "~-" and a
// "~" is written "~~", so that ("42-a", "b") and ("42", "a-b") differ while ("42", "ann") reads "42-ann".
func JoinID(parts ...string) string {
	var b strings.Builder
	for i, p := range parts {
		if i > 0 {
			b.WriteByte('-')
		}
		for j := range len(p) {
			if p[j] == '-' || p[j] == '~' {
				b.WriteByte('~')
			}
			b.WriteByte(p[j])
		}
	}
	return b.String()
}

// SplitID takes apart what JoinID joined. An id that JoinID could not have made is an error.
func SplitID(id string) ([]string, error) {
	var parts []string
	var b strings.Builder
	for i := 0; i < len(id); i++ {
		switch c := id[i]; c {
		case '-':
			parts = append(parts, b.String())
			b.Reset()
		case '~':
			i++
			if i == len(id) || id[i] != '-' && id[i] != '~' {
				return nil, errors.New(`split id: "~" stands before something else than "-" or "~"`)
			}
			b.WriteByte(id[i])
		default:
			b.WriteByte(c)
		}
	}
	return append(parts, b.String()), nil
}

// StreamName is "category-id". Stores refuse one whose category or length is not allowed (see CheckStream).
func StreamName(category, id string) string { return category + "-" + id }

// Category is what stands before the first "-" of a stream name, or the whole name.
func Category(stream string) string {
	category, _, _ := strings.Cut(stream, "-")
	return category
}
