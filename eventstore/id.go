package eventstore

import (
	"errors"
	"strings"
)

// JoinID joins parts to one aggregate id, such as "42" and "ann" to "42-ann". Different parts
// give different ids: a "-" inside a part becomes "~-", and a "~" becomes "~~". SplitID is the
// inverse.
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

// SplitID returns the parts of an id that JoinID made. Another id, with a "~" before something
// other than "-" or "~", is an error.
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
				return nil, errors.New(`split id: "~" must be followed by "-" or "~"`)
			}
			b.WriteByte(id[i])
		default:
			b.WriteByte(c)
		}
	}
	return append(parts, b.String()), nil
}

// StreamName returns "category-id". Stores check the category and the length when the name is
// used: the category must match ^[a-z][a-z0-9_]{0,40}$, and the name has at most 255 bytes.
func StreamName(category, id string) string { return category + "-" + id }
