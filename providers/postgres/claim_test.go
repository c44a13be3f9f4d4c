package postgres_test

import (
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// claimQueries has a query for each claim statement.
var claimQueries = []provider.EntryQuery{
	{}, {Near: true}, {Unordered: true},
	{Topics: []string{"t"}}, {Topics: []string{"t"}, Near: true}, {Topics: []string{"t"}, Unordered: true},
}

// A claim takes the entries that no other transaction has locked, and waits for none.
// Promise: G2.2
func TestAClaimSkipsLockedEntries(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	fill(t, db, 5, 5)
	other := begin(t, db)
	var locked int
	require.NoError(t, other.QueryRow(t.Context(), `select count(*) from (select from kinora.outbox order by id limit 2 for update) o`).Scan(&locked))
	require.Equal(t, 2, locked)
	for _, q := range claimQueries {
		taken, err := provider.ClaimEntries(patience.Context(t), db, q, claim.Terms{Lease: time.Hour})
		require.NoError(t, err, "%+v: the claim must not wait", q)
		require.Equal(t, []int64{3, 4, 5}, seqs(taken), "%+v", q)
		markAll(t, db, taken, outbox.Mark{To: outbox.Pending})
	}
	require.NoError(t, other.Rollback(t.Context()))
	taken, err := provider.ClaimEntries(t.Context(), db, claimQueries[0], claim.Terms{Lease: time.Hour})
	require.NoError(t, err)
	require.Equal(t, []int64{1, 2, 3, 4, 5}, seqs(taken))
}

// The server sends the rows of a statement before it commits. If the commit fails, nothing is claimed: a relay or a worker
// that took the rows would work beside the one that claims them next.
// Promise: G2.1
func TestAClaimWhoseCommitFailsReturnsNothing(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, `create function refuse() returns trigger language plpgsql as $$ begin
			raise exception 'not now' using errcode = '57P01';
		end $$;
		create constraint trigger refuse after update on kinora.outbox deferrable initially deferred for each row execute function refuse();
		create constraint trigger refuse after update on kinora.tasks deferrable initially deferred for each row execute function refuse()`)
	fill(t, db, 5, 5)
	enqueueTasks(t, db, provider.TaskDraft{ID: "one", Kind: "a/k", Input: []byte("1")})
	for _, q := range claimQueries {
		taken, err := provider.ClaimEntries(t.Context(), db, q, claim.Terms{Lease: time.Hour})
		require.ErrorContains(t, err, "not now", "%+v", q)
		require.Empty(t, taken, "%+v", q)
	}
	tasks, err := provider.ClaimTasks(t.Context(), db, provider.TaskQuery{Kinds: []string{"a/k"}}, claim.Terms{Lease: time.Hour})
	require.ErrorContains(t, err, "not now")
	require.Empty(t, tasks)
	require.Zero(t, count(t, db, `select (select count(*) from kinora.outbox where status = 'claimed') + (select count(*) from kinora.tasks where status = 'claimed')`))
}

// A malformed task that cannot be abandoned at this moment keeps no other task of its claim back.
// Promise: G2.1
func TestAClaimWithAMalformedTaskReturnsTheOthers(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	enqueueTasks(t, db, provider.TaskDraft{ID: "one", Kind: "a/k", Input: []byte("1")}, provider.TaskDraft{ID: "two", Kind: "a/k", Input: []byte("1")})
	_, err := db.Pool().Exec(t.Context(), `update kinora.tasks set state = '1' where id = 'one';
		create function refuse() returns trigger language plpgsql as $$ begin raise exception 'not now'; end $$;
		create trigger refuse before update on kinora.tasks for each row when (new.status = 'abandoned') execute function refuse()`)
	require.NoError(t, err)
	tasks, err := provider.ClaimTasks(t.Context(), db, provider.TaskQuery{Kinds: []string{"a/k"}}, claim.Terms{Lease: time.Hour})
	require.NoError(t, err)
	require.Len(t, tasks, 1)
	require.Equal(t, "two", tasks[0].ID)
}

// The rows of a claim may come in any order, here in that of the table. The entries are in order
// of Seq.
// Promise: G2.2
func TestAClaimIsSortedBySeq(t *testing.T) {
	t.Parallel()
	scanning, err := pgxpool.New(t.Context(), postgrestest.DSN(t, nil)+"&enable_nestloop=off&enable_mergejoin=off&enable_indexscan=off&enable_bitmapscan=off")
	require.NoError(t, err)
	defer scanning.Close()
	db, err := postgres.New(scanning, nil)
	require.NoError(t, err)
	_, err = scanning.Exec(t.Context(), `
		insert into kinora.outbox (id, message_id, topic, key, payload, headers, next_attempt_at, created_at) overriding system value
		select g, g, 't', g, '', '{}', now(), now() from generate_series(50, 1, -1) g`)
	require.NoError(t, err)
	taken, err := provider.ClaimEntries(t.Context(), db, provider.EntryQuery{}, claim.Terms{Lease: time.Hour})
	require.NoError(t, err)
	require.Len(t, taken, 50)
	require.True(t, slices.IsSorted(seqs(taken)), "%v", seqs(taken))
}
