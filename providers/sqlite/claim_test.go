package sqlite_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	moderncsqlite "modernc.org/sqlite"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// clock reads SQLite's clock.
func clock(t testing.TB, db *sql.DB) time.Time {
	t.Helper()
	var ms int64
	require.NoError(t, db.QueryRow(`select cast(round(unixepoch('subsec') * 1000) as integer)`).Scan(&ms))
	return time.UnixMilli(ms).UTC()
}

// clocked is a connector for a SQLite with a clock that a test sets.
type clocked struct {
	driver *moderncsqlite.Driver
	dsn    string
}

func (c clocked) Connect(context.Context) (driver.Conn, error) { return c.driver.Open(c.dsn) }
func (c clocked) Driver() driver.Driver                        { return c.driver }

// Leases and backoffs use only SQLite's clock: this test sets it to 2001 and advances it.
// Promise: G8.1
func TestLeaseEndsOnSQLiteClock(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	var now atomic.Int64 // in milliseconds
	now.Store(time.Date(2001, 2, 3, 4, 5, 6, 0, time.UTC).UnixMilli())
	d := &moderncsqlite.Driver{}
	require.NoError(t, d.RegisterScalarFunction("unixepoch", 1,
		func(*moderncsqlite.FunctionContext, []driver.Value) (driver.Value, error) {
			return float64(now.Load()) / 1000, nil
		}))
	pool := sql.OpenDB(clocked{d, "file:" + migrated(t) + "?" + immediate.Encode()})
	t.Cleanup(func() { require.NoError(t, pool.Close()) })
	db, err := sqlite.New(pool, routed())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	_, err = db.Append(ctx, "review-1", eventstore.NoStream, drafts(1))
	require.NoError(t, err)

	// A lease and a backoff are never shorter than requested. The entry is claimable exactly at
	// the end.
	const lease, rounded = 90*time.Second + time.Microsecond, 90_001
	takeAtEnd := func() outbox.Entry {
		t.Helper()
		now.Add(rounded - 1)
		early, err := db.ClaimEntries(ctx, provider.EntryQuery{}, claim.Terms{Lease: lease})
		require.NoError(t, err)
		require.Empty(t, early)
		now.Add(1)
		taken, err := db.ClaimEntries(ctx, provider.EntryQuery{}, claim.Terms{Lease: lease})
		require.NoError(t, err)
		require.Len(t, taken, 1)
		require.Equal(t, now.Load(), taken[0].LastAttemptedAt.UnixMilli())
		require.Equal(t, now.Load()+rounded, taken[0].NextAttemptAt.UnixMilli())
		return taken[0]
	}
	_, err = db.ClaimEntries(ctx, provider.EntryQuery{}, claim.Terms{Lease: lease})
	require.NoError(t, err)
	e := takeAtEnd()
	late, err := db.MarkEntries(ctx, []outbox.Mark{{Seq: e.Seq, Token: e.Token, To: outbox.Failed, After: lease, Error: "boom"}})
	require.NoError(t, err)
	require.Empty(t, late)
	takeAtEnd()
}

// A claim whose context ends is either complete and returned, or not made.
func TestCancelledClaimIsWholeOrNothing(t *testing.T) {
	t.Parallel()
	db := open(t, routed())
	for i := range 3 {
		_, err := db.Append(context.Background(), fmt.Sprint("review-", i), eventstore.NoStream, drafts(3))
		require.NoError(t, err)
	}
	began := time.Now()
	all, err := db.ClaimEntries(context.Background(), provider.EntryQuery{}, claim.Terms{})
	require.NoError(t, err)
	require.Len(t, all, 9)
	usual := time.Since(began)
	made := 0
	for i := range 400 {
		_, err := db.SQL().Exec(`update kinora_outbox set status = 'pending', token = null, next_attempt_at = 0`)
		require.NoError(t, err)
		terms := claim.Terms{Token: claim.NewToken()}
		ctx, cancel := context.WithTimeout(context.Background(), rand.N(2*usual))
		var taken []outbox.Entry
		if i%2 == 0 {
			taken, err = db.ClaimEntries(ctx, provider.EntryQuery{}, terms)
		} else if e, ok, failed := db.TakeEntry(ctx, all[0], provider.EntryQuery{}, terms); ok {
			taken, err = []outbox.Entry{e}, failed
		}
		cancel()
		if err != nil {
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Empty(t, taken)
		}
		stored, err := db.Entries(context.Background(), outbox.Filter{Status: []outbox.Status{outbox.Claimed}})
		require.NoError(t, err)
		require.Equal(t, len(taken), len(stored))
		made += min(len(stored), 1)
	}
	t.Log(made, "of 400 claims were made")
}

