package main

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
)

// TestErasedReview: a review that is erased is gone from the read model for ever, also after a rebuild, and
// after its events are archived. The ratings of its product follow.
// Promise: G1.11
func TestErasedReview(t *testing.T) {
	t.Parallel()
	onEachProjection(t, func(t *testing.T, d database) {
		s := startService(t, d, inProcess, patience)
		review := s.url + "/products/tea/reviews/ann"
		require.Equal(t, http.StatusCreated, s.post("tea", "bob", 5).status)
		require.Equal(t, http.StatusCreated, s.post("tea", "ann", 2).status)
		require.Equal(t, http.StatusCreated, s.post("tea", "ann", 3).status)
		a := call(t, "DELETE", review+"?forever", "", strong, "Idempotency-Key: k")
		require.Equal(t, http.StatusOK, a.status, a.text)
		require.JSONEq(t, `{"product":"tea","author":"ann","version":4,"changed":true}`, a.text)
		again := call(t, "DELETE", review+"?forever", "", strong, "Idempotency-Key: k")
		require.Equal(t, a.text, again.text)

		gone := func(when string) {
			t.Helper()
			product := call(t, "GET", s.url+"/products/tea", "").decode(t)
			require.EqualValues(t, 1, product["reviews"], when)
			require.EqualValues(t, 5, product["stars"], when)
			latest := product["latest"].([]any)
			require.Len(t, latest, 1, when)
			require.Equal(t, "bob", latest[0].(map[string]any)["author"], when)
			newest, err := s.db.newest(t.Context(), 10)
			require.NoError(t, err)
			require.Len(t, newest, 1, when)
			require.Equal(t, "bob", newest[0].Author, when)
			a := s.post("tea", "ann", 1)
			require.Equal(t, http.StatusGone, a.status, when)
			require.Equal(t, "erased", code(t, a))
			require.Equal(t, http.StatusGone, call(t, "DELETE", review, "").status, when)
			o := runOperator(t, d, "verify")
			require.Zero(t, o.code, o.stdout+o.stderr)
		}
		gone("after it was erased")
		o := runOperator(t, d, "rebuild", "--reason", "a test")
		require.Zero(t, o.code, o.stderr)
		gone("after a rebuild")

		stream := eventstore.StreamName("review", eventstore.JoinID("tea", "ann"))
		archive := s.db.(interface {
			Archive(ctx context.Context, stream string, o eventstore.ArchiveOptions) (int64, error)
		}).Archive
		var opts eventstore.ArchiveOptions
		if s.db.name() == redisProjector { // its checkpoint is not in the database; the erasure has waited for it
			opts.Ignore = []string{redisProjector}
		}
		var n int64
		require.Eventually(t, func() bool { // the checkpoint follows
			var err error
			n, err = archive(t.Context(), stream, opts)
			return err == nil
		}, patience, 20*time.Millisecond)
		require.EqualValues(t, 3, n)
		gone("after its events were archived")
		o = runOperator(t, d, "rebuild", "--reason", "another test")
		require.Zero(t, o.code, o.stderr)
		gone("after archive and rebuild")
	})
}
