package main

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/examples/reviews/review"
)

// TestRedisAnswersAsSQL: after the same commands, every page, response and report is the same, whether
// the read model is in SQL or in Redis.
func TestRedisAnswersAsSQL(t *testing.T) {
	t.Parallel()
	path, bad := generateFile(t, 3000)
	_, inRedis := newRedis(t)
	inSQL := databases["sqlite"](t)
	var services []*testService
	for _, d := range []database{inSQL, inRedis} {
		o := runOperator(t, d, "import", path)
		require.Zero(t, o.code, o.stderr)
		require.Equal(t, expectedReport(t, path, bad), productsOf(t, d))
		services = append(services, startService(t, d, inProcess, patience))
	}
	same := func(get func(i int) string) string {
		t.Helper()
		want, got := get(0), get(1)
		require.Equal(t, want, got)
		return got
	}
	products := productsOf(t, inSQL)
	for i, p := range products[:6] { // all reviews of three products, and the latest of three others
		for {
			_, latest, err := services[0].db.product(t.Context(), p.Product, latestShown)
			require.NoError(t, err)
			for _, r := range latest {
				same(func(i int) string {
					a := call(t, "DELETE", services[i].url+"/products/"+url.PathEscape(p.Product)+"/reviews/"+url.PathEscape(r.Author), "", strong)
					require.Equal(t, http.StatusOK, a.status, a.text)
					return a.text
				})
			}
			if len(latest) == 0 || i >= 3 {
				break
			}
		}
	}
	for next := "/products?limit=7"; next != ""; {
		text := same(func(i int) string { return call(t, "GET", services[i].url+next, "").text })
		next, _ = answer{text: text}.decode(t)["next"].(string)
	}
	pages := []string{"/", "/?product=none", "/products/none"}
	for i, p := range products {
		of := url.QueryEscape(p.Product)
		if pages = append(pages, "/products/"+url.PathEscape(p.Product)); i%10 == 0 {
			pages = append(pages, "/?product="+of, "/?after="+of)
		}
	}
	for _, page := range pages {
		same(func(i int) string {
			a := call(t, "GET", services[i].url+page, "")
			return fmt.Sprint(a.status, " ", a.text)
		})
	}
	for _, args := range [][]string{{"--json"}, {"--best", "5"}, {"--best", "1000", "--json"}, {"--product", products[7].Product, "--limit", "1000"}, {"--product", products[7].Product, "--limit", "0"}} {
		same(func(i int) string { return runOperator(t, []database{inSQL, inRedis}[i], "report", args...).stdout })
	}
}

// TestRedisLosesItsData: while clients write, Redis is killed, and restarted empty. The read model is right
// again by itself, and the page too.
func TestRedisLosesItsData(t *testing.T) {
	t.Parallel()
	for name, flags := range map[string]pipelineFlags{"log": inProcess, "broker": overMemory} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server, d := newRedis(t)
			s := startService(t, d, flags, patience)
			var want sync.Map // by product, the stars of ann, who writes all reviews
			var writers sync.WaitGroup
			write := func(each int) {
				for i := range 4 {
					writers.Go(func() {
						for n := range each {
							product, stars := fmt.Sprintf("p%d-%d", i, rand.IntN(20)), 1+rand.IntN(5)
							a, err := send(t.Context(), "POST", s.url+"/products/"+product+"/reviews", reviewJSON("ann", stars, fmt.Sprint(n)))
							if err != nil || a.status >= 300 {
								t.Errorf("post: %d %s %v", a.status, a.text, err)
							}
							want.Store(product, stars)
						}
					})
				}
			}
			write(50)
			writers.Wait()
			write(100)
			server.kill()
			require.Equal(t, http.StatusServiceUnavailable, call(t, "GET", s.url+"/products", "").status)
			require.Equal(t, http.StatusServiceUnavailable, call(t, "GET", s.url+"/readyz", "").status)
			server.start()
			writers.Wait()
			write(20)
			writers.Wait()
			require.Eventually(t, func() bool { return call(t, "GET", s.url+"/readyz", "").status == http.StatusOK },
				patience, 50*time.Millisecond, "the client tries to connect once a second")
			require.Equal(t, http.StatusCreated, s.post("last", "ann", 5).status, "a write waits until it is visible")
			want.Store("last", 5)
			var all []rating
			want.Range(func(product, stars any) bool {
				all = append(all, rating{product.(string), 1, stars.(int)})
				return true
			})
			s.eventuallyRatings(all)
			require.Contains(t, call(t, "GET", s.url+"/?product=last", "").text, "<bdi>ann</bdi></strong> on <bdi>last</bdi>")
			o := runOperator(t, d, "verify")
			require.Zero(t, o.code, o.stdout+o.stderr)
			require.NotContains(t, o.stderr, "\n0 events applied")
		})
	}
}

