package sqlite_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
)

// refuseEntries is a trigger that refuses the outbox entries of topic review.
const refuseEntries = `
create trigger refuse before insert on kinora_outbox when new.topic = 'review' begin select raise(%s, 'refused'); end`

// Promise: G1.1
func TestEventsAndEntriesCommitTogether(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, routed())
	_, err := db.Append(ctx, "order-1", eventstore.NoStream, drafts(2))
	require.NoError(t, err)
	_, err = db.SQL().Exec(fmt.Sprintf(refuseEntries, "abort"))
	require.NoError(t, err)

	events := drafts(3)
	_, err = db.Append(ctx, "review-1", eventstore.NoStream, events)
	require.ErrorContains(t, err, "refused")
	require.Equal(t, 0, count(t, db.SQL(), "kinora_events where stream = 'review-1'"), "no event without its entry")
	require.Equal(t, 0, count(t, db.SQL(), "kinora_streams where stream = 'review-1'"))
	require.Equal(t, 2, count(t, db.SQL(), "kinora_outbox"))

	_, err = db.SQL().Exec(`drop trigger refuse`)
	require.NoError(t, err)
	at, err := db.Append(ctx, "review-1", eventstore.NoStream, events)
	require.NoError(t, err)
	require.Equal(t, eventstore.Appended{Stream: "review-1", Version: 3, Position: 5, Count: 3, Log: at.Log}, at, "the failed append used no position")
}

// The caller's transaction remains usable, without the append.
// Promise: G1.2
func TestFailedAppendLeavesTheCallersTransactionUsable(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, routed())
	_, err := db.SQL().Exec(fmt.Sprintf(refuseEntries, "abort"))
	require.NoError(t, err)

	tx, err := db.SQL().Begin()
	require.NoError(t, err)
	_, err = tx.Exec(addToTotal, "p1", 1)
	require.NoError(t, err)
	view := db.InTx(tx)
	_, err = view.Append(ctx, "review-1", eventstore.NoStream, drafts(2))
	require.ErrorContains(t, err, "refused")
	require.ErrorContains(t, view.Enqueue(ctx, outbox.Message{Topic: "order"}, outbox.Message{Topic: "review"}), "refused")
	_, err = view.Append(ctx, "order-1", 7, drafts(1))
	require.ErrorIs(t, err, eventstore.ErrConflict)
	_, err = view.Append(ctx, "order-1", eventstore.NoStream, drafts(1))
	require.NoError(t, err)
	require.NoError(t, tx.Commit())

	require.Equal(t, 1, total(t, db.SQL(), "p1"))
	require.Equal(t, 1, count(t, db.SQL(), "kinora_events"))
	require.Equal(t, 1, count(t, db.SQL(), "kinora_outbox"))
	require.Equal(t, 1, count(t, db.SQL(), "kinora_streams"))
}

// If the context ends in the middle of an append, the caller's transaction has none of the
// append.
func TestAppendInterruptedInCallersTransaction(t *testing.T) {
	t.Parallel()
	db := open(t, routed())
	tx, err := db.SQL().Begin()
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err = db.InTx(tx).Append(ctx, "review-1", eventstore.NoStream, drafts(2))
	require.ErrorIs(t, err, context.Canceled)
	for n := range 40 { // each one ends at a different place
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(n)*20*time.Microsecond)
		stream := fmt.Sprint("review-", n)
		before := n
		_, err := db.InTx(tx).Append(ctx, stream, eventstore.NoStream, drafts(20))
		cancel()
		var there int
		if tx.QueryRow(`select count(*) from kinora_events where stream = ?`, stream).Scan(&there) != nil {
			break // the interrupt rolled the whole transaction back
		}
		if err != nil {
			require.Equal(t, 0, there, "try %d: %v", before, err)
		} else {
			require.Equal(t, 20, there)
		}
	}
	_ = tx.Commit()
	require.Equal(t, count(t, db.SQL(), "kinora_events"), count(t, db.SQL(), "kinora_outbox"))
}

// An event and its entries have the same creation time, from SQLite's clock.
func TestEventAndEntryHaveTheSameTime(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, routed())
	before := clock(t, db.SQL())
	_, err := db.Append(ctx, "review-1", eventstore.NoStream, drafts(3))
	require.NoError(t, err)
	after := clock(t, db.SQL())
	entries, err := db.Entries(ctx, outbox.Filter{})
	require.NoError(t, err)
	i := 0
	for e, err := range db.ReadStream(ctx, "review-1", 0) {
		require.NoError(t, err)
		require.Equal(t, e.RecordedAt, entries[i].CreatedAt)
		require.Equal(t, time.UTC, e.RecordedAt.Location())
		require.False(t, e.RecordedAt.Before(before) || e.RecordedAt.After(after))
		i++
	}
	require.Equal(t, 3, i)
}

// A stream of several pages is read while another goroutine appends. The reader holds no
// connection between pages.
func TestReadStreamInPages(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db, _ := traced(t, 1, nil)
	_, err := db.Append(ctx, "review-1", eventstore.NoStream, drafts(450))
	require.NoError(t, err)
	next := int64(1)
	for e, err := range db.ReadStream(ctx, "review-1", 0) {
		require.NoError(t, err)
		require.Equal(t, next, e.Version)
		if next == 199 || next == 400 {
			_, err := db.Append(ctx, "review-1", eventstore.Any, drafts(1))
			require.NoError(t, err)
		}
		next++
	}
	require.Equal(t, int64(453), next, "events appended during the read are on a later page")
}

// A message was enqueued under the id of an event that is appended later.
func TestEventIDTakenByAMessage(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, routed())
	events := drafts(1)
	tx, err := db.SQL().Begin()
	require.NoError(t, err)
	require.NoError(t, db.InTx(tx).Enqueue(ctx, outbox.Message{ID: events[0].ID, Topic: "review"}))
	require.NoError(t, tx.Commit())
	_, err = db.Append(ctx, "review-1", eventstore.NoStream, events)
	require.ErrorIs(t, err, eventstore.ErrEventIDReused)
	require.Equal(t, 0, count(t, db.SQL(), "kinora_events"))
}

// InTx accepts a transaction of another pool on the same file.
func TestTransactionOfAnotherPool(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	path := migrated(t)
	db := openAt(t, path, routed())
	_, err := db.Append(ctx, "review-1", eventstore.NoStream, drafts(1))
	require.NoError(t, err)
	tx, err := pooled(t, path, immediate).Begin()
	require.NoError(t, err)
	view := db.InTx(tx)
	_, err = view.Append(ctx, "review-1", 1, drafts(2))
	require.NoError(t, err)
	require.NoError(t, view.Enqueue(ctx, outbox.Message{Topic: "out"}))
	n := 0
	for _, err := range view.ReadStream(ctx, "review-1", 0) {
		require.NoError(t, err)
		n++
	}
	require.Equal(t, 3, n)
	require.Equal(t, 1, count(t, db.SQL(), "kinora_events"), "no event is visible before the commit")
	require.NoError(t, tx.Commit())
	require.Equal(t, 3, count(t, db.SQL(), "kinora_events"))
	require.Equal(t, 4, count(t, db.SQL(), "kinora_outbox"))
}
