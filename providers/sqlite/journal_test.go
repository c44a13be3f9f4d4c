package sqlite_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/sqlite"
)

var decided = projector.Decision{By: "ann", Reason: "fixed"}

func attempt(id, key string) projector.Attempt {
	return projector.Attempt{Projector: "totals", Handler: handler, MessageID: id, Key: key, Takes: []string{"review.posted"}}
}

// parked is a message that is in the way of others of its key.
func parked(id, key string) projector.Parked {
	return projector.Parked{
		Projector: "totals", Handler: handler, MessageID: id, Key: key, Type: "review.posted", Holds: true,
		Class: projector.PermanentClass, Code: "P0001", Attempts: 1,
	}
}

// behind is a message that waits.
func behind(id, key string) projector.Parked {
	p := parked(id, key)
	p.Class, p.Code, p.Attempts = projector.HeldClass, "", 0
	return p
}

func park(t testing.TB, db *sqlite.DB, ps ...projector.Parked) {
	t.Helper()
	require.NoError(t, db.Do(context.Background(), projector.Work{Projector: "totals", Park: ps}, nil))
}

// listed are the messages that are parked, by id.
func listed(t testing.TB, db *sqlite.DB) map[string]projector.Parked {
	t.Helper()
	all, err := db.ParkedMessages(context.Background(), projector.ParkedFilter{Limit: 1000})
	require.NoError(t, err)
	byID := map[string]projector.Parked{}
	for _, p := range all {
		byID[p.MessageID] = p
	}
	return byID
}

func replays(p projector.Parked) projector.Work {
	a := attempt(p.MessageID, p.Key)
	a.Seq = p.Seq
	w := marks(p.MessageID)
	w.Replay = []projector.Replay{{Attempt: a, Decision: decided}}
	return w
}

// What is asked for each message, and each time that a runner looks for something to do, goes by the indexes.
func TestJournalPlans(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db, tr := traced(t, 1, nil)
	park(t, db, parked("m1", "a"), behind("m2", "a"))
	const (
		message = "SEARCH kinora_parked USING INDEX kinora_parked_message (message_id=? AND projector=?)"
		byName  = "SEARCH kinora_parked USING COVERING INDEX kinora_parked_handler (projector=? AND key=? AND handler=? AND rowid<?)"
		byType  = "SEARCH kinora_parked EXISTS USING COVERING INDEX kinora_parked_type (projector=? AND key=? AND type=? AND rowid<?)"
		leap    = "SEARCH kinora_parked USING COVERING INDEX kinora_parked_type (projector=? AND key=? AND type>?)"
		named   = "SEARCH kinora_inflight USING PRIMARY KEY (handler=? AND message_id=?)"
		byID    = "SEARCH kinora_parked USING INTEGER PRIMARY KEY (rowid=?)"
	)
	p := listed(t, db)["m1"]
	for _, c := range []struct {
		name  string
		run   func()
		plans [][]string // of the statements, in order; nil: of no interest
	}{
		{"begin", func() {
			v, err := db.Begin(ctx, "r1", []projector.Attempt{attempt("m3", "b")}, []projector.Attempt{attempt("m0", "b")})
			require.NoError(t, err)
			require.Equal(t, []projector.Verdict{projector.Clear}, v)
		}, [][]string{
			nil, {"SEARCH kinora_inflight USING PRIMARY KEY (handler=? AND message_id=? AND runner=?)"},
			{"SEARCH kinora_parked USING COVERING INDEX kinora_parked_live (projector=?)"}, {message, byName, byType, leap, named}, nil,
		}},
		{"begin what is held", func() {
			v, err := db.Begin(ctx, "r1", []projector.Attempt{attempt("m3", "a")}, nil)
			require.NoError(t, err)
			require.Equal(t, []projector.Verdict{projector.Held}, v)
		}, [][]string{nil, nil, nil, {message, byName, byType, leap, named}, nil}},
		{"park behind", func() {
			a := attempt("m3", "a")
			w := projector.Work{Projector: "totals", Park: []projector.Parked{behind("m3", "a")}, Behind: &a}
			require.NoError(t, db.Do(ctx, w, nil))
		}, [][]string{nil, {byName, byType, leap}, nil, nil}},
		{"replay", func() { require.NoError(t, db.Do(ctx, replays(p), adds("a"))) }, [][]string{
			nil, nil, {byID}, {byName, byType, leap}, {"SEARCH kinora_floors USING PRIMARY KEY (handler=?)"}, nil, {byID},
			{
				"SEARCH kinora_parked USING COVERING INDEX kinora_parked_waiting (projector=? AND key=? AND handler>?)",
				"SEARCH kinora_parked USING COVERING INDEX kinora_parked_waiting (projector=? AND key=? AND handler=? AND rowid>?)", byID,
			}, nil,
		}},
		{"due", func() {
			due, err := db.DueParked(ctx, "totals", []string{"review.posted"}, 0, 10)
			require.NoError(t, err)
			require.Len(t, due, 1)
			require.Equal(t, "m2", due[0].MessageID)
		}, [][]string{{
			"SEARCH kinora_parked USING COVERING INDEX kinora_parked_due (projector=? AND rowid>?)",
			"SEARCH kinora_parked USING COVERING INDEX kinora_parked_unregistered (projector=? AND type=? AND rowid>?)", byID,
		}}},
		{"list", func() {
			_, err := db.ParkedMessages(ctx, projector.ParkedFilter{Projector: "totals"})
			require.NoError(t, err)
		}, [][]string{{"SEARCH kinora_parked USING INDEX kinora_parked_live (projector=? AND rowid>? AND rowid<?)"}}},
		{"count", func() {
			_, err := db.ParkedCount(ctx, "totals")
			require.NoError(t, err)
		}, [][]string{{"SCAN kinora_parked USING COVERING INDEX kinora_parked_live"}}},
		{"prune markers", func() {
			require.NoError(t, shiftBack(db.SQL(), time.Hour))
			n, err := db.PruneMarkers(ctx, handler, time.Minute, 10)
			require.NoError(t, err)
			require.Equal(t, 1, n)
		}, append(make([][]string, 12), [][]string{
			{"SEARCH kinora_markers USING COVERING INDEX kinora_markers_age (handler=? AND processed_at<?)"}, nil,
			{"SEARCH kinora_markers USING COVERING INDEX kinora_markers_age (handler=? AND processed_at<?)"}, nil, nil,
		}...)},
		{"prune the journal", func() {
			n, err := db.PruneJournal(ctx, "totals", time.Minute, 10)
			require.NoError(t, err)
			require.Equal(t, 2, n, "what was replayed, and what a runner has named that never said it lives")
		}, [][]string{
			nil, {"SEARCH kinora_parked USING INDEX kinora_parked_resolved (projector=? AND resolved_at<?)"},
			{"SEARCH kinora_attempts USING COVERING INDEX kinora_attempts_age (<expr>=? AND last_at<?)"}, nil, nil, nil,
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
				require.Contains(t, got, line, "%s: %s", c.name, strings.Join(got, "\n"))
			}
			for _, line := range got {
				require.NotRegexp(t, `^SCAN kinora_(parked|inflight|markers|attempts)$`, line, c.name)
			}
		}
	}
}

