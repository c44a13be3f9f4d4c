package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var writersFor = flag.Duration("writers.for", time.Second, "how long TestWriters writes")

const (
	writers      = 200
	writtenAbout = 20 // products
)

// TestWriters: 200 clients write at the same time, and the read model then matches their accepted
// commands. Each client is an author of its own and records its last writes. The clients share the
// products.
func TestWriters(t *testing.T) {
	t.Parallel()
	onEachProjection(t, func(t *testing.T, db database) {
		s := startService(t, db, inProcess, patience)
		var all sync.WaitGroup
		var accepted atomic.Int64
		posted := make([]map[string]int, writers) // by writer and product: the stars of the posted review
		until := time.Now().Add(*writersFor)
		for i := range writers {
			all.Go(func() { posted[i] = writeReviews(t, s.url, i, until, &accepted) })
		}
		all.Wait()
		require.False(t, t.Failed())
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		stuck, err := waitCaughtUp(ctx, s.db, s.pipe.Ended(), func(int64) {})
		require.NoError(t, err)
		require.Zero(t, stuck)
		t.Logf("%d commands accepted in %s; the read model caught up %s later", accepted.Load(), *writersFor, time.Since(start).Round(time.Millisecond))

		want := map[string]rating{}
		for _, own := range posted {
			for product, stars := range own {
				r := want[product]
				want[product] = rating{product, r.Reviews + 1, r.Stars + stars}
			}
		}
		require.NotEmpty(t, want)
		hot := call(t, "GET", s.url+"/products?limit=100&after=hot-&", "").decode(t)["products"].([]any)
		for _, row := range hot {
			if p := row.(map[string]any); strings.HasPrefix(p["product"].(string), "hot-") {
				require.EqualValues(t, 1, p["reviews"], p["product"])
			}
		}
		require.Contains(t, hot[0].(map[string]any)["product"], "hot-")
		for i := range writtenAbout {
			product := fmt.Sprintf("product-%d", i)
			got := call(t, "GET", s.url+"/products/"+product, "")
			if want[product].Reviews == 0 {
				require.Equal(t, http.StatusNotFound, got.status)
				continue
			}
			require.EqualValues(t, want[product].Reviews, got.decode(t)["reviews"], product)
			require.EqualValues(t, want[product].Stars, got.decode(t)["stars"], product)
		}
	})
}

// atLeast is how many reviews a client writes on a machine that is so slow that the time is over before.
const atLeast = 3

// writeReviews posts, edits and withdraws reviews of one author. It returns the stars of the posted
// reviews by product.
func writeReviews(t *testing.T, url string, client int, until time.Time, accepted *atomic.Int64) map[string]int {
	author, stands := fmt.Sprintf("author-%d", client), map[string]int{}
	for n := 0; (n < atLeast || time.Now().Before(until)) && !t.Failed(); n++ {
		if rand.IntN(20) == 0 || client+n == 0 { // all clients write to the same product for a second
			a, err := send(t.Context(), "POST", fmt.Sprintf("%s/products/hot-%d/reviews", url, time.Now().Unix()), reviewJSON("everybody", 1+rand.IntN(5), author))
			if err != nil || a.status != http.StatusCreated && a.status != http.StatusOK {
				t.Errorf("write to the hot product: %d %s %v", a.status, a.text, err)
				return nil
			}
		}
		product := fmt.Sprintf("product-%d", rand.IntN(writtenAbout))
		path, stars := url+"/products/"+product+"/reviews", 1+rand.IntN(5)
		var a answer
		var err error
		if stands[product] > 0 && rand.IntN(5) == 0 {
			a, err = send(t.Context(), "DELETE", path+"/"+author, "")
			delete(stands, product)
		} else {
			a, err = send(t.Context(), "POST", path, reviewJSON(author, stars, "text"))
			stands[product] = stars
		}
		if err != nil || a.status != http.StatusOK && a.status != http.StatusCreated {
			t.Errorf("%s on %s: %d %s %v", author, product, a.status, a.text, err)
			return nil
		}
		accepted.Add(1)
	}
	return stands
}
