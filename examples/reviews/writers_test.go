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

var writersFor = flag.Duration("writers.for", 3*time.Second, "how long the writers of TestWriters write")

const (
	writers        = 200
	writtenAbout   = 20 // products
	writerPatience = 2 * time.Minute
)

// TestWriters: 200 clients write at once; then the read model is what their accepted commands come to. Each of
// them has a name of its own, and knows what it said last; the products they share.
func TestWriters(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, db database) {
		s := serveHere(t, db, here, 10*time.Second)
		var all sync.WaitGroup
		var accepted atomic.Int64
		said := make([]map[string]int, writers) // by writer: the stars that stand, by product
		until := time.Now().Add(*writersFor)
		for i := range writers {
			all.Go(func() { said[i] = write(t, s.url, fmt.Sprintf("author-%d", i), until, &accepted) })
		}
		all.Wait()
		require.False(t, t.Failed())
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), writerPatience)
		defer cancel()
		require.NoError(t, caughtUp(ctx, s.db, s.pipe, s.pipe.done, func(int64) {}))
		t.Logf("%d commands were accepted in %s; the read model had them %s later", accepted.Load(), *writersFor, time.Since(start).Round(time.Millisecond))

		want := map[string]rating{}
		for _, mine := range said {
			for product, stars := range mine {
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

// write posts, edits and withdraws reviews of one author, and returns what stands in the end.
func write(t *testing.T, url, author string, until time.Time, accepted *atomic.Int64) map[string]int {
	stands := map[string]int{}
	for time.Now().Before(until) && !t.Failed() {
		if rand.IntN(20) == 0 { // all of them write to this one, for a second
			a, err := try(t.Context(), "POST", fmt.Sprintf("%s/products/hot-%d/reviews", url, time.Now().Unix()), reviewJSON("everybody", 1+rand.IntN(5), author))
			if err != nil || a.status != http.StatusCreated && a.status != http.StatusOK {
				t.Errorf("on the hot one: %d %s %v", a.status, a.text, err)
				return nil
			}
		}
		product := fmt.Sprintf("product-%d", rand.IntN(writtenAbout))
		path, stars := url+"/products/"+product+"/reviews", 1+rand.IntN(5)
		var a answer
		var err error
		if stands[product] > 0 && rand.IntN(5) == 0 {
			a, err = try(t.Context(), "DELETE", path+"/"+author, "")
			delete(stands, product)
		} else {
			a, err = try(t.Context(), "POST", path, reviewJSON(author, stars, "text"))
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
