package postgres_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/internal/pgconform"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

const long = 5 * time.Second

// enqueue adds entries of topic t and this key. Nothing else is in flight, so their ids are
// contiguous.
func enqueue(t *testing.T, db *postgres.DB, key string, n int) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), db.Pool(), func(tx pgx.Tx) error {
		ms := make([]outbox.Message, n)
		for i := range ms {
			ms[i] = outbox.Message{Topic: "t", Key: key}
		}
		return db.InTx(tx).Enqueue(t.Context(), ms...)
	}))
}

func claimAll(t *testing.T, db *postgres.DB) []outbox.Entry {
	t.Helper()
	entries, err := provider.ClaimEntries(t.Context(), db, provider.EntryQuery{}, claim.Terms{Lease: time.Hour, Limit: 1000})
	require.NoError(t, err)
	return entries
}

func seqs(entries []outbox.Entry) []int64 {
	got := []int64{}
	for _, e := range entries {
		got = append(got, e.Seq)
	}
	return got
}

func markAll(t *testing.T, db *postgres.DB, entries []outbox.Entry, m outbox.Mark) {
	t.Helper()
	var marks []outbox.Mark
	for _, e := range entries {
		m.Seq, m.Token = e.Seq, e.Token
		marks = append(marks, m)
	}
	late, err := db.MarkEntries(t.Context(), marks)
	require.NoError(t, err)
	require.Empty(t, late)
}

func hold(t *testing.T, db *postgres.DB) int {
	t.Helper()
	n, err := db.HoldEntries(t.Context(), long, 10_000)
	require.NoError(t, err)
	return n
}

// statuses returns the statuses of all entries, in order. It also checks the columns of the
// partial indexes.
func statuses(t *testing.T, db *postgres.DB) string {
	t.Helper()
	require.Zero(t, count(t, db, `select count(*) from kinora.outbox where open <> (status in ('pending', 'claimed', 'failed'))
		or held <> (status in ('held', 'abandoned')) or not stuck and status in ('failed', 'abandoned')
		or stuck and status in ('published', 'skipped')`))
	var all string
	require.NoError(t, db.Pool().QueryRow(t.Context(), `select coalesce(string_agg(status, ' ' order by id), '') from kinora.outbox`).Scan(&all))
	return all
}

// poisoned adds entries of one key and fails or abandons the first.
func poisoned(t *testing.T, db *postgres.DB, n int, to outbox.Mark) {
	t.Helper()
	enqueue(t, db, "k", 1)
	markAll(t, db, claimAll(t, db), to)
	enqueue(t, db, "k", n-1)
}

var (
	failed    = outbox.Mark{To: outbox.Failed, After: time.Hour, Error: "x"}
	abandoned = outbox.Mark{To: outbox.Abandoned, Error: "x"}
	published = outbox.Mark{To: outbox.Published}
)

