package sqlite_test

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
)

var decided = provider.Decision{By: "ann", Reason: "fixed"}

// keyed returns a unit of deliveries with one ordering key.
func keyed(key string, ids ...string) provider.Unit {
	u := delivery(ids...)
	for i := range u.Messages {
		u.Messages[i].Lane = provider.LaneOfKey(key)
	}
	return u
}

// asides returns the messages of u, parked with this class.
func asides(u provider.Unit, class provider.Class, after time.Duration) (all []provider.Aside) {
	for i, m := range u.Messages {
		all = append(all, provider.Aside{Message: i, After: after, Parked: provider.Parked{
			Projector: u.Projector, Handlers: []string{handler}, MessageID: m.ID, Topic: "review", Key: "k", Lane: m.Lane,
			Type: "review.posted", Payload: []byte(`{"n":1}`), Class: class, Code: "c", Attempts: 1, Version: "v1",
		}})
		if class == provider.ClassHeld {
			all[i].Parked.Code, all[i].Parked.Attempts = "", 0
		}
	}
	return all
}

// parks returns a handler that parks all messages of u.
func parks(u provider.Unit, class provider.Class, after time.Duration) handlerFunc {
	return func(context.Context, *sql.Tx, provider.Found) (provider.Closing, error) {
		return provider.Closing{Park: asides(u, class, after)}, nil
	}
}

// park parks the messages of u: the first one failed, the others wait behind it.
func park(t testing.TB, db *sqlite.DB, u provider.Unit, after time.Duration) {
	t.Helper()
	require.NoError(t, db.Do(context.Background(), u, func(context.Context, *sql.Tx, provider.Found) (provider.Closing, error) {
		return provider.Closing{Park: append(asides(u, provider.ClassUnknown, after)[:1], asides(u, provider.ClassHeld, 0)[1:]...)}, nil
	}))
}

// rows returns all parked messages, in order.
func rows(t testing.TB, db *sqlite.DB) []provider.Parked {
	t.Helper()
	all, err := db.Parked(context.Background(), provider.ParkedFilter{Limit: 100_000, States: []provider.ParkedState{
		provider.StateWaiting, provider.StateStuck, provider.StateReplayed, provider.StateSkipped,
	}})
	require.NoError(t, err)
	return all
}

// due returns the ids of the due messages.
func due(t testing.TB, db *sqlite.DB, lanes ...provider.Lane) (ids []string) {
	t.Helper()
	listed, err := db.Due(context.Background(), provider.DueFilter{Builds: []provider.Build{totals}, Lanes: lanes, Keys: 100, Each: 100})
	require.NoError(t, err)
	for _, p := range listed {
		ids = append(ids, p.MessageID)
	}
	return ids
}

// ofParked returns a unit of parked messages.
func ofParked(parked ...provider.Parked) provider.Unit {
	u := provider.Unit{Projector: "totals"}
	for _, p := range parked {
		m := provider.Message{ID: p.MessageID, Lane: p.Lane, Parked: &p}
		for _, h := range p.Handlers {
			m.Handlers = append(m.Handlers, provider.Handler{Name: h})
		}
		u.Messages = append(u.Messages, m)
	}
	return u
}

