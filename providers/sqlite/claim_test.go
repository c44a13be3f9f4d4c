package sqlite_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
)

// clock is what SQLite's clock says now.
func clock(t testing.TB, db *sql.DB) time.Time {
	t.Helper()
	var ms int64
	require.NoError(t, db.QueryRow(`select cast(round(unixepoch('subsec') * 1000) as integer)`).Scan(&ms))
	return time.UnixMilli(ms).UTC()
}

// Leases and backoffs end on SQLite's clock.
func TestLeaseEndsOnSQLiteClock(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, routed())
	_, err := db.Append(ctx, "review-1", eventstore.NoStream, drafts(1))
	require.NoError(t, err)
	lease := 90*time.Second + time.Microsecond

	requireIn := func(what string, at, from, to time.Time) {
		t.Helper()
		require.False(t, at.Before(from) || at.After(to), "%s %s is not in %s to %s", what, at, from, to)
	}
	before := clock(t, db.SQL())
	entries, err := db.ClaimEntries(ctx, outbox.Query{}, claim.Terms{Holder: "here", Lease: lease})
	require.NoError(t, err)
	after := clock(t, db.SQL())
	require.Len(t, entries, 1)
	e := entries[0]
	requireIn("attempt", e.LastAttemptedAt, before, after)
	require.Equal(t, 90*time.Second+time.Millisecond, e.NextAttemptAt.Sub(e.LastAttemptedAt), "never shorter than asked for")

	before = clock(t, db.SQL())
	late, err := db.MarkEntries(ctx, []outbox.Mark{{Seq: e.Seq, Token: e.Token, To: outbox.Failed, After: lease, Error: "boom"}})
	require.NoError(t, err)
	require.Empty(t, late)
	after = clock(t, db.SQL())
	stored, err := db.Entries(ctx, outbox.Filter{})
	require.NoError(t, err)
	requireIn("backoff", stored[0].NextAttemptAt, before.Add(lease), after.Add(lease+time.Millisecond))
}

// No code of the package asks for this process's time.
func TestNoOtherClock(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	for _, file := range files {
		if matched, _ := filepath.Match("*_test.go", file); matched {
			continue
		}
		source, err := os.ReadFile(file)
		require.NoError(t, err)
		require.NotRegexp(t, regexp.MustCompile(`time\.(Now|Since|Until)\b`), string(source), file)
	}
}

// An idle relay holds up nobody: it does not even begin a transaction.
func TestIdleClaim(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db, tr := traced(t, 1, routed())
	statements := tr.during(func() {
		entries, err := db.ClaimEntries(ctx, outbox.Query{}, claim.Terms{})
		require.NoError(t, err)
		require.Empty(t, entries)
		late, err := db.MarkEntries(ctx, nil)
		require.NoError(t, err)
		require.Empty(t, late)
	})
	require.Len(t, statements, 1)
}

// The candidates were read, then another relay took the first: the second must not be taken past it.
func TestTakeDoesNotPassAnEarlierEntry(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, routed())
	_, err := db.Append(ctx, "review-1", eventstore.NoStream, drafts(2))
	require.NoError(t, err)
	read, err := db.EntryCandidates(ctx, outbox.Query{}, 10)
	require.NoError(t, err)
	require.Len(t, read, 2)

	other, err := db.ClaimEntries(ctx, outbox.Query{}, claim.Terms{Holder: "other", Limit: 1})
	require.NoError(t, err)
	require.Len(t, other, 1)
	mine := claim.Terms{Holder: "mine", Token: claim.NewToken()}
	_, ok, err := db.TakeEntry(ctx, read[1], outbox.Query{}, mine)
	require.NoError(t, err)
	require.False(t, ok, "an earlier entry of its key is with another relay")

	_, err = db.MarkEntries(ctx, []outbox.Mark{{Seq: other[0].Seq, Token: other[0].Token, To: outbox.Pending}})
	require.NoError(t, err)
	_, ok, err = db.TakeEntry(ctx, read[1], outbox.Query{}, mine)
	require.NoError(t, err)
	require.False(t, ok, "an earlier entry of its key waits")
}