// eventuallyRatings waits until readers see the ratings.
func (s *testService) eventuallyRatings(want []rating) {
	s.Helper()
	slices.SortFunc(want, func(a, b rating) int { return cmp.Compare(a.Product, b.Product) })
	require.EventuallyWithT(s, func(t *assert.CollectT) {
		got, err := s.db.ratings(s.Context(), "")
		require.NoError(t, err)
		require.Equal(t, want, got)
	}, patience, 50*time.Millisecond)
}

// TestRedisVerify: verify finds the keys that were changed by hand, and repair mends them.
func TestRedisVerify(t *testing.T) {
	t.Parallel()
	server, d := newRedis(t)
	importFour(t, d)
	want := productsOf(t, d)
	require.Zero(t, runOperator(t, d, "verify").code)
	server.damage()
	o := runOperator(t, d, "verify")
	require.Equal(t, 1, o.code, o.stderr)
	require.Equal(t, `reviews key=":extra": extra
reviews key=":latest:p2": missing
reviews key=":rating:p2": value is {"stars":"9"}, must be {"stars":"8"}
`, o.stdout)
	require.Contains(t, o.stderr, "3 rows differ at position 4\n")
	o = runOperator(t, d, "verify", "--repair", "--reason", "commands by hand")
	require.Zero(t, o.code, o.stderr)
	require.Contains(t, o.stderr, "3 rows differ at position 4; 3 were repaired\n")
	o = runOperator(t, d, "verify")
	require.Zero(t, o.code, o.stdout)
	require.Equal(t, want, productsOf(t, d))
}

// damage changes keys of the first generation of four imported reviews.
func (s *redisServer) damage() {
	const table = "{reviews}reviews_g1:"
	s.do([]any{"hset", table + "rating:p2", "stars", 9}, []any{"del", table + "latest:p2"}, []any{"set", table + "extra", 1})
}

// TestRedisRebuild: a rebuild mends the read model, in new keys or in place.
func TestRedisRebuild(t *testing.T) {
	t.Parallel()
	server, d := newRedis(t)
	importFour(t, d)
	want := productsOf(t, d)
	server.damage()
	require.Equal(t, "4 events; it first empties the read model\n", runOperator(t, d, "rebuild", "plan", "--in-place").stdout)
	o := runOperator(t, d, "rebuild", "--reason", "wrong stars", "--check", "--wait", "0s")
	require.Equal(t, 1, o.code)
	require.Contains(t, o.stderr, "generation 2: 3 rows differ from the live read model: promote it or cancel it")
	require.NotEqual(t, want, productsOf(t, d))
	o = runOperator(t, d, "rebuild", "promote", "2", "--reason", "as expected")
	require.Zero(t, o.code, o.stderr)
	require.Equal(t, want, productsOf(t, d))
	o = runOperator(t, d, "rebuild", "promote", "1", "--reason", "go back")
	require.Zero(t, o.code, o.stderr)
	require.NotEqual(t, want, productsOf(t, d))
	o = runOperator(t, d, "rebuild", "--in-place", "--reason", "wrong stars", "--wait", "0s")
	require.Zero(t, o.code, o.stderr)
	require.Contains(t, o.stdout, "generation 3 is live")
	require.Equal(t, want, productsOf(t, d))
	o = runOperator(t, d, "verify")
	require.Zero(t, o.code, o.stdout+o.stderr)
}

