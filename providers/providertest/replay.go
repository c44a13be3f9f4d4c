package providertest

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

var replayCases = []testCase{
	{
		name: "a replay", play: replayed,
		rule: "With the unit's commit a parked message is replayed: it takes effect, is no longer parked, and the decision is kept with it",
	},
	{
		name: "a replay of what was applied", play: replayOfApplied,
		rule: "With the unit's commit it is replayed, also where its mark was not new: then apply does not run for it",
	},
	{
		name: "a replay of what is not parked", play: replayOfGone,
		rule: "A message that is not parked any more fails the unit with ErrNotParked, permanent, in a *ReplayError that says which; nothing is recorded",
	},
	{
		name: "a replay of what waits", play: replayOfHeld,
		rule: "A message that another is in the way of fails the unit with ErrHeld, permanent, in a *ReplayError that says which; nothing is recorded",
	},
	{
		name: "a replay of what has an odd key", play: replayOfOdd,
		rule: "Parked.Key and Parked.MessageID are as they came, also where no text column takes them: a replay is held by an earlier message of that key",
	},
	{
		name: "a replay after markers were pruned", play: replayAfterPrune,
		rule: "A message parked at a time of which markers of the handler, by any of its names, are pruned, fails the unit with ErrPruned, permanent, in a *ReplayError that says which, unless Force",
	},
	{
		name: "replays while markers are pruned", play: replaysBesidePrune,
		rule: "A message that took effect after it was parked does not do so again: its marker is there, or it is ErrPruned; also while markers are pruned",
	},
	{
		name: "a replay that fails", play: failingReplay,
		rule: "A unit that fails records nothing: what it was to replay stays parked, as it was",
	},
	{
		name: "a replay at one of several handlers", play: replayStays,
		rule: "Replay.Stays: it stays parked: another of its handlers is still to come; what fails a replay fails this one",
	},
	{
		name: "several replays in one unit", play: severalReplays,
		rule: "A unit may replay several messages of one key, in order: those that it replays before are in nobody's way",
	},
	{
		name: "one message replayed many times at once", play: replaysAtOnce,
		rule: "Units with one parked message follow one another: one of them replays it, for the others it is not parked any more",
	},
	{
		name: "parked again", play: parkedAgain,
		rule: "Work.Park: a message that was replayed is set aside again: as the last one, and it is in the way again",
	},
	{
		name: "a new handle knows what was decided", unless: Volatile, play: decisionsOutlive,
		rule: "What became of a parked message outlives the process: replayed, skipped, due, or still parked",
	},
}

var because = projector.Decision{By: `o'hara "日本"`, Reason: "fixed; in v2"}

// replayOf is the replay of p at its handler, or at ratings/posted.
func replayOf(p projector.Parked) projector.Replay {
	a := posted(p.MessageID, p.Key)
	if a.Projector, a.Seq = p.Projector, p.Seq; p.Handler != "" {
		a.Handler = p.Handler
	}
	return projector.Replay{Attempt: a, Decision: because}
}

// replays is the work of replaying these, with their marks.
func replays(ps ...projector.Parked) projector.Work {
	w := projector.Work{Projector: ps[0].Projector}
	for _, p := range ps {
		r := replayOf(p)
		w.Replay = append(w.Replay, r)
		w.Marks = append(w.Marks, marker.Key{Handler: r.Handler, MessageID: r.MessageID})
	}
	return w
}

// replay replays p: that adds 1 to the total of its message.
func (s *stage) replay(p projector.Parked) error {
	return s.do(s.ctx, replays(p), adds(p.MessageID, 1))
}

// refused ends the case if a unit does not fail with this error, permanent, and leaves nothing. It returns the Seq that is
// to blame.
func (s *stage) refused(what string, w projector.Work, want error) int64 {
	s.Helper()
	before := s.dump()
	w.Fresh = func(int) { s.Errorf("Fresh is told of %s", what) }
	err := s.do(s.ctx, w, func(u unit) ([]outbox.Message, error) {
		return []outbox.Message{{Topic: "mail"}}, u.add("refused", 1)
	})
	s.classed(err, what, projector.PermanentClass)
	s.holds(errors.Is(err, want), "%s fails with %v: %v", what, want, err)
	s.unchanged(before, what)
	same(s, "total after "+what, s.total("refused"), 0)
	e, ok := errors.AsType[*projector.ReplayError](err)
	s.holds(ok && slices.ContainsFunc(w.Replay, func(r projector.Replay) bool { return r.Seq == e.Seq }), "the error %v says which replay failed", err)
	return e.Seq
}