func begin(t *testing.T, db *postgres.DB) pgx.Tx {
	t.Helper()
	tx, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// stuckHeads returns the entries behind which a hold finds others.
func stuckHeads(t *testing.T, tx pgx.Tx, long time.Duration) (heads []int64) {
	t.Helper()
	row := tx.QueryRow(t.Context(), constants(t)["stuckHeadsSQL"], long.Microseconds(), "", "", 0, 100)
	require.NoError(t, row.Scan(&heads, nil, nil, nil))
	return heads
}

// lockHeads runs the first statement of a hold in a transaction of the test.
func lockHeads(t *testing.T, tx pgx.Tx, long time.Duration) []int64 {
	t.Helper()
	rows, err := tx.Query(t.Context(), constants(t)["lockHeadsSQL"], long.Microseconds(), 100, stuckHeads(t, tx, long))
	require.NoError(t, err)
	var id int64
	ids := []int64{}
	_, err = pgx.ForEachRow(rows, []any{&id, nil, nil}, func() error { ids = append(ids, id); return nil })
	require.NoError(t, err)
	return ids
}

// holdBehind runs the second statement of a hold.
func holdBehind(t *testing.T, tx pgx.Tx, ids ...int64) int {
	t.Helper()
	topics, keys := make([]string, len(ids)), make([]string, len(ids))
	for i := range ids {
		topics[i], keys[i] = "t", "k"
	}
	tag, err := tx.Exec(t.Context(), constants(t)["holdEntriesSQL"], ids, topics, keys, 100)
	require.NoError(t, err)
	return int(tag.RowsAffected())
}

const waitingSQL = `select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`

// waiting waits until n statements wait for a lock.
func waiting(t *testing.T, db *postgres.DB, n int) {
	t.Helper()
	patience.Until(t, func() bool { return count(t, db, waitingSQL) == n }, "%d statements to wait for a lock", n)
}

// sleepSQL sleeps for longer than a test waits for anything.
const sleepSQL = `select pg_sleep(3600)`

// asleep waits until n statements sleep.
func asleep(t *testing.T, db *postgres.DB, n int) {
	t.Helper()
	patience.Until(t, func() bool {
		return count(t, db, `select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep'`) == n
	}, "%d statements to sleep", n)
}

// Entries enqueued later do not pass held ones: neither before nor after the first one's backoff
// ends, nor when it is published.
// Promise: G3.5
func TestHeldEntriesKeepTheirPlace(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	poisoned(t, db, 3, failed)
	require.Equal(t, 2, hold(t, db))
	require.Zero(t, hold(t, db))
	enqueue(t, db, "k", 1)
	require.Equal(t, "failed held held pending", statuses(t, db))
	require.Empty(t, claimAll(t, db))
	pgconform.Advance(t, db)(2 * time.Hour)
	first := claimAll(t, db)
	require.Equal(t, []int64{1}, seqs(first))
	require.Empty(t, claimAll(t, db))
	markAll(t, db, first, published)
	require.Equal(t, "published pending pending pending", statuses(t, db))
	rest := claimAll(t, db)
	require.Equal(t, []int64{2, 3, 4}, seqs(rest))
	markAll(t, db, rest, published)
}

// While the first entry of a key is being requeued, skipped or claimed, no entry behind it is
// held, and a hold does not wait.
func TestAHoldPassesHeadsThatOthersChange(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	poisoned(t, db, 2, abandoned)
	requeue := begin(t, db)
	_, err := requeue.Exec(t.Context(), constants(t)["requeueSQL"], nil, "", "", nil, 0, "", 0, 10, 0)
	require.NoError(t, err)
	require.Zero(t, hold(t, db), "in flight: the hold does not wait")
	require.NoError(t, requeue.Commit(t.Context()))
	require.Zero(t, hold(t, db))
	require.Equal(t, "pending pending", statuses(t, db))
}

// The lock keeps the head unchanged. The requeue waits for it, and then releases the entries held
// meanwhile, which its first statement could not see.
func TestAChangeReleasesWhatAHoldInFlightHeld(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(ctx context.Context, db *postgres.DB) (int, error)
		want   string
	}{
		"requeue": {func(ctx context.Context, db *postgres.DB) (int, error) {
			return db.Requeue(ctx, outbox.Filter{})
		}, "pending pending pending"},
		"skip": {func(ctx context.Context, db *postgres.DB) (int, error) {
			return db.Skip(ctx, outbox.Filter{Status: []outbox.Status{outbox.Abandoned}})
		}, "skipped pending pending"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, nil, totals)
			poisoned(t, db, 3, abandoned)
			tx := begin(t, db)
			require.Equal(t, []int64{1}, lockHeads(t, tx, long))
			done := make(chan error, 1)
			go func() {
				n, err := c.change(t.Context(), db)
				if err == nil && n != 1 {
					err = fmt.Errorf("%d changed", n)
				}
				done <- err
			}()
			waiting(t, db, 1)
			require.Equal(t, 2, holdBehind(t, tx, 1))
			require.NoError(t, tx.Commit(t.Context()))
			require.NoError(t, <-done)
			require.Equal(t, c.want, statuses(t, db))
			require.Zero(t, hold(t, db))
		})
	}
}

