package providertest

import (
	"errors"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

var dueCases = []testCase{
	{
		name: "what waits is due", play: waitingIsDue,
		rule: "DueParked lists messages that wait (HeldClass) and are due, since what was before them was replayed or skipped: the first of each handler",
	},
	{
		name: "what has become known is due", play: knownIsDue,
		rule: "DueParked lists those parked with the code \"unregistered\" whose type is one of types, in order of Seq, after Seq after, at most limit, and looks at no others",
	},
	{
		name: "a replay that failed", play: failedReplay,
		rule: "FailParked: its Class, Code, Attempts and Version are p's from now on, and it is not due; the count of a begins anew, and runner's name of it is taken back; one that is not parked any more stays as it is",
	},
	{
		name: "a replay that is held", play: heldReplay,
		rule: "FailParked where p's Class is HeldClass says only that it is not due, and that only while something is in a's way",
	},
}

// due lists what may go on by itself.
func (s *stage) due(types []string) []projector.Parked {
	s.Helper()
	due, err := s.db.DueParked(s.ctx, "ratings", types, 0, 100)
	s.ok(err, "list due messages")
	return due
}

// isDue ends the case if other messages are due, in another order.
func (s *stage) isDue(when string, types []string, want ...string) {
	s.Helper()
	same(s, "due "+when, idsOfParked(s.due(types)), append([]string{}, want...))
}

func idsOfParked(ps []projector.Parked) []string {
	ids := []string{}
	for _, p := range ps {
		ids = append(ids, p.MessageID)
	}
	return ids
}

// atOther is p at another handler of the projector.
func atOther(p projector.Parked) projector.Parked {
	p.Handler = "ratings/other"
	return p
}

func waitingIsDue(s *stage) {
	elsewhere := waiting("m-4", "ann")
	elsewhere.Projector, elsewhere.Handler = "stars", "stars/posted"
	rows := s.setAside(
		waiting("m-0", "ann"), poison("m-1", "ann"), waiting("m-2", "ann"), atOther(waiting("m-2'", "ann")), waiting("m-3", "ann"),
		atOther(waiting("m-3'", "ann")), elsewhere, waiting("m-5", "ben"), poison("m-6", "ann"), waiting("m-7", ""),
	)
	s.isDue("at first", nil)
	stays := replayOf(rows[0])
	stays.Stays = true
	s.ok(s.do(s.ctx, projector.Work{Projector: "ratings", Replay: []projector.Replay{stays}}, nil), "replay what stays")
	s.isDue("after the replay of one that stays", nil)
	s.skipParked(projector.ParkedFilter{Seqs: []int64{rows[0].Seq}}, 1)
	s.isDue("behind the very first", nil, "m-2", "m-2'") // and not what was replayed or skipped
	s.skipParked(projector.ParkedFilter{Seqs: []int64{rows[1].Seq}}, 1)
	s.isDue("behind the first", nil, "m-2", "m-2'")
	failing := errors.New("failing")
	err := s.do(s.ctx, replays(rows[2]), func(unit) ([]outbox.Message, error) { return nil, failing })
	s.holds(errors.Is(err, failing), "the error %v is apply's", err)
	s.isDue("after a replay that failed", nil, "m-2", "m-2'")
	s.ok(s.replay(rows[2]), "replay")
	s.isDue("behind the second", nil, "m-2'", "m-3")
	s.skipParked(projector.ParkedFilter{Seqs: []int64{rows[8].Seq}}, 1)
	s.isDue("behind the last", nil, "m-2'", "m-3")
	s.ok(s.replay(rows[4]), "replay")
	s.ok(s.replay(rows[3]), "replay")
	s.isDue("behind all but one", nil, "m-3'")
	s.skipParked(projector.ParkedFilter{Key: "ann", Projector: "ratings"}, 1)
	s.isDue("behind all", nil)
	due, err := s.db.DueParked(s.ctx, "stars", nil, 0, 10)
	s.ok(err, "list due messages")
	same(s, "due of another projector", len(due), 0)
}

func knownIsDue(s *stage) {
	liked := func(id, eventType string) projector.Parked {
		p := unregistered(id, "key of "+id)
		p.Type = eventType
		return p
	}
	elsewhere, undecodable, gone := liked("m-4", "review.liked"), liked("m-5", "review.liked"), liked("m-9", "review.liked")
	elsewhere.Projector, undecodable.Code = "stars", "undecodable"
	rows := s.setAside(
		liked("m-1", "review.liked"), liked("m-2", "review.disliked"), poison("m-3", "ann"), elsewhere, undecodable, waiting("m-6", "ann"),
		liked("m-7", "review.liked"), liked("m-8", "REVIEW.LIKED"), gone, liked("m-10", ""), liked("m-11", "review.liked"),
	)
	s.skipParked(projector.ParkedFilter{Key: "key of m-9"}, 1)
	s.isDue("of no types", nil)
	s.isDue("of one type", []string{"review.liked"}, "m-1", "m-7", "m-11")
	s.isDue("of several types", []string{"review.posted", "review.disliked", "review.liked"}, "m-1", "m-2", "m-7", "m-11")
	s.skipParked(projector.ParkedFilter{Key: "ann", Limit: 1}, 1)
	s.isDue("together with what waits", []string{"review.liked"}, "m-1", "m-6", "m-7", "m-11")
	for _, c := range []struct {
		after int64
		limit int
		want  []string
	}{
		{0, 2, []string{"m-1", "m-6"}}, {rows[5].Seq, 1, []string{"m-7"}}, {rows[5].Seq, 5, []string{"m-7", "m-11"}},
		{rows[4].Seq, 1, []string{"m-6"}}, {rows[10].Seq, 5, []string{}},
	} {
		page, err := s.db.DueParked(s.ctx, "ratings", []string{"review.liked"}, c.after, c.limit)
		s.ok(err, "list due messages")
		same(s, "page of due messages", idsOfParked(page), c.want)
	}
	for _, p := range s.due([]string{"review.liked"}) {
		same(s, "a due message", []projector.Parked{plainParked(p)}, s.listParked(projector.ParkedFilter{Seqs: []int64{p.Seq}}))
	}
}

func failedReplay(s *stage) {
	rows := s.setAside(poison("m-1", "ann"), waiting("m-2", "ann"), waiting("m-3", "ann"), unregistered("m-4", "ben"), poison("m-5", "cid"))
	fail := func(p projector.Parked) {
		s.Helper()
		s.ok(s.db.FailParked(s.ctx, "one", p, replayOf(p).Attempt), "fail a replay")
	}
	s.skipParked(projector.ParkedFilter{Seqs: []int64{rows[0].Seq}}, 1)
	s.isDue("behind the first", nil, "m-2")
	failed := rows[1]
	failed.Class, failed.Code, failed.Attempts, failed.Version = projector.UnknownClass, "22'012", 4, "v2"
	spoilt := failed
	spoilt.Payload, spoilt.Headers, spoilt.Topic, spoilt.Holds, spoilt.Type, spoilt.MessageID = []byte("x"), nil, "t", false, "x", "x"
	spoilt.State, spoilt.Decision, spoilt.At = projector.Skipped, projector.Decision{By: "x", Reason: "x"}, time.Time{}
	s.ok(s.db.FailParked(s.ctx, "one", spoilt, replayOf(rows[1]).Attempt), "fail a replay")
	same(s, "what failed", s.listParked(projector.ParkedFilter{Seqs: []int64{failed.Seq}}), []projector.Parked{failed})
	s.isDue("behind one that failed", nil)
	s.verdict("an attempt behind one that failed", posted("m-9", "ann"), projector.Held)
	s.skipParked(projector.ParkedFilter{Seqs: []int64{failed.Seq}}, 1)
	s.isDue("behind one that failed, and was skipped", nil, "m-3")

	undecodable := rows[3]
	undecodable.Code, undecodable.Attempts = "undecodable", 2
	a := replayOf(undecodable).Attempt
	s.alive("one", time.Hour)
	s.alive("two", time.Hour)
	s.countAttempt(a, 1)
	s.alone("one", a, 9, 1, 0)
	s.alone("two", a, 9, 1, 1)
	fail(undecodable)
	s.alone("three", a, 0, 0, 1) // that of two
	s.alive("one", 0)
	s.alive("two", 0)
	s.isDue("of what failed otherwise", []string{"review.liked"}, "m-3")

	s.ok(s.replay(rows[4]), "replay")
	for _, i := range []int{0, 4} { // skipped, replayed
		before := s.dump()
		gone := rows[i]
		gone.Class, gone.Code, gone.Attempts = projector.UnknownClass, "late", 9
		fail(gone)
		gone.Class = projector.HeldClass
		fail(gone)
		s.unchanged(before, "a failed replay of what is not parked any more")
	}
	never := rows[0]
	never.Seq = 1 << 40
	fail(never)
}

func heldReplay(s *stage) {
	rows := s.setAside(poison("m-1", "ann"), unregistered("m-2", "ann"), waiting("m-3", "ann"), poison("m-4", "ann"))
	held := func(p projector.Parked) {
		s.Helper()
		p.Class, p.Code, p.Attempts, p.Version = projector.HeldClass, "x", 9, "x" // of which it says nothing
		s.ok(s.db.FailParked(s.ctx, "one", p, replayOf(p).Attempt), "say that a replay is held")
		p.Class, p.Code, p.Attempts, p.Version = rows[2].Class, rows[2].Code, rows[2].Attempts, rows[2].Version
		same(s, "what is held", s.listParked(projector.ParkedFilter{Seqs: []int64{p.Seq}}), []projector.Parked{p})
	}
	held(rows[2])
	s.isDue("at first", nil)
	s.skipParked(projector.ParkedFilter{Seqs: []int64{rows[0].Seq}}, 1)
	s.isDue("behind the first", nil, "m-3")
	s.countAttempt(replayOf(rows[2]).Attempt, 1)
	held(rows[2])
	s.countAttempt(replayOf(rows[2]).Attempt, 2)
	s.isDue("while the second is in its way", nil)
	s.skipParked(projector.ParkedFilter{Seqs: []int64{rows[1].Seq}}, 1)
	s.isDue("behind both", nil, "m-3")
	held(rows[2]) // who said so had looked before the second was skipped
	s.isDue("while nothing is in its way but what came later", nil, "m-3")

	other := s.setAside(poison("m-5", "ben"), poison("m-6", "ben"))[1] // which never waited
	before := s.dump()
	other.Class = projector.HeldClass
	s.ok(s.db.FailParked(s.ctx, "one", other, replayOf(other).Attempt), "say that a replay is held")
	s.unchanged(before, "a replay that is held")
}
