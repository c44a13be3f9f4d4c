package sqlite_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// enqueue adds one message for each of keys, in order.
func enqueue(t testing.TB, db *sqlite.DB, keys ...string) {
	t.Helper()
	tx, err := db.SQL().Begin()
	require.NoError(t, err)
	defer func() { _ = tx.Rollback() }()
	for _, key := range keys {
		require.NoError(t, db.InTx(tx).Enqueue(context.Background(), outbox.Message{Topic: "review", Key: key}))
	}
	require.NoError(t, tx.Commit())
}

// backlog adds n messages to key.
func backlog(t testing.TB, db *sqlite.DB, key string, n int) {
	t.Helper()
	_, err := db.SQL().Exec(`
		with recursive n (i) as (select 1 union all select i + 1 from n where i < ?2)
		insert into kinora_outbox (message_id, topic, key, payload, headers, created_at, next_attempt_at)
		select ?1 || '/' || i, 'review', ?1, x'7b7d', '{}', 0, 0 from n`, key, n)
	require.NoError(t, err)
}

func claimAll(t testing.TB, db *sqlite.DB, q provider.EntryQuery) []outbox.Entry {
	t.Helper()
	entries, err := db.ClaimEntries(context.Background(), q, claim.Terms{Limit: 100})
	require.NoError(t, err)
	return entries
}

func markAll(t testing.TB, db *sqlite.DB, marks ...outbox.Mark) {
	t.Helper()
	late, err := db.MarkEntries(context.Background(), marks)
	require.NoError(t, err)
	require.Empty(t, late)
}

func published(entries []outbox.Entry, drop bool) []outbox.Mark {
	marks := make([]outbox.Mark, len(entries))
	for i, e := range entries {
		marks[i] = outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Published, Drop: drop}
	}
	return marks
}

// stick claims the first entry of each key and marks it as failed or abandoned.
func stick(t testing.TB, db *sqlite.DB, to outbox.Status, keys ...string) {
	t.Helper()
	for _, key := range keys {
		head, err := db.Entries(context.Background(), outbox.Filter{Key: key, Limit: 1})
		require.NoError(t, err)
		terms := claim.Terms{Token: claim.NewToken()}
		_, ok, err := db.TakeEntry(context.Background(), head[0], provider.EntryQuery{}, terms)
		require.NoError(t, err)
		require.True(t, ok)
		markAll(t, db, outbox.Mark{Seq: head[0].Seq, Token: terms.Token, To: to, After: time.Hour, Error: "boom"})
	}
}

const long = 5 * time.Second

func hold(t testing.TB, db *sqlite.DB, limit, want int) {
	t.Helper()
	n, err := db.HoldEntries(context.Background(), long, limit)
	require.NoError(t, err)
	require.Equal(t, want, n, "entries held")
}

func seqs(entries []outbox.Entry) []int64 {
	all := []int64{}
	for _, e := range entries {
		all = append(all, e.Seq)
	}
	return all
}

func in(t testing.TB, db *sqlite.DB, of ...outbox.Status) []int64 {
	t.Helper()
	entries, err := db.Entries(context.Background(), outbox.Filter{Status: of, Limit: 1 << 20})
	require.NoError(t, err)
	return seqs(entries)
}

// drain publishes all claimable entries and returns them in order.
func drain(t testing.TB, db *sqlite.DB, drop bool) (all []int64) {
	t.Helper()
	for {
		entries := claimAll(t, db, provider.EntryQuery{})
		if len(entries) == 0 {
			return all
		}
		markAll(t, db, published(entries, drop)...)
		all = append(all, seqs(entries)...)
	}
}