// Units and searches for due messages use the indexes, and need no more statements for many
// messages than for one.
func TestParkedPlans(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db, tr := traced(t, 1, nil)
	park(t, db, keyed("a", "a1", "a2", "a3"), 0)
	park(t, db, keyed("b", "b1"), 0)
	const (
		marked     = "SEARCH kinora_markers EXISTS USING PRIMARY KEY (handler=? AND generation=? AND message_id=?)"
		checkpoint = "SEARCH kinora_checkpoints USING PRIMARY KEY (projector=? AND generation=?)"
		inFlight   = "SEARCH kinora_in_flight EXISTS USING PRIMARY KEY (message_id=? AND build=?)"
		worker     = "SEARCH kinora_in_flight USING COVERING INDEX kinora_in_flight_worker (runner=? AND worker=?)"
		byID       = "SEARCH kinora_parked USING INTEGER PRIMARY KEY (rowid=?)"
		inLane     = "SEARCH kinora_parked USING COVERING INDEX kinora_parked_lane (projector=? AND generation=? AND lane=?)"
		upto       = "SEARCH kinora_parked USING COVERING INDEX kinora_parked_lane (projector=? AND generation=? AND lane=? AND rowid<?)"
		held       = "SEARCH kinora_parked EXISTS USING COVERING INDEX kinora_parked_lane (projector=? AND generation=? AND lane=?)"
		dueAt      = "SEARCH f USING INDEX kinora_parked_lane (projector=? AND generation=? AND lane=?)"
		open       = "SEARCH kinora_parked USING INDEX kinora_parked_open (projector=? AND rowid>? AND rowid<?)"
		foreign    = "SEARCH kinora_markers USING COVERING INDEX kinora_markers_position (handler=? AND position=? AND processed_at<?)"
		events     = "SEARCH m USING COVERING INDEX kinora_markers_position (handler=? AND position>?)"
	)
	ok := func(_ any, err error) {
		t.Helper()
		require.NoError(t, err)
	}
	for _, c := range []struct {
		name  string
		run   func()
		plans [][]string // of the statements, in order; nil: not checked
	}{
		{"a careful unit", func() {
			u := keyed("b", "b2", "b3")
			u.Messages[1].Lane = provider.LaneOfKey("c")
			u.Careful = &provider.Worker{Runner: "r1", Number: 1}
			ok(nil, db.Do(ctx, u, adds("a")))
		}, [][]string{
			nil, {"SEARCH kinora_parked USING COVERING INDEX kinora_parked_lane (projector=? AND generation=?)", held}, {checkpoint}, {marked}, nil, {inFlight}, nil, nil, {worker}, nil,
		}},
		{"a redelivery", func() {
			u := keyed("a", "a1")
			ok(nil, db.Do(ctx, u, parks(u, provider.ClassUnknown, 0)))
		}, [][]string{nil, {held}, {checkpoint}, {marked}, {upto}, nil}},
		{"due", func() { require.Equal(t, []string{"a1", "b1"}, due(t, db)) }, [][]string{{
			"SEARCH kinora_parked USING INDEX kinora_parked_due (projector=? AND generation=? AND due_at<?)",
			"SEARCH p USING INTEGER PRIMARY KEY (rowid=?)", upto, dueAt,
			"SEARCH p USING INDEX kinora_parked_needs (projector=? AND generation=? AND needs=?)",
			"SEARCH f USING COVERING INDEX kinora_parked_lane (projector=? AND generation=? AND lane=?)",
		}}},
		{"needs", func() { ok(db.Needs(ctx, []provider.Need{{Build: totals}})) }, [][]string{{
			"SEARCH kinora_parked USING COVERING INDEX kinora_parked_needs (projector=? AND generation=? AND needs>?)",
			"SEARCH p USING COVERING INDEX kinora_parked_needs (projector=? AND generation=? AND needs>?)",
			"SEARCH p USING INDEX kinora_parked_needs (projector=? AND generation=? AND needs=?)",
		}}},
		{"due in lanes", func() { require.Equal(t, []string{"b1"}, due(t, db, provider.LaneOfKey("b"))) }, [][]string{{byID, inLane, upto}}},
		{"try", func() {
			tried, err := db.Try(ctx, rows(t, db)[0], 5, 0)
			ok(nil, err)
			require.True(t, tried)
		}, [][]string{nil, nil, {byID}, nil}},
		{"parked messages", func() {
			parked := rows(t, db)
			ok(nil, db.Do(ctx, ofParked(parked...), func(_ context.Context, _ *sql.Tx, found provider.Found) (provider.Closing, error) {
				require.Equal(t, []bool{true, true, true, true}, found.Live)
				return provider.Closing{Park: []provider.Aside{{Message: 3, Parked: parked[3]}}}, nil
			}))
		}, [][]string{nil, nil, {upto}, {checkpoint}, {byID}, {byID}, {upto}, {byID, inLane}, nil}},
		{"park more", func() { park(t, db, keyed("a", "a4", "a5"), -1) }, make([][]string, 8)},
		{"decide", func() {
			n, err := db.Decide(ctx, provider.ParkedFilter{Projector: "totals", Key: "k"}, provider.StateSkipped, decided)
			ok(nil, err)
			require.Equal(t, 3, n)
		}, [][]string{nil, {open, byID}, {byID, inLane}, nil}},
		{"list", func() { ok(db.Parked(ctx, provider.ParkedFilter{Projector: "totals"})) }, [][]string{
			{open, "SEARCH p USING INTEGER PRIMARY KEY (rowid=?)", dueAt},
		}},
		{"count", func() { ok(db.ParkedCount(ctx, "totals")) }, [][]string{{
			"SEARCH p USING INDEX kinora_parked_open (projector>? AND projector<?)", "SEARCH g USING PRIMARY KEY (projector=? AND generation=?)",
		}}},
		{"outcomes", func() {
			ok(db.Outcomes(ctx, slices.Repeat([]provider.Question{{Handler: handler, MessageID: "a1"}}, 500)))
		}, [][]string{{
			"SEARCH p USING INDEX kinora_parked_message (projector=? AND generation=? AND message_id=?)",
			"SEARCH m USING PRIMARY KEY (handler=? AND generation=? AND message_id=?)", "SEARCH f USING PRIMARY KEY (handler=?)",
		}}},
		{"name", func() { ok(nil, db.InFlight(ctx, totals, provider.Worker{Runner: "r2", Number: 1}, []string{"a1"})) }, [][]string{nil, {worker}, nil, nil}},
		{"beat", func() { ok(db.Beat(ctx, "r1", time.Minute, time.Hour)) }, [][]string{
			nil, nil, {"SEARCH kinora_in_flight USING COVERING INDEX kinora_in_flight_worker (runner=?)"}, nil, nil, nil,
		}},
		{"an hour later", func() { require.NoError(t, shiftBack(db.SQL(), time.Hour)) }, make([][]string, 31)},
		{"prune", func() {
			n, err := db.Prune(ctx, "totals", []string{handler}, time.Minute, 100)
			ok(nil, err)
			require.Equal(t, 8+3, n, "markers and skipped messages")
		}, [][]string{
			{foreign, events}, nil,
			{foreign, events}, nil, nil,
			{"SEARCH kinora_parked USING COVERING INDEX kinora_parked_resolved (projector=? AND resolved_at<?)"}, nil,
			{"SEARCH kinora_parked USING COVERING INDEX kinora_parked_resolved (projector=? AND resolved_at<?)", byID}, nil,
		}},
	} {
		requirePlans(t, db, c.name, tr.during(c.run), c.plans)
	}
}

