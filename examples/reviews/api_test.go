package main

import (
	"fmt"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/projector"
)

// TestAPI: each endpoint returns the documented status and body.
func TestAPI(t *testing.T) {
	t.Parallel()
	onEachProjection(t, func(t *testing.T, db database) {
		s := startService(t, db, inProcess, patience)
		post := func(product, body string, headers ...string) answer {
			return call(t, "POST", s.url+"/products/"+product+"/reviews", body, headers...)
		}
		a := post("p1", reviewJSON("ann", 4, "first"), strong)
		require.Equal(t, http.StatusCreated, a.status, a.text)
		require.Equal(t, "/products/p1", a.header.Get("Location"))
		require.JSONEq(t, `{"product":"p1","author":"ann","version":1,"changed":true}`, a.text)

		a = post("p1", reviewJSON("ann", 4, "first"))
		require.Equal(t, http.StatusOK, a.status, "repeating a post changes nothing")
		require.JSONEq(t, `{"product":"p1","author":"ann","version":1,"changed":false}`, a.text)

		a = post("p1", reviewJSON("ann", 1, "second <thoughts>"), strong)
		require.Equal(t, http.StatusCreated, a.status)
		require.EqualValues(t, 2, a.decode(t)["version"])
		require.Equal(t, http.StatusCreated, call(t, "POST", s.url+"/products/p1/reviews?consistency=strong", reviewJSON("bob", 5, "")).status)

		got := call(t, "GET", s.url+"/products/p1", "")
		require.Equal(t, http.StatusOK, got.status)
		product := got.decode(t)
		require.EqualValues(t, 2, product["reviews"])
		require.EqualValues(t, 6, product["stars"])
		require.EqualValues(t, 3, product["average"])
		latest := product["latest"].([]any)
		require.Len(t, latest, 2)
		require.Equal(t, "bob", latest[0].(map[string]any)["author"], "the latest review comes first")
		require.Equal(t, "second <thoughts>", latest[1].(map[string]any)["excerpt"])

		a = call(t, "DELETE", s.url+"/products/p1/reviews/ann", "", strong)
		require.Equal(t, http.StatusOK, a.status, a.text)
		require.JSONEq(t, `{"product":"p1","author":"ann","version":3,"changed":true}`, a.text)
		require.EqualValues(t, 1, call(t, "GET", s.url+"/products/p1", "").decode(t)["reviews"])
		a = call(t, "DELETE", s.url+"/products/p1/reviews/ann", "", strong)
		require.Equal(t, http.StatusOK, a.status, "a withdrawal may be sent again")
		require.JSONEq(t, `{"product":"p1","author":"ann","version":3,"changed":false}`, a.text)
		a = call(t, "DELETE", s.url+"/products/p1/reviews/nobody", "", strong)
		require.Equal(t, http.StatusNotFound, a.status)
		require.Equal(t, "no_review", code(t, a))

		require.Equal(t, http.StatusOK, call(t, "DELETE", s.url+"/products/p1/reviews/bob", "", strong).status)
		a = call(t, "GET", s.url+"/products/p1", "")
		require.Equal(t, http.StatusNotFound, a.status, "a product without reviews is not found")
		require.Equal(t, "no_reviews", code(t, a))
		require.JSONEq(t, `{"products":[]}`, call(t, "GET", s.url+"/products", "").text)

		escaped := "50%/a b?c#ü"
		require.Equal(t, http.StatusCreated, post(url.PathEscape(escaped), reviewJSON("x/y", 3, ""), strong).status)
		require.Equal(t, escaped, call(t, "GET", s.url+"/products/"+url.PathEscape(escaped), "").decode(t)["product"])
		require.Equal(t, http.StatusOK, call(t, "DELETE", s.url+"/products/"+url.PathEscape(escaped)+"/reviews/"+url.PathEscape("x/y"), "").status)
	})
}

func code(t *testing.T, a answer) any {
	t.Helper()
	require.Equal(t, "application/json; charset=utf-8", a.header.Get("Content-Type"))
	return a.decode(t)["error"].(map[string]any)["code"]
}