// A hold takes longer than the backoff that it saw. The entry is not claimed before the hold
// ends, so its publication finds the held entries.
func TestAClaimDoesNotTakeAHeadThatAHoldHasLocked(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	poisoned(t, db, 3, outbox.Mark{To: outbox.Failed})
	tx := begin(t, db)
	require.Equal(t, []int64{1}, lockHeads(t, tx, -time.Hour), "its backoff is over, as after a long hold")
	require.Empty(t, claimAll(t, db))
	require.Equal(t, 2, holdBehind(t, tx, 1))
	require.NoError(t, tx.Commit(t.Context()))
	first := claimAll(t, db)
	require.Equal(t, []int64{1}, seqs(first))
	markAll(t, db, first, published)
	require.Equal(t, "published pending pending", statuses(t, db))
	require.Equal(t, []int64{2, 3}, seqs(claimAll(t, db)))
}

// A claim saw entries as pending that are held before it locks them: it takes neither them nor
// those behind them.
func TestAClaimWhoseEntriesAreHeldMeanwhile(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	poisoned(t, db, 3, abandoned)
	require.Equal(t, 2, hold(t, db))
	enqueue(t, db, "k", 1)
	skip := begin(t, db)
	_, err := skip.Exec(t.Context(), constants(t)["skipSQL"], nil, "", "", []int64{1}, 0, "", 0, 10)
	require.NoError(t, err)
	require.Empty(t, claimAll(t, db), "as before, while the skip is in flight")
	require.NoError(t, skip.Rollback(t.Context()))
	_, err = db.Skip(t.Context(), outbox.Filter{Seqs: []int64{1}})
	require.NoError(t, err)
	// holds 2 as a hold does, and not 3
	other := begin(t, db)
	_, err = other.Exec(t.Context(), `update kinora.outbox set status = 'held', open = false, held = true where id = 2`)
	require.NoError(t, err)
	require.Empty(t, claimAll(t, db), "a locked entry blocks those behind it")
	require.NoError(t, other.Commit(t.Context()))
	require.Empty(t, claimAll(t, db))
	require.Zero(t, hold(t, db)) // it finds an orphan
	require.Equal(t, []int64{2, 3, 4}, seqs(claimAll(t, db)))
}

// A key has two abandoned entries: those behind the second wait for it also after the first is
// resolved.
func TestTwoHeadsInOneKey(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	enqueue(t, db, "k", 4)
	some := claimAll(t, db)
	markAll(t, db, []outbox.Entry{some[0], some[2]}, abandoned)
	markAll(t, db, []outbox.Entry{some[1], some[3]}, outbox.Mark{To: outbox.Pending})
	require.Equal(t, 2, hold(t, db))
	require.Equal(t, "abandoned held abandoned held", statuses(t, db))

	// A requeue of the second entry and a hold behind the first at the same time: either order
	// loses no entry.
	tx := begin(t, db)
	enqueue(t, db, "k", 1)
	require.Equal(t, []int64{1}, lockHeads(t, tx, long))
	n, err := db.Requeue(t.Context(), outbox.Filter{Seqs: []int64{3}})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Equal(t, 4, holdBehind(t, tx, 1))
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, "abandoned held held held held", statuses(t, db))

	_, err = db.Skip(t.Context(), outbox.Filter{Seqs: []int64{1}})
	require.NoError(t, err)
	require.Equal(t, "skipped pending pending pending pending", statuses(t, db))
	require.Equal(t, []int64{2, 3, 4, 5}, seqs(claimAll(t, db)))
}

