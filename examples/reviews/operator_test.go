package main

import (
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestServeHasAPageForOperators(t *testing.T) {
	t.Parallel()
	p := startServiceProcess(t, "--db", "sqlite:"+filepath.Join(t.TempDir(), "reviews.db"), "--addr", "127.0.0.1:0", "--operator")
	got, err := http.Get(p.url + "/operator/streams")
	require.NoError(t, err)
	defer got.Body.Close()
	require.Equal(t, http.StatusOK, got.StatusCode)
	for host, status := range map[string]int{"evil.example": http.StatusForbidden, "localhost": http.StatusOK} {
		r, err := http.NewRequestWithContext(t.Context(), "GET", p.url+"/operator/streams", nil)
		require.NoError(t, err)
		r.Host = host // a page of this name reads the answer, if the name resolves to this machine
		got, err := browser.Do(r)
		require.NoError(t, err)
		require.NoError(t, got.Body.Close())
		require.Equal(t, status, got.StatusCode, host)
	}
	post, err := http.Post(p.url+"/operator/pause", "application/x-www-form-urlencoded", strings.NewReader("kind=topic&name=t&reason=r"))
	require.NoError(t, err)
	defer post.Body.Close()
	require.Equal(t, http.StatusForbidden, post.StatusCode, "read-only")
	require.Equal(t, http.StatusOK, call(t, "GET", p.url+"/readyz", "").status)
}