// The lease ended, another relay took over, and the first comes late.
func TestLateMarkChangesNothing(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, to := range []outbox.Status{outbox.Published, outbox.Failed, outbox.Abandoned, outbox.Claimed, outbox.Pending} {
		t.Run(string(to), func(t *testing.T) {
			t.Parallel()
			db := open(t, routed())
			_, err := db.Append(ctx, "review-1", eventstore.NoStream, drafts(1))
			require.NoError(t, err)
			slow, err := db.ClaimEntries(ctx, outbox.Query{}, claim.Terms{Holder: "slow"})
			require.NoError(t, err)
			require.NoError(t, shiftBack(db.SQL(), time.Hour))
			owner, err := db.ClaimEntries(ctx, outbox.Query{}, claim.Terms{Holder: "owner"})
			require.NoError(t, err)
			require.Len(t, owner, 1)

			late, err := db.MarkEntries(ctx, []outbox.Mark{{Seq: slow[0].Seq, Token: slow[0].Token, To: to, Error: "late"}})
			require.NoError(t, err)
			require.Equal(t, []int64{slow[0].Seq}, late)
			stored, err := db.Entries(ctx, outbox.Filter{})
			require.NoError(t, err)
			require.Equal(t, owner, stored)
		})
	}
}

// plan is how SQLite goes about a statement.
func plan(t *testing.T, db *sql.DB, query string) (all []string) {
	t.Helper()
	args := []any{"[]", 2, 3, 4, []byte("5"), "6", 7, 8}
	n := 0
	for i := range args {
		if regexp.MustCompile(fmt.Sprintf(`\?%d\b`, i+1)).MatchString(query) {
			n = i + 1
		}
	}
	rows, err := db.Query(`explain query plan `+query, args[:n]...)
	require.NoError(t, err)
	defer rows.Close()
	for rows.Next() {
		var id, parent, unused int
		var detail string
		require.NoError(t, rows.Scan(&id, &parent, &unused, &detail))
		all = append(all, detail)
	}
	return all
}

// A claim costs as much as the backlog, never as much as all that was ever published: by its indexes.
func TestClaimPlan(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db, tr := traced(t, 1, routed())
	_, err := db.Append(ctx, "review-1", eventstore.NoStream, drafts(1))
	require.NoError(t, err)
	statements := tr.during(func() {
		_, err := db.ClaimEntries(ctx, outbox.Query{Topics: []string{"review"}}, claim.Terms{})
		require.NoError(t, err)
	})
	require.Len(t, statements, 4, "candidates, begin, one taken, commit")
	candidates := plan(t, db.SQL(), statements[0])
	require.Contains(t, candidates, "SCAN o USING INDEX kinora_outbox_open")
	require.Contains(t, candidates, "SEARCH b USING INDEX kinora_outbox_lane (topic=? AND key=? AND id<?)")
	require.Contains(t, candidates, "MATERIALIZE ck", "the clock is read once")
	for _, line := range candidates {
		require.NotContains(t, line, "TEMP B-TREE", "nothing is sorted")
	}
	take := plan(t, db.SQL(), statements[2])
	require.Contains(t, take, "SEARCH o USING INTEGER PRIMARY KEY (rowid=?)")
	require.Contains(t, take, "SEARCH b USING INDEX kinora_outbox_lane (topic=? AND key=? AND id<?)")
}

// The hint comes after the commit that adds entries, whoever adds them.
func TestWaking(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, routed())
	woken := func(wake <-chan struct{}) bool {
		select {
		case <-wake:
			return true
		default:
			return false
		}
	}
	wake := db.Enqueued()
	require.False(t, woken(wake))
	events := drafts(1)
	_, err := db.Append(ctx, "review-1", eventstore.NoStream, events)
	require.NoError(t, err)
	require.True(t, woken(wake), "an append")

	wake = db.Enqueued()
	_, err = db.Append(ctx, "review-1", eventstore.NoStream, events)
	require.NoError(t, err)
	require.False(t, woken(wake), "not the same append again")
	err = db.Do(ctx, marks("m1"), func(context.Context, *sql.Tx, []int) ([]message, error) { return []message{{Topic: "out"}}, nil })
	require.NoError(t, err)
	require.True(t, woken(wake), "a handler's output")

	wake = db.Enqueued()
	err = db.Do(ctx, marks("m2"), func(ctx context.Context, tx *sql.Tx, _ []int) ([]message, error) {
		_, err := db.InTx(tx).Append(ctx, "review-2", eventstore.NoStream, drafts(1))
		require.False(t, woken(wake), "not before the commit")
		return nil, err
	})
	require.NoError(t, err)
	require.True(t, woken(wake), "a handler's append")
}
