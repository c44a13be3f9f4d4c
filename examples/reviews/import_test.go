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
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/projector"
)

const (
	countEvents  = `select count(*) from kinora_events`
	countEntries = `select count(*) from kinora_outbox`
	countApplied = `select coalesce(sum(position), 0) from kinora_checkpoints`
)

// generateFile writes a file of generated lines and returns its path and the numbers of the bad
// lines.
func generateFile(t *testing.T, lines int, args ...string) (path string, bad map[int]bool) {
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

// expectedReport computes the report from the file without the code under test. For each product
// and author the good line with the latest time counts, and the first of several.
func expectedReport(t *testing.T, path string, bad map[int]bool) []reportRow {
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

// TestImport: a file with edits, repeats, late and bad lines gives the expected report. A second
// import appends nothing. --strict only changes the exit status.
func TestImport(t *testing.T) {
	t.Parallel()
	path, bad := generateFile(t, 3000, "-seed", "7", "-bad", "0.03")
	require.Greater(t, len(bad), 50)
	db := filepath.Join(t.TempDir(), "with #?% in its name.db")

	first := reviews(t, "import", "--db", "sqlite:"+db, path)
	require.Zero(t, first.code, first.stderr)
	require.Contains(t, first.stdout, "3000 lines: ")
	require.Contains(t, first.stdout, fmt.Sprintf("%d were bad", len(bad)))
	reported := 0
	for line := range strings.Lines(first.stderr) {
		if strings.HasPrefix(line, "line ") || strings.HasPrefix(line, "more bad lines") {
			reported++ // other lines show the progress of a slow import
		}
	}
	require.Equal(t, 21, reported, "20 bad lines and a note about the others: %s", first.stderr)
	require.NotContains(t, first.stderr, "recommended", "the text of a line is not shown")
	for line := range strings.Lines(first.stderr) {
		var n int
		if _, err := fmt.Sscanf(line, "line %d:", &n); err == nil {
			require.True(t, bad[n], line)
		}
	}
	require.Equal(t, expectedReport(t, path, bad), report(t, db))
	events := queryInt(t, db, countEvents)
	require.Zero(t, queryInt(t, db, countEntries), "without a broker there are no outbox entries")
	require.Equal(t, events, queryInt(t, db, countApplied))
	require.Equal(t, queryInt(t, db, `select count(*) from latest_reviews`), queryInt(t, db, `select sum(reviews) from ratings`))

	again := reviews(t, "import", "--db", "sqlite:"+db, "--strict", path)
	require.Equal(t, 2, again.code, again.stderr)
	require.Contains(t, again.stdout, "0 posted or edited a review")
	require.Equal(t, events, queryInt(t, db, countEvents))
	require.Equal(t, expectedReport(t, path, bad), report(t, db))
}

// TestImportGzip: the first bytes show that a file is gzip, not its name. Without bad lines
// --strict succeeds.
func TestImportGzip(t *testing.T) {
	t.Parallel()
	plain, bad := generateFile(t, 300, "-seed", "8", "-bad", "0")
	zipped, _ := generateFile(t, 300, "-seed", "8", "-bad", "0", "-gzip")
	require.Empty(t, bad)
	db := filepath.Join(t.TempDir(), "reviews.db")
	// Run in this process, where the race detector sees it.
	c := &importCmd{DB: database{kind: "sqlite", path: db}, File: zipped, Strict: true, pipelineFlags: inProcess}
	require.NoError(t, c.Run(t.Context()))
	require.Equal(t, expectedReport(t, plain, nil), report(t, db))
}

// TestImportKilled: an import that is killed while it reads the file, and again while it updates
// the read model, gives the expected report when it is run again.
func TestImportKilled(t *testing.T) {
	t.Parallel()
	path, bad := generateFile(t, 6_000, "-seed", "9")
	db := filepath.Join(t.TempDir(), "reviews.db")
	kill := func(file, progress string) {
		cmd := exec.Command(reviewsBin, "import", "--db", "sqlite:"+db, file)
		require.NoError(t, cmd.Start())
		waitUntil(t, db, progress, 500)
		require.NoError(t, cmd.Process.Kill())
		require.Error(t, cmd.Wait())
		applied, events := queryInt(t, db, countApplied), queryInt(t, db, countEvents)
		require.Less(t, applied, events, "the import was killed halfway")
	}
	kill(endless(t, path), countEvents)
	d := database{kind: "sqlite", path: db}
	change(t, d, `create view forever as with recursive n(i) as (select 1 union all select i + 1 from n) select i from n`)
	change(t, d, `create trigger halfway before insert on latest_reviews_g1 when (select max(position) from kinora_checkpoints) > 500
		begin select count(*) from forever; end`) // does not end, so the import is killed before
	kill(path, countApplied)
	change(t, d, `drop trigger halfway`)
	change(t, d, `drop view forever`)

	o := reviews(t, "import", "--db", "sqlite:"+db, path)
	require.Zero(t, o.code, o.stderr)
	require.Equal(t, expectedReport(t, path, bad), report(t, db))
	events := queryInt(t, db, countEvents)
	require.Equal(t, queryInt(t, db, countApplied), events)

	o = reviews(t, "import", "--db", "sqlite:"+db, path)
	require.Zero(t, o.code, o.stderr)
	require.Equal(t, events, queryInt(t, db, countEvents))
}

// TestImportChangesBroker: imports over a broker and from the log, by turns, apply each event once.
func TestImportChangesBroker(t *testing.T) {
	t.Parallel()
	db, all := filepath.Join(t.TempDir(), "reviews.db"), filepath.Join(t.TempDir(), "all.json")
	var text []byte
	numbers := map[int]bool{}
	for i, broker := range []string{noneKind, memoryKind, noneKind, memoryKind} {
		path, bad := generateFile(t, 600, "-seed", fmt.Sprint(20+i))
		o := reviews(t, "import", "--db", "sqlite:"+db, "--broker", broker, path)
		require.Zero(t, o.code, o.stderr)
		part, err := os.ReadFile(path)
		require.NoError(t, err)
		text = append(text, part...)
		for n := range bad {
			numbers[600*i+n] = true
		}
		require.NoError(t, os.WriteFile(all, text, 0o600))
		require.Equal(t, expectedReport(t, all, numbers), report(t, db), broker)
	}
}

// TestImportRefuses: invalid arguments fail with the reason and create no file.
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
		{`use "sqlite:PATH", "postgres://…" or "memory"`, []string{"import", "--db", "sqlite:", text}},
		{`use "sqlite:PATH", "postgres://…" or "memory"`, []string{"import", "--db", db, text}},
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

// TestImportReportsStuckEvents: an import waits for messages that are tried again, and fails if one
// is stuck.
func TestImportReportsStuckEvents(t *testing.T) {
	t.Parallel()
	path := importFile(t, fourReviews)
	empty := filepath.Join(t.TempDir(), "empty")
	require.NoError(t, os.WriteFile(empty, nil, 0o600))
	again := func() outcome { return reviews(t, "import", "--db", "sqlite:"+path, empty) }
	require.Zero(t, again().code)

	db, err := createSQLite(t.Context(), database{kind: "sqlite", path: path}, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, db.Close()) }()
	commands, err := review.NewCommands(db)
	require.NoError(t, err)
	// The handler fails for ann, and is tried five times.
	_, err = db.SQL().ExecContext(t.Context(),
		`create trigger refuse before insert on latest_reviews_g1 when new.author = 'ann' begin select raise(abort, 'no'); end`)
	require.NoError(t, err)
	for _, stars := range []int{1, 2} {
		_, err = commands.Post(t.Context(), "x", "ann", review.Content{Stars: stars}, time.Unix(int64(stars), 0))
		require.NoError(t, err)
	}
	o := again()
	require.Equal(t, 1, o.code)
	require.Contains(t, o.stderr, "waiting for parked messages that are tried again")
	require.Contains(t, o.stderr, "2 messages are stuck, or wait behind a stuck one")

	// With the cause removed and the attempts reset, the next import applies both.
	_, err = db.SQL().ExecContext(t.Context(), `drop trigger refuse`)
	require.NoError(t, err)
	_, err = projector.Replay(t.Context(), db, projector.ParkedFilter{}, projector.Decision{By: "ann", Reason: "test"})
	require.NoError(t, err)
	o = again()
	require.Zero(t, o.code, o.stderr)
	require.Equal(t, 2, queryInt(t, path, `select stars from latest_reviews where product = 'x'`))
}

// TestImportWaitsForWaitingMessages: a message that is tried again later is not an error, and the
// wait for it is bounded.
func TestImportWaitsForWaitingMessages(t *testing.T) {
	t.Parallel()
	r := retries{patience: 20 * time.Millisecond}
	require.NoError(t, r.check(2))
	require.Eventually(t, func() bool { return r.check(2) != nil }, patience, time.Millisecond)
	require.ErrorContains(t, r.check(2), "2 messages are tried again, and none was applied for 20ms")
	require.NoError(t, r.check(1), "one was applied")
}

// TestImportInterrupted: Ctrl-C stops an import at once and cleanly, and the next import continues.
func TestImportInterrupted(t *testing.T) {
	t.Parallel()
	path, bad := generateFile(t, 4000, "-seed", "10")
	db := filepath.Join(t.TempDir(), "reviews.db")
	var stderr strings.Builder
	cmd := exec.Command(reviewsBin, "import", "--db", "sqlite:"+db, endless(t, path))
	cmd.Stderr = &stderr
	require.NoError(t, cmd.Start())
	waitUntil(t, db, countEvents, 100)
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	require.Error(t, cmd.Wait())
	require.Equal(t, 1, cmd.ProcessState.ExitCode())
	require.Contains(t, stderr.String(), "interrupted")

	o := reviews(t, "import", "--db", "sqlite:"+db, path)
	require.Zero(t, o.code, o.stderr)
	require.Equal(t, expectedReport(t, path, bad), report(t, db))
}

// endless returns the path of a file that has the lines of another one again and again, without an end: a program that
// reads it is in the middle, however long the test takes to end it.
func endless(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	fifo := filepath.Join(t.TempDir(), "endless")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	to, err := os.OpenFile(fifo, os.O_RDWR, 0) // not only to write, which would wait for the program
	require.NoError(t, err)
	var writing sync.WaitGroup
	writing.Go(func() {
		for err := error(nil); err == nil; {
			_, err = to.Write(text)
		}
	})
	t.Cleanup(func() {
		require.NoError(t, to.Close())
		writing.Wait()
	})
	return fifo
}

// waitUntil waits until a count of an import in another process is larger than a number.
func waitUntil(t *testing.T, db, count string, more int) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, err := os.Stat(db + "-wal")
		return err == nil && queryInt(t, db, `select count(*) from sqlite_master where name = 'latest_reviews'`) == 1 &&
			queryInt(t, db, count) > more
	}, patience, time.Millisecond)
}
