package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
)

type reportCmd struct {
	DB      database `required:"" placeholder:"sqlite:PATH" help:"The database: sqlite:PATH or postgres://…."`
	JSON    bool     `help:"Print JSON."`
	Product string   `help:"Print the latest reviews of this product instead."`
	Limit   int      `default:"10" help:"Maximum number of these reviews."`
	Best    int      `placeholder:"N" help:"Print only the N products with the most stars, the best first."`

	projectionFlags `embed:""`
}

// reportRow is a product in the report.
type reportRow struct {
	Product string  `json:"product"`
	Reviews int     `json:"reviews"`
	Stars   int     `json:"stars"`
	Average float64 `json:"average"`
}

// Run prints the read model.
func (c *reportCmd) Run(ctx context.Context) (err error) {
	db, err := c.of(c.DB).open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if c.Product != "" {
		_, reviews, err := db.product(ctx, c.Product, max(c.Limit, 0))
		if err != nil {
			return err
		}
		return show(c.JSON, append([]currentReview{}, reviews...), latestTable(reviews))
	}
	var ratings []rating
	if c.Best > 0 {
		ratings, err = db.best(ctx, c.Best)
	} else {
		ratings, err = db.ratings(ctx, "")
	}
	if err != nil {
		return err
	}
	rows := reportRows(ratings)
	return show(c.JSON, rows, reportTable(rows))
}

// reportRows omits the products without reviews.
func reportRows(ratings []rating) []reportRow {
	rows := make([]reportRow, 0, len(ratings))
	for _, r := range ratings {
		if r.Reviews > 0 {
			rows = append(rows, reportRow{r.Product, r.Reviews, r.Stars, r.average()})
		}
	}
	return rows
}

func reportTable(rows []reportRow) []string {
	table := []string{"product\treviews\tstars\taverage"}
	for _, r := range rows {
		table = append(table, fmt.Sprintf("%s\t%d\t%d\t%.2f", printable(r.Product), r.Reviews, r.Stars, r.Average))
	}
	return table
}

func latestTable(reviews []currentReview) []string {
	table := []string{"date\tstars\tauthor\tsummary"}
	for _, r := range reviews {
		table = append(table, fmt.Sprintf("%s\t%d\t%s\t%s", r.ReviewedAt.Format(time.DateOnly), r.Stars, printable(r.Author), printable(r.Summary)))
	}
	return table
}

// show prints rows as JSON, or as a table.
func show(asJSON bool, rows any, table []string) error {
	if asJSON {
		out := json.NewEncoder(os.Stdout)
		out.SetIndent("", "  ")
		out.SetEscapeHTML(false)
		return out.Encode(rows)
	}
	_, err := fmt.Print(columns(table))
	return err
}

// columns aligns the cells of rows, which are separated by tabs.
func columns(rows []string) string {
	var b strings.Builder
	t := tabwriter.NewWriter(&b, 0, 4, 3, ' ', 0)
	_, _ = t.Write([]byte(strings.Join(rows, "\n") + "\n"))
	_ = t.Flush() // a Builder returns no error
	return b.String()
}

// printable replaces characters that would break the line or control the terminal.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '·'
	}, text)
}
