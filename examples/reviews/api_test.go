package main

import (
	"fmt"
	"net/http"
	"net/url"
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

// TestAPI: each endpoint, as a client sees it.
func TestAPI(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, db database) {
		s := serveHere(t, db, here, 10*time.Second)
		post := func(product, body string, headers ...string) answer {
			return call(t, "POST", s.url+"/products/"+product+"/reviews", body, headers...)
		}
		a := post("p1", reviewJSON("ann", 4, "first"), strong)
		require.Equal(t, http.StatusCreated, a.status, a.text)
		require.Equal(t, "/products/p1", a.header.Get("Location"))
		require.JSONEq(t, `{"product":"p1","author":"ann","version":1,"changed":true}`, a.text)

		a = post("p1", reviewJSON("ann", 4, "first"))
		require.Equal(t, http.StatusOK, a.status, "the same again is no change")
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
		require.Equal(t, "bob", latest[0].(map[string]any)["author"], "the latest first")
		require.Equal(t, "second <thoughts>", latest[1].(map[string]any)["excerpt"])

		a = call(t, "DELETE", s.url+"/products/p1/reviews/ann", "", strong)
		require.Equal(t, http.StatusOK, a.status, a.text)
		require.JSONEq(t, `{"product":"p1","author":"ann","version":3,"changed":true}`, a.text)
		require.EqualValues(t, 1, call(t, "GET", s.url+"/products/p1", "").decode(t)["reviews"])
		a = call(t, "DELETE", s.url+"/products/p1/reviews/ann", "", strong)
		require.Equal(t, http.StatusOK, a.status, "to send it again is safe")
		require.JSONEq(t, `{"product":"p1","author":"ann","version":3,"changed":false}`, a.text)
		a = call(t, "DELETE", s.url+"/products/p1/reviews/nobody", "", strong)
		require.Equal(t, http.StatusNotFound, a.status)
		require.Equal(t, "no_review", code(t, a))

		require.Equal(t, http.StatusOK, call(t, "DELETE", s.url+"/products/p1/reviews/bob", "", strong).status)
		a = call(t, "GET", s.url+"/products/p1", "")
		require.Equal(t, http.StatusNotFound, a.status, "a product without reviews is not there")
		require.Equal(t, "no_reviews", code(t, a))
		require.JSONEq(t, `{"products":[]}`, call(t, "GET", s.url+"/products", "").text)

		odd := "50%/a b?c#ü"
		require.Equal(t, http.StatusCreated, post(url.PathEscape(odd), reviewJSON("x/y", 3, ""), strong).status)
		require.Equal(t, odd, call(t, "GET", s.url+"/products/"+url.PathEscape(odd), "").decode(t)["product"])
		require.Equal(t, http.StatusOK, call(t, "DELETE", s.url+"/products/"+url.PathEscape(odd)+"/reviews/"+url.PathEscape("x/y"), "").status)
	})
}

func code(t *testing.T, a answer) any {
	t.Helper()
	require.Equal(t, "application/json; charset=utf-8", a.header.Get("Content-Type"))
	return a.decode(t)["error"].(map[string]any)["code"]
}

// TestProductPages: every product once, in order, over pages of any size.
func TestProductPages(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, db database) {
		s := serveHere(t, db, here, 10*time.Second)
		var want []string
		for i := range 25 {
			want = append(want, fmt.Sprintf("p&%02d", i))
			headers := []string{}
			if i == 24 {
				headers = append(headers, strong) // and so are those before it, on its topic
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
		require.Len(t, first["products"], pageSize, "without a limit")
	})
}

