package commands_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// status sends a request to the page, and returns the status of the answer and its text.
func (w *world) status(method, url, host, body string) (int, string) {
	w.Helper()
	r, err := http.NewRequestWithContext(w.Context(), method, url, strings.NewReader(body))
	require.NoError(w, err)
	r.Host = host
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	got, err := http.DefaultClient.Do(r)
	require.NoError(w, err)
	defer got.Body.Close()
	text, err := io.ReadAll(got.Body)
	require.NoError(w, err)
	return got.StatusCode, string(text)
}

// Without flags the page is for this machine, changes nothing, and shows no data of users.
func TestUIIsReadOnlyAndForThisMachine(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(w.runner())
	w.rate("cup-ann", 5, 0, 4)
	w.shows([]string{"parked", "ls"}, "stuck", "waiting")
	url := w.ui()
	require.True(t, strings.HasPrefix(url, "http://127.0.0.1:"), url)
	status, _ := w.status("POST", url+"pause", "", "kind=projector&name=ratings&reason=r")
	require.Equal(t, http.StatusForbidden, status)
	require.NotContains(t, w.ok("status"), "PAUSED")
	for _, path := range []string{"", "parked", "message?seq=" + firstNumber(t, w), "outbox", "entry?seq=1", "stream?id=review-cup-ann", "event?after=0&position=1", "services", "acts"} {
		status, text := w.status("GET", url+path, "", "")
		require.Equal(t, http.StatusOK, status, path)
		require.NotContains(t, text, canary, path)
		status, _ = w.status("GET", url+path, "evil.example", "")
		require.Equal(t, http.StatusMisdirectedRequest, status, "a name of another site that leads to this machine")
	}
	for _, host := range []string{"localhost", "localhost:8042", "127.0.0.1:1", "[::1]:8042"} {
		status, _ := w.status("GET", url, host, "")
		require.Equal(t, http.StatusOK, status, host)
	}
	for _, args := range [][]string{{"--listen", ":8042"}, {"--listen", "nonsense"}, {"--acts", "--by", ""}} {
		require.Contains(t, w.fails(2, append([]string{"ui"}, args...)...), "--")
	}
	status, text := w.status("GET", w.ui("--listen", "0.0.0.0:0")+"parked", "ops.example", "")
	require.Equal(t, http.StatusOK, status, text)
}