// TestIdempotencyKey: an old request that arrives again does not undo what came after it. A key counts for one operation,
// and another request with it is refused.
// Promise: G1.12
func TestIdempotencyKey(t *testing.T) {
	t.Parallel()
	s := startService(t, database{kind: "sqlite", path: filepath.Join(t.TempDir(), "reviews.db")}, inProcess, patience)
	post := func(body, key string) answer {
		return call(t, "POST", s.url+"/products/p1/reviews", body, strong, "Idempotency-Key: "+key)
	}
	first := post(reviewJSON("ann", 4, "first"), "k1")
	require.Equal(t, http.StatusCreated, first.status, first.text)
	require.Equal(t, http.StatusCreated, post(reviewJSON("ann", 1, "second"), "k2").status)
	again := post(reviewJSON("ann", 4, "first"), "k1")
	require.Equal(t, http.StatusCreated, again.status)
	require.Equal(t, first.text, again.text)
	require.EqualValues(t, 1, call(t, "GET", s.url+"/products/p1", "").decode(t)["stars"])
	require.Equal(t, http.StatusCreated, post(reviewJSON("bob", 5, ""), "k1").status, "the key of another review")
	require.Equal(t, http.StatusUnprocessableEntity, post(reviewJSON("ann", 3, ""), strings.Repeat("k", 256)).status)
	for _, other := range []string{reviewJSON("ann", 5, "first"), reviewJSON("ann", 4, "other")} {
		require.Equal(t, http.StatusUnprocessableEntity, post(other, "k1").status, "another request with the key of the first")
	}
	withdraw := func() answer {
		return call(t, "DELETE", s.url+"/products/p1/reviews/ann", "", strong, "Idempotency-Key: k2")
	}
	gone := withdraw() // the key of a post
	require.JSONEq(t, `{"product":"p1","author":"ann","version":3,"changed":true}`, gone.text)
	require.EqualValues(t, 1, call(t, "GET", s.url+"/products/p1", "").decode(t)["reviews"], "withdrawn, and bob's is left")
	require.Equal(t, http.StatusCreated, post(reviewJSON("ann", 2, "back"), "k4").status)
	require.Equal(t, gone.text, withdraw().text)
	require.EqualValues(t, 7, call(t, "GET", s.url+"/products/p1", "").decode(t)["stars"])
	a := call(t, "DELETE", s.url+"/products/p1/reviews/ann?forever", "", strong, "Idempotency-Key: k2")
	require.JSONEq(t, `{"product":"p1","author":"ann","version":6,"changed":true}`, a.text, "another operation")
}

// TestProductPages: pages of any size list every product once and in order.
func TestProductPages(t *testing.T) {
	t.Parallel()
	onEachProjection(t, func(t *testing.T, db database) {
		s := startService(t, db, inProcess, patience)
		var want []string
		for i := range 25 {
			want = append(want, fmt.Sprintf("p&%02d", i))
			headers := []string{}
			if i == 24 {
				headers = append(headers, strong) // waits for the earlier posts too: they share its topic
			}
			require.Equal(t, http.StatusCreated, call(t, "POST", s.url+"/products/"+url.PathEscape(want[i])+"/reviews", reviewJSON("ann", 5, ""), headers...).status)
		}
		for _, size := range []int{1, 7, 24, 25, 26, 100} {
			var got []string
			for next := fmt.Sprintf("/products?limit=%d", size); next != ""; {
				page := call(t, "GET", s.url+next, "").decode(t)
				rows := page["products"].([]any)
				require.LessOrEqual(t, len(rows), size)
				for _, row := range rows {
					got = append(got, row.(map[string]any)["product"].(string))
				}
				next, _ = page["next"].(string)
			}
			require.Equal(t, want, got, "pages of %d", size)
		}
		first := call(t, "GET", s.url+"/products", "").decode(t)
		require.Len(t, first["products"], pageSize, "the default limit")
	})
}

