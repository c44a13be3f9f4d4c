package outbox_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// slow is a publisher whose calls take a while and may overlap.
type slow struct {
	each    time.Duration
	mu      sync.Mutex
	started map[string]time.Time
	ids     []string
}

func newSlow(each time.Duration) *slow { return &slow{each: each, started: map[string]time.Time{}} }

func (p *slow) Publish(_ string, ms ...*message.Message) error {
	p.mu.Lock()
	for _, m := range ms {
		p.started[m.UUID] = time.Now()
	}
	p.mu.Unlock()
	time.Sleep(p.each) // on the clock of a bubble
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range ms {
		p.ids = append(p.ids, m.UUID)
	}
	return nil
}

func (*slow) Close() error { return nil }

var ten = []string{"a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "a8", "a9"}

// A batch may take many leases: its claims are renewed, and no other relay takes any entry.
// Promise: G2.5
func TestRelayKeepsItsClaims(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, first, second := newDB(t), newSlow(time.Minute), newSlow(0)
		enqueue(t, db, ten...)
		stop := start(t, db, first, outbox.RelayConfig{Lease: 15 * time.Second})
		synctest.Wait()
		stopSecond := start(t, db, second, outbox.RelayConfig{Lease: 15 * time.Second})
		time.Sleep(time.Hour)
		require.NoError(t, stop())
		require.NoError(t, stopSecond())
		require.Equal(t, ten, first.ids)
		require.Empty(t, second.ids)
		for id, e := range entries(t, db) {
			require.Equal(t, outbox.Published, e.Status, id)
			require.Equal(t, 1, e.Attempts, id)
			require.False(t, e.Suspect, id)
		}
	})
}

// unrenewed is a store whose renewals fail.
type unrenewed struct{ provider.Outbox }

func (u unrenewed) MarkEntries(ctx context.Context, marks []outbox.Mark) ([]int64, error) {
	if marks[0].To == outbox.Claimed {
		return nil, errors.New("away")
	}
	return u.Outbox.MarkEntries(ctx, marks)
}

// When its lease has ended, a relay has lost its claim and begins no further call.
// Promise: G2.5
func TestRelayStopsPublishingWhenItsLeaseEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, pub := newDB(t), newSlow(100*time.Millisecond)
		enqueue(t, db, ten...)
		stop := start(t, unrenewed{db}, pub, outbox.RelayConfig{Lease: 250 * time.Millisecond})
		time.Sleep(10 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, ten, pub.ids, "the mark of the call in flight still counts, and no entry is published twice")
		for id, e := range entries(t, db) {
			require.Equal(t, outbox.Published, e.Status, id)
			require.False(t, e.Suspect, id)
			require.LessOrEqual(t, pub.started[id].Sub(e.LastAttemptedAt), 250*time.Millisecond, "%s: from its claim to its call", id)
		}
	})
}

// newSteppingDB returns a store whose clock can be set forward, ahead of the relays' clocks.
func newSteppingDB(t *testing.T) (db *memory.DB, step func(time.Duration)) {
	t.Helper()
	var ahead atomic.Int64
	db, err := memory.New(&memory.Config{Clock: func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }})
	require.NoError(t, err)
	return db, func(d time.Duration) { ahead.Add(int64(d)) }
}

// A relay whose lease ended by the store's clock, and whose entries another relay took over, learns
// that from its next renewal and publishes none of them.
// Promise: G2.5
func TestRelayLeavesEntriesThatWereTakenOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, step := newSteppingDB(t)
		first, second := newSlow(time.Minute), newSlow(time.Second)
		enqueue(t, db, "a1", "a2", "a3", "b1", "b2")
		stop := start(t, db, first, outbox.RelayConfig{Lease: time.Minute})
		synctest.Wait()
		step(2 * time.Minute)
		stopSecond := start(t, db, second, outbox.RelayConfig{Lease: time.Minute})
		time.Sleep(10 * time.Minute)
		require.NoError(t, stop())
		require.NoError(t, stopSecond())
		require.ElementsMatch(t, []string{"a1", "b1"}, first.ids, "its call was in flight")
		for _, key := range []string{"a", "b"} {
			of := slices.DeleteFunc(slices.Clone(second.ids), func(id string) bool { return id[:1] != key })
			require.True(t, slices.IsSorted(of), "%v", of)
		}
		require.Len(t, second.ids, 5)
		for id, e := range entries(t, db) {
			require.Equal(t, outbox.Published, e.Status, id)
		}
	})
}

// A stop releases entries that are not being published at once. The call in flight is marked,
// however long it takes.
func TestRelayRenewsTheClaimOfACallWhileItStops(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, first, second := newDB(t), newSlow(10*time.Minute), newSlow(0)
		enqueue(t, db, "a1", "a2", "b1")
		stop := start(t, db, first, outbox.RelayConfig{Lease: time.Minute, Drain: time.Hour})
		synctest.Wait()
		stopSecond := start(t, db, second, outbox.RelayConfig{Lease: time.Minute})
		require.NoError(t, stop())
		require.Equal(t, []string{"a1", "b1"}, first.ids)
		time.Sleep(time.Minute)
		require.NoError(t, stopSecond())
		require.Equal(t, []string{"a2"}, second.ids, "released, and behind its head")
		for id, e := range entries(t, db) {
			require.Equal(t, 1, e.Attempts, id)
		}
	})
}
