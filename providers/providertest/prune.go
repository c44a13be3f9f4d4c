package providertest

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

var pruneCases = []testCase{
	{
		name: "old markers", play: oldMarkers,
		rule: "PruneMarkers deletes at most limit markers of handler that are older than window on the store's clock, the oldest first, and returns how many; it does not look at younger ones",
	},
	{
		name: "the floor", play: floorRises,
		rule: "PruneMarkers raises the handler's floor: the time at which, and before which, its markers may be missing; Floor is the zero time where none of its markers were pruned",
	},
	{
		name: "a redelivery after a prune", play: redeliveredAfterPrune,
		rule: "A message that comes again within the window finds its marker, whatever was pruned; under each name of its handler",
	},
	{
		name: "many old markers", play: manyOldMarkers,
		rule: "Prune deletes the markers of handlers that are older than the window until there are none, and returns how many; also where several do so at once",
	},
	{
		name: "the journal forgets", play: journalForgets,
		rule: "PruneJournal forgets at most limit each of: messages of projector replayed or skipped, attempts of its handlers last counted, and names by runners dead, of whatever projector, for longer than keep. It returns how many it forgot",
	},
	{
		name: "the journal of others", play: journalOfOthers,
		rule: "PruneJournal forgets messages of projector, and attempts of its handlers (those called projector + \"/\" and more): what other projectors keep, others may need for longer",
	},
	{
		name: "the journal does not forget", play: journalRemembers,
		rule: "PruneJournal forgets nothing that is younger than keep, no message that is still parked, and no name by a runner that may live",
	},
	{
		name: "the journal forgets bit by bit", play: journalForgetsInPages,
		rule: "PruneJournal forgets at most limit of each",
	},
	{
		name: "the floor outlives the process", unless: Volatile, play: floorOutlives,
		rule: "A floor commits with the deletion of the markers, and a new handle knows both",
	},
}

func (s *stage) floor(handler string) time.Time {
	s.Helper()
	at, err := s.db.Floor(s.ctx, handler)
	s.ok(err, "floor")
	return at
}

// markedHourly marks messages m-0, m-1 and so on, the last one just now, and an hour lies between each and the next.
func (s *stage) markedHourly(n int) []marker.Key {
	s.Helper()
	var keys []marker.Key
	for i := range n {
		if i > 0 {
			s.advance(time.Hour)
		}
		keys = append(keys, key(fmt.Sprint("m-", i)))
		w := projector.Work{Projector: "ratings", Marks: []marker.Key{keys[i], {Handler: "ratings/postedlater", MessageID: keys[i].MessageID}}}
		s.ok(s.do(s.ctx, w, nil), "mark")
	}
	return keys
}

// marked ends the case if others than the last of keys have their markers.
func (s *stage) marked(keys []marker.Key, last int) {
	s.Helper()
	for i, o := range s.outcomes(keys...) {
		want := projector.Unseen
		if i >= len(keys)-last {
			want = projector.Applied
		}
		same(s, "outcome of "+keys[i].MessageID, o, want)
	}
}

func oldMarkers(s *stage) {
	s.pruneMarkers("ratings/posted", time.Hour, 10, 0)
	keys := s.markedHourly(8)
	s.pruneMarkers("ratings/posted", 24*time.Hour, 10, 0)
	s.pruneMarkers("ratings/posted", math.MaxInt64, 10, 0)
	s.holds(s.floor("ratings/posted").IsZero(), "the floor is the zero time where markers are kept for ever")
	s.pruneMarkers("ratings/poste", time.Hour, 10, 0)
	s.pruneMarkers("ratings/posted%", time.Hour, 10, 0)
	s.pruneMarkers("ratings", time.Hour, 10, 0)
	s.marked(keys, 8)
	const window = 150 * time.Minute // three are younger
	s.pruneMarkers("ratings/posted", window, 1, 1)
	s.marked(keys, 7)
	s.pruneMarkers("ratings/posted", window, 3, 3)
	s.marked(keys, 4)
	s.pruneMarkers("ratings/posted", window, 3, 1)
	s.pruneMarkers("ratings/posted", window, 3, 0)
	s.marked(keys, 3)
	s.advance(time.Hour)
	s.pruneMarkers("ratings/posted", window, 3, 1)
	s.marked(keys, 2)
	for i := range keys {
		keys[i].Handler = "ratings/postedlater"
	}
	s.marked(keys, 8)
	s.advance(10_000 * time.Hour)
	s.pruneMarkers("ratings/postedlater", window, 100, 8)
	handlers, err := s.db.MarkedHandlers(s.ctx)
	s.ok(err, "list handlers")
	same(s, "handlers with markers", handlers, []string{"ratings/posted"})
}