// TestBadInput: each bad request gets the right status, code and message, and writes nothing.
func TestBadInput(t *testing.T) {
	t.Parallel()
	s := startService(t, databases["sqlite"](t), inProcess, patience)
	long := strings.Repeat("x", 300)
	good := reviewJSON("ann", 5, "")
	for name, c := range map[string]struct {
		method, path, body string
		headers            []string
		status             int
		code, message      string
	}{
		"invalid JSON":        {"POST", "/products/p/reviews", "{", nil, 400, "bad_request", "not valid JSON"},
		"empty body":          {"POST", "/products/p/reviews", "", []string{"Content-Type: application/json"}, 400, "bad_request", "not valid JSON"},
		"an array":            {"POST", "/products/p/reviews", "[]", nil, 400, "bad_request", "must be a JSON object"},
		"two values":          {"POST", "/products/p/reviews", good + good, nil, 400, "bad_request", "not valid JSON"},
		"duplicate key":       {"POST", "/products/p/reviews", `{"author":"a","stars":1,"stars":5}`, nil, 400, "bad_request", "appears twice"},
		"unknown key":         {"POST", "/products/p/reviews", `{"author":"a","stars":1,"txt":""}`, nil, 400, "bad_request", "txt"},
		"stars as text":       {"POST", "/products/p/reviews", `{"author":"a","stars":"5"}`, nil, 400, "bad_request", "stars has the wrong type"},
		"half a star":         {"POST", "/products/p/reviews", `{"author":"a","stars":4.5}`, nil, 400, "bad_request", "stars has the wrong type"},
		"invalid UTF-8":       {"POST", "/products/p/reviews", "{\"author\":\"\xff\",\"stars\":5}", nil, 400, "bad_request", "not valid JSON"},
		"unpaired surrogate":  {"POST", "/products/p/reviews", `{"author":"\ud800","stars":5}`, nil, 400, "bad_request", "not valid JSON"},
		"wrong media type":    {"POST", "/products/p/reviews", good, []string{"Content-Type: text/plain"}, 415, "unsupported_media_type", "application/json"},
		"too large":           {"POST", "/products/p/reviews", reviewJSON("a", 5, strings.Repeat("x", bodyMax)), nil, 413, "too_large", "longer than"},
		"no stars":            {"POST", "/products/p/reviews", `{"author":"a"}`, nil, 422, "rejected", "stars must be 1 to 5, got 0"},
		"six stars":           {"POST", "/products/p/reviews", reviewJSON("a", 6, ""), nil, 422, "rejected", "stars must be 1 to 5, got 6"},
		"empty author":        {"POST", "/products/p/reviews", reviewJSON("", 5, ""), nil, 422, "rejected", "author"},
		"long author":         {"POST", "/products/p/reviews", reviewJSON(long, 5, ""), nil, 422, "rejected", "id"},
		"NUL in the author":   {"POST", "/products/p/reviews", `{"author":"a\u0000","stars":5}`, nil, 422, "rejected", "id"},
		"NUL in the text":     {"POST", "/products/p/reviews", `{"author":"a","stars":5,"text":"\u0000"}`, nil, 422, "rejected", "NUL"},
		"long text":           {"POST", "/products/p/reviews", reviewJSON("a", 5, strings.Repeat("x", review.MaxText+1)), nil, 422, "rejected", "bytes"},
		"long product":        {"POST", "/products/" + long + "/reviews", good, nil, 422, "rejected", "id"},
		"product not UTF-8":   {"POST", "/products/%ff/reviews", good, nil, 422, "rejected", "id"},
		"unknown consistency": {"POST", "/products/p/reviews", good, []string{"Consistency: total"}, 400, "bad_request", "consistency"},
		"empty consistency":   {"POST", "/products/p/reviews?consistency=", good, []string{strong}, 201, "", ""},
		"withdraw: absent":    {"DELETE", "/products/p/reviews/bob", "", nil, 404, "no_review", "no such review"},
		"withdraw: long":      {"DELETE", "/products/p/reviews/" + long, "", nil, 422, "rejected", "id"},
		"withdraw: header":    {"DELETE", "/products/p/reviews/bob?consistency=x", "", nil, 400, "bad_request", "consistency"},
		"limit: zero":         {"GET", "/products?limit=0", "", nil, 400, "bad_request", "limit"},
		"limit: too high":     {"GET", "/products?limit=101", "", nil, 400, "bad_request", "limit"},
		"limit: text":         {"GET", "/products?limit=x", "", nil, 400, "bad_request", "limit"},
		"after: not UTF-8":    {"GET", "/products?after=%ff", "", nil, 400, "bad_request", "after"},
		"after: NUL":          {"GET", "/products?after=%00", "", nil, 400, "bad_request", "after"},
		"product: NUL":        {"GET", "/products/%00", "", nil, 400, "bad_request", "product"},
		"product: absent":     {"GET", "/products/none", "", nil, 404, "no_reviews", "no reviews"},
		"product: two dots":   {"POST", "/products/%2e%2e/reviews", good, nil, 422, "rejected", `".."`},
		"product: blank":      {"POST", "/products/%20/reviews", good, nil, 422, "rejected", "empty"},
		"unknown path":        {"GET", "/product", "", nil, 404, "not_found", ""},
		"wrong method":        {"PUT", "/products/p/reviews", good, nil, 405, "method_not_allowed", "POST"},
		"wrong list method":   {"DELETE", "/products", "", nil, 405, "method_not_allowed", "GET"},
		"templates":           {"GET", "/web/page.html", "", nil, 404, "not_found", ""},
		"cross-site":          {"POST", "/products/p/reviews", good, []string{"Sec-Fetch-Site: cross-site"}, 403, "cross_origin", ""},
		"foreign origin":      {"DELETE", "/products/p/reviews/a", "", []string{"Origin: http://evil.example"}, 403, "cross_origin", ""},
	} {
		t.Run(name, func(t *testing.T) {
			a := call(t, c.method, s.url+c.path, c.body, c.headers...)
			require.Equal(t, c.status, a.status, a.text)
			if c.code == "" {
				return
			}
			require.Equal(t, c.code, code(t, a))
			require.Contains(t, a.decode(t)["error"].(map[string]any)["message"], c.message)
		})
	}
	last, err := s.db.LogPosition(t.Context(), eventstore.From{Now: true})
	require.NoError(t, err)
	require.EqualValues(t, 1, last, "only the valid request was written")
}

