package adminpage_test

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/admin/adminpage"
	"github.com/kinora-go/kinora/providers/memory"
)

// Each page of a store of events shows the parts of the store, and names the missing ones.
func TestThePageOfAStoreOfEvents(t *testing.T) {
	t.Parallel()
	db, err := memory.New(nil)
	require.NoError(t, err)
	handler, err := adminpage.New(struct{ admin.Store }{db}, adminpage.Config{Who: everyone("ann")})
	require.NoError(t, err)
	shows := func(path string) string {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		require.Equal(t, http.StatusOK, w.Code, path)
		return w.Body.String()
	}
	overview := shows("/")
	require.Contains(t, overview, "Nothing was found, but not everything could be checked")
	require.Contains(t, overview, "Not checked: lags and parked messages")
	require.Contains(t, overview, "Because the store keeps no operations.")
	require.NotContains(t, overview, "Tasks that are not over")
	require.Contains(t, shows("/outbox"), "Every entry is published.")
	for path, part := range map[string]string{
		"/parked": "projectors", "/message?seq=1": "projectors", "/tasks": "tasks", "/task?id=a": "tasks", "/streams": "operations", "/services": "operations", "/acts": "operations",
	} {
		require.Contains(t, shows(path), "The store keeps no "+part+".", path)
	}
	form := url.Values{"id": {"a"}, "reason": {"a test"}}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/requeue-tasks", strings.NewReader(form.Encode()))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, r)
	require.Equal(t, http.StatusNotImplemented, w.Code)
	require.Contains(t, w.Body.String(), "The store keeps no tasks. Nothing was changed.")
}