func (s *stage) inState(p projector.Parked, want projector.ParkedState) projector.Parked {
	s.Helper()
	got := s.listParked(projector.ParkedFilter{Seqs: []int64{p.Seq}, State: want})
	same(s, fmt.Sprintf("messages %s of %s", want, p.MessageID), len(got), 1)
	return got[0]
}

func replayed(s *stage) {
	for i, marks := range []bool{true, false} {
		id := fmt.Sprint("m-", i)
		row := s.setAside(poison(id, "ann"))[0]
		s.advance(time.Hour)
		row = s.inState(row, projector.StillParked)
		w, told := replays(row), -1
		w.Fresh = func(n int) { told = n }
		if !marks {
			w.Marks = nil
		}
		w.Forget = []projector.Attempt{posted(id, "")}
		s.countAttempt(posted(id, ""), 1)
		s.ok(s.do(s.ctx, w, func(u unit) ([]outbox.Message, error) {
			return []outbox.Message{{ID: "from " + id, Topic: "mail"}}, u.add(id, 1)
		}), "replay")
		got := s.inState(row, projector.Replayed)
		s.holds(got.ResolvedAt.Sub(got.At) >= time.Hour, "it was replayed at %v, an hour after %v", got.ResolvedAt, got.At)
		row.State, row.Decision, row.ResolvedAt = projector.Replayed, because, got.ResolvedAt
		same(s, "replayed message", got, row)
		same(s, "total, entries, told", []int{s.total(id), len(s.entries(outbox.Filter{})), told}, []int{1, i + 1, len(w.Marks)})
		same(s, "outcome", s.outcomes(key(id))[0] == projector.Applied, marks)
		same(s, "parked", len(s.parked("", 0, 0)), 0)
		s.countAttempt(posted(id, ""), 1)
	}
}

func replayOfApplied(s *stage) {
	rows := s.setAside(poison("m-1", "ann"), waiting("m-2", "ann"))
	s.ok(s.do(s.ctx, work("m-1"), adds("k", 1)), "apply it meanwhile")
	told := -1
	w := replays(rows[0])
	w.Fresh = func(n int) { told = n }
	s.ok(s.do(s.ctx, w, adds("k", 1)), "replay")
	same(s, "total, told", []int{s.total("k"), told}, []int{1, 0})
	same(s, "decision", s.inState(rows[0], projector.Replayed).Decision, because)
	s.isDue("behind what had been applied", nil, "m-2")
}

func replayOfGone(s *stage) {
	rows := s.setAside(poison("m-1", "ann"), poison("m-2", "ben"), poison("m-3", "cid"))
	s.ok(s.replay(rows[0]), "replay")
	s.skipParked(projector.ParkedFilter{Key: "ben"}, 1)
	unmarked := projector.Work{Projector: "ratings", Replay: []projector.Replay{replayOf(rows[0])}}
	never := rows[2]
	never.Seq = 1 << 40
	elsewhere := rows[2]
	elsewhere.Projector = "stars"
	s.refused("a replay of what was replayed", replays(rows[0]), projector.ErrNotParked)
	s.refused("a replay without markers of what was replayed", unmarked, projector.ErrNotParked)
	s.refused("a replay of what was skipped", replays(rows[1]), projector.ErrNotParked)
	s.refused("a replay of what never was", replays(never), projector.ErrNotParked)
	s.refused("a replay of what is another projector's", replays(elsewhere), projector.ErrNotParked)
	blamed := s.refused("a replay together with one that cannot be", replays(rows[2], rows[1]), projector.ErrNotParked)
	same(s, "what is to blame", blamed, rows[1].Seq)
	same(s, "outcomes", s.outcomes(key("m-1"), key("m-2"), key("m-3")), []projector.Outcome{projector.Applied, projector.IsSkipped, projector.IsParked})
}

