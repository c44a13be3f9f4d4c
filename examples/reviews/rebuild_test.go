package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestRebuildUnderLoad: while clients write and a reader polls, an operator rebuilds the read model,
// goes back to the first generation, and verifies. The service does the work. The reader never
// sees a product with fewer reviews than before, or with other stars.
func TestRebuildUnderLoad(t *testing.T) {
	t.Parallel()
	onEachProjection(t, func(t *testing.T, d database) {
		s := startService(t, d, inProcess, patience)
		ctx, stop := context.WithCancel(t.Context())
		var accepted, slowest atomic.Int64
		timed := func(method, path, body string) (answer, error) {
			begin := time.Now()
			a, err := send(t.Context(), method, s.url+path, body)
			for took := int64(time.Since(begin)); ; {
				if was := slowest.Load(); took <= was || slowest.CompareAndSwap(was, took) {
					return a, err
				}
			}
		}
		wentBack := ""
		wrote, read := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(wrote)
			for n := 1; ctx.Err() == nil && !t.Failed(); n++ {
				a, err := timed("POST", "/products/tea/reviews", reviewJSON(fmt.Sprint("author-", n), 4, ""))
				if err != nil || a.status != http.StatusCreated {
					t.Errorf("post: %d %s %v", a.status, a.text, err)
				}
				accepted.Add(1)
				_ = sleep(ctx, 2*time.Millisecond)
			}
		}()
		go func() {
			defer close(read)
			for most := 0.0; ctx.Err() == nil && !t.Failed(); {
				a, err := timed("GET", "/products/tea", "")
				if err != nil || a.status != http.StatusOK {
					if most > 0 {
						t.Errorf("get: %d %s %v", a.status, a.text, err)
					}
					continue
				}
				got := a.decode(t)
				n := got["reviews"].(float64)
				if got["stars"] != 4*n {
					t.Errorf("%v reviews with %v stars", n, got["stars"])
				}
				if n < most {
					wentBack = fmt.Sprintf("%v reviews after %v", n, most)
				}
				most = n
				_ = sleep(ctx, time.Millisecond)
			}
		}()
		require.Eventually(t, func() bool { return accepted.Load() > 100 }, patience, time.Millisecond)

		o := runOperator(t, d, "rebuild", "--reason", "a test", "--wait", patience.String())
		require.Zero(t, o.code, o.stderr)
		require.Contains(t, o.stdout, "generation 2 is live")
		require.NotContains(t, o.stderr, "this one does")
		o = runOperator(t, d, "rebuild", "promote", "1", "--reason", "go back", "--by", "ann")
		require.Zero(t, o.code, o.stderr)
		require.Equal(t, "generation 1 is live\n", o.stdout)
		o = runOperator(t, d, "rebuild", "list")
		require.Regexp(t, `(?m)^1 +live .*ann +go back$`, o.stdout)
		require.Regexp(t, `(?m)^2 +standby +1 +blue-green `, o.stdout)
		o = runOperator(t, d, "verify")
		require.Zero(t, o.code, o.stdout+o.stderr)
		stop()
		<-wrote
		<-read
		// Redis may show the old read model again if the other store does not commit the switch for a third of the lease. On a
		// machine that is as slow, requests take long too.
		if d.redis.url == "" || time.Duration(slowest.Load()) < lease/6 {
			require.Empty(t, wentBack, "the slowest request took %s", time.Duration(slowest.Load()))
		}
		require.Eventually(t, func() bool {
			return int64(call(t, "GET", s.url+"/products/tea", "").decode(t)["reviews"].(float64)) == accepted.Load()
		}, patience, 10*time.Millisecond)
		o = runOperator(t, d, "verify")
		require.Zero(t, o.code, o.stdout+o.stderr)
		require.Contains(t, o.stderr, fmt.Sprintf("%d events applied, 0 of them failed; 0 rows differ at position ", accepted.Load()))
	})
}

// importFour imports four reviews of the products cup and tea into a new database.
func importFour(t *testing.T, d database) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "four.json")
	require.NoError(t, os.WriteFile(path, []byte(fourReviews), 0o600))
	o := runOperator(t, d, "import", path)
	require.Zero(t, o.code, o.stderr)
}