// A held entry blocks later entries of its key, and cannot be claimed, even without order.
// Promise: G3.5
func TestHeldEntriesKeepTheirPlaces(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	enqueue(t, db, "a", "a", "a", "b", "b", "a") // 1 to 6
	stick(t, db, outbox.Abandoned, "a")
	hold(t, db, 2, 2)
	require.Equal(t, []int64{2, 3}, in(t, db, outbox.Held))
	hold(t, db, 2, 1)
	hold(t, db, 2, 0)
	enqueue(t, db, "a", "b") // 7 and 8
	require.Equal(t, []int64{2, 3, 6}, in(t, db, outbox.Held))
	require.Equal(t, []int64{1, 2, 3, 6, 7}, seqs(mustList(t, db, outbox.Filter{
		Key: "a", Status: []outbox.Status{outbox.Abandoned, outbox.Held, outbox.Pending},
	})), "entries of both indexes in one order")
	counts, err := db.StatusCounts(ctx, outbox.Held, outbox.Pending)
	require.NoError(t, err)
	require.Equal(t, map[outbox.Status]int64{outbox.Held: 3, outbox.Pending: 4}, counts)
	counts, err = db.StatusCounts(ctx, outbox.Pending)
	require.NoError(t, err)
	require.Equal(t, map[outbox.Status]int64{outbox.Pending: 4}, counts)

	loose, err := db.EntryCandidates(ctx, provider.EntryQuery{Unordered: true}, 100)
	require.NoError(t, err)
	require.Equal(t, []int64{4, 5, 7, 8}, seqs(loose))

	// The first entry is deleted by hand: only held ones precede the last one.
	_, err = db.SQL().Exec(`delete from kinora_outbox where id = 1`)
	require.NoError(t, err)
	some, err := db.EntryCandidates(ctx, provider.EntryQuery{}, 100)
	require.NoError(t, err)
	require.Equal(t, []int64{4, 5, 8}, seqs(some))
	mine := claim.Terms{Token: claim.NewToken()}
	_, ok, err := db.TakeEntry(ctx, loose[2], provider.EntryQuery{}, mine)
	require.NoError(t, err)
	require.False(t, ok, "held entries precede it")
	for _, seq := range in(t, db, outbox.Held) {
		e := mustList(t, db, outbox.Filter{Seqs: []int64{seq}})[0]
		for _, q := range []provider.EntryQuery{{}, {Unordered: true}} {
			_, ok, err = db.TakeEntry(ctx, e, q, mine)
			require.NoError(t, err)
			require.False(t, ok, "a held entry")
		}
	}
	hold(t, db, 0, 0)
	require.Equal(t, []int64{3, 6}, in(t, db, outbox.Held), "the first held entry is released, because none precedes it")
	require.Equal(t, []int64{2, 4, 5, 8, 3, 6, 7}, drain(t, db, false))
}

func mustList(t testing.TB, db *sqlite.DB, f outbox.Filter) []outbox.Entry {
	t.Helper()
	entries, err := db.Entries(context.Background(), f)
	require.NoError(t, err)
	return entries
}

// Held entries return in their places, however the wait ends. Entries added meanwhile wait for
// them.
func TestHeldEntriesComeBackInOrder(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	const n = 1301
	requeue := func(t *testing.T, db *sqlite.DB) {
		n, err := db.Requeue(ctx, outbox.Filter{Seqs: []int64{1}})
		require.NoError(t, err)
		require.Equal(t, 1, n)
	}
	publish := func(drop bool) func(t *testing.T, db *sqlite.DB) {
		return func(t *testing.T, db *sqlite.DB) {
			require.NoError(t, shiftBack(db.SQL(), 2*time.Hour))
			entries := claimAll(t, db, provider.EntryQuery{})
			require.Equal(t, []int64{1}, seqs(entries))
			require.Len(t, in(t, db, outbox.Held), n-1, "a claim alone releases none")
			markAll(t, db, published(entries, drop)...)
		}
	}
	for name, c := range map[string]struct {
		stuck outbox.Status
		end   func(t *testing.T, db *sqlite.DB)
		first int64 // first to be published after the wait
		back  int   // how many held entries are released at once
		drop  bool
	}{
		"requeue":                   {outbox.Abandoned, requeue, 1, 499, false},
		"requeue of a failed entry": {outbox.Failed, requeue, 1, 499, true},
		"published":                 {outbox.Failed, publish(false), 2, 500, false},
		"dropped":                   {outbox.Failed, publish(true), 2, 500, true},
		"skip": {outbox.Abandoned, func(t *testing.T, db *sqlite.DB) {
			n, err := db.Skip(ctx, outbox.Filter{Seqs: []int64{1}})
			require.NoError(t, err)
			require.Equal(t, 1, n)
		}, 2, 500, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := open(t, nil)
			backlog(t, db, "a", n)
			stick(t, db, c.stuck, "a")
			hold(t, db, 10_000, n-1)
			enqueue(t, db, "a", "a")
			c.end(t, db)
			require.Len(t, in(t, db, outbox.Held), n-1-c.back, "one window of them is released")
			want := []int64{}
			for seq := c.first; seq <= n+2; seq++ {
				want = append(want, seq)
			}
			for len(want) > 0 {
				entries := claimAll(t, db, provider.EntryQuery{})
				require.Equal(t, want[:min(100, len(want))], seqs(entries), "no entry is blocked")
				want = want[len(entries):]
				markAll(t, db, published(entries, c.drop)...)
			}
			require.Empty(t, in(t, db, outbox.Held))
		})
	}
}

