package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
)

const (
	countEvents  = `select count(*) from kinora_events`
	countApplied = `select count(*) from kinora_outbox where status = 'published'`
	countOpen    = `select count(*) from kinora_outbox where open = 1`
)

// generated makes a file of lines, and tells which of them are bad.
func generated(t *testing.T, lines int, args ...string) (path string, bad map[int]bool) {
	t.Helper()
	o := finish(t, exec.Command(generateBin, append(args, "-lines", fmt.Sprint(lines), "-mark")...))
	require.Zero(t, o.code, o.stderr)
	path, bad = filepath.Join(t.TempDir(), "reviews.json"), map[int]bool{}
	require.NoError(t, os.WriteFile(path, []byte(o.stdout), 0o600))
	for word := range strings.FieldsSeq(o.stderr) {
		var n int
		_, err := fmt.Sscan(word, &n)
		require.NoError(t, err)
		bad[n] = true
	}
	return path, bad
}

// expected computes the report from the file, without the code under test: for each product and author, the
// first of the good lines with the latest time.
func expected(t *testing.T, path string, bad map[int]bool) []reportRow {
	t.Helper()
	file, err := os.Open(path)
	require.NoError(t, err)
	defer file.Close()
	in := bufio.NewScanner(file)
	in.Buffer(nil, 16<<20)
	type one struct {
		ASIN, ReviewerID string
		Overall          float64
		UnixReviewTime   int64
	}
	last := map[[2]string]one{}
	for n := 1; in.Scan(); n++ {
		if bad[n] {
			continue
		}
		var r one
		require.NoError(t, json.Unmarshal(in.Bytes(), &r))
		id := [2]string{r.ASIN, r.ReviewerID}
		if had, ok := last[id]; !ok || r.UnixReviewTime > had.UnixReviewTime {
			last[id] = r
		}
	}
	require.NoError(t, in.Err())
	products := map[string]reportRow{}
	for id, r := range last {
		row := products[id[0]]
		row.Product, row.Reviews, row.Stars = id[0], row.Reviews+1, row.Stars+int(r.Overall)
		products[id[0]] = row
	}
	var rows []reportRow
	for _, row := range products {
		row.Average = float64(row.Stars) / float64(row.Reviews)
		rows = append(rows, row)
	}
	slices.SortFunc(rows, func(a, b reportRow) int { return cmp.Compare(a.Product, b.Product) })
	return rows
}

// TestImport: a file with edits, repeats, late and bad lines gives the report that a few lines compute from
// it; again it appends nothing; --strict only changes the exit status.
func TestImport(t *testing.T) {
	t.Parallel()
	path, bad := generated(t, 3000, "-seed", "7", "-bad", "0.03")
	require.Greater(t, len(bad), 50)
	db := filepath.Join(t.TempDir(), "with #?% in its name.db")

	first := reviews(t, "import", "--db", "sqlite:"+db, path)
	require.Zero(t, first.code, first.stderr)
	require.Contains(t, first.stdout, "3000 lines: ")
	require.Contains(t, first.stdout, fmt.Sprintf("%d were bad", len(bad)))
	told := 0
	for line := range strings.Lines(first.stderr) {
		if strings.HasPrefix(line, "line ") || strings.HasPrefix(line, "further bad lines") {
			told++ // the others tell the progress, if it took long
		}
	}
	require.Equal(t, 21, told, "20 bad lines and a word on the others: %s", first.stderr)
	require.NotContains(t, first.stderr, "recommended", "what people wrote is not shown")
	for line := range strings.Lines(first.stderr) {
		var n int
		if _, err := fmt.Sscanf(line, "line %d:", &n); err == nil {
			require.True(t, bad[n], line)
		}
	}
	require.Equal(t, expected(t, path, bad), report(t, db))
	events := number(t, db, countEvents)
	require.Zero(t, number(t, db, countOpen))
	require.Equal(t, number(t, db, `select count(*) from latest_reviews`), number(t, db, `select sum(reviews) from ratings`))

	again := reviews(t, "import", "--db", "sqlite:"+db, "--strict", path)
	require.Equal(t, 2, again.code, again.stderr)
	require.Contains(t, again.stdout, "0 posted or edited a review")
	require.Equal(t, events, number(t, db, countEvents))
	require.Equal(t, expected(t, path, bad), report(t, db))
}

// TestImportGzip: the first bytes tell gzip, not the name; without bad lines --strict is content.
func TestImportGzip(t *testing.T) {
	t.Parallel()
	plain, bad := generated(t, 300, "-seed", "8", "-bad", "0")
	zipped, _ := generated(t, 300, "-seed", "8", "-bad", "0", "-gzip")
	require.Empty(t, bad)
	db := filepath.Join(t.TempDir(), "reviews.db")
	// In this process, where the race detector sees it.
	c := &importCmd{DB: database{kind: "sqlite", path: db}, File: zipped, Strict: true, pipelineFlags: pipelineFlags{memoryKind, true}}
	require.NoError(t, c.Run(t.Context()))
	require.Equal(t, expected(t, plain, nil), report(t, db))
}