// It costs the same however much is parked that neither is due nor in the way.
func TestBesideWhatIsParked(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	const n, tries = 5000, 30
	look := func() time.Duration {
		best := time.Hour
		for i := range tries {
			began := time.Now()
			due, err := db.DueParked(ctx, "totals", []string{"review.posted"}, 0, 100)
			require.NoError(t, err)
			require.Empty(t, due)
			a := attempt(fmt.Sprint("new-", i), "a")
			v, err := db.Begin(ctx, "r1", []projector.Attempt{a}, []projector.Attempt{a})
			require.NoError(t, err)
			require.Equal(t, []projector.Verdict{projector.Clear}, v)
			best = min(best, time.Since(began))
			require.NoError(t, db.Alive(ctx, "r1", 0))
		}
		return best
	}
	before := look()
	_, err := db.SQL().Exec(`
with recursive n (i) as (select 1 union all select i + 1 from n where i < ?1)
insert into kinora_parked (projector, handler, message_id, topic, key, type, holds, class, code, attempts, version, parked_at, headers, payload)
select 'totals', 'totals/other', 'm' || i, 'review', 'a', 'review.posted', 1, iif(i % 2, 'held', 'permanent'), 'P0001', 1, '', 0, '{}', x''
from n`, n)
	require.NoError(t, err)
	after := look()
	t.Logf("a look for what is due and an attempt: %s beside nothing, %s beside %d parked messages of another handler", before, after, n)
	require.Less(t, after, 10*before+time.Millisecond)
}

// childRuns names an attempt, and dies with it.
func childRuns(path string) error {
	ctx := context.Background()
	db, err := sqlite.Open(ctx, path, nil)
	if err != nil {
		return err
	}
	err = db.Alive(ctx, "child", time.Hour)
	if err == nil {
		_, err = db.Begin(ctx, "child", []projector.Attempt{attempt("m1", "a"), attempt("m2", "a")}, nil)
	}
	if err == nil {
		_, err = db.Begin(ctx, "child", nil, []projector.Attempt{attempt("m2", "a")})
	}
	if err != nil {
		return err
	}
	return db.Do(ctx, marks("m1"), func(context.Context, *sql.Tx, []int) ([]outbox.Message, error) {
		fmt.Println("running")
		select {}
	})
}