func replayOfHeld(s *stage) {
	cid := poison("m-3", "cid")
	cid.Handler, cid.Type = "ratings/other", "review.liked"
	rows := s.setAside(
		poison("m-1", "ann"), waiting("m-2", "ann"), atOther(poison("m-2'", "ann")), // 0 1 2
		unregistered("m-4", "ben"), waiting("m-5", "ben"), cid, waiting("m-6", "cid"), // 3 4 5 6
		poison("m-7", ""), poison("m-8", ""),
	)
	s.refused("a replay behind one of its handler", replays(rows[1]), projector.ErrHeld)
	s.refused("a replay behind one of no handler", replays(rows[4]), projector.ErrHeld)
	s.refused("a replay behind one of a type that is not taken", replays(rows[6]), projector.ErrHeld)
	renamed := replays(rows[1])
	renamed.Replay[0].Handler, renamed.Replay[0].Was = "ratings/given", []string{"ratings/posted"}
	renamed.Marks = nil
	s.refused("a replay behind one of its handler, by its old name", renamed, projector.ErrHeld)
	forced := replays(rows[1])
	forced.Replay[0].Force = true
	s.refused("a replay by force", forced, projector.ErrHeld)
	for _, i := range []int{8, 7, 2, 0, 1, 3, 4, 5, 6} {
		s.ok(s.replay(rows[i]), "replay of "+rows[i].MessageID)
	}
	same(s, "parked", len(s.parked("", 0, 0)), 0)
}

func replayOfOdd(s *stage) {
	for _, key := range []string{"\xff", "\xfe", "a\x00b", "a" + replacement + "b", replacement} {
		rows := s.setAside(poison("m-1"+key, key), waiting("m-2"+key, key))
		for i, want := range []string{"m-1", "m-2"} {
			same(s, "id, key", []string{rows[i].MessageID, rows[i].Key}, []string{want + key, key})
		}
		unmarked := projector.Work{Projector: "ratings", Replay: []projector.Replay{replayOf(rows[1])}}
		s.refused(fmt.Sprintf("a replay behind another of %q", key), unmarked, projector.ErrHeld)
		s.ok(s.do(s.ctx, projector.Work{Projector: "ratings", Replay: []projector.Replay{replayOf(rows[0])}}, nil), "replay the first")
		due := s.due(nil)
		same(s, "what is due", due, []projector.Parked{rows[1]})
		s.ok(s.do(s.ctx, unmarked, nil), "replay the second")
	}
}

// pruneMarkers ends the case if PruneMarkers does not delete so many.
func (s *stage) pruneMarkers(handler string, window time.Duration, limit, want int) {
	s.Helper()
	n, err := s.db.PruneMarkers(s.ctx, handler, window, limit)
	s.ok(err, "prune markers")
	same(s, "markers pruned of "+handler, n, want)
}

func replayAfterPrune(s *stage) {
	const window = 8 * 24 * time.Hour
	s.ok(s.do(s.ctx, work("m-0"), nil), "mark")
	s.advance(time.Hour)
	rows := s.setAside(poison("m-1", "ann"), atOther(poison("m-2", "ann")), poison("m-3", "ben"), poison("m-4", "cid"))
	s.advance(window + time.Hour)
	s.pruneMarkers("ratings/posted", window, 10, 1)
	s.ok(s.replay(rows[0]), "replay of what was parked after those markers that are pruned")

	s.ok(s.do(s.ctx, work("m-3"), adds("m-3", 1)), "apply")
	s.advance(window + time.Hour)
	young := s.setAside(poison("m-5", "dan"))[0]
	s.pruneMarkers("ratings/posted", window, 10, 2)
	s.refused("a replay of what has taken effect", replays(rows[2]), projector.ErrPruned)
	s.refused("a replay of what may have taken effect", replays(rows[3]), projector.ErrPruned)
	blamed := s.refused("a replay together with one that may have", replays(young, rows[3]), projector.ErrPruned)
	same(s, "what is to blame", blamed, rows[3].Seq)
	unmarked := projector.Work{Projector: "ratings", Replay: []projector.Replay{replayOf(rows[3])}}
	s.refused("a replay without marks of what may have taken effect", unmarked, projector.ErrPruned)
	renamed := replays(rows[3])
	renamed.Replay[0].Handler, renamed.Replay[0].Was = "ratings/given", []string{"ratings/rated", "ratings/posted"}
	renamed.Marks[0].Handler, renamed.Marks[0].Was = "ratings/given", renamed.Replay[0].Was
	s.refused("a replay by another name", renamed, projector.ErrPruned)
	s.ok(s.replay(rows[1]), "replay at another handler")
	s.ok(s.replay(young), "replay of what was parked later")
	renamed.Replay[0].Force = true
	s.ok(s.do(s.ctx, renamed, adds("m-4", 1)), "replay by force")
	same(s, "totals", []int{s.total("m-1"), s.total("m-2"), s.total("m-3"), s.total("m-4"), s.total("m-5")}, []int{1, 1, 1, 1, 1})
	same(s, "parked", idsOfParked(s.parked("", 0, 0)), []string{"m-3"})
}

