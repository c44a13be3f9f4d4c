package main

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestServeOverTopics: with topics in the database the service supports strong consistency, whether
// relay and runner are in its process or in others.
func TestServeOverTopics(t *testing.T) {
	t.Parallel()
	t.Run("in this process", func(t *testing.T) {
		t.Parallel()
		s := startService(t, database{kind: "postgres", path: postgresDSN(t)}, pipelineFlags{Broker: sqlKind, Pipeline: true}, patience)
		for i := range 5 {
			require.Equal(t, http.StatusCreated, call(t, "POST", s.url+"/products/p/reviews", reviewJSON(fmt.Sprint("a", i), 5, ""), strong).status)
			require.EqualValues(t, i+1, call(t, "GET", s.url+"/products/p", "").decode(t)["reviews"])
		}
		page := listen(t, s.url+"/live")
		page.waitFor("page", "a4", `id="pending">0<`)
	})
	t.Run("in other processes", func(t *testing.T) {
		t.Parallel()
		dsn := postgresDSN(t)
		p := startServiceProcess(t, "--db", dsn, "--addr", "127.0.0.1:0", "--broker", "sql", "--no-pipeline")
		a := call(t, "POST", p.url+"/products/p/reviews", reviewJSON("ann", 5, ""))
		require.Equal(t, http.StatusCreated, a.status, "the write succeeds without a relay")
		require.Contains(t, call(t, "GET", p.url+"/", "").text, `<dd id="pending">waiting for the first projector</dd>`)
		startProcess(t, dsn, "relay")
		startProcess(t, dsn, "project", "--broker", "sql")
		require.Equal(t, http.StatusOK, postUntilVisible(t, p.url+"/products/p/reviews", reviewJSON("ann", 5, "")))
		require.EqualValues(t, 1, call(t, "GET", p.url+"/products/p", "").decode(t)["reviews"])

		var all sync.WaitGroup
		var accepted atomic.Int64
		stop, writing := context.WithTimeout(t.Context(), time.Second) // a slow machine writes less
		defer writing()
		for i := range 20 {
			all.Go(func() {
				for n := 0; stop.Err() == nil; n++ {
					a, err := send(t.Context(), "POST", p.url+"/products/q/reviews", reviewJSON(fmt.Sprintf("%d-%d", i, n), 3, ""))
					if err != nil || a.status != http.StatusCreated {
						t.Error(a.status, a.text, err)
						return
					}
					accepted.Add(1)
				}
			})
		}
		all.Wait()
		require.Equal(t, http.StatusCreated, call(t, "POST", p.url+"/products/q/reviews", reviewJSON("last", 3, "")).status)
		require.Eventually(t, func() bool {
			a := call(t, "GET", p.url+"/products/q", "")
			return a.status == http.StatusOK && a.decode(t)["reviews"].(float64) == float64(accepted.Load()+1)
		}, patience, 50*time.Millisecond)
		require.Zero(t, p.stop(t, syscall.SIGTERM), p.stderr.String())
	})
}
