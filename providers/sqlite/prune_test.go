package sqlite_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/outbox"
)

const day = 24 * time.Hour

// Entries published or skipped long enough ago are deleted, and no others.
func TestDeleteEntries(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	enqueue(t, db, "published", "skipped", "abandoned", "failed", "claimed", "held", "held", "pending")
	stick(t, db, outbox.Published, "published")
	stick(t, db, outbox.Abandoned, "abandoned", "held")
	stick(t, db, outbox.Failed, "failed")
	stick(t, db, outbox.Claimed, "claimed")
	hold(t, db, 10, 1)
	_, err := db.Skip(ctx, outbox.Filter{Key: "skipped"})
	require.NoError(t, err)

	keep := outbox.EntryRetention{Published: 7 * day, Skipped: 30 * day}
	prune := func(keep outbox.EntryRetention, want int, left ...int64) {
		t.Helper()
		n, err := outbox.Prune(ctx, db, keep)
		require.NoError(t, err)
		require.Equal(t, want, n)
		require.Equal(t, left, seqs(mustList(t, db, outbox.Filter{})))
	}
	all := []int64{1, 2, 3, 4, 5, 6, 7, 8}
	require.NoError(t, shiftBack(db.SQL(), 7*day-20*time.Minute))
	prune(keep, 0, all...)
	require.NoError(t, shiftBack(db.SQL(), 20*time.Minute+time.Second))
	prune(keep, 1, all[1:]...)
	require.NoError(t, shiftBack(db.SQL(), 23*day-20*time.Minute))
	prune(keep, 0, all[1:]...)
	require.NoError(t, shiftBack(db.SQL(), 20*time.Minute))
	prune(keep, 1, all[2:]...)
	require.NoError(t, shiftBack(db.SQL(), 1000*day))
	prune(keep, 0, all[2:]...)

	// The age counts from the publication or skip, not from the creation.
	_, err = db.Skip(ctx, outbox.Filter{Key: "abandoned"})
	require.NoError(t, err)
	require.Len(t, drain(t, db, false), 3)
	prune(keep, 0, all[2:]...)
	require.NoError(t, shiftBack(db.SQL(), time.Second))
	prune(outbox.EntryRetention{Published: 1, Skipped: 30 * day}, 3, 3, 6, 7)
	require.Equal(t, []int64{7}, in(t, db, outbox.Held))
}

// Entries are scanned in windows. If all entries of a window are young, later ones are not
// scanned.
func TestDeleteEntriesInWindows(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	backlog(t, db, "a", 2500) // created in 1970
	_, err := db.SQL().Exec(`update kinora_outbox set status = 'published', open = 0, published_at = 0 where id % 2 = 0`)
	require.NoError(t, err)
	_, err = db.SQL().Exec(`update kinora_outbox set created_at = unixepoch('subsec') * 1000 where id = 999`)
	require.NoError(t, err)
	keep := outbox.EntryRetention{Published: day, Skipped: day}
	scan := func(after int64, n int, next int64) {
		t.Helper()
		got, then, err := db.DeleteEntries(ctx, keep, after)
		require.NoError(t, err)
		require.Equal(t, []any{n, next}, []any{got, then})
	}
	scan(0, 500, 1000)
	scan(1000, 500, 2000)
	scan(2000, 250, 0)
	scan(0, 0, 1999) // only odd ones are left
	scan(1999, 0, 0)
	scan(99_999, 0, 0)
	_, err = db.SQL().Exec(`update kinora_outbox set created_at = unixepoch('subsec') * 1000 where id <= 1999`)
	require.NoError(t, err)
	scan(0, 0, 0)
	keep.Published = 0 // no published entry expires
	_, err = db.SQL().Exec(`update kinora_outbox set created_at = 0`)
	require.NoError(t, err)
	_, err = db.SQL().Exec(`update kinora_outbox set status = 'published', open = 0, published_at = 0 where id = 2499`)
	require.NoError(t, err)
	scan(1999, 0, 0)
	keep.Published = 1
	scan(1999, 1, 0)
}