// Releasing a key leaves the entries of other keys held.
func TestOtherKeysStayHeld(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	enqueue(t, db, "a", "b", "a", "b", "a") // 1 to 5
	stick(t, db, outbox.Abandoned, "a", "b")
	hold(t, db, 100, 3)
	n, err := db.Skip(ctx, outbox.Filter{Status: []outbox.Status{outbox.Held}, Key: "a", Limit: 1})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	skipped := mustList(t, db, outbox.Filter{Status: []outbox.Status{outbox.Skipped}})
	require.Equal(t, []int64{3}, seqs(skipped))
	require.WithinDuration(t, clock(t, db.SQL()), skipped[0].NextAttemptAt, patience.Limit(), "the time of the skip")
	require.Equal(t, []int64{4}, in(t, db, outbox.Held))
	hold(t, db, 100, 1)
	require.Equal(t, []int64{4, 5}, in(t, db, outbox.Held))
	_, err = db.Requeue(ctx, outbox.Filter{Key: "b"})
	require.NoError(t, err)
	require.Equal(t, []int64{5}, in(t, db, outbox.Held))
	require.Equal(t, []int64{2, 4}, drain(t, db, true))
}

// Entries behind a short wait are not held. If an entry fails again after its backoff, those
// behind it are held again.
func TestOnlyLongWaitsAreHeld(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	enqueue(t, db, "a", "a", "a")
	stick(t, db, outbox.Failed, "a")
	// its remaining backoff is shorter than long
	require.NoError(t, shiftBack(db.SQL(), time.Hour-long+20*time.Minute))
	hold(t, db, 100, 0)
	require.NoError(t, shiftBack(db.SQL(), -40*time.Minute))
	hold(t, db, 100, 2)
	require.NoError(t, shiftBack(db.SQL(), 2*time.Hour))
	hold(t, db, 100, 0)
	require.Equal(t, []int64{2, 3}, in(t, db, outbox.Held), "time alone does not release them")
	require.Equal(t, []int64{1, 2, 3}, drain(t, db, false))
}

// Only pending entries behind the stuck one are held: not earlier ones, and not claimed ones.
func TestOnlyPendingFollowersAreHeld(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	enqueue(t, db, "a", "a", "a", "a", "a")
	for _, e := range mustList(t, db, outbox.Filter{Seqs: []int64{2, 3, 4}}) {
		terms := claim.Terms{Token: claim.NewToken()}
		_, ok, err := db.TakeEntry(ctx, e, provider.EntryQuery{Unordered: true}, terms)
		require.NoError(t, err)
		require.True(t, ok)
		switch e.Seq {
		case 2:
			markAll(t, db, outbox.Mark{Seq: 2, Token: terms.Token, To: outbox.Abandoned})
		case 3:
			markAll(t, db, outbox.Mark{Seq: 3, Token: terms.Token, To: outbox.Failed, After: time.Hour})
		}
	}
	hold(t, db, 100, 1)
	require.Equal(t, []int64{5}, in(t, db, outbox.Held))
}

// With many keys and topics, the first held entry of a key is released once no entry precedes it.
func TestOrphansOfManyKeys(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	keys := []string{}
	for i := range 50 {
		keys = append(keys, fmt.Sprint("k", i%25))
	}
	enqueue(t, db, append(keys, keys...)...) // four entries of each key
	_, err := db.SQL().Exec(`update kinora_outbox set topic = 'topic' || (substr(key, 2) % 3)`)
	require.NoError(t, err)
	stick(t, db, outbox.Abandoned, keys[:25]...)
	hold(t, db, 1000, 75)
	_, err = db.SQL().Exec(`delete from kinora_outbox where status = 'abandoned' and key not in ('k3', 'k4')`)
	require.NoError(t, err)
	hold(t, db, 1000, 0)
	freed := mustList(t, db, outbox.Filter{Status: []outbox.Status{outbox.Pending}})
	require.Len(t, freed, 23)
	for _, e := range freed {
		require.Equal(t, int64(slices.Index(keys, e.Key)+26), e.Seq)
	}
	require.Len(t, drain(t, db, false), 23*3)
	require.Len(t, in(t, db, outbox.Held), 6)
}

// If an idle relay has nothing to hold or delete, it begins no transaction.
func TestIdleMaintenanceBeginsNoTransaction(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db, tr := traced(t, 1, routed())
	scan := func() {
		t.Helper()
		require.Len(t, tr.during(func() {
			hold(t, db, 100, 0)
			n, next, err := db.DeleteEntries(ctx, outbox.EntryRetention{Published: time.Hour, Skipped: time.Hour}, 0)
			require.NoError(t, err)
			require.Zero(t, n)
			require.Zero(t, next)
		}), 2)
	}
	scan()
	_, err := db.Append(ctx, "review-1", eventstore.NoStream, drafts(3))
	require.NoError(t, err)
	stick(t, db, outbox.Abandoned, "review-1")
	hold(t, db, 100, 2)
	scan()
}
