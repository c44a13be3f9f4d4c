package adminpage_test

import (
	"bufio"
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/admin/adminpage"
)

func record(h http.Handler, method, target, body string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	r := httptest.NewRequest(method, "/", strings.NewReader(body))
	path, query, _ := strings.Cut(target, "?")
	r.URL.Path, r.URL.RawQuery, r.RequestURI = path, query, target
	h.ServeHTTP(w, r)
	return w
}

// Live pages are limited, show what changes, and end with Run.
// Promise: O4.1
func TestLivePages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h, err := adminpage.New(w.db, adminpage.Config{Logger: w.logger()})
	require.NoError(t, err)
	h.Patient()
	server := httptest.NewServer(h)
	defer server.Close()
	ctx, stop := context.WithCancel(t.Context())
	defer stop() // first: it ends the live pages
	done := make(chan error, 1)
	go func() { done <- h.Run(ctx) }()
	<-h.Running()
	open := func() *http.Response {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/streams", nil)
		require.NoError(t, err)
		r.Header.Set("Accept", "text/event-stream")
		got, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		return got
	}
	var all []*http.Response
	for {
		got := open()
		if got.StatusCode == http.StatusServiceUnavailable {
			got.Body.Close()
			break
		}
		require.Equal(t, http.StatusOK, got.StatusCode)
		all = append(all, got)
		require.LessOrEqual(t, len(all), 100)
	}
	for range 10 {
		open().Body.Close()
	}
	require.Equal(t, 1, strings.Count(w.logs.String(), "level=WARN"), "one line for all: %s", w.logs.String())
	require.Equal(t, http.StatusOK, w.get(server.URL+"/streams").status, "a page that is not live")
	lines := bufio.NewScanner(all[0].Body)
	see := func(text string) {
		for lines.Scan() {
			if strings.Contains(lines.Text(), text) {
				return
			}
		}
		t.Fatalf("the stream ends without %q: %v", text, lines.Err())
	}
	see("No stream has these values")
	w.rate("review-new", "x", 1)
	see("review-new")
	stop()
	require.NoError(t, <-done)
	for _, got := range all {
		for end := bufio.NewScanner(got.Body); end.Scan(); {
			continue // until the stream ends
		}
		got.Body.Close()
	}
	require.ErrorContains(t, h.Run(t.Context()), "twice")
}

// A database that does not answer gives an error without details.
func TestAClosedDatabase(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	at := w.serve(adminpage.Config{}, "")
	require.NoError(t, w.db.Close())
	for _, path := range []string{"", "projectors", "parked", "streams", "event?id=x"} {
		got := w.get(at + path)
		require.GreaterOrEqual(t, got.status, 500, path)
		require.Contains(t, got.body, "The database")
		require.NotContains(t, got.body, "sql:")
	}
	require.Contains(t, w.logs.String(), "page not served")
}

func TestNewRefusesNoStore(t *testing.T) {
	t.Parallel()
	_, err := adminpage.New(nil, adminpage.Config{})
	require.Error(t, err)
}
