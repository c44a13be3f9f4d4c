package sqlite_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
)

func TestZZFair(t *testing.T) {
	db := open(t, routed())
	var stop atomic.Bool
	done := make(chan int)
	go func() {
		n := 0
		for ; !stop.Load(); n++ {
			_, err := db.Append(context.Background(), fmt.Sprint("review-", n), eventstore.NoStream, drafts(1))
			require.NoError(t, err)
		}
		done <- n
	}()
	var worst, sum time.Duration
	const N = 40
	for range N {
		time.Sleep(3*time.Millisecond)
		st := time.Now()
		tx, err := db.SQL().Begin()
		d := time.Since(st)
		require.NoError(t, err)
		_ = tx.Rollback()
		worst = max(worst, d)
		sum += d
	}
	stop.Store(true)
	fmt.Println("appends", <-done, "user begin: mean", sum/N, "worst", worst)
}
