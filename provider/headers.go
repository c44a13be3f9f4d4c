package provider

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"
)

// ParseHeaders parses headers that a provider stored as a JSON object of strings. Any other text
// is ErrMalformed. Names and values share the memory of text.
func ParseHeaders(text string) (map[string]string, error) {
	p := headerParser{rest: text}
	if !utf8.ValidString(p.rest) || !p.skip('{') {
		return nil, errNoObject
	}
	headers := make(map[string]string, min(strings.Count(p.rest, `:`), 64))
	for first := true; !p.skip('}'); first = false {
		if !first && !p.skip(',') {
			return nil, errNoObject
		}
		name, ok := p.text()
		if !ok || !p.skip(':') {
			return nil, errNoObject
		}
		if headers[name], ok = p.text(); !ok {
			return nil, errNoObject
		}
	}
	if p.space(); p.rest != "" {
		return nil, errNoObject
	}
	return headers, nil
}

var errNoObject = fmt.Errorf("%w: the headers are not a JSON object of strings", ErrMalformed)

type headerParser struct{ rest string }

func (p *headerParser) space() { p.rest = strings.TrimLeft(p.rest, " \t\r\n") }

// skip skips white space and c. It returns false if another character follows.
func (p *headerParser) skip(c byte) bool {
	if p.rest == "" || p.rest[0] != c {
		if p.space(); p.rest == "" || p.rest[0] != c {
			return false
		}
	}
	p.rest = p.rest[1:]
	return true
}

// text reads a string after white space.
func (p *headerParser) text() (s string, ok bool) {
	if !p.skip('"') {
		return "", false
	}
	for i := 0; i < len(p.rest); i++ {
		switch c := p.rest[i]; {
		case c == '"':
			s, p.rest = p.rest[:i], p.rest[i+1:]
			return s, true
		case c == '\\':
			return p.escaped()
		case c < ' ':
			return "", false
		}
	}
	return "", false
}

// escaped reads the rest of a string that has an escape.
func (p *headerParser) escaped() (s string, ok bool) {
	for i := 0; i < len(p.rest); i++ {
		switch p.rest[i] {
		case '\\':
			i++
		case '"':
			err := json.Unmarshal([]byte(`"`+p.rest[:i+1]), &s)
			p.rest = p.rest[i+1:]
			return s, err == nil
		}
	}
	return "", false
}