func floorRises(s *stage) {
	s.holds(s.floor("ratings/posted").IsZero(), "the floor is the zero time at first")
	keys := s.markedHourly(3)
	s.pruneMarkers("ratings/posted", 24*time.Hour, 10, 0)
	s.holds(s.floor("ratings/posted").IsZero(), "the floor is the zero time where nothing was pruned")
	n, err := s.db.DropMarkers(s.ctx, "ratings/postedlater", 1)
	s.ok(err, "drop a marker")
	same(s, "markers dropped", n, 1)
	s.pruneMarkers("ratings/posted", 30*time.Minute, 1, 1)
	first := s.floor("ratings/posted")
	s.pruneMarkers("ratings/posted", 30*time.Minute, 1, 1)
	second := s.floor("ratings/posted")
	s.holds(first.Location() == time.UTC, "the floor %v is in UTC", first)
	apart := second.Sub(first)
	s.holds(apart >= time.Hour && apart < 2*time.Hour, "the second floor is an hour after the first, as the markers were, not %v", apart)
	s.pruneMarkers("ratings/posted", 30*time.Minute, 10, 0)
	s.holds(s.floor("ratings/posted").Equal(second), "a prune of nothing leaves the floor where it was")
	s.holds(s.floor("ratings/postedlater").IsZero(), "another handler has a floor of its own")
	s.marked(keys, 1)
	row := s.setAside(poison("m-9", "ann"))[0]
	s.holds(row.At.After(second), "what is parked now, at %v, is parked after the floor, %v", row.At, second)
	s.ok(s.replay(row), "replay what was parked after the floor")
}

func redeliveredAfterPrune(s *stage) {
	const window = 8 * 24 * time.Hour
	renamed := work("m-1")
	renamed.Marks[0].Handler, renamed.Marks[0].Was = "ratings/given", []string{"ratings/posted"}
	s.ok(s.do(s.ctx, work("m-0"), adds("m-0", 1)), "deliver")
	s.advance(2 * time.Hour)
	s.ok(s.do(s.ctx, renamed, adds("m-1", 1)), "deliver")
	s.advance(window - time.Hour)
	pruned, err := marker.Prune(s.ctx, s.db, marker.Retention{}, "ratings/posted", "ratings/given")
	s.ok(err, "prune")
	same(s, "markers pruned", pruned, 1)
	for _, w := range []projector.Work{renamed, work("m-1")} {
		s.ok(s.do(s.ctx, w, adds("m-1", 1)), "deliver again within the window")
	}
	same(s, "total of what came again within the window", s.total("m-1"), 1)
	same(s, "outcome", s.outcomes(key("m-0"))[0], projector.Unseen)
	s.ok(s.do(s.ctx, work("m-0"), adds("m-0", 1)), "deliver again after the window")
	same(s, "total of what came again after the window", s.total("m-0"), 2)
	same(s, "outcome", s.outcomes(key("m-0"))[0], projector.Applied)
}