// requirePlans requires these lines in the plan of each statement, and no scan of a table.
func requirePlans(t *testing.T, db *sqlite.DB, name string, statements []string, plans [][]string) {
	t.Helper()
	require.Len(t, statements, len(plans), "%s: %s", name, strings.Join(statements, "\n"))
	for i, want := range plans {
		if len(want) == 0 {
			continue
		}
		got := plan(t, db.SQL(), statements[i])
		for _, line := range want {
			require.Contains(t, got, line, "%s: %s", name, strings.Join(got, "\n"))
		}
		for _, line := range got {
			require.NotRegexp(t, `^SCAN (kinora_(parked|markers|in_flight)|[pfhmd])\b`, line, name)
		}
	}
}

// A search for due messages and a unit cost the same with thousands of other lanes, projectors
// and held messages.
func TestCostDoesNotGrowWithParkedMessages(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	park(t, db, keyed("a", "a1"), 0)
	const n = 5000 // so that a scan takes several times the limit
	unit := 0
	call := func() {
		unit++
		require.Equal(t, []string{"a1"}, due(t, db))
		require.NoError(t, db.Do(ctx, keyed("free", fmt.Sprint("free-", unit)), adds("a")))
	}
	before := patience.Fastest(20, call)
	for _, lane := range []string{"cast(i as blob)", "x'01'", "zeroblob(i)"} {
		projector := map[string]string{"zeroblob(i)": "others"}[lane]
		_, err := db.SQL().Exec(`
with recursive n (i) as (select 1 union all select i + 1 from n where i < ?1)
insert into kinora_parked (projector, generation, lane, state, class, code, attempts, handler, handlers, message_id, topic, key, type, version, parked_at, headers, payload)
select iif(?2 = '', 'totals', ?2), 1, `+lane+`, 'waiting', 'held', '', 0, '', '[]', '', '', '', '', '', 0, '', zeroblob(100) from n`, n, projector)
		require.NoError(t, err)
	}
	_, err := db.SQL().Exec(`
update kinora_parked set due_at = iif(projector = 'totals', 4102444800000, 0)
where class = 'held' and id in (select min(id) from kinora_parked where open = 1 group by projector, lane)`)
	require.NoError(t, err)
	after := patience.Faster(t, 5*before+time.Millisecond, call)
	t.Logf("a search for due messages and a unit: %s with one parked message, %s with %d", before, after, 3*n+1)
}

