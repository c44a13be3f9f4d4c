package adminpage

import (
	"bytes"
	"encoding/json"
	"fmt"
	"html/template"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/provider"
)

// view is a page: blocks that are updated while they are open, and forms below them.
type view struct {
	Title, Intro  string
	Notice, Error string
	Live          []block
	Forms         []form

	At, Name, By string
	Nav          []navLink
	Style        template.CSS
	Script       template.JS
}

type navLink struct{ Path, Href, Text string }

var nav = []navLink{
	{"/", "./", "Overview"}, {"/projectors", "./projectors", "Projectors"}, {"/parked", "./parked", "Parked"}, {"/outbox", "./outbox", "Outbox"},
	{"/tasks", "./tasks", "Tasks"}, {"/streams", "./streams", "Streams"}, {"/services", "./services", "Services"}, {"/acts", "./acts", "Acts"},
}

// block is a part of a page. It has one of its lists.
type block struct {
	Title, Note string
	Findings    []finding
	Unchecked   []provider.Unchecked
	Plots       []plot
	Fields      []field
	Table       *table
	Texts       []text
	Progress    *progress
	Links       []cell
}

type finding struct {
	provider.Finding
	Link cell
}

type progress struct {
	Value, Max int64
	Text       string
}

type field struct {
	Name  string
	Value cell
}

// text is data of users, in a box that is closed at first.
type text struct{ Name, Value string }

type table struct {
	Label string
	Head  []string // a name that begins with "#" is that of a column of numbers
	Rows  [][]cell
	Empty string
	More  string // a link to the next page
}

type cell struct {
	Text, Href string
	Mark       string // "bad", "good", "quiet" or "number"
	Lines      []line
}

type line struct {
	Text string
	Mark string // "old" or "new"
}

// form posts to an act.
type form struct {
	Title, Note, Action, Button string
	Method                      string // empty means post
	Hidden                      [][2]string
	Inputs                      []input
	Confirm                     string // what must be typed; empty: nothing
	Danger                      bool
}

type input struct {
	Name, Label, Value string
	Type               string // of the input; "select", "area", "check"; empty means text
	Options            [][2]string
	Required           bool
}

func show(s string) string { return check.Printable(s, "\n\t") }

func plain(s string) cell           { return cell{Text: show(s)} }
func to(s, href string) cell        { return cell{Text: show(s), Href: href} }
func marked(s, mark string) cell    { return cell{Text: show(s), Mark: mark} }
func (c cell) marked(m string) cell { c.Mark = m; return c }

// statusCell marks a status that is bad or good.
func statusCell[S ~string](s, bad, good S) cell {
	switch s {
	case bad:
		return marked(string(s), "bad")
	case good:
		return marked(string(s), "good")
	}
	return plain(string(s))
}

// digits returns a number with its thousands apart.
func digits(n int64) string {
	s := fmt.Sprint(n)
	sign := ""
	if n < 0 {
		sign, s = "−", s[1:]
	}
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return sign + s
}

func num(n int64) cell { return cell{Text: digits(n), Mark: "number"} }

func count(c provider.Count) string {
	if c.AtLeast {
		return "≥ " + digits(c.N)
	}
	return digits(c.N)
}

func at(t time.Time) cell {
	if t.IsZero() {
		return cell{}
	}
	return cell{Text: t.UTC().Format("2006-01-02 15:04:05"), Mark: "time"}
}

// span returns a duration for people.
func span(d time.Duration) string {
	switch {
	case d < 0:
		return "0 s"
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < 2*time.Minute:
		return fmt.Sprintf("%.0f s", d.Seconds())
	case d < 2*time.Hour:
		return fmt.Sprintf("%.0f min", d.Minutes())
	case d < 48*time.Hour:
		return fmt.Sprintf("%.0f h", d.Hours())
	}
	return fmt.Sprintf("%.0f days", d.Hours()/24)
}

// fields returns the fields that have a value.
func fields(all ...field) (some []field) {
	for _, f := range all {
		if f.Value.Text != "" || f.Value.Lines != nil {
			some = append(some, f)
		}
	}
	return some
}

// private returns texts of users if the viewer may see them, else a note.
func (v viewer) private(title string, texts ...text) block {
	if !v.payloads {
		return block{Title: title, Note: "Hidden: it may be data of users."}
	}
	b := block{Title: title}
	for _, t := range texts {
		if t.Value != "" && t.Value != "null" {
			b.Texts = append(b.Texts, text{t.Name, show(t.Value)})
		}
	}
	return b
}

// indented returns JSON in lines, or the text itself.
func indented(raw []byte) string {
	var b bytes.Buffer
	if json.Indent(&b, raw, "", "  ") == nil {
		return b.String()
	}
	return string(raw)
}

// headers returns headers in lines, in order of their names.
func headers(all map[string]string) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(&b, "%s: %s\n", name, all[name])
	}
	return b.String()
}

// hidden returns text that may be data of users, if the viewer may see it.
func (v viewer) hidden(text string) cell {
	if !v.payloads {
		return marked("hidden", "quiet")
	}
	return plain(text)
}

// sides returns the columns of a row before and after a change, if the viewer may see them. Changed values are marked.
func (v viewer) sides(before, after json.RawMessage) (was, is cell) {
	b, isRow := columns(before)
	a, isRow2 := columns(after)
	side := func(raw json.RawMessage, of, other map[string]json.RawMessage, mark string) (c cell) {
		switch {
		case len(raw) == 0 || string(raw) == "null":
			return marked("no row", "quiet")
		case !v.payloads || !isRow || !isRow2:
			return v.hidden(string(raw))
		}
		for _, name := range slices.Sorted(maps.Keys(of)) {
			l := line{Text: show(name + ": " + string(of[name]))}
			if !bytes.Equal(of[name], other[name]) {
				l.Mark = mark
			}
			c.Lines = append(c.Lines, l)
		}
		return c
	}
	return side(before, b, a, "old"), side(after, a, b, "new")
}

func columns(row json.RawMessage) (all map[string]json.RawMessage, ok bool) {
	ok = len(row) == 0 || json.Unmarshal(row, &all) == nil
	return all, ok
}