// TestStrongConsistency: a write with strong consistency returns when the read model shows it.
func TestStrongConsistency(t *testing.T) {
	t.Parallel()
	onEachProjection(t, func(t *testing.T, db database) {
		s := startService(t, db, inProcess, patience)
		for i := range 30 {
			a := call(t, "POST", s.url+"/products/p/reviews", reviewJSON(fmt.Sprint("a", i), 5, ""), strong)
			require.Equal(t, http.StatusCreated, a.status)
			require.EqualValues(t, i+1, call(t, "GET", s.url+"/products/p", "").decode(t)["reviews"], "the write is visible at once")
		}
	})
}

// TestStrongConsistencyTimeout: a write that is not visible in time returns 504 and its result.
func TestStrongConsistencyTimeout(t *testing.T) {
	t.Parallel()
	s := startService(t, databases["sqlite"](t), inProcess, 50*time.Millisecond)
	require.NoError(t, s.pipe.Stop())
	a := call(t, "POST", s.url+"/products/p/reviews", reviewJSON("ann", 5, ""), strong)
	require.Equal(t, http.StatusGatewayTimeout, a.status, a.text)
	require.Equal(t, "not_visible_yet", code(t, a))
	require.Equal(t, map[string]any{"product": "p", "author": "ann", "version": 1., "changed": true}, a.decode(t)["written"])
	require.Equal(t, http.StatusOK, call(t, "POST", s.url+"/products/p/reviews", reviewJSON("ann", 5, "")).status, "it was written")
}

// TestStrongConsistencyWhileStopping: a waiting write is answered, not cut off, when the service
// stops.
func TestStrongConsistencyWhileStopping(t *testing.T) {
	t.Parallel()
	s := startService(t, databases["sqlite"](t), inProcess, patience)
	require.NoError(t, s.pipe.Stop())
	begin := time.Now()
	time.AfterFunc(50*time.Millisecond, s.stopping)
	a := call(t, "POST", s.url+"/products/p/reviews", reviewJSON("ann", 5, ""), strong)
	require.Equal(t, "not_visible_yet", code(t, a))
	require.Less(t, time.Since(begin), patience, "the stop has ended the wait")
}

