package check

import (
	"errors"
	"strings"
	"time"
)

// ParseTime parses an RFC 3339 time of the years 1 to 9999, and returns it in UTC. Unlike time.Parse, it
// takes the letters T and Z in lower case, as RFC 3339 allows, and a leap second: second 60 is
// the first one of the next minute.
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