// A claim that waits for the write lock ends with its context and changes no entry.
func TestWaitingClaimEndsWithItsContext(t *testing.T) {
	t.Parallel()
	db := open(t, routed())
	_, err := db.Append(context.Background(), "review-1", eventstore.NoStream, drafts(1))
	require.NoError(t, err)
	read, err := db.EntryCandidates(context.Background(), provider.EntryQuery{}, 1)
	require.NoError(t, err)
	tx, err := db.SQL().Begin()
	require.NoError(t, err)
	ctx := within(t, 20*time.Millisecond)
	_, err = db.ClaimEntries(ctx, provider.EntryQuery{}, claim.Terms{})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	_, ok, err := db.TakeEntry(ctx, read[0], provider.EntryQuery{}, claim.Terms{Token: claim.NewToken()})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.False(t, ok)
	require.NoError(t, tx.Rollback())
	after, err := db.EntryCandidates(context.Background(), provider.EntryQuery{}, 1)
	require.NoError(t, err)
	require.Equal(t, read, after)
}

// The package does not read the clock of the process.
// Promise: G8.1
func TestOnlySQLitesClockIsUsed(t *testing.T) {
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

// An idle relay does not block writers: it does not begin a transaction.
func TestIdleClaimBeginsNoTransaction(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db, tr := traced(t, 1, routed())
	statements := tr.during(func() {
		entries, err := db.ClaimEntries(ctx, provider.EntryQuery{}, claim.Terms{})
		require.NoError(t, err)
		require.Empty(t, entries)
		late, err := db.MarkEntries(ctx, nil)
		require.NoError(t, err)
		require.Empty(t, late)
	})
	require.Len(t, statements, 1)
}

// After the candidates were read, another relay claims the first one. The second one must not be
// taken past it.
// Promise: G3.1
func TestTakeDoesNotPassAnEarlierEntry(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, routed())
	_, err := db.Append(ctx, "review-1", eventstore.NoStream, drafts(2))
	require.NoError(t, err)
	read, err := db.EntryCandidates(ctx, provider.EntryQuery{}, 10)
	require.NoError(t, err)
	require.Len(t, read, 2)

	other, err := db.ClaimEntries(ctx, provider.EntryQuery{}, claim.Terms{Holder: "other", Limit: 1})
	require.NoError(t, err)
	require.Len(t, other, 1)
	mine := claim.Terms{Holder: "mine", Token: claim.NewToken()}
	_, ok, err := db.TakeEntry(ctx, read[1], provider.EntryQuery{}, mine)
	require.NoError(t, err)
	require.False(t, ok, "another relay has an earlier entry of the key")

	_, err = db.MarkEntries(ctx, []outbox.Mark{{Seq: other[0].Seq, Token: other[0].Token, To: outbox.Pending}})
	require.NoError(t, err)
	_, ok, err = db.TakeEntry(ctx, read[1], provider.EntryQuery{}, mine)
	require.NoError(t, err)
	require.False(t, ok, "an earlier entry of the key is pending")
}

