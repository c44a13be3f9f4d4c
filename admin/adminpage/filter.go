package adminpage

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/kinora-go/kinora/internal/filters"
	"github.com/kinora-go/kinora/provider"
)

// filterOf reads a list of package filters from the values of a request.
func filterOf[L any](q *query) L {
	list, err := filters.Read[L](func(name string) []string { return q.values[name] })
	if err != nil && q.err == nil {
		q.err = problem{http.StatusBadRequest, fmt.Sprintf("The value of %s.", err)}
	}
	return list
}

// actOn is filterOf for an act. It refuses a value that is not in the list: without it, the act would select more rows.
func actOn[L any](q *query) L {
	list := filterOf[L](q)
	read := map[string][]string{"reason": q.values["reason"], "confirm": q.values["confirm"]}
	for _, f := range filters.Fields(list) {
		read[f.Name] = f.Values
	}
	for name, given := range q.values {
		given = slices.DeleteFunc(slices.Clone(given), func(s string) bool { return s == "" })
		if len(given) > 0 && !slices.Equal(given, read[name]) {
			q.refuse(name, "cannot be read back: nothing was changed. Open the page again")
		}
	}
	return list
}

// find is the form of a list. Its inputs are the fields that have a label.
func find(page string, list any, more ...input) form {
	f := form{Title: "Find", Method: "get", Action: page, Button: "Find"}
	for _, field := range filters.Fields(list) {
		i := input{Name: field.Name, Label: field.Label, Value: cmp.Or(strings.Join(field.Values, ","), field.Default)}
		for _, o := range field.Options {
			i.Type, i.Options = "select", append(i.Options, [2]string{o, cmp.Or(o, "any")})
		}
		if i.Label != "" {
			f.Inputs = append(f.Inputs, i)
		}
	}
	f.Inputs = append(f.Inputs, more...)
	return f
}

// decide is an act on the rows that a filter selects. It returns their number.
type decide[F any] = func(context.Context, F, provider.Decision) (int, error)

// rowList is a list of package filters that selects rows for an act.
type rowList[F any] interface {
	Filter() F
	// IsOne reports whether it selects one row, or rows that wait for each other.
	IsOne() bool
	// Confirm is what a person must type.
	Confirm() string
}

// rowForms are the forms of acts on the rows of a list. For several rows, and with Danger, a person must type what the list says.
func rowForms[F any](list rowList[F], note string, acts ...form) []form {
	for i := range acts {
		f := &acts[i]
		f.Note, f.Hidden, f.Inputs = note+f.Note, filters.Values(list), []input{reason()}
		if f.Danger || !list.IsOne() {
			f.Confirm = list.Confirm()
		}
	}
	return acts
}

// selection describes a list.
func selection(list any) string {
	var parts []string
	for _, p := range filters.Values(list) {
		parts = append(parts, p[0]+" "+p[1])
	}
	return strings.Join(parts, ", ")
}

// page is a link to a list.
func page(to string, list any, more ...string) string {
	var all []string
	for _, p := range filters.Values(list) {
		all = append(all, p[0], p[1])
	}
	return link(to, append(all, more...)...)
}

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