// A message can be parked whatever its content is, and comes back byte for byte.
func TestAnythingCanBeParked(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	bad := "\x00\xff'; drop table kinora_parked; --" + strings.Repeat("long", 100)
	u := provider.Unit{Projector: "totals", Messages: []provider.Message{{ID: bad, Lane: provider.LaneOfMessage(bad)}}}
	p := provider.Parked{
		Projector: "totals", Generation: 1, MessageID: bad, Topic: bad, Key: bad, Lane: u.Messages[0].Lane, Type: bad, Version: bad, Payload: []byte(bad),
		Headers: map[string]string{"valid": "\x00 é ' ☂"}, Class: provider.ClassPermanent, Code: "malformed", Attempts: 1,
	}
	aside := provider.Aside{Parked: p, After: time.Hour}
	for range 2 { // parked once, because its id is known
		require.NoError(t, db.Do(ctx, u, func(context.Context, *sql.Tx, provider.Found) (provider.Closing, error) {
			return provider.Closing{Park: []provider.Aside{aside}}, nil
		}))
	}
	got := rows(t, db)
	require.Len(t, got, 1)
	require.WithinDuration(t, got[0].At.Add(time.Hour), got[0].DueAt, patience.Limit())
	p.Seq, p.At, p.DueAt = 1, got[0].At, got[0].DueAt
	require.Equal(t, p, got[0])
	require.NoError(t, shiftBack(db.SQL(), time.Hour))
	require.Equal(t, []string{bad}, due(t, db))
	p = rows(t, db)[0]
	require.NoError(t, db.Do(ctx, ofParked(p), func(_ context.Context, _ *sql.Tx, found provider.Found) (provider.Closing, error) {
		require.Equal(t, []bool{true}, found.Live)
		return provider.Closing{}, nil
	}))
	require.Empty(t, rows(t, db))
}

// The oldest markers are deleted first. Afterwards, messages of their time count as pruned and
// not as unseen.
func TestPruneMarkers(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	prune := func(window time.Duration, limit int) int {
		n, err := db.Prune(ctx, "totals", []string{handler, "totals/other"}, window, limit)
		require.NoError(t, err)
		return n
	}
	outcome := func(id string, recorded time.Time) provider.Outcome {
		question := provider.Question{Handler: "totals/renamed", Was: []string{handler}, MessageID: id, RecordedAt: recorded}
		o, err := db.Outcomes(ctx, []provider.Question{question})
		require.NoError(t, err)
		return o[0]
	}
	for _, id := range []string{"m1", "m2", "m3"} {
		require.NoError(t, db.Do(ctx, delivery(id), adds("a")))
		require.NoError(t, shiftBack(db.SQL(), time.Hour))
	}
	now := clock(t, db.SQL())
	require.Equal(t, 0, prune(4*time.Hour, 10))
	require.Equal(t, 0, prune(0, 0))
	require.Equal(t, provider.OutcomeUnseen, outcome("other", now.Add(-3*time.Hour)))
	require.Equal(t, 1, prune(90*time.Minute, 1))
	require.Equal(t, provider.OutcomePruned, outcome("m1", now.Add(-3*time.Hour-time.Minute)))
	require.Equal(t, provider.OutcomeUnseen, outcome("m1", now.Add(-3*time.Hour+time.Minute)))
	require.Equal(t, provider.OutcomeUnseen, outcome("m1", time.Time{}))
	require.Equal(t, provider.OutcomeApplied, outcome("m2", now.Add(-3*time.Hour-time.Minute)))
	require.Equal(t, 1, prune(90*time.Minute, 10))
	require.Equal(t, provider.OutcomePruned, outcome("m2", now.Add(-2*time.Hour-time.Minute)))
	require.Equal(t, provider.OutcomeApplied, outcome("m3", now))
}

