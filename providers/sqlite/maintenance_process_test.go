package sqlite_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// childHolds holds entries and requeues stuck ones until its parent sends a line.
func childHolds(path string) error {
	ctx := context.Background()
	db, err := sqlite.Open(ctx, path, nil)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	stop := make(chan struct{})
	go func() {
		defer close(stop)
		awaitLine()
	}()
	held := 0
	for {
		select {
		case <-stop:
			fmt.Println(held)
			return db.Close()
		default:
		}
		n, holds := db.HoldEntries(ctx, long, 1+rand.N(5))
		held += n
		_, requeues := db.Requeue(ctx, outbox.Filter{Limit: rand.N(3)})
		if err := errors.Join(holds, requeues); err != nil {
			return err
		}
	}
}

// One process publishes and sometimes fails, the other holds and requeues. The entries of every
// key are published once and in order, while more are added.
func TestOrderWhileAnotherProcessHolds(t *testing.T) {
	t.Parallel()
	ctx := patience.Context(t)
	path := migrated(t)
	db := openAt(t, path, nil)
	other := start(t, "hold", path)
	require.Equal(t, "ready", other.line())
	const keys, each = 5, 30
	order := map[string][]int64{}
	for added, done := 0, 0; done < keys*each; {
		if added < each {
			enqueue(t, db, "a", "b", "c", "d", "e")
			added++
		}
		entries, err := db.ClaimEntries(ctx, provider.EntryQuery{}, claim.Terms{Limit: 7})
		require.NoError(t, err)
		stopped := map[string]bool{}
		marks := published(entries, added%2 == 0)
		for i, e := range entries {
			m := outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Pending}
			switch {
			case stopped[e.Key]:
				marks[i] = m
			case rand.N(4) == 0:
				stopped[e.Key] = true
				m.To, m.After = []outbox.Status{outbox.Failed, outbox.Abandoned}[rand.N(2)], time.Hour
				marks[i] = m
			default:
				order[e.Key] = append(order[e.Key], e.Seq)
				done++
			}
		}
		late, err := db.MarkEntries(ctx, marks)
		require.NoError(t, err)
		require.Empty(t, late)
	}
	other.send("stop")
	t.Log("held:", other.line())
	other.wait()
	for key, seqs := range order {
		require.Len(t, seqs, each, key)
		require.True(t, slices.IsSorted(seqs), "%s: %v", key, seqs)
		require.Len(t, slices.Compact(seqs), each, key)
	}
	require.Empty(t, in(t, db, outbox.Pending, outbox.Held, outbox.Failed, outbox.Abandoned, outbox.Claimed))
}

// A claim next to a large backlog behind one stuck entry costs almost nothing once the backlog is
// held. The test compares it with the cost before, on the same machine at about the same time.
func TestClaimSkipsHeldEntries(t *testing.T) {
	t.Parallel()
	// BenchmarkClaimWithHeldBacklog has 100,000
	const n, tries = 2000, 5
	db := open(t, nil)
	claim := func() { require.Empty(t, claimAll(t, db, provider.EntryQuery{})) }
	empty := patience.Fastest(tries, claim)
	backlog(t, db, "a", n)
	stick(t, db, outbox.Abandoned, "a")
	before := patience.Fastest(tries, claim)
	began := time.Now()
	for {
		held, err := db.HoldEntries(context.Background(), long, 10_000)
		require.NoError(t, err)
		if held == 0 {
			break
		}
	}
	holding := time.Since(began)
	after := patience.Faster(t, before/10, claim)
	began = time.Now()
	hold(t, db, 10_000, 0)
	t.Logf("a claim: %s with an empty outbox, %s with %d blocked entries, %s once they are held, which took %s; a scan for more to hold: %s",
		empty, before, n, after, holding, time.Since(began))

	// Later entries of the key wait without a walk over the held ones.
	enqueue(t, db, slices.Repeat([]string{"a"}, 50)...)
	patience.Faster(t, before/5, claim)
}
