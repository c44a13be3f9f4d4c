package main

import (
	"database/sql"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/examples/reviews/review"
)

// importFile returns the path of a database into which the lines are imported.
func importFile(t *testing.T, lines string) string {
	t.Helper()
	dir := t.TempDir()
	text, db := filepath.Join(dir, "lines"), filepath.Join(dir, "reviews.db")
	require.NoError(t, os.WriteFile(text, []byte(lines), 0o600))
	o := reviews(t, "import", "--db", "sqlite:"+db, "--strict", text)
	require.Zero(t, o.code, o.stderr)
	return db
}

const fourReviews = `
{"asin":"p2","reviewerID":"ann","overall":4.0,"summary":"so\tso \u001b[31m","reviewText":"t","unixReviewTime":1000}
{"asin":"p<1>","reviewerID":"ann","overall":5.0,"unixReviewTime":1000}
{"asin":"p2","reviewerID":"bob","overall":3.0,"summary":"newest","unixReviewTime":86400}
{"asin":"p2","reviewerID":"cid","overall":1.0,"summary":"oldest","unixReviewTime":1}
`

// TestReport: the exact output of the report as JSON, as a table and for one product.
func TestReport(t *testing.T) {
	t.Parallel()
	db := importFile(t, fourReviews)
	o := reviews(t, "report", "--db", "sqlite:"+db, "--json")
	require.Zero(t, o.code, o.stderr)
	require.Empty(t, o.stderr)
	require.Equal(t, `[
  {
    "product": "p2",
    "reviews": 3,
    "stars": 8,
    "average": 2.6666666666666665
  },
  {
    "product": "p<1>",
    "reviews": 1,
    "stars": 5,
    "average": 5
  }
]
`, o.stdout)
	o = reviews(t, "report", "--db", "sqlite:"+db)
	require.Zero(t, o.code, o.stderr)
	require.Equal(t, "product   reviews   stars   average\np2        3         8       2.67\np<1>      1         5       5.00\n", o.stdout)
	o = reviews(t, "report", "--db", "sqlite:"+db, "--product", "p2", "--limit", "2")
	require.Zero(t, o.code, o.stderr)
	require.Equal(t, "date         stars   author   summary\n1970-01-02   3       bob      newest\n1970-01-01   4       ann      so·so ·[31m\n", o.stdout)
}

// TestReportOmitsProductsWithoutReviews: a product whose reviews are all withdrawn is not in the
// report.
func TestReportOmitsProductsWithoutReviews(t *testing.T) {
	t.Parallel()
	db := importFile(t, fourReviews)
	withdraw(t, db, "p<1>", "ann")
	rows := report(t, db)
	require.Len(t, rows, 1)
	require.Equal(t, "p2", rows[0].Product)

	withdraw(t, db, "p2", "bob")
	require.Equal(t, []reportRow{{"p2", 2, 5, 2.5}}, report(t, db))
}

// TestReportBest: the products with the most stars come first.
func TestReportBest(t *testing.T) {
	t.Parallel()
	onEachProjection(t, func(t *testing.T, d database) {
		importFour(t, d)
		for best, want := range map[string]string{"1": "p2", "2": "p2 p<1>", "9": "p2 p<1>"} {
			var products []string
			o := runOperator(t, d, "report", "--json", "--best", best)
			require.Zero(t, o.code, o.stderr)
			var rows []reportRow
			require.NoError(t, json.Unmarshal([]byte(o.stdout), &rows))
			for _, row := range rows {
				products = append(products, row.Product)
			}
			require.Equal(t, want, strings.Join(products, " "))
		}
	})
}

// TestReportRefuses: report fails without a file, a database or a read model, names the problem,
// and creates no file.
func TestReportRefuses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	other := filepath.Join(dir, "other.db")
	pool, err := sql.Open("sqlite", other)
	require.NoError(t, err)
	_, err = pool.Exec(`create table unrelated (x)`)
	require.NoError(t, err)
	require.NoError(t, pool.Close())
	for _, c := range []struct{ db, want string }{
		{"sqlite:" + filepath.Join(dir, "missing.db"), "no such file"},
		{"sqlite:" + dir, "is not a regular file"},
		{"sqlite:" + file("empty.db", ""), "has no read model"},
		{"sqlite:" + other, "has no read model"},
		{"sqlite:" + file("text.db", "this is a text file, and not a database of any kind, long enough for a header"), "not a database"},
		{"memory", "use sqlite:PATH"},
	} {
		before, _ := filepath.Glob(filepath.Join(dir, "*"))
		o := reviews(t, "report", "--db", c.db)
		require.Equal(t, 1, o.code, c.db)
		require.Contains(t, o.stderr, c.want)
		require.Empty(t, o.stdout)
		after, _ := filepath.Glob(filepath.Join(dir, "*"))
		require.Equal(t, before, after, "report created a file")
	}
}

// withdraw withdraws a review and waits for the read model.
func withdraw(t *testing.T, path, product, author string) {
	t.Helper()
	d := database{kind: "sqlite", path: path}
	db, err := d.create(t.Context(), noneKind)
	require.NoError(t, err)
	defer func() { require.NoError(t, db.Close()) }()
	commands, err := review.NewCommands(db)
	require.NoError(t, err)
	pipe, err := inProcess.start(t.Context(), d, db)
	require.NoError(t, err)
	defer func() { require.NoError(t, pipe.Stop()) }()
	at, err := commands.Withdraw(t.Context(), product, author, time.Now())
	require.NoError(t, err)
	require.NoError(t, db.wait(t.Context(), at))
}