// Parked messages are live only if they are unchanged since they were listed, due, and a gapless
// start of their lane.
func TestParkedMessagesAreLiveAsListed(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	park(t, db, keyed("a", "a1", "a2", "a3"), 0)
	park(t, db, keyed("b", "b1", "b2"), 0)
	live := func(u provider.Unit) (live []bool) {
		t.Helper()
		require.NoError(t, db.Do(ctx, u, func(_ context.Context, _ *sql.Tx, found provider.Found) (c provider.Closing, err error) {
			for i, m := range u.Messages {
				require.Equal(t, slices.Repeat([]bool{found.Live[i]}, len(m.Handlers)), found.Fresh[i])
				if found.Live[i] { // keep it parked
					c.Park = append(c.Park, provider.Aside{Message: i, Parked: *m.Parked})
				}
			}
			live = found.Live
			return c, nil
		}))
		return live
	}
	all := rows(t, db)
	a, b := all[:3], all[3:]
	require.Equal(t, []bool{true, true, true, true, true}, live(ofParked(all...)))
	require.Equal(t, []bool{true, true, true, true, true}, live(ofParked(a[0], b[0], a[1], b[1], a[2])))
	require.Equal(t, []bool{false, false, true}, live(ofParked(a[1], a[2], b[0])), "not the first of their lane")
	require.Equal(t, []bool{true, false}, live(ofParked(a[0], a[2])), "one between them is missing")
	require.Equal(t, []bool{false, true}, live(ofParked(a[1], a[0])), "in another order")

	redelivered := keyed("a", "a2")
	redelivered.Messages[0].Handlers[0].Name = "totals/added"
	again := asides(redelivered, provider.ClassHeld, 0)
	again[0].Parked.Handlers = []string{"totals/added"}
	require.NoError(t, db.Do(ctx, redelivered, func(context.Context, *sql.Tx, provider.Found) (provider.Closing, error) {
		return provider.Closing{Park: again}, nil
	}))
	require.Equal(t, []string{handler, "totals/added"}, rows(t, db)[1].Handlers)
	require.Equal(t, []bool{true, false, false}, live(ofParked(a...)), "the second has one more handler since it was listed")

	for range 2 {
		tried, err := db.Try(ctx, b[0], 5, time.Minute)
		require.NoError(t, err)
		require.Equal(t, b[0].Attempts == 1, tried, "once while it is due")
		b[0].Attempts++
		if tried {
			require.Equal(t, []bool{true}, live(ofParked(b[0])), "its try is counted")
			_, err := db.SQL().Exec(`update kinora_parked set due_at = due_at + 60000 where lane = ?`, b[0].Lane[:])
			require.NoError(t, err)
		}
	}
	require.Equal(t, []bool{false}, live(ofParked(b[0])), "its attempts have changed since it was listed")
	require.Equal(t, []bool{false}, live(ofParked(b[1])))
}

// A parked message that other software damaged affects no list and no other lane.
func TestAForeignParkedMessageHarmsOnlyItself(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	park(t, db, keyed("a", "a1"), 0)
	park(t, db, keyed("b", "b1"), 0)
	_, err := db.SQL().Exec(`update kinora_parked set handlers = '[1]', headers = '%zz', class = 'x', code = x'ff' || '' where message_id = 'a1'`)
	require.NoError(t, err)
	require.Equal(t, []string{"a1", "b1"}, due(t, db))
	all := rows(t, db)
	require.Len(t, all, 2)
	require.NoError(t, db.Do(ctx, ofParked(all...), func(_ context.Context, _ *sql.Tx, found provider.Found) (provider.Closing, error) {
		require.True(t, found.Live[1])
		return provider.Closing{}, nil
	}))
	n, err := db.Decide(ctx, provider.ParkedFilter{}, provider.StateSkipped, decided)
	require.NoError(t, err)
	require.Len(t, rows(t, db), n)
}