// change runs a statement that is valid in each database.
func change(t *testing.T, d database, stmt string) {
	t.Helper()
	db, err := d.open(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, db.Close()) }()
	(&testService{T: t, db: db}).exec(stmt, stmt)
}

// TestVerify: verify finds the rows that were changed by SQL, and repair mends them.
func TestVerify(t *testing.T) {
	t.Parallel()
	onEachDatabase(t, func(t *testing.T, d database) {
		importFour(t, d)
		want := productsOf(t, d)
		o := runOperator(t, d, "verify")
		require.Zero(t, o.code, o.stdout+o.stderr)
		require.Empty(t, o.stdout)
		require.Contains(t, o.stderr, "4 events applied, 0 of them failed; 0 rows differ at position 4\n")

		change(t, d, `update ratings_g1 set stars = 9 where product = 'p2'`)
		change(t, d, `insert into ratings_g1 (product, reviews, stars) values ('more', 1, 1)`)
		change(t, d, `delete from latest_reviews_g1 where author = 'bob'`)
		o = runOperator(t, d, "verify")
		require.Equal(t, 1, o.code, o.stderr)
		const stars, others = `ratings product="p2": stars is 9, must be 8` + "\n",
			`ratings product="more": extra` + "\n" + `latest_reviews author="bob" product="p2": missing` + "\n"
		require.ElementsMatch(t, strings.Split(stars+others, "\n"), strings.Split(o.stdout, "\n"))
		require.Contains(t, o.stderr, "3 rows differ")
		o = runOperator(t, d, "verify", "--ignore", "stars,summary")
		require.Equal(t, 1, o.code, o.stderr)
		require.ElementsMatch(t, strings.Split(others, "\n"), strings.Split(o.stdout, "\n"))
		o = runOperator(t, d, "verify", "--repair", "--limit", "1", "--reason", "SQL by hand")
		require.Equal(t, 1, o.code, "there may be more differences")

		o = runOperator(t, d, "verify", "--repair", "--reason", "SQL by hand")
		require.Zero(t, o.code, o.stderr)
		require.Contains(t, o.stderr, "2 rows differ at position 4; 2 were repaired\n")
		require.Equal(t, want, productsOf(t, d))
		o = runOperator(t, d, "verify")
		require.Zero(t, o.code, o.stdout+o.stderr)
	})
}

// TestVerifyFails: an error is not taken for a difference.
func TestVerifyFails(t *testing.T) {
	t.Parallel()
	o := reviews(t, "verify", "--db", "sqlite:"+filepath.Join(t.TempDir(), "missing.db"))
	require.Equal(t, 2, o.code, o.stderr)
	o = reviews(t, "verify", "--db", "sqlite:"+importFile(t, fourReviews), "--repair")
	require.Greater(t, o.code, 1, o.stderr)
	require.Contains(t, o.stderr, "--reason is missing")
}

// TestRebuildWithoutService: without a running service, the command rebuilds the read model itself.
func TestRebuildWithoutService(t *testing.T) {
	t.Parallel()
	onEachDatabase(t, func(t *testing.T, d database) {
		importFour(t, d)
		want := productsOf(t, d)
		change(t, d, `update ratings_g1 set stars = 9 where product = 'p2'`)
		o := runOperator(t, d, "rebuild", "plan", "--in-place")
		require.Zero(t, o.code, o.stderr)
		require.Regexp(t, `^4 events, about [1-9][0-9ms]*; it first empties ratings_g1, latest_reviews_g1\n$`, o.stdout)
		o = runOperator(t, d, "rebuild", "--reason", "wrong stars", "--check", "--wait", "0s")
		require.Equal(t, 1, o.code)
		require.Regexp(t, `(?m)^4 events, about [1-9][0-9ms]*; readers see the new tables once they are complete$`, o.stdout)
		require.Contains(t, o.stderr, "generation 2: 1 rows differ from the live read model: promote it or cancel it")
		require.NotEqual(t, want, productsOf(t, d))
		o = runOperator(t, d, "rebuild", "promote", "2", "--reason", "as expected")
		require.Zero(t, o.code, o.stderr)
		require.Equal(t, want, productsOf(t, d))
		o = runOperator(t, d, "rebuild", "drop", "1", "--reason", "it works")
		require.Zero(t, o.code, o.stderr)
		require.NotContains(t, runOperator(t, d, "rebuild", "list").stdout, "standby")

		change(t, d, `update ratings_g2 set stars = 9 where product = 'p2'`)
		o = runOperator(t, d, "rebuild", "--in-place", "--reason", "wrong stars", "--wait", "0s")
		require.Zero(t, o.code, o.stderr)
		require.Contains(t, o.stdout, "generation 3 is live")
		require.Equal(t, want, productsOf(t, d))

		for _, args := range [][]string{{"pause"}, {"resume"}, {"cancel"}, {"promote", "1"}, {"drop", "3"}} {
			o = runOperator(t, d, "rebuild", append(args, "--reason", "a test")...)
			require.Equal(t, 1, o.code, "%v: %s", args, o.stdout)
		}
		require.NotZero(t, runOperator(t, d, "rebuild").code, "without a reason")
	})
}

