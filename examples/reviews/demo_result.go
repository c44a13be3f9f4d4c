package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"slices"
)

// demoResult is the result of the demo, as written to --json.
type demoResult struct {
	Commands             int    `json:"commands"`
	Accepted             int    `json:"accepted"`
	Rejected             int    `json:"rejected"`
	Events               int64  `json:"events"`
	Deliveries           int    `json:"deliveries"`
	Duplicates           int    `json:"duplicates"`
	ConcurrentDuplicates int    `json:"concurrent_duplicates"`
	Kills                int    `json:"kills"`
	Expected             totals `json:"expected"`
	ExactlyOnce          arm    `json:"exactly_once"`
	Control              arm    `json:"control"`
	OK                   bool   `json:"ok"`

	rows []demoRow
}

type totals struct {
	Reviews int `json:"reviews"`
	Stars   int `json:"stars"`
}

// arm is the read model of one of the two projectors.
type arm struct {
	totals
	WrongProducts int `json:"wrong_products"`
}

// demoRow is one product with its expected ratings and those of both projectors.
type demoRow struct {
	product                  string
	expected, exact, control totals
}

func newDemoResult(t *tally, exact, control []rating) *demoResult {
	r := &demoResult{Commands: t.accepted + t.rejected, Accepted: t.accepted, Rejected: t.rejected}
	rows := map[string]*demoRow{}
	row := func(product string) *demoRow {
		if rows[product] == nil {
			rows[product] = &demoRow{product: product}
		}
		return rows[product]
	}
	for product, e := range t.expected() {
		row(product).expected = totals{e.Reviews, e.Stars}
	}
	for _, e := range exact {
		row(e.Product).exact = totals{e.Reviews, e.Stars}
	}
	for _, e := range control {
		row(e.Product).control = totals{e.Reviews, e.Stars}
	}
	for _, row := range rows {
		r.Expected.add(row.expected)
		r.ExactlyOnce.add(row.exact, row.expected)
		r.Control.add(row.control, row.expected)
		r.rows = append(r.rows, *row)
	}
	return r
}

func (t *totals) add(of totals) {
	t.Reviews += of.Reviews
	t.Stars += of.Stars
}

func (a *arm) add(got, want totals) {
	a.totals.add(got)
	if got != want {
		a.WrongProducts++
	}
}

// count takes the counts of the ledger and sets OK.
func (r *demoResult) count(c counts, kills int) {
	r.Deliveries, r.Duplicates, r.ConcurrentDuplicates = c.Deliveries, c.Duplicates, c.Concurrent
	// If the control is right although copies were delivered, the run proves nothing.
	shown := c.Injected == 0 || r.Control.WrongProducts > 0
	r.OK = r.ExactlyOnce.WrongProducts == 0 && shown && r.Kills == kills
}

const rowsShown = 10

// String returns the table and the summary line.
func (r *demoResult) String() string {
	off := func(got, want totals) int { return abs(got.Reviews-want.Reviews) + abs(got.Stars-want.Stars) }
	slices.SortFunc(r.rows, func(a, b demoRow) int {
		return cmp.Or(
			cmp.Compare(off(b.exact, b.expected), off(a.exact, a.expected)), // expected to be 0
			cmp.Compare(off(b.control, b.expected), off(a.control, a.expected)),
			cmp.Compare(a.product, b.product))
	})
	table := []string{"product\texpected\texactly once\tcontrol"}
	for _, row := range r.rows[:min(rowsShown, len(r.rows))] {
		table = append(table, fmt.Sprintf("%s\t%s\t%s\t%s",
			row.product, row.expected, row.exact.against(row.expected), row.control.against(row.expected)))
	}
	more := ""
	if n := len(r.rows) - rowsShown; n > 0 {
		more = fmt.Sprintf("and %d more\n", n)
	}
	return fmt.Sprintf("\nreviews / sum of stars\n%s%s\n"+
		"%d messages in %d deliveries, %d of them duplicates (%d at the same moment), and %d kills: of %d products, exactly once has %d wrong, the control has %d wrong.\n",
		columns(table), more, r.Events, r.Deliveries, r.Duplicates, r.ConcurrentDuplicates, r.Kills,
		len(r.rows), r.ExactlyOnce.WrongProducts, r.Control.WrongProducts)
}

func (t totals) String() string { return fmt.Sprintf("%d / %d", t.Reviews, t.Stars) }

func (t totals) against(want totals) string {
	if t == want {
		return t.String()
	}
	return t.String() + "  wrong"
}

func (r *demoResult) write(path string) error {
	if path == "" {
		return nil
	}
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}

func abs(n int) int { return max(n, -n) }