// TestImportKilled: an import that is killed half-way and run again ends as if nothing had happened, and does
// not wait long for what the killed one had claimed.
func TestImportKilled(t *testing.T) {
	t.Parallel()
	path, bad := generated(t, 6000, "-seed", "9")
	db := filepath.Join(t.TempDir(), "reviews.db")
	cmd := exec.Command(reviewsBin, "import", "--db", "sqlite:"+db, path)
	require.NoError(t, cmd.Start())
	waitApplied(t, db, 500)
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	halfway := number(t, db, countApplied)

	start := time.Now()
	o := reviews(t, "import", "--db", "sqlite:"+db, path)
	require.Zero(t, o.code, o.stderr)
	require.Less(t, time.Since(start), time.Minute)
	require.Equal(t, expected(t, path, bad), report(t, db))
	events := number(t, db, countEvents)
	require.Less(t, halfway, events, "it was not killed half-way")
	require.Equal(t, number(t, db, countApplied), events)

	o = reviews(t, "import", "--db", "sqlite:"+db, path)
	require.Zero(t, o.code, o.stderr)
	require.Equal(t, events, number(t, db, countEvents))
}

// TestImportRefuses: what cannot work says so, and makes no file.
func TestImportRefuses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	db, noFile := filepath.Join(dir, "reviews.db"), filepath.Join(dir, "none.json")
	text := filepath.Join(dir, "empty.json")
	require.NoError(t, os.WriteFile(text, nil, 0o600))
	for _, c := range []struct {
		want string
		args []string
	}{
		{"no such file", []string{"import", "--db", "sqlite:" + db, noFile}},
		{"use sqlite:PATH", []string{"import", "--db", "memory", text}},
		{`want "sqlite:PATH", "postgres://…" or "memory"`, []string{"import", "--db", "sqlite:", text}},
		{`want "sqlite:PATH", "postgres://…" or "memory"`, []string{"import", "--db", db, text}},
		{"--db", []string{"import", text}},
	} {
		o := reviews(t, c.args...)
		require.NotContains(t, []int{0, 2}, o.code, c.args)
		require.Contains(t, o.stderr, c.want)
		require.NoFileExists(t, db)
	}
	o := reviews(t, "import", "--db", "sqlite:"+db, text)
	require.Zero(t, o.code, o.stderr)
	require.Empty(t, report(t, db))
}

// TestImportTells: events that do not reach the read model are not passed over in silence.
func TestImportTells(t *testing.T) {
	t.Parallel()
	path := imported(t, fourReviews)
	empty := filepath.Join(t.TempDir(), "empty")
	require.NoError(t, os.WriteFile(empty, nil, 0o600))
	again := func() outcome { return reviews(t, "import", "--db", "sqlite:"+path, empty) }
	require.Zero(t, again().code)

	db, err := createSQLite(t.Context(), path)
	require.NoError(t, err)
	require.NoError(t, db.inTx(t.Context(), func(tx eventstore.TxStore) error {
		_, err := tx.Append(t.Context(), "review-x-y", eventstore.NoStream, []eventstore.Draft{
			{ID: "0190a6f0-0000-7000-8000-000000000000", Type: "review.unheard_of", Schema: 1, Data: []byte(`{}`)},
		})
		return err
	}))
	o := again()
	require.Equal(t, 1, o.code)
	require.Contains(t, o.stderr, "0 outbox entries are abandoned, 1 messages are parked")

	_, err = db.SQL().ExecContext(t.Context(), `update kinora_outbox set status = 'abandoned', open = 1 where id = 1`)
	require.NoError(t, err)
	require.NoError(t, db.Close())
	o = again()
	require.Equal(t, 1, o.code)
	require.Contains(t, o.stderr, "1 outbox entries are abandoned, 1 messages are parked")
}

// TestImportInterrupted: Ctrl-C ends an import at once, cleanly, and the next one goes on.
func TestImportInterrupted(t *testing.T) {
	t.Parallel()
	path, bad := generated(t, 4000, "-seed", "10")
	db := filepath.Join(t.TempDir(), "reviews.db")
	var stderr strings.Builder
	cmd := exec.Command(reviewsBin, "import", "--db", "sqlite:"+db, path)
	cmd.Stderr = &stderr
	require.NoError(t, cmd.Start())
	waitApplied(t, db, 100)
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	require.Error(t, cmd.Wait())
	require.Equal(t, 1, cmd.ProcessState.ExitCode())
	require.Contains(t, stderr.String(), "interrupted")
	require.Zero(t, number(t, db, `select count(*) from kinora_outbox where status = 'claimed'`), "what was claimed is given back")

	o := reviews(t, "import", "--db", "sqlite:"+db, path)
	require.Zero(t, o.code, o.stderr)
	require.Equal(t, expected(t, path, bad), report(t, db))
}

// waitApplied waits until an import in another process has applied some events.
func waitApplied(t *testing.T, db string, events int) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, err := os.Stat(db + "-wal")
		return err == nil && number(t, db, `select count(*) from sqlite_master where name = 'latest_reviews'`) == 1 &&
			number(t, db, countApplied) > events
	}, time.Minute, 5*time.Millisecond)
}
