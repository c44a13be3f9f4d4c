package main

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// If an attacker's name resolves to this machine (DNS rebinding), the browser treats the page and the
// service as one origin. Only the Host header shows where the write comes from.
func TestWritesWithAForeignHostAreRefused(t *testing.T) {
	t.Parallel()
	s := startService(t, databases["sqlite"](t), inProcess, patience)
	for host, status := range map[string]int{
		"evil.example": 403, "evil.example:8080": 403, "localhost.evil.example": 403, "127.0.0.1.evil.example": 403,
		"192.168.1.5:80": 403, "[::2]:80": 403, "reviews.localhost": 403,
		"localhost": 201, "LOCALHOST:9999": 201, "127.0.0.1:1": 201, "127.8.9.10": 201, "[::1]": 201, "[::1]:80": 201,
	} {
		for _, w := range []struct{ method, path, kind, body string }{
			{"POST", "/products/p/reviews", "application/json", reviewJSON(host, 5, "")},
			{"POST", "/", "application/x-www-form-urlencoded", "product=p&stars=5&text=x&author=form-" + host},
			{"DELETE", "/products/p/reviews/none", "", ""},
		} {
			r, err := http.NewRequestWithContext(t.Context(), w.method, s.url+w.path, strings.NewReader(w.body))
			require.NoError(t, err)
			r.Host = host
			r.Header.Set("Content-Type", w.kind)
			r.Header.Set("Origin", "http://"+host)
			res, err := browser.Do(r)
			require.NoError(t, err)
			text, err := io.ReadAll(res.Body)
			require.NoError(t, err)
			require.NoError(t, res.Body.Close())
			if status != http.StatusForbidden {
				require.NotEqual(t, http.StatusForbidden, res.StatusCode, "%s %s of %s: %s", w.method, w.path, host, text)
				continue
			}
			require.Equal(t, status, res.StatusCode, "%s %s of %s: %s", w.method, w.path, host, text)
			var answer struct {
				Error struct{ Code, Message string }
			}
			require.NoError(t, json.Unmarshal(text, &answer))
			require.Equal(t, "foreign_host", answer.Error.Code)
			require.Contains(t, answer.Error.Message, "--addr")
		}
	}
	r, err := http.NewRequestWithContext(t.Context(), "GET", s.url+"/products", nil)
	require.NoError(t, err)
	r.Host = "evil.example"
	res, err := browser.Do(r)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusOK, res.StatusCode, "a read is answered")
}

func TestTheHostToListenOnIsKnown(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		listen, host string
		known        bool
	}{
		{"reviews.example:80", "Reviews.Example", true}, {"reviews.example:80", "reviews.example.:80", true},
		{"reviews.example:80", "other.example", false}, {"reviews.example:80", "192.168.1.5", false},
		{"192.168.1.5:80", "192.168.1.5:8080", true}, {"192.168.1.5:80", "192.168.1.6", false},
		{"[fe80::1]:80", "[fe80::1]", true}, {"127.0.0.1:80", "localhost:80", true}, {"127.0.0.1:80", "", false},
		{":80", "192.168.1.5", true}, {"0.0.0.0:80", "192.168.1.5:80", true}, {"[::]:80", "[fe80::1]:80", true},
		{":80", "evil.example", false}, {":80", "", false}, {"0.0.0.0:80", "evil.example", false}, {"0.0.0.0:80", "0.0.0.0.evil.example", false},
	} {
		require.Equal(t, c.known, isOwnHost(hostOf(c.host), hostOf(c.listen)), "listens on %s, host %s", c.listen, c.host)
	}
}