func manyOldMarkers(s *stage) {
	const n = 2300
	for _, handler := range []string{"ratings/posted", "ratings/other"} {
		w := projector.Work{Projector: "ratings"}
		for i := range n {
			w.Marks = append(w.Marks, marker.Key{Handler: handler, MessageID: fmt.Sprint("m-", i)})
		}
		s.ok(s.do(s.ctx, w, nil), "mark")
	}
	s.advance(10 * 24 * time.Hour)
	s.ok(s.do(s.ctx, work("young"), nil), "mark")
	pruned, errs := make([]int, 4), make([]error, 4)
	together(len(pruned), func(i int) {
		pruned[i], errs[i] = marker.Prune(s.ctx, s.db, marker.Retention{}, "ratings/posted")
	})
	s.ok(errors.Join(errs...), "prune at once")
	same(s, "markers pruned", pruned[0]+pruned[1]+pruned[2]+pruned[3], n)
	left, err := marker.Drop(s.ctx, s.db, "ratings/other")
	s.ok(err, "drop")
	same(s, "markers of the other handler", left, n)
	same(s, "outcomes", s.outcomes(key("m-0"), key("young")), []projector.Outcome{projector.Unseen, projector.Applied})
	for _, r := range []marker.Retention{{Window: 24 * time.Hour}, {Horizon: -1}, {Window: -1}} {
		_, err := marker.Prune(s.ctx, s.db, r, "ratings/posted")
		s.holds(errors.Is(err, marker.ErrUnsafe), "the error %v is ErrUnsafe", err)
	}
}

// pruneJournal ends the case if PruneJournal does not forget so many.
func (s *stage) pruneJournal(keep time.Duration, limit, want int) {
	s.Helper()
	n, err := s.db.PruneJournal(s.ctx, "ratings", keep, limit)
	s.ok(err, "prune the journal")
	same(s, "forgotten", n, want)
}

func journalForgets(s *stage) {
	s.pruneJournal(time.Hour, 100, 0)
	rows := s.setAside(poison("m-1", "ann"), poison("m-2", "ben"), poison("m-3", "cid"), waiting("m-4", "cid"))
	s.ok(s.replay(rows[0]), "replay")
	s.skipParked(projector.ParkedFilter{Key: "ben"}, 1)
	a := posted("m-9", "dan")
	s.countAttempt(a, 1)
	s.countAttempt(a, 2)
	s.alive("one", time.Minute)
	s.begin("one", a)
	s.verdict("what was skipped", posted("m-2", "ben"), projector.Settled)
	s.verdict("what another runner has named", a, projector.Suspect)
	s.advance(2 * time.Hour)
	s.pruneJournal(3*time.Hour, 100, 0)
	s.pruneJournal(math.MaxInt64, 100, 0)
	s.pruneJournal(time.Hour, 100, 4) // one replayed, one skipped, one counted, one named
	s.pruneJournal(time.Hour, 100, 0)
	for state, want := range map[projector.ParkedState][]string{
		projector.Replayed: {}, projector.Skipped: {}, projector.StillParked: {"m-3", "m-4"},
	} {
		same(s, "what is "+state.String(), idsOfParked(s.listParked(projector.ParkedFilter{State: state})), want)
	}
	s.verdict("what was skipped, and is forgotten", posted("m-2", "ben"), projector.Clear)
	s.verdict("what was named, and is forgotten", a, projector.Clear)
	s.countAttempt(a, 1)
	s.ok(s.do(s.ctx, work("m-1"), adds("m-1", 1)), "redeliver what was replayed")
	same(s, "total of what was replayed", s.total("m-1"), 1)
	same(s, "Seq of the next", s.setAside(poison("m-5", "eve"))[0].Seq > rows[3].Seq, true)
}

func journalOfOthers(s *stage) {
	for _, name := range []string{"ratings2", "rating", "stars"} {
		a, p := posted("m-1", "ann"), poison("m-2", "ben")
		a.Projector, a.Handler, p.Projector, p.Handler = name, name+"/posted", name, name+"/posted"
		s.setAside(p)
		s.countAttempt(a, 1)
		a.Handler = "" // before any handler
		s.countAttempt(a, 1)
	}
	s.countAttempt(projector.Attempt{Projector: "ratings", MessageID: "m-1"}, 1)
	s.skipParked(projector.ParkedFilter{}, 3)
	dead := posted("m-3", "")
	dead.Projector, dead.Handler = "stars", "stars/posted"
	s.begin("one", dead)
	s.advance(2 * time.Hour)
	s.pruneJournal(time.Hour, 100, 2) // what was counted of ratings, and the dead one's name
	same(s, "what others have skipped", len(s.listParked(projector.ParkedFilter{State: projector.Skipped})), 3)
	n, err := s.db.PruneJournal(s.ctx, "stars", time.Hour, 100)
	s.ok(err, "prune another's journal")
	same(s, "forgotten", n, 3)
}