func replaysBesidePrune(s *stage) {
	const messages, window = 40, 8 * 24 * time.Hour
	var ps []projector.Parked
	for i := range messages {
		ps = append(ps, poison(fmt.Sprint("m-", i), fmt.Sprint("key ", i)))
	}
	rows := s.setAside(ps...)
	s.advance(time.Hour)
	for _, p := range rows {
		s.ok(s.do(s.ctx, work(p.MessageID), adds(p.MessageID, 1)), "apply after all")
	}
	s.advance(window + time.Hour)
	errs := make([]error, messages+1)
	together(messages+1, func(i int) {
		if i < messages {
			errs[i] = s.replay(rows[i])
			return
		}
		for n := 1; n > 0 && errs[i] == nil; {
			n, errs[i] = s.db.PruneMarkers(s.ctx, "ratings/posted", window, 5)
		}
	})
	s.ok(errs[messages], "prune markers")
	for i, p := range rows {
		s.holds(errs[i] == nil || errors.Is(errs[i], projector.ErrPruned), "the error %v is nil or ErrPruned", errs[i])
		same(s, "total of "+p.MessageID, s.total(p.MessageID), 1)
	}
}

func failingReplay(s *stage) {
	row := s.setAside(poison("m-1", "ann"), waiting("m-2", "ann"))[0]
	before := s.dump()
	failing := errors.New("failing")
	for _, w := range []projector.Work{replays(row), {Projector: "ratings", Replay: []projector.Replay{replayOf(row)}}} {
		err := s.do(s.ctx, w, func(u unit) ([]outbox.Message, error) {
			return nil, errors.Join(u.add("m-1", 1), failing)
		})
		s.holds(errors.Is(err, failing), "the error %v is apply's", err)
		func() {
			defer func() { _ = recover() }()
			_ = s.do(s.ctx, w, func(unit) ([]outbox.Message, error) { panic(failing) })
		}()
		s.unchanged(before, "a replay that fails")
		s.isDue("behind a replay that failed", nil)
	}
	same(s, "outcome", s.outcomes(key("m-1"))[0], projector.IsParked)
	s.ok(s.replay(row), "a later try")
	same(s, "total", s.total("m-1"), 1)
}

func replayStays(s *stage) {
	rows := s.setAside(unregistered("m-1", "ann"), waiting("m-2", "ann"), atOther(waiting("m-2", "ann")), unregistered("m-3", "ann"))
	stays := func(p projector.Parked) projector.Work {
		w := replays(p)
		w.Replay[0].Stays = true
		return w
	}
	before := s.dump()
	for range 2 {
		s.ok(s.do(s.ctx, stays(rows[0]), adds("first", 1)), "replay at the first handler")
		same(s, "total", s.total("first"), 1)
		s.unchanged(before, "a replay of what stays")
	}
	s.verdict("an attempt behind what stays", posted("m-9", "ann"), projector.Held)
	s.isDue("behind what stays", nil)
	s.refused("a replay of what stays, behind another", stays(rows[3]), projector.ErrHeld)
	last := replays(atOther(rows[0]))
	s.ok(s.do(s.ctx, last, adds("last", 1)), "replay at the last handler")
	same(s, "total", s.total("last"), 1)
	s.isDue("behind what was replayed at each handler", nil, "m-2", "m-2")
	s.refused("a replay of what stays, and is gone", stays(rows[0]), projector.ErrNotParked)
}

