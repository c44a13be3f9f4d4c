package sqlite_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Paused topics are omitted, also when the candidates are read again.
func TestClaimExceptTopics(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	enqueue(t, db, "a", "b", "c")
	_, err := db.SQL().Exec(`update kinora_outbox set topic = key`)
	require.NoError(t, err)
	for _, c := range []struct {
		q    provider.EntryQuery
		want []int64
	}{
		{provider.EntryQuery{Except: []string{"b"}}, []int64{1, 3}},
		{provider.EntryQuery{Except: []string{"b", "c", "none"}}, []int64{1}},
		{provider.EntryQuery{Topics: []string{"a", "b"}, Except: []string{"b"}}, []int64{1}},
		{provider.EntryQuery{Except: []string{"a"}, Unordered: true}, []int64{2, 3}},
		{provider.EntryQuery{Except: []string{"a", "b", "c"}}, []int64{}},
	} {
		read, err := db.EntryCandidates(ctx, c.q, 10)
		require.NoError(t, err)
		require.Equal(t, c.want, seqs(read))
	}
	require.Equal(t, []int64{1, 3}, seqs(claimAll(t, db, provider.EntryQuery{Except: []string{"b"}})))
	require.Empty(t, claimAll(t, db, provider.EntryQuery{Except: []string{"b"}}))
}

// Without order no entry waits for another. With order all do.
func TestUnorderedClaimIgnoresEarlierEntries(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	enqueue(t, db, "a", "a", "a", "a")
	stick(t, db, outbox.Failed, "a")
	require.Empty(t, claimAll(t, db, provider.EntryQuery{}))
	q := provider.EntryQuery{Unordered: true}
	read, err := db.EntryCandidates(ctx, q, 10)
	require.NoError(t, err)
	require.Equal(t, []int64{2, 3, 4}, seqs(read))
	_, ok, err := db.TakeEntry(ctx, read[2], provider.EntryQuery{}, claim.Terms{Token: claim.NewToken()})
	require.NoError(t, err)
	require.False(t, ok)
	_, ok, err = db.TakeEntry(ctx, read[2], q, claim.Terms{Token: claim.NewToken()})
	require.NoError(t, err)
	require.True(t, ok)
	require.Equal(t, []int64{2, 3}, seqs(claimAll(t, db, q)), "an entry with a live lease is not claimed")
}

// A drop deletes an entry. It cannot end another relay's claim.
func TestDroppedEntryIsDeleted(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	enqueue(t, db, "a", "a")
	entries := claimAll(t, db, provider.EntryQuery{})
	drop := published(entries, true)
	drop[1].Token = claim.NewToken()
	late, err := db.MarkEntries(ctx, append(drop, published(entries[:1], false)...))
	require.NoError(t, err)
	require.Equal(t, []int64{2, 1}, late)
	require.Equal(t, entries[1:], mustList(t, db, outbox.Filter{}))
}

// A released entry can get a delay and an error.
func TestReleaseWithAPause(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	enqueue(t, db, "a")
	for _, c := range []struct{ why, want string }{{"*net.OpError", "*net.OpError"}, {"", "*net.OpError"}, {"other", "other"}} {
		e := claimAll(t, db, provider.EntryQuery{})[0]
		markAll(t, db, outbox.Mark{Seq: 1, Token: e.Token, To: outbox.Pending, After: time.Hour, Error: c.why})
		e = mustList(t, db, outbox.Filter{})[0]
		require.Equal(t, outbox.Pending, e.Status)
		require.Equal(t, c.want, e.LastError)
		require.Zero(t, e.Attempts)
		require.WithinDuration(t, clock(t, db.SQL()).Add(time.Hour), e.NextAttemptAt, patience.Limit())
		require.Empty(t, claimAll(t, db, provider.EntryQuery{}))
		require.NoError(t, shiftBack(db.SQL(), time.Hour+time.Second))
	}
}

// Entries are found by the stream of their event, and by age.
func TestFilterByStreamAndAge(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, routed())
	for _, stream := range []string{"review-1", "review-2", "review-1"} {
		_, err := db.Append(ctx, stream, eventstore.Any, drafts(1))
		require.NoError(t, err)
	}
	enqueue(t, db, "review-1")
	require.NoError(t, shiftBack(db.SQL(), time.Hour))
	_, err := db.Append(ctx, "review-1", eventstore.Any, drafts(1))
	require.NoError(t, err)
	for _, open := range [][]outbox.Status{nil, {outbox.Pending, outbox.Held}} {
		pick := func(f outbox.Filter) []int64 {
			f.Status = open
			return seqs(mustList(t, db, f))
		}
		require.Equal(t, []int64{1, 3, 5}, pick(outbox.Filter{Stream: "review-1"}))
		require.Equal(t, []int64{1, 3}, pick(outbox.Filter{Stream: "review-1", Older: 30 * time.Minute}))
		require.Equal(t, []int64{1, 2, 3, 4}, pick(outbox.Filter{Older: 30 * time.Minute}))
		require.Equal(t, []int64{}, pick(outbox.Filter{Older: 2 * time.Hour}))
		require.Equal(t, []int64{}, pick(outbox.Filter{Stream: "review"}))
		require.Equal(t, []int64{3}, pick(outbox.Filter{Stream: "review-1", Seqs: []int64{4, 3, 2}}))
	}
	n, err := db.Skip(ctx, outbox.Filter{Stream: "review-1", Older: 30 * time.Minute})
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.Equal(t, []int64{1, 3}, in(t, db, outbox.Skipped))
}