func journalRemembers(s *stage) {
	rows := s.setAside(poison("m-1", "ann"), waiting("m-2", "ann"), unregistered("m-3", "ben"), poison("m-4", "cid"), poison("m-5", "dan"))
	living, ended, counted := posted("m-7", ""), posted("m-8", ""), posted("m-9", "")
	s.countAttempt(counted, 1)
	s.alive("living", time.Hour)
	s.alive("ended", time.Hour)
	s.begin("living", living)
	s.begin("ended", ended)
	s.advance(50 * time.Minute)
	s.alive("living", 10*time.Hour)
	s.advance(9 * time.Hour)
	s.countAttempt(counted, 2)
	s.skipParked(projector.ParkedFilter{Key: "ann", Limit: 1}, 1)
	s.ok(s.replay(rows[4]), "replay")
	s.advance(30 * time.Minute) // the one has been dead for nine hours and 20 minutes
	s.pruneJournal(9*time.Hour+30*time.Minute, 100, 0)
	s.verdict("what a runner has named that died later", ended, projector.Suspect)
	s.pruneJournal(9*time.Hour, 100, 1)
	s.verdict("what a runner has named that died before", ended, projector.Clear)
	s.pruneJournal(time.Hour, 100, 0)
	s.verdict("what a living runner has named", living, projector.Suspect)
	s.alone("two", living, 5, 0, 1)
	s.countAttempt(counted, 3)
	s.advance(10_000 * time.Hour)
	s.pruneJournal(time.Hour, 100, 5) // skipped, replayed, counted, and what the living one and the second had named
	same(s, "what is parked", idsOfParked(s.parked("", 0, 0)), []string{"m-2", "m-3", "m-4"})
	s.isDue("long after", []string{"review.liked"}, "m-2", "m-3")
}

func journalForgetsInPages(s *stage) {
	var ps []projector.Parked
	for i := range 7 {
		a := posted(fmt.Sprint("m-", i), "")
		ps = append(ps, poison(a.MessageID, a.MessageID))
		s.countAttempt(a, 1)
		s.begin("dead", posted("named "+a.MessageID, ""))
		if i < 2 {
			s.countAttempt(atOtherHandler(a), 1)
		}
	}
	rows := s.setAside(ps...)
	for i, p := range rows {
		if i%2 == 0 {
			s.ok(s.replay(p), "replay")
		}
	}
	s.skipParked(projector.ParkedFilter{}, 3)
	s.advance(2 * time.Hour)
	for _, want := range []int{3 + 3 + 3, 3 + 3 + 3, 1 + 3 + 1, 0} {
		s.pruneJournal(time.Hour, 3, want)
	}
}

func atOtherHandler(a projector.Attempt) projector.Attempt {
	a.Handler = "ratings/other"
	return a
}

func floorOutlives(s *stage) {
	keys := s.markedHourly(3)
	row := s.setAside(poison("m-9", "ann"))[0]
	s.advance(time.Hour)
	s.ok(s.do(s.ctx, work("m-9"), func(u unit) ([]outbox.Message, error) { return nil, u.add("m-9", 1) }), "apply it after all")
	s.advance(time.Hour)
	s.pruneMarkers("ratings/posted", time.Minute, 10, 4)
	again := s.reopen()
	again.marked(keys, 0)
	s.holds(again.floor("ratings/posted").Equal(s.floor("ratings/posted")), "a new handle knows the floor")
	again.refused("a replay through a new handle", replays(row), projector.ErrPruned)
	same(s, "total", s.total("m-9"), 1)
}