// TestBadInput: what is wrong is said, by status, code and text, and nothing is written.
func TestBadInput(t *testing.T) {
	t.Parallel()
	s := serveHere(t, databases["sqlite"](t), here, time.Second)
	long := strings.Repeat("x", 300)
	good := reviewJSON("ann", 5, "")
	for name, c := range map[string]struct {
		method, path, body string
		headers            []string
		status             int
		code, says         string
	}{
		"no JSON":             {"POST", "/products/p/reviews", "{", nil, 400, "bad_request", "not valid JSON"},
		"no body":             {"POST", "/products/p/reviews", "", []string{"Content-Type: application/json"}, 400, "bad_request", "not valid JSON"},
		"an array":            {"POST", "/products/p/reviews", "[]", nil, 400, "bad_request", "not a JSON object"},
		"two values":          {"POST", "/products/p/reviews", good + good, nil, 400, "bad_request", "not valid JSON"},
		"a key twice":         {"POST", "/products/p/reviews", `{"author":"a","stars":1,"stars":5}`, nil, 400, "bad_request", "twice"},
		"an unknown key":      {"POST", "/products/p/reviews", `{"author":"a","stars":1,"txt":""}`, nil, 400, "bad_request", "txt"},
		"stars as text":       {"POST", "/products/p/reviews", `{"author":"a","stars":"5"}`, nil, 400, "bad_request", "stars is of the wrong type"},
		"half a star":         {"POST", "/products/p/reviews", `{"author":"a","stars":4.5}`, nil, 400, "bad_request", "stars is of the wrong type"},
		"no UTF-8":            {"POST", "/products/p/reviews", "{\"author\":\"\xff\",\"stars\":5}", nil, 400, "bad_request", "not valid JSON"},
		"half a surrogate":    {"POST", "/products/p/reviews", `{"author":"\ud800","stars":5}`, nil, 400, "bad_request", "not valid JSON"},
		"another media type":  {"POST", "/products/p/reviews", good, []string{"Content-Type: text/plain"}, 415, "unsupported_media_type", "application/json"},
		"too large":           {"POST", "/products/p/reviews", reviewJSON("a", 5, strings.Repeat("x", bodyMax)), nil, 413, "too_large", "longer than"},
		"no stars":            {"POST", "/products/p/reviews", `{"author":"a"}`, nil, 422, "rejected", "0 stars"},
		"six stars":           {"POST", "/products/p/reviews", reviewJSON("a", 6, ""), nil, 422, "rejected", "6 stars"},
		"no author":           {"POST", "/products/p/reviews", reviewJSON("", 5, ""), nil, 422, "rejected", "author"},
		"a long author":       {"POST", "/products/p/reviews", reviewJSON(long, 5, ""), nil, 422, "rejected", "id"},
		"a NUL in the author": {"POST", "/products/p/reviews", `{"author":"a\u0000","stars":5}`, nil, 422, "rejected", "id"},
		"a NUL in the text":   {"POST", "/products/p/reviews", `{"author":"a","stars":5,"text":"\u0000"}`, nil, 422, "rejected", "NUL"},
		"a long text":         {"POST", "/products/p/reviews", reviewJSON("a", 5, strings.Repeat("x", review.MaxText+1)), nil, 422, "rejected", "bytes"},
		"a long product":      {"POST", "/products/" + long + "/reviews", good, nil, 422, "rejected", "id"},
		"a product no text":   {"POST", "/products/%ff/reviews", good, nil, 422, "rejected", "id"},
		"a consistency":       {"POST", "/products/p/reviews", good, []string{"Consistency: total"}, 400, "bad_request", "consistency"},
		"one as a parameter":  {"POST", "/products/p/reviews?consistency=", good, []string{strong}, 201, "", ""},
		"withdraw: none":      {"DELETE", "/products/p/reviews/bob", "", nil, 404, "no_review", "no such review"},
		"withdraw: long":      {"DELETE", "/products/p/reviews/" + long, "", nil, 422, "rejected", "id"},
		"withdraw: a word":    {"DELETE", "/products/p/reviews/bob?consistency=x", "", nil, 400, "bad_request", "consistency"},
		"limit: none":         {"GET", "/products?limit=0", "", nil, 400, "bad_request", "limit"},
		"limit: many":         {"GET", "/products?limit=101", "", nil, 400, "bad_request", "limit"},
		"limit: text":         {"GET", "/products?limit=x", "", nil, 400, "bad_request", "limit"},
		"after: no text":      {"GET", "/products?after=%ff", "", nil, 400, "bad_request", "after"},
		"after: NUL":          {"GET", "/products?after=%00", "", nil, 400, "bad_request", "after"},
		"product: NUL":        {"GET", "/products/%00", "", nil, 400, "bad_request", "product"},
		"product: none":       {"GET", "/products/none", "", nil, 404, "no_reviews", "no reviews"},
		"two dots":            {"POST", "/products/%2e%2e/reviews", good, nil, 422, "rejected", "dot"},
		"a blank product":     {"POST", "/products/%20/reviews", good, nil, 422, "rejected", "empty"},
		"no such place":       {"GET", "/product", "", nil, 404, "not_found", ""},
		"no such method":      {"PUT", "/products/p/reviews", good, nil, 405, "method_not_allowed", "POST"},
		"no such method here": {"DELETE", "/products", "", nil, 405, "method_not_allowed", "GET"},
		"templates":           {"GET", "/web/page.html", "", nil, 404, "not_found", ""},
		"another site":        {"POST", "/products/p/reviews", good, []string{"Sec-Fetch-Site: cross-site"}, 403, "cross_origin", ""},
		"another origin":      {"DELETE", "/products/p/reviews/a", "", []string{"Origin: http://evil.example"}, 403, "cross_origin", ""},
	} {
		t.Run(name, func(t *testing.T) {
			a := call(t, c.method, s.url+c.path, c.body, c.headers...)
			require.Equal(t, c.status, a.status, a.text)
			if c.code == "" {
				return
			}
			require.Equal(t, c.code, code(t, a))
			require.Contains(t, a.decode(t)["error"].(map[string]any)["message"], c.says)
		})
	}
	counts, err := s.db.StatusCounts(t.Context())
	require.NoError(t, err)
	sum := int64(0)
	for _, n := range counts {
		sum += n
	}
	require.EqualValues(t, 1, sum, "only the one good request was written")
}