// TestRedisParked: Redis refuses a product. Its messages are parked in the database, and others are applied.
// After the fault is fixed, a replay applies them in order. There are no dry runs.
func TestRedisParked(t *testing.T) {
	t.Parallel()
	server, d := newRedis(t)
	s := startService(t, d, inProcess, patience)
	const refused = "{reviews}reviews_g1:rating:cup"
	server.do([]any{"set", refused, "not a hash"})
	commands, err := review.NewCommands(s.db)
	require.NoError(t, err)
	for day, stars := range []int{2, 4} {
		_, err = commands.Post(t.Context(), "cup", "ann", review.Content{Stars: stars}, time.Date(2026, 5, day+1, 0, 0, 0, 0, time.UTC))
		require.NoError(t, err)
	}
	require.Equal(t, http.StatusCreated, s.post("tea", "ben", 5).status)
	s.eventuallyParked(2)
	s.eventuallyStuck()
	require.Equal(t, []string{
		"1 product-reviews-redis/posted review-cup-ann unknown WRONGTYPE 5",
		"2 product-reviews-redis review-cup-ann held  0",
	}, summaries(parkedList(t, d)))
	require.Contains(t, call(t, "GET", s.url+"/", "").text, `<dd class="error">2</dd>`)
	o := runOperator(t, d, "replay", "--all", "--dry-run")
	require.Equal(t, 1, o.code)
	require.Contains(t, o.stderr, "has no dry runs")

	server.do([]any{"del", refused})
	o = runOperator(t, d, "replay", "--all", "--reason", "cup is a hash again")
	require.Zero(t, o.code, o.stderr)
	require.Equal(t, "2 selected: 0 still waiting, 0 stuck\n", o.stdout)
	require.Equal(t, []rating{{"cup", 1, 4}, {"tea", 1, 5}}, s.report())
	require.Zero(t, runOperator(t, d, "verify").code)
}

// TestRedisAndBack: one database may have a read model in SQL and one in Redis. Each catches up with the
// events when it is used.
func TestRedisAndBack(t *testing.T) {
	t.Parallel()
	onEachDatabase(t, func(t *testing.T, inSQL database) {
		inRedis := inSQL
		inRedis.redis = redisKeys{startRedis(t).url(), "reviews"}
		for i, d := range []database{inSQL, inRedis, inSQL, inRedis} {
			s := startService(t, d, inProcess, patience)
			require.Equal(t, http.StatusCreated, s.post("tea", fmt.Sprint("author-", i), 1+i).status)
			require.Equal(t, []rating{{"tea", 1 + i, []int{1, 3, 6, 10}[i]}}, s.report())
			require.NoError(t, s.pipe.Stop())
			o := runOperator(t, d, "verify")
			require.Zero(t, o.code, o.stdout+o.stderr)
		}
	})
}

// TestRedisRefuses: a command that cannot work fails with the reason, and shows no password.
func TestRedisRefuses(t *testing.T) {
	t.Parallel()
	server, d := newRedis(t)
	importFour(t, d)
	other := "sqlite:" + filepath.Join(t.TempDir(), "other.db")
	path := filepath.Join(t.TempDir(), "four.json")
	require.NoError(t, os.WriteFile(path, []byte(fourReviews), 0o600))
	for _, c := range []struct {
		redis, want string
		args        []string
	}{
		{"redis://ann:hunter2@127.0.0.1:1/0", "connect to redis://127.0.0.1:1/0", []string{"report", "--db", d.flag()}},
		{"http://ann:hunter2@127.0.0.1:1/0", "--redis is not a URL", []string{"report", "--db", d.flag()}},
		{server.url(), "no such file", []string{"report", "--db", other}},
		{server.url(), "the log has changed", []string{"import", "--db", other, path}},
		{server.url(), "use --projection sql", []string{"demo", "--db", "memory", "--kills", "0"}},
	} {
		o := reviews(t, append(c.args, "--projection", "redis", "--redis", c.redis)...)
		require.NotZero(t, o.code, c.args)
		require.Contains(t, o.stderr, c.want)
		require.NotContains(t, o.stdout+o.stderr, "hunter2")
	}
	// A database whose read model is in SQL has none in Redis.
	o := reviews(t, "import", "--db", other, path)
	require.Zero(t, o.code, o.stderr)
	o = reviews(t, "report", "--db", other, "--projection", "redis", "--redis", server.url())
	require.Contains(t, o.stderr, "has no read model of reviews: import a file first")
}

// TestDemoRedis: with kills and duplicates the projector with markers in Redis is exact. A second demo on the
// same server begins without the keys of the first one.
func TestDemoRedis(t *testing.T) {
	t.Parallel()
	server := startRedis(t)
	for range 2 {
		o, result := demoJSON(t, "--projection", "redis", "--redis", server.url(), "--commands", "300", "--products", "8", "--kills", "2", "--duplicates", "0.9")
		require.Zero(t, o.code, "%s\n%s", o.stdout, o.stderr)
		require.Equal(t, 2, intAt(t, result, "kills"))
		require.Zero(t, intAt(t, result, "exactly_once.wrong_products"))
		require.Positive(t, intAt(t, result, "control.wrong_products"))
		require.Positive(t, intAt(t, result, "concurrent_duplicates"))
	}
}