// TestRebuildIsControlled: a rebuild is interrupted, joined, paused, resumed and canceled.
func TestRebuildIsControlled(t *testing.T) {
	t.Parallel()
	onEachProjection(t, func(t *testing.T, d database) {
		path, _ := generateFile(t, 1500) // at one event per second, the rebuild does not end before the test
		require.Zero(t, runOperator(t, d, "import", path).code)
		want := productsOf(t, d)
		listed := func(what string) {
			t.Helper()
			require.Eventually(t, func() bool {
				return strings.Contains(runOperator(t, d, "rebuild", "list").stdout, what)
			}, patience, 100*time.Millisecond, what)
		}
		first := startProcess(t, d.flag(), append([]string{"rebuild", "--rate", "1", "--reason", "slowly", "--wait", "0s"}, d.args()...)...)
		listed(" building ")
		require.NoError(t, first.Process.Signal(syscall.SIGINT))
		require.Error(t, first.Wait())
		require.Contains(t, first.stderr.String(), "interrupted")

		second := startProcess(t, d.flag(), append([]string{"rebuild", "--reason", "again", "--wait", "0s"}, d.args()...)...)
		_ = runOperator(t, d, "rebuild", "pause", "--reason", "too much load", "--by", "ann")
		listed("building, paused")
		listed("too much load")
		require.Zero(t, runOperator(t, d, "rebuild", "resume", "--reason", "night").code)
		require.Eventually(t, func() bool {
			return strings.Contains(second.stderr.String(), "rebuild progress")
		}, patience, 10*time.Millisecond)
		require.Zero(t, runOperator(t, d, "rebuild", "cancel", "--reason", "enough").code)
		require.Error(t, second.Wait())
		require.Contains(t, second.stderr.String(), "the rebuild was canceled")
		require.Equal(t, want, productsOf(t, d))
	})
}

// productsOf returns the report.
func productsOf(t *testing.T, d database) []reportRow {
	t.Helper()
	o := runOperator(t, d, "report", "--json")
	require.Zero(t, o.code, o.stderr)
	var rows []reportRow
	require.NoError(t, json.Unmarshal([]byte(o.stdout), &rows))
	return rows
}

// TestRebuildAppliesParkedMessages: a rebuild tries a stuck message again. After that only the
// generation that stands by has it.
func TestRebuildAppliesParkedMessages(t *testing.T) {
	t.Parallel()
	onEachDatabase(t, func(t *testing.T, d database) {
		s := startService(t, d, inProcess, patience)
		s.refuse("ann") // in the tables of the first generation
		require.Equal(t, http.StatusInternalServerError, s.post("cup", "ann", 4).status)
		s.eventuallyStuck()
		require.Contains(t, runOperator(t, d, "rebuild", "plan").stdout, "1 parked messages are tried again\n")
		o := runOperator(t, d, "rebuild", "--reason", "the table refused ann")
		require.Zero(t, o.code, o.stderr)
		require.EqualValues(t, 4, call(t, "GET", s.url+"/products/cup", "").decode(t)["stars"])
		s.eventuallyParked(0)
		rows := parkedList(t, d)
		require.Len(t, rows, 1)
		require.Equal(t, 1, rows[0].Generation)
		require.Equal(t, 1, runOperator(t, d, "replay", "--all", "--reason", "a test").code, "no message of the live generation is parked")
		require.Zero(t, runOperator(t, d, "verify").code)
	})
}