func severalReplays(s *stage) {
	var ps []projector.Parked
	for i := range 6 {
		ps = append(ps, poison(fmt.Sprint("m-", i), "ann"))
	}
	rows := s.setAside(append(ps, waiting("m-6", "ann"))...)
	s.ok(s.do(s.ctx, work("m-2"), adds("m-2", 1)), "apply one meanwhile")
	s.refused("replays behind another", replays(rows[1:4]...), projector.ErrHeld)
	s.refused("replays in another order", replays(rows[1], rows[0]), projector.ErrHeld)
	blamed := s.refused("replays with one left out", replays(rows[0], rows[2], rows[3]), projector.ErrHeld)
	same(s, "what is to blame", blamed, rows[2].Seq)
	w, ran := replays(rows[:4]...), []int{}
	s.ok(s.do(s.ctx, w, func(u unit) ([]outbox.Message, error) {
		ran = u.fresh
		for _, i := range u.fresh {
			if err := u.add(w.Marks[i].MessageID, 1); err != nil {
				return nil, err
			}
		}
		return nil, nil
	}), "replay four")
	same(s, "those that were new", ran, []int{0, 1, 3})
	unmarked := projector.Work{Projector: "ratings", Replay: []projector.Replay{replayOf(rows[4]), replayOf(rows[5])}}
	s.isDue("behind the fourth", nil, "m-6")
	s.ok(s.do(s.ctx, unmarked, func(u unit) ([]outbox.Message, error) {
		return nil, errors.Join(u.add("m-4", 1), u.add("m-5", 1))
	}), "replay two without marks")
	for _, p := range rows[:6] {
		same(s, "total of "+p.MessageID, s.total(p.MessageID), 1)
		s.inState(p, projector.Replayed)
	}
	s.isDue("behind all", nil, "m-6")
}

func replaysAtOnce(s *stage) {
	for i, marks := range []bool{true, false} {
		id := fmt.Sprint("m-", i)
		row := s.setAside(poison(id, "ann"))[0]
		w := replays(row)
		if !marks {
			w.Marks = nil
		}
		errs := make([]error, storm)
		together(storm, func(i int) { errs[i] = s.do(s.ctx, w, adds(id, 1)) })
		for _, err := range errs {
			s.holds(err == nil || errors.Is(err, projector.ErrNotParked), "the error %v is nil or ErrNotParked", err)
		}
		done := len(slices.DeleteFunc(errs, func(err error) bool { return err != nil }))
		same(s, "total, units that replayed it", []int{s.total(id), done}, []int{1, 1})
	}
}

func parkedAgain(s *stage) {
	p := poison("m-1", "ann")
	first := s.setAside(p, waiting("m-2", "ann"))[0]
	s.ok(s.do(s.ctx, projector.Work{Projector: "ratings", Replay: []projector.Replay{replayOf(first)}}, nil), "replay")
	s.verdict("what was replayed", posted("m-1", "ann"), projector.Held) // behind m-2
	p.Payload, p.Code = []byte("again"), "deadline"
	again := s.setAside(p)[0]
	s.holds(again.Seq > first.Seq+1, "Seq %d of what is parked again is greater than all", again.Seq)
	same(s, "what is parked again", []string{string(again.Payload), again.Code}, []string{"again", "deadline"})
	same(s, "its decision", []any{again.Decision, again.ResolvedAt.IsZero()}, []any{projector.Decision{}, true})
	s.inState(first, projector.Replayed)
	s.verdict("what is parked again", posted("m-1", "ann"), projector.Settled)
	s.ok(s.do(s.ctx, projector.Work{Projector: "ratings", Park: []projector.Parked{p}}, nil), "park it once more")
	same(s, "parked", idsOfParked(s.parked("", 0, 0)), []string{"m-2", "m-1"})
	s.refused("a replay in another order than that of parking", replays(again), projector.ErrHeld)
	s.skipParked(projector.ParkedFilter{Limit: 1}, 1)
	s.ok(s.replay(again), "replay")
	same(s, "messages replayed", len(s.listParked(projector.ParkedFilter{State: projector.Replayed})), 2)
}

func decisionsOutlive(s *stage) {
	rows := s.setAside(poison("m-1", "ann"), waiting("m-2", "ann"), poison("m-3", "ben"), waiting("m-4", "cid"))
	s.ok(s.replay(rows[0]), "replay")
	s.skipParked(projector.ParkedFilter{Key: "ben"}, 1)
	before := s.dump()
	again := s.reopen()
	again.unchanged(before, "opening a new handle")
	again.isDue("through a new handle", nil, "m-2")
	again.refused("a replay through a new handle of what was replayed", replays(rows[0]), projector.ErrNotParked)
	again.ok(again.replay(rows[1]), "replay through a new handle")
	s.inState(rows[1], projector.Replayed)
}