// What a process had named when it was killed is a suspect. It is counted once, after its lease.
func TestNamesOfAKilledProcess(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	path := migrated(t)
	db := openAt(t, path, nil)
	other := start(t, "run", path)
	require.Equal(t, "running", other.line())
	require.NoError(t, other.cmd.Process.Kill()) // SIGKILL
	_ = other.cmd.Wait()

	m1 := attempt("m1", "a")
	v, err := db.Begin(ctx, "here", []projector.Attempt{m1, attempt("m2", "a")}, nil)
	require.NoError(t, err)
	require.Equal(t, []projector.Verdict{projector.Suspect, projector.Clear}, v)
	alone := func(limit int) [2]int {
		attempts, alive, err := db.BeginAlone(ctx, "here", m1, limit)
		require.NoError(t, err)
		return [2]int{attempts, alive}
	}
	require.Equal(t, [2]int{0, 1}, alone(1), "it may live, and that is one too many")
	require.Equal(t, 2, count(t, db.SQL(), "kinora_inflight"))
	require.NoError(t, shiftBack(db.SQL(), 2*time.Hour))
	require.Equal(t, [2]int{1, 0}, alone(5))
	require.Equal(t, [2]int{1, 0}, alone(5), "once")
	require.Equal(t, 1, count(t, db.SQL(), "kinora_inflight where message_id = 'm1' and runner = 'here'"))
	n, err := db.CountAttempt(ctx, "", m1, -1)
	require.NoError(t, err)
	require.Equal(t, 2, n)
}

// Whoever parks behind a message, and whoever replays it at the same moment, in another process or in this: either what
// was parked is due, or it was not parked.
func childReplays(path string) error {
	db, err := sqlite.Open(context.Background(), path, nil)
	if err != nil {
		return err
	}
	all, err := db.ParkedMessages(context.Background(), projector.ParkedFilter{Projector: "totals", Limit: 1000})
	fmt.Println("ready")
	told()
	for _, p := range all {
		if err == nil {
			err = db.Do(context.Background(), replays(p), adds(p.Key))
		}
	}
	return errors.Join(err, db.Close())
}