// TestStrong: a write returns when the read model shows it, and says so where it does not.
func TestStrong(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, db database) {
		s := serveHere(t, db, here, 10*time.Second)
		for i := range 30 {
			a := call(t, "POST", s.url+"/products/p/reviews", reviewJSON(fmt.Sprint("a", i), 5, ""), strong)
			require.Equal(t, http.StatusCreated, a.status)
			require.EqualValues(t, i+1, call(t, "GET", s.url+"/products/p", "").decode(t)["reviews"], "no write is missing, at once")
		}
	})
}

func TestStrongTooLate(t *testing.T) {
	t.Parallel()
	s := serveHere(t, databases["sqlite"](t), here, 50*time.Millisecond)
	require.NoError(t, s.pipe.Stop())
	a := call(t, "POST", s.url+"/products/p/reviews", reviewJSON("ann", 5, ""), strong)
	require.Equal(t, http.StatusGatewayTimeout, a.status, a.text)
	require.Equal(t, "not_visible_yet", code(t, a))
	require.Equal(t, map[string]any{"product": "p", "author": "ann", "version": 1., "changed": true}, a.decode(t)["written"])
	require.Equal(t, http.StatusOK, call(t, "POST", s.url+"/products/p/reviews", reviewJSON("ann", 5, "")).status, "it was written")
}

// A write that waits is answered when the service stops, and not broken off.
func TestStrongWhileStopping(t *testing.T) {
	t.Parallel()
	s := serveHere(t, databases["sqlite"](t), here, requestLimit-time.Second)
	require.NoError(t, s.pipe.Stop())
	begin := time.Now()
	time.AfterFunc(50*time.Millisecond, s.stopping)
	a := call(t, "POST", s.url+"/products/p/reviews", reviewJSON("ann", 5, ""), strong)
	require.Equal(t, "not_visible_yet", code(t, a))
	require.Less(t, time.Since(begin), drain)
}