// Several thousand entries are held in several calls, and released in order, some hundred at a
// time.
func TestALongQueueIsHeldAndReleasedInParts(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	poisoned(t, db, 1201, abandoned)
	n, err := db.HoldEntries(t.Context(), long, 1000)
	require.NoError(t, err)
	require.Equal(t, 1000, n)
	n, err = db.HoldEntries(t.Context(), long, 1000)
	require.NoError(t, err)
	require.Equal(t, 200, n)
	_, err = db.Requeue(t.Context(), outbox.Filter{})
	require.NoError(t, err)
	require.Equal(t, 500, count(t, db, `select count(*) from kinora.outbox where status = 'pending' and id <= 500`))
	require.Equal(t, 500, count(t, db, `select count(*) from kinora.outbox where status = 'pending'`))
	var all []int64
	for len(all) < 1201 {
		some := claimAll(t, db)
		require.NotEmpty(t, some)
		all = append(all, seqs(some)...)
		markAll(t, db, some, outbox.Mark{To: outbox.Published, Drop: true})
	}
	require.IsIncreasing(t, all)
	require.Zero(t, count(t, db, `select count(*) from kinora.outbox`))
}

// The entries for which others waited are deleted by hand. Many other keys wait for entries that
// still exist.
func TestOrphansAreReleased(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	_, err := db.Pool().Exec(t.Context(), `
		insert into kinora.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at, status, open, held, stuck)
		select g, 't', 'k' || lpad((g % 2500)::text, 4, '0'), '', '{}', now(), now(), case when g <= 2500 then 'abandoned' else 'held' end, false, true, g <= 2500
		from generate_series(1, 5000) g`)
	require.NoError(t, err)
	_, err = db.Pool().Exec(t.Context(), `delete from kinora.outbox where status = 'abandoned' and key in ('k0001', 'k2400')`)
	require.NoError(t, err)
	for range 3 {
		require.Zero(t, hold(t, db))
	}
	back := claimAll(t, db)
	require.Equal(t, []int64{2501, 4900}, seqs(back))
	markAll(t, db, back, published)
}

// A claim changes no indexed column, also of an entry that has failed before.
func TestClaimsAreHotUpdates(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	enqueue(t, db, "a", 5)
	enqueue(t, db, "b", 1)
	some := claimAll(t, db)
	markAll(t, db, some[:5], outbox.Mark{To: outbox.Pending})
	markAll(t, db, some[5:], outbox.Mark{To: outbox.Failed})
	tx := begin(t, db)
	updates := func() (all, hot int) { // by this connection, so far
		require.NoError(t, tx.QueryRow(t.Context(), `select n_tup_upd, n_tup_hot_upd from pg_stat_xact_user_tables where relname = 'outbox'`).Scan(&all, &hot))
		return all, hot
	}
	all, hot := updates()
	require.Len(t, claimIn(t, tx, 10), 6)
	allAfter, hotAfter := updates()
	require.Equal(t, []int{6, 6}, []int{allAfter - all, hotAfter - hot})

	// This holds too if whole pages are claimed at once.
	_, err := db.Pool().Exec(t.Context(), `
		insert into kinora.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at)
		select gen_random_uuid(), 'review', 'review-' || g, convert_to(repeat('x', 50 + 7 * g), 'UTF8'), '{"kinora_version": "1"}', now(), now() from generate_series(1, 150) g`)
	require.NoError(t, err)
	all, hot = updates()
	require.Len(t, claimIn(t, tx, 1000), 150)
	allAfter, hotAfter = updates()
	require.Equal(t, 150, allAfter-all)
	require.Greater(t, hotAfter-hot, 140, "except about one on each page")
}