// TestDatabaseUnavailable: an unavailable database is a 503, so that clients retry, and not a 500.
func TestDatabaseUnavailable(t *testing.T) {
	t.Parallel()
	_, err := database{kind: "postgres", path: "postgres://127.0.0.1:1/none?connect_timeout=2"}.open(t.Context())
	require.Error(t, err)
	require.Equal(t, http.StatusServiceUnavailable, asHTTP(err).Status)
	for code, status := range map[string]int{"57P01": 503, "53300": 503, "08006": 503, "42601": 500} {
		require.Equal(t, status, asHTTP(fmt.Errorf("read: %w", &pgconn.PgError{Code: code})).Status, code)
	}
}

// TestStrongConsistencyParked: a write that the read model parks or skips is answered with that
// error.
func TestStrongConsistencyParked(t *testing.T) {
	t.Parallel()
	s := startService(t, databases["sqlite"](t), inProcess, patience)
	_, err := s.db.(*sqliteStore).SQL().Exec(`create trigger fail before insert on ratings_g1 begin select raise(abort, 'no'); end`)
	require.NoError(t, err)
	a := call(t, "POST", s.url+"/products/p/reviews", reviewJSON("ann", 5, ""), strong)
	require.Equal(t, http.StatusInternalServerError, a.status, a.text)
	require.Equal(t, "parked", code(t, a))
	page := call(t, "GET", s.url+"/", "")
	require.Contains(t, page.text, `<dd class="error">1</dd>`, "the page shows one parked message")
	_, err = projector.Skip(t.Context(), s.db, projector.ParkedFilter{}, projector.Decision{By: "ann", Reason: "test"})
	require.NoError(t, err)
	a = call(t, "POST", s.url+"/products/p/reviews", reviewJSON("ann", 5, ""), strong)
	require.Equal(t, http.StatusInternalServerError, a.status, "the write succeeded earlier and is never shown")
	require.Equal(t, "skipped", code(t, a))
}

// TestStrongConsistencyAfterPruning: a repeated command whose markers are pruned is answered like
// any command that changes nothing.
func TestStrongConsistencyAfterPruning(t *testing.T) {
	t.Parallel()
	s := startService(t, databases["sqlite"](t), overMemory, patience)
	db := s.db.(*sqliteStore)
	for i, status := range []int{http.StatusCreated, http.StatusOK} {
		a := call(t, "POST", s.url+"/products/p/reviews", reviewJSON("ann", 5, ""), strong)
		require.Equal(t, status, a.status, a.text)
		require.Equal(t, map[string]any{"product": "p", "author": "ann", "version": 1., "changed": i == 0}, a.decode(t))
		_, err := db.SQL().Exec(`update kinora_events set recorded_at = recorded_at - ?1; update kinora_markers set processed_at = processed_at - ?1`, (9 * 24 * time.Hour).Milliseconds())
		require.NoError(t, err)
		_, err = marker.Prune(t.Context(), db, marker.Retention{}, sqliteReviews.Name(), sqliteReviews.Handlers()...)
		require.NoError(t, err)
	}
}

// TestConflictsAreRetried: concurrent writes to one review all succeed, one after another.
func TestConflictsAreRetried(t *testing.T) {
	t.Parallel()
	onEachDatabase(t, func(t *testing.T, db database) {
		s := startService(t, db, inProcess, patience)
		const writers = 20
		answers := make([]answer, writers)
		var all sync.WaitGroup
		for i := range writers {
			all.Go(func() {
				answers[i], _ = send(t.Context(), "POST", s.url+"/products/p/reviews", reviewJSON("ann", 1+i%5, fmt.Sprint(i)), strong)
			})
		}
		all.Wait()
		versions := map[any]bool{}
		for _, a := range answers {
			require.Equal(t, http.StatusCreated, a.status, a.text)
			versions[a.decode(t)["version"]] = true
		}
		require.Len(t, versions, writers)
	})
}

// TestErrorStatus: a final conflict, an unknown outcome and an internal error have their own
// status.
func TestErrorStatus(t *testing.T) {
	t.Parallel()
	e := asHTTP(fmt.Errorf("update: %w", &eventstore.ConflictError{}))
	require.Equal(t, http.StatusConflict, e.Status)
	e = asHTTP(fmt.Errorf("update: %w", eventstore.ErrAmbiguous))
	require.Equal(t, http.StatusServiceUnavailable, e.Status)
	e = asHTTP(fmt.Errorf("secret"))
	require.Equal(t, http.StatusInternalServerError, e.Status)
	require.NotContains(t, e.Message, "secret")
}