// The lease ended, another relay claimed the entry, and the first one marks it late.
// Promise: G2.4
func TestLateMarkChangesNothing(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, to := range []outbox.Status{outbox.Published, outbox.Failed, outbox.Abandoned, outbox.Claimed, outbox.Pending} {
		t.Run(string(to), func(t *testing.T) {
			t.Parallel()
			db := open(t, routed())
			_, err := db.Append(ctx, "review-1", eventstore.NoStream, drafts(1))
			require.NoError(t, err)
			slow, err := db.ClaimEntries(ctx, provider.EntryQuery{}, claim.Terms{Holder: "slow"})
			require.NoError(t, err)
			require.NoError(t, shiftBack(db.SQL(), time.Hour))
			owner, err := db.ClaimEntries(ctx, provider.EntryQuery{}, claim.Terms{Holder: "owner"})
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

// The signal comes after every commit that adds entries.
func TestEnqueuedSignalsAfterTheCommit(t *testing.T) {
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
	require.False(t, woken(wake), "no signal for a replayed append")
	err = db.Do(ctx, delivery("m1"), func(context.Context, *sql.Tx, provider.Found) (provider.Closing, error) {
		return provider.Closing{Output: []outbox.Message{{Topic: "out"}}}, nil
	})
	require.NoError(t, err)
	require.True(t, woken(wake), "a handler's output")

	wake = db.Enqueued()
	err = db.Do(ctx, delivery("m2"), func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
		_, err := db.InTx(tx).Append(ctx, "review-2", eventstore.NoStream, drafts(1))
		require.False(t, woken(wake), "not before the commit")
		return provider.Closing{}, err
	})
	require.NoError(t, err)
	require.True(t, woken(wake), "a handler's append")
}

// A claim of some topics returns what a claim of all topics returns for them.
func TestSomeTopicsAreClaimedLikeAll(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	_, err := db.SQL().Exec(`with recursive n (i) as (select 1 union all select i + 1 from n where i < 300)
		insert into kinora_outbox (message_id, topic, key, payload, headers, created_at, next_attempt_at, status)
		select i, 't' || (i * 7 % 6), 'k' || (i % 11), x'7b7d', '{}', 0, 0, iif(i % 41 = 0, 'abandoned', iif(i % 37 = 0, 'held', 'pending')) from n`)
	require.NoError(t, err)
	_, err = db.SQL().Exec(`update kinora_outbox set open = status <> 'held'`)
	require.NoError(t, err)
	for _, q := range []provider.EntryQuery{
		{Topics: []string{"t3"}},
		{Topics: []string{"t5", "t1", "t5", "none"}},
		{Topics: []string{"t5", "t1", "t2"}, Except: []string{"t1"}},
		{Except: []string{"t0"}},
		{Except: []string{"t4", "none", "t1"}},
		{Except: []string{"t0", "t1", "t2", "t3", "t4", "t5"}},
		{Topics: []string{"none"}},
	} {
		for _, unordered := range []bool{false, true} {
			q.Unordered = unordered
			all, err := db.EntryCandidates(ctx, provider.EntryQuery{Unordered: unordered}, 10_000)
			require.NoError(t, err)
			want := []int64{}
			for _, e := range all {
				if (len(q.Topics) == 0 || slices.Contains(q.Topics, e.Topic)) && !slices.Contains(q.Except, e.Topic) {
					want = append(want, e.Seq)
				}
			}
			for _, limit := range []int{1, 7, 50, 10_000} {
				got, err := db.EntryCandidates(ctx, q, limit)
				require.NoError(t, err)
				require.Equal(t, want[:min(limit, len(want))], seqs(got), "%+v, %d", q, limit)
			}
		}
	}
}

// A number of attempts that another program wrote stops neither claims nor marks.
func TestForeignAttempts(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	enqueue(t, db, "a", "b")
	execSQL(t, db, `update kinora_outbox set attempts = 9223372036854775807 where key = 'a'`)
	taken, err := db.ClaimEntries(t.Context(), provider.EntryQuery{}, claim.Terms{Holder: "me"})
	require.NoError(t, err)
	require.Len(t, taken, 2)
	execSQL(t, db, `update kinora_outbox set attempts = -9223372036854775808 where key = 'a'`)
	var marks []outbox.Mark
	for _, e := range taken {
		marks = append(marks, outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Pending})
	}
	late, err := db.MarkEntries(t.Context(), marks)
	require.NoError(t, err)
	require.Empty(t, late)
}
