package sqlite_test

import (
	"context"
	"database/sql"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// plan returns SQLite's plan of a statement.
func plan(t *testing.T, db *sql.DB, query string) (all []string) {
	t.Helper()
	args := []any{"[]", "[]", 3, 4, []byte("5"), "6", 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20}
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

// The cost of a claim grows with the backlog, not with the number of published entries.
func TestClaimPlan(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db, tr := traced(t, 1, routed())
	_, err := db.Append(ctx, "review-1", eventstore.NoStream, drafts(1))
	require.NoError(t, err)
	statements := tr.during(func() {
		_, err := db.ClaimEntries(ctx, provider.EntryQuery{}, claim.Terms{})
		require.NoError(t, err)
	})
	require.Len(t, statements, 4, "candidates, begin, one take, commit")
	candidates := plan(t, db.SQL(), statements[0])
	require.Contains(t, candidates, "SEARCH o USING INDEX kinora_outbox_open (id>?)")
	require.Contains(t, candidates, "SEARCH b USING INDEX kinora_outbox_lane (topic=? AND key=? AND id<?)")
	require.Contains(t, candidates, "MATERIALIZE ck", "the clock is read once")
	for _, line := range candidates {
		require.NotContains(t, line, "TEMP B-TREE", "nothing is sorted")
	}
	listings := tr.during(func() {
		open := outbox.Filter{Status: []outbox.Status{outbox.Failed}}
		_, err := db.Entries(ctx, open)
		require.NoError(t, err)
		_, err = db.StatusCounts(ctx, open.Status...)
		require.NoError(t, err)
	})
	for _, listing := range listings {
		require.Contains(t, strings.Join(plan(t, db.SQL(), listing), "\n"), "USING INDEX kinora_outbox_open")
	}
	take := plan(t, db.SQL(), statements[2])
	require.Contains(t, take, "SEARCH o USING INTEGER PRIMARY KEY (rowid=?)")
	require.Contains(t, take, "SEARCH b USING INDEX kinora_outbox_lane (topic=? AND key=? AND id<?)")
}

// The statements of maintenance and of people's decisions use the indexes too: none scans the
// whole table, and none sorts a backlog.
func TestMaintenancePlans(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db, tr := traced(t, 1, routed())
	enqueue(t, db, "a", "a", "a", "b")
	ok := func(_ any, err error) {
		t.Helper()
		require.NoError(t, err)
	}
	const (
		byID     = "SEARCH kinora_outbox USING INTEGER PRIMARY KEY (rowid=?)"
		openID   = "SEARCH kinora_outbox USING INDEX kinora_outbox_open (id>? AND id<?)"
		heldID   = "SEARCH kinora_outbox USING INDEX kinora_outbox_held_id (id>? AND id<?)"
		lane     = "SEARCH o USING INDEX kinora_outbox_lane (topic=? AND key=? AND id>?)"
		nextKey  = "SEARCH n USING COVERING INDEX kinora_outbox_held (topic=? AND key>?)"
		nextLane = "SEARCH n USING COVERING INDEX kinora_outbox_held (topic>?)"
		before   = "SEARCH b USING COVERING INDEX kinora_outbox_lane (topic=? AND key=? AND id<?)"
		anyHeld  = "SCAN kinora_outbox USING COVERING INDEX kinora_outbox_held"
		held     = "SEARCH kinora_outbox USING COVERING INDEX kinora_outbox_held (topic=? AND key=?)"
		stuck    = "SCAN kinora_outbox USING INDEX kinora_outbox_stuck"
	)
	stick(t, db, outbox.Abandoned, "a")
	for _, c := range []struct {
		name  string
		run   func()
		plans [][]string // of the statements, in order; nil: not checked
	}{
		{"hold", func() { ok(db.HoldEntries(ctx, time.Second, 10)) }, [][]string{
			{stuck, lane, nextKey, nextLane, before}, nil, {stuck, lane, byID}, {nextKey, nextLane, before, byID}, nil,
		}},
		{"nothing to hold", func() { ok(db.HoldEntries(ctx, time.Second, 10)) }, [][]string{nil}},
		{"claim", func() { ok(db.EntryCandidates(ctx, provider.EntryQuery{}, 10)) }, [][]string{
			{"SEARCH h USING COVERING INDEX kinora_outbox_held (topic=? AND key=? AND id<?)"},
		}},
		{"claim without order", func() { ok(db.EntryCandidates(ctx, provider.EntryQuery{Unordered: true}, 10)) }, [][]string{
			{"SEARCH o USING INDEX kinora_outbox_open (id>?)"},
		}},
		{"claim some topics", func() {
			ok(db.EntryCandidates(ctx, provider.EntryQuery{Topics: []string{"a"}}, 10))
			ok(db.EntryCandidates(ctx, provider.EntryQuery{Except: []string{"a"}, Unordered: true}, 10))
		}, [][]string{
			{"SEARCH o USING INDEX kinora_outbox_topic (topic=? AND id>?)", "SEARCH b USING INDEX kinora_outbox_lane (topic=? AND key=? AND id<?)"},
			{"SEARCH kinora_outbox USING COVERING INDEX kinora_outbox_topic (topic>?)", "SEARCH o USING INDEX kinora_outbox_topic (topic=? AND id>?)"},
		}},
		{"take", func() {
			e := outbox.Entry{Seq: 4, Status: outbox.Pending}
			_, _, err := db.TakeEntry(ctx, e, provider.EntryQuery{}, claim.Terms{Token: claim.NewToken()})
			require.NoError(t, err)
		}, [][]string{nil, {"SEARCH h USING COVERING INDEX kinora_outbox_held (topic=? AND key=? AND id<?)"}, nil}},
		{"list", func() { ok(db.Entries(ctx, outbox.Filter{Status: []outbox.Status{outbox.Pending, outbox.Held}})) }, [][]string{
			{"MERGE (UNION ALL)", openID, heldID},
		}},
		{"count", func() { ok(db.StatusCounts(ctx, outbox.Pending, outbox.Held)) }, [][]string{
			{"SCAN kinora_outbox USING INDEX kinora_outbox_open", "SCAN kinora_outbox USING COVERING INDEX kinora_outbox_held_id"},
		}},
		{"skip", func() { ok(db.Skip(ctx, outbox.Filter{Seqs: []int64{2}})) }, [][]string{
			nil, {"MERGE (UNION ALL)", openID, heldID, byID}, {anyHeld}, {held, byID}, nil,
		}},
		{"requeue", func() { ok(db.Requeue(ctx, outbox.Filter{Key: "a"})) }, [][]string{
			nil, {stuck, byID}, {anyHeld}, nil,
		}},
		{"publish", func() {
			markAll(t, db, published(claimAll(t, db, provider.EntryQuery{}), false)...)
		}, [][]string{nil, nil, nil, nil, nil, nil, {anyHeld, byID}, {byID}, {byID}, nil}},
		{"a second later", func() { require.NoError(t, shiftBack(db.SQL(), time.Second)) }, make([][]string, 31)},
		{"delete", func() {
			_, _, err := db.DeleteEntries(ctx, outbox.EntryRetention{Published: 1, Skipped: time.Hour}, 0)
			require.NoError(t, err)
		}, [][]string{
			{"SEARCH kinora_outbox USING INTEGER PRIMARY KEY (rowid>?)"}, nil,
			{"SEARCH kinora_outbox USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)"}, nil,
		}},
	} {
		statements := tr.during(c.run)
		require.Len(t, statements, len(c.plans), "%s: %q", c.name, statements)
		for i, want := range c.plans {
			if len(want) == 0 {
				continue
			}
			got := plan(t, db.SQL(), statements[i])
			for _, line := range want {
				require.Contains(t, got, line, c.name)
			}
			for _, line := range got {
				require.NotRegexp(t, `^SCAN (kinora_outbox|[bhno])$`, line, c.name)
				// few entries are stuck; a count groups; each topic sorts a batch
				if c.name != "requeue" && c.name != "count" && c.name != "claim some topics" {
					require.NotContains(t, line, "TEMP B-TREE", c.name)
				}
			}
		}
	}
	enqueue(t, db, "c")
	entries := claimAll(t, db, provider.EntryQuery{})
	statements := tr.during(func() { markAll(t, db, published(entries, true)...) })
	require.Len(t, statements, 4, "begin, a check for held entries, one drop, commit")
	require.Contains(t, plan(t, db.SQL(), statements[1]), anyHeld)
	require.Contains(t, plan(t, db.SQL(), statements[2]), byID)
}