// A database that is away is no bug of the service's: clients are told to come again.
func TestDatabaseAway(t *testing.T) {
	t.Parallel()
	_, err := database{kind: "postgres", path: "postgres://127.0.0.1:1/none?connect_timeout=2"}.open(t.Context())
	require.Error(t, err)
	require.Equal(t, http.StatusServiceUnavailable, asHTTP(err).Status)
	for code, status := range map[string]int{"57P01": 503, "53300": 503, "08006": 503, "42601": 500} {
		require.Equal(t, status, asHTTP(fmt.Errorf("read: %w", &pgconn.PgError{Code: code})).Status, code)
	}
}

func TestStrongParked(t *testing.T) {
	t.Parallel()
	s := serveHere(t, databases["sqlite"](t), here, 20*time.Second)
	_, err := s.db.(*sqliteStore).SQL().Exec(`create trigger fail before insert on ratings begin select raise(abort, 'no'); end`)
	require.NoError(t, err)
	a := call(t, "POST", s.url+"/products/p/reviews", reviewJSON("ann", 5, ""), strong)
	require.Equal(t, http.StatusInternalServerError, a.status, a.text)
	require.Equal(t, "parked", code(t, a))
	page := call(t, "GET", s.url+"/", "")
	require.Contains(t, page.text, `<dd class="error">1</dd>`, "the page says that one is parked")
	_, err = projector.Skip(t.Context(), s.db, projector.ParkedFilter{}, projector.Decision{By: "ann", Reason: "test"})
	require.NoError(t, err)
	a = call(t, "POST", s.url+"/products/p/reviews", reviewJSON("ann", 5, ""), strong)
	require.Equal(t, http.StatusInternalServerError, a.status, "sent again, it is written already, and never shown")
	require.Equal(t, "skipped", code(t, a))
}

// A command sent again, of which the markers are pruned, was shown long ago: it is answered like any that changes nothing.
func TestStrongAfterPruning(t *testing.T) {
	t.Parallel()
	s := serveHere(t, databases["sqlite"](t), here, 20*time.Second)
	db := s.db.(*sqliteStore)
	for i, status := range []int{http.StatusCreated, http.StatusOK} {
		begin := time.Now()
		a := call(t, "POST", s.url+"/products/p/reviews", reviewJSON("ann", 5, ""), strong)
		require.Equal(t, status, a.status, a.text)
		require.Equal(t, map[string]any{"product": "p", "author": "ann", "version": 1., "changed": i == 0}, a.decode(t))
		require.Less(t, time.Since(begin), 10*time.Second)
		_, err := db.SQL().Exec(`update kinora_events set recorded_at = recorded_at - ?1; update kinora_markers set processed_at = processed_at - ?1`, (9 * 24 * time.Hour).Milliseconds())
		require.NoError(t, err)
		_, err = marker.Prune(t.Context(), db, marker.Retention{}, sqliteReviews.Name(), sqliteReviews.Handlers()...)
		require.NoError(t, err)
	}
}

// TestConflictsAreRetriedInside: people who write to one review at the same moment are all served, one after the other.
func TestConflictsAreRetriedInside(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, db database) {
		s := serveHere(t, db, here, 20*time.Second)
		const writers = 20
		answers := make([]answer, writers)
		var all sync.WaitGroup
		for i := range writers {
			all.Go(func() {
				answers[i], _ = try(t.Context(), "POST", s.url+"/products/p/reviews", reviewJSON("ann", 1+i%5, fmt.Sprint(i)), strong)
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

// TestConflictIsSaid: where the database refuses for ever, the client hears of it.
func TestConflictIsSaid(t *testing.T) {
	t.Parallel()
	e := asHTTP(fmt.Errorf("update: %w", &eventstore.ConflictError{}))
	require.Equal(t, http.StatusConflict, e.Status)
	e = asHTTP(fmt.Errorf("update: %w", eventstore.ErrAmbiguous))
	require.Equal(t, http.StatusServiceUnavailable, e.Status)
	e = asHTTP(fmt.Errorf("secret"))
	require.Equal(t, http.StatusInternalServerError, e.Status)
	require.NotContains(t, e.Message, "secret")
}
