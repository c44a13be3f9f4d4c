package postgres_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// topicsOf adds n entries, with topics and keys computed by these expressions of g.
func topicsOf(t *testing.T, db *postgres.DB, n int, topic, key string) {
	t.Helper()
	_, err := db.Pool().Exec(t.Context(), fmt.Sprintf(`
		insert into kinora.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at)
		select gen_random_uuid(), %s, %s, '', '{}', now(), now() from generate_series(1, $1) g`, topic, key), n)
	require.NoError(t, err)
}

// A claim of some topics returns what a claim of all topics returns for them.
func TestSomeTopicsAreClaimedLikeAll(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	topicsOf(t, db, 600, "'t' || g * 7 % 6", "'k' || g % 11")
	first, err := provider.ClaimEntries(t.Context(), db, provider.EntryQuery{Unordered: true}, claim.Terms{Lease: time.Hour, Limit: 120})
	require.NoError(t, err)
	markAll(t, db, first[:40], published)
	markAll(t, db, first[40:43], failed)
	markAll(t, db, first[43:46], abandoned)
	markAll(t, db, first[50:], outbox.Mark{To: outbox.Pending})
	claimed := func(q provider.EntryQuery, limit int) []outbox.Entry {
		taken, err := provider.ClaimEntries(t.Context(), db, q, claim.Terms{Lease: time.Hour, Limit: limit})
		require.NoError(t, err)
		markAll(t, db, taken, outbox.Mark{To: outbox.Pending})
		return taken
	}
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
			all := claimed(provider.EntryQuery{Unordered: unordered}, 10_000)
			want := slices.DeleteFunc(seqs(all), func(seq int64) bool {
				e := all[slices.IndexFunc(all, func(e outbox.Entry) bool { return e.Seq == seq })]
				return len(q.Topics) > 0 && !slices.Contains(q.Topics, e.Topic) || slices.Contains(q.Except, e.Topic)
			})
			for _, limit := range []int{1, 7, 50, 10_000} {
				require.Equal(t, want[:min(limit, len(want))], seqs(claimed(q, limit)), "%+v, %d", q, limit)
			}
		}
	}
}

// If a claim of some topics is in flight, another claim takes the next entries.
func TestClaimsOfSomeTopicsDoNotBlockEachOther(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	topicsOf(t, db, 300, "'t' || g % 3", "'k' || g")
	tx := begin(t, db)
	token := claim.NewToken()
	tag, err := tx.Exec(t.Context(), constants(t)["claimTopicsSQL"], token[:], time.Hour.Microseconds(), 10, 8, "a", 0, 0, nil, []string{"t0"})
	require.NoError(t, err)
	require.Equal(t, int64(10), tag.RowsAffected())
	taken, err := provider.ClaimEntries(t.Context(), db, provider.EntryQuery{Except: []string{"t0"}}, claim.Terms{Lease: time.Hour, Limit: 10})
	require.NoError(t, err)
	require.Len(t, taken, 10)
	require.Greater(t, taken[0].Seq, int64(10))
}

// blocks returns how many pages a statement reads.
func blocks(t *testing.T, db *postgres.DB, sql string, args ...any) int {
	t.Helper()
	tx, err := db.Pool().BeginTx(t.Context(), pgx.TxOptions{})
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	var out []byte
	row := tx.QueryRow(t.Context(), "explain (analyze, buffers, format json) "+sql, append([]any{pgx.QueryExecModeCacheDescribe}, args...)...)
	require.NoError(t, row.Scan(&out))
	var plans []struct {
		Plan struct {
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	require.NoError(t, json.Unmarshal(out, &plans))
	return plans[0].Plan.Hit + plans[0].Plan.Read
}

// The backlog of a paused topic, or of another relay's topic, does not slow the claims of others.
func TestABacklogOfOtherTopicsCostsNothing(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	topicsOf(t, db, 3000, "'up' || g % 3", "'k' || g")
	_, err := db.Pool().Exec(t.Context(), `vacuum analyze kinora.outbox`)
	require.NoError(t, err)
	token, all := "00000000-0000-0000-0000-000000000001", constants(t)
	ups, idle := []string{"up0", "up1", "up2"}, []string{"up0", "up1", "up2", "down"}
	costs := func() (cost []int) {
		for _, topics := range [][]any{{ups, nil}, {nil, []string{"down"}}, {nil, idle}, {[]string{"none"}, nil}} {
			for _, name := range []string{"claimTopicsSQL", "claimTopicsNearSQL", "claimTopicsNoOrderSQL"} {
				cost = append(cost, blocks(t, db, all[name], append([]any{token, 60_000_000, 50, 8, "me", 0, 0}, topics...)...))
			}
		}
		return cost
	}
	alone := costs()
	topicsOf(t, db, 30_000, "'down'", "'k' || g % 500")
	for i, cost := range costs() {
		require.Less(t, cost, 2*alone[i]+60, "with a backlog; without one %d", alone[i])
	}
}
