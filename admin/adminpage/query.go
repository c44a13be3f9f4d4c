package adminpage

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/kinora-go/kinora/provider"
)

// query reads the values of a request. The first one that is not valid is err.
type query struct {
	values url.Values
	err    error
}

func (q *query) refuse(name, why string) {
	if q.err == nil {
		q.err = problem{http.StatusBadRequest, fmt.Sprintf("The value of %q %s.", name, why)}
	}
}

// text returns a value of at most provider.MaxIDBytes.
func (q *query) text(name string) string { return q.long(name, provider.MaxIDBytes) }

func (q *query) long(name string, most int) string {
	t := q.values.Get(name)
	switch {
	case len(t) > most:
		q.refuse(name, fmt.Sprintf("is longer than %d bytes", most))
	case !utf8.ValidString(t) || strings.ContainsRune(t, 0):
		q.refuse(name, "is not UTF-8, or has a NUL")
	default:
		return t
	}
	return ""
}

// required is text that must not be empty.
func (q *query) required(name string) string {
	t := q.text(name)
	if t == "" {
		q.refuse(name, "is missing")
	}
	return t
}

// number returns a number that is not negative, 0 if there is none.
func (q *query) number(name string) int64 {
	t := q.values.Get(name)
	if t == "" {
		return 0
	}
	n, err := strconv.ParseInt(t, 10, 64)
	if err != nil || n < 0 {
		q.refuse(name, "is not a number")
		return 0
	}
	return n
}

// oneOf returns a value that must be empty or one of these.
func (q *query) oneOf(name string, of ...string) string {
	t := q.values.Get(name)
	if t != "" && !slices.Contains(of, t) {
		q.refuse(name, "must be one of: "+strings.Join(of, ", "))
		return ""
	}
	return t
}

// link returns a link to a page with values, without the empty ones.
func link(to string, pairs ...string) string {
	values := url.Values{}
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			values.Add(pairs[i], pairs[i+1])
		}
	}
	if len(values) == 0 {
		return "./" + to
	}
	return "./" + to + "?" + values.Encode()
}