func TestParkingBehindWhatIsReplayed(t *testing.T) {
	t.Parallel()
	ctx := within(t, time.Minute)
	path := migrated(t)
	db := openAt(t, path, nil)
	const keys = 60
	for i := range keys {
		park(t, db, parked(fmt.Sprint("poison-", i), fmt.Sprint("k", i)))
	}
	other := start(t, "replay", path)
	require.Equal(t, "ready", other.line())
	other.tell("go")
	var wg sync.WaitGroup
	for i := range keys {
		wg.Go(func() {
			a := attempt(fmt.Sprint("next-", i), fmt.Sprint("k", i))
			w := projector.Work{Projector: "totals", Park: []projector.Parked{behind(a.MessageID, a.Key)}, Behind: &a}
			if err := db.Do(ctx, w, nil); err != nil && !errors.Is(err, projector.ErrNotHeld) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	other.wait()
	due, err := db.DueParked(ctx, "totals", nil, 0, 1000)
	require.NoError(t, err)
	require.Len(t, due, len(listed(t, db)), "what is parked is due")
	t.Logf("%d of %d were parked in time", len(due), keys)
	require.Equal(t, keys, count(t, db.SQL(), "kinora_parked where state = 'replayed' and resolved_by = 'ann' and reason = 'fixed'"))
	require.Equal(t, keys, count(t, db.SQL(), "kinora_markers"))
}

// Of many replays of one message at once, one applies it.
func TestReplayAtOnce(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	park(t, db, parked("m1", "a"))
	w := replays(listed(t, db)["m1"])
	w.Marks = nil // the parked message alone decides
	errs := make(chan error)
	for range 8 {
		go func() { errs <- db.Do(context.Background(), w, adds("a")) }()
	}
	applied := 0
	for range 8 {
		if err := <-errs; err == nil {
			applied++
		} else {
			requireClass(t, err, "permanent", "not_parked")
			var e *projector.ReplayError
			require.ErrorAs(t, err, &e)
			require.Equal(t, w.Replay[0].Seq, e.Seq)
		}
	}
	require.Equal(t, 1, applied)
	require.Equal(t, 1, total(t, db.SQL(), "a"))
}

// Markers go oldest first, and the floor says of which time the last one was.
func TestPruneMarkers(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	apply := func(id string) { require.NoError(t, db.Do(ctx, marks(id), adds("a"))) }
	prune := func(handler string, window time.Duration, limit int) int {
		n, err := db.PruneMarkers(ctx, handler, window, limit)
		require.NoError(t, err)
		return n
	}
	floor := func() time.Time {
		at, err := db.Floor(ctx, handler)
		require.NoError(t, err)
		return at
	}
	park(t, db, parked("before", ""))
	for _, id := range []string{"m1", "m2", "m3"} {
		apply(id)
		require.NoError(t, shiftBack(db.SQL(), time.Hour))
	}
	require.True(t, floor().IsZero())
	require.Equal(t, 0, prune(handler, 4*time.Hour, 10))
	require.Equal(t, 0, prune("totals/other", 0, 10))
	require.Equal(t, 0, prune(handler, 0, 0))
	require.Equal(t, 1, prune(handler, 90*time.Minute, 1))
	first := floor()
	require.Equal(t, 0, count(t, db.SQL(), "kinora_markers where message_id = 'm1'"))
	require.Equal(t, 1, prune(handler, 90*time.Minute, 10))
	require.InDelta(t, time.Hour, floor().Sub(first), float64(time.Minute))
	require.Equal(t, 1, count(t, db.SQL(), "kinora_markers where message_id = 'm3'"))

	park(t, db, parked("after", ""))
	rows := listed(t, db)
	w := replays(rows["before"])
	err := db.Do(ctx, w, adds("b"))
	requireClass(t, err, "permanent", "pruned")
	require.ErrorIs(t, err, projector.ErrPruned)
	w.Replay[0].Handler, w.Replay[0].Was = "totals/renamed", []string{handler}
	require.ErrorIs(t, db.Do(ctx, w, adds("b")), projector.ErrPruned, "under an earlier name")
	require.NoError(t, db.Do(ctx, replays(rows["after"]), adds("b")))
	w.Replay[0].Force = true
	require.NoError(t, db.Do(ctx, w, adds("b")))
	require.Equal(t, 2, total(t, db.SQL(), "b"))
	require.Equal(t, 0, count(t, db.SQL(), "kinora_markers where message_id = 'm2'"))
}

// A commit that is not synced leaves the connection as it was: the next one is.
func TestUnsyncedCommitsLeaveTheOthersSynced(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	synced := func() (level int) {
		err := db.Do(ctx, projector.Work{Projector: "totals"}, func(ctx context.Context, tx *sql.Tx, _ []int) ([]message, error) {
			return nil, tx.QueryRowContext(ctx, `pragma synchronous`).Scan(&level)
		})
		require.NoError(t, err)
		return level
	}
	const full = 2
	require.Equal(t, full, synced())
	_, err := db.Begin(ctx, "r1", []projector.Attempt{attempt("m1", "a")}, nil)
	require.NoError(t, err)
	require.NoError(t, db.Alive(ctx, "r1", time.Minute))
	require.Equal(t, full, synced())
	ended, cancel := context.WithCancel(ctx)
	cancel()
	_, err = db.Begin(ended, "r1", []projector.Attempt{attempt("m2", "a")}, nil)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, full, synced())
	for range 50 { // it may end anywhere inside
		ctx, cancel := context.WithCancel(ctx)
		go cancel()
		_, _ = db.Begin(ctx, "r1", []projector.Attempt{attempt("m2", "a")}, []projector.Attempt{attempt("m2", "a")})
		require.Equal(t, full, synced())
	}
}

// What a loss of power may leave of the log after a commit that was not synced: any part of it, or rubbish in its place. What was
// committed before is there.
func TestTornLogAfterAnUnsyncedCommit(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	path := migrated(t)
	db := openAt(t, path, nil)
	log := func() []byte {
		b, err := os.ReadFile(path + "-wal")
		require.NoError(t, err)
		return b
	}
	require.NoError(t, db.Do(ctx, marks("m1"), adds("a")))
	synced := len(log())
	_, err := db.Begin(ctx, "r1", []projector.Attempt{attempt("m2", "a"), attempt("m3", "b")}, nil)
	require.NoError(t, err)
	whole := log()
	require.Greater(t, len(whole), synced)
	file, err := os.ReadFile(path)
	require.NoError(t, err)
	for i := range 20 {
		torn := bytes.Clone(whole)
		at := synced + i*(len(whole)-synced)/19
		if i%2 == 0 {
			torn = torn[:at]
		} else {
			clear(torn[at:min(at+1000, len(torn))])
		}
		copied := filepath.Join(t.TempDir(), "kinora.db")
		require.NoError(t, os.WriteFile(copied, file, 0o600))
		require.NoError(t, os.WriteFile(copied+"-wal", torn, 0o600))
		left := openAt(t, copied, nil)
		require.Equal(t, 1, total(t, left.SQL(), "a"))
		require.Equal(t, 1, count(t, left.SQL(), "kinora_markers"))
		require.Contains(t, []int{0, 2}, count(t, left.SQL(), "kinora_inflight"))
		require.NoError(t, left.Do(ctx, marks("m2"), adds("a")))
	}
}