// stuckLanes makes abandoned entries, one in each of n keys, and a pending one behind every
// every-th of them.
func stuckLanes(t *testing.T, db *postgres.DB, n, every int) {
	t.Helper()
	_, err := db.Pool().Exec(t.Context(), `
		insert into kinora.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at, status, open, held, stuck)
		select 's' || g, 't', 'k' || lpad(g::text, 6, '0'), '', '{}', now(), now(), 'abandoned', false, true, true from generate_series(1, $1) g`, n)
	require.NoError(t, err)
	_, err = db.Pool().Exec(t.Context(), `
		insert into kinora.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at)
		select 'p' || g, 't', 'k' || lpad(g::text, 6, '0'), '', '{}', now(), now() from generate_series($2::int, $1, $2) g`, n, every)
	require.NoError(t, err)
}

// However many entries are stuck, one call scans some of them, and the next calls continue until
// all are scanned.
func TestAHoldScansSomeStuckEntries(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	stuckLanes(t, db, 5000, 1)
	require.Equal(t, 2000, hold(t, db))
	n, err := db.HoldEntries(t.Context(), long, 1500)
	require.NoError(t, err)
	require.Equal(t, 1500, n)
	n, err = db.HoldEntries(t.Context(), long, 1500)
	require.NoError(t, err)
	require.Equal(t, 500, n, "the remaining entries of the scan: the last call reached its limit")
	require.Equal(t, 1000, hold(t, db), "continued from the end of the last scan")
	require.Zero(t, hold(t, db))

	// New entries behind any of them are held within one round.
	_, err = db.Pool().Exec(t.Context(), `
		insert into kinora.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at)
		select 'q' || k, 't', k, '', '{}', now(), now() from unnest(array['k000001', 'k002500', 'k005000']) k`)
	require.NoError(t, err)
	require.Equal(t, 3, hold(t, db)+hold(t, db)+hold(t, db))

	// If few entries are stuck, every call scans all of them.
	_, err = db.Pool().Exec(t.Context(), `delete from kinora.outbox where key > 'k000010'`)
	require.NoError(t, err)
	for range 3 {
		for _, key := range []string{"k000001", "k000010"} {
			enqueue(t, db, key, 1)
		}
		require.Equal(t, 2, hold(t, db))
	}
}

// Relays that share a database hold entries one at a time, and none waits for another.
func TestOneRelayHoldsAtATime(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	dsn := db.Pool().Config().ConnString()
	poisoned(t, db, 2, abandoned)
	tx := begin(t, db)
	var mine bool
	require.NoError(t, tx.QueryRow(t.Context(), constants(t)["tryHoldSQL"], postgres.LockClassHold, postgres.LockKey("kinora")).Scan(&mine))
	require.True(t, mine)
	other, err := postgres.Open(t.Context(), dsn, nil)
	require.NoError(t, err)
	t.Cleanup(other.Close)
	require.Zero(t, hold(t, db))
	require.Zero(t, hold(t, other))
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, 1, hold(t, other))
	require.Equal(t, "abandoned held", statuses(t, db))
}

// After a long hold, entries are released in a window, so that they do not slow every claim. The
// others follow as these are published.
func TestHeldEntriesAreReleasedInWindows(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	poisoned(t, db, 3000, abandoned)
	require.Equal(t, 2999, hold(t, db))
	// behind all of them: not part of the window
	enqueue(t, db, "k", 700)
	_, err := db.Requeue(t.Context(), outbox.Filter{})
	require.NoError(t, err)
	first := int64(1)
	for _, n := range []int{1, 1, 2, 50, 300, 500} {
		some, err := provider.ClaimEntries(t.Context(), db, provider.EntryQuery{}, claim.Terms{Lease: time.Hour, Limit: n})
		require.NoError(t, err)
		require.Len(t, some, n)
		require.Equal(t, first, some[0].Seq)
		first += int64(n)
		markAll(t, db, some, outbox.Mark{To: outbox.Published, Drop: n%2 == 0})
		require.Equal(t, 500, count(t, db, `select count(*) from kinora.outbox where open and id <= 3000`))
		require.Zero(t, count(t, db, fmt.Sprintf(`select count(*) from kinora.outbox where open and id between %d and 3000`, first+500)))
	}
}
