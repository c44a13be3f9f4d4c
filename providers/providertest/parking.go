package providertest

import (
	"errors"
	"strings"
	"time"

	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

var parkingCases = []testCase{
	{
		name: "filters of parked messages", play: parkedFilters,
		rule: "ParkedMessages lists what f picks, in order of Seq; the zero filter picks all that are still parked",
	},
	{
		name: "parking behind", play: parkBehind,
		rule: "Work.Behind: the unit fails with ErrNotHeld, permanent, unless a parked message is in the way of the attempt",
	},
	{
		name: "what is parked is not behind itself", play: notBehindItself,
		rule: "Work.Behind is why the messages of Park are set aside: none of them is that, nor what is not parked any more",
	},
	{
		name: "what is in the way stays there", play: staysInTheWay,
		rule: "Work.Behind: until the unit is over, what is in the way stays there: nothing is parked behind what is gone",
	},
	{
		name: "giving up", play: givingUp,
		rule: "SkipParked gives up for good on the messages that f picks of those that are still parked, and keeps d with them; it returns how many",
	},
	{
		name: "giving up on some", play: givingUpOnSome,
		rule: "SkipParked takes what f picks, in order of Seq, at most Limit, where that is not zero",
	},
	{
		name: "a decision of nobody", play: badDecisions,
		rule: "A decision of nobody, without a reason, or of over 255 and 1,000 bytes is an error (ErrInput), nothing changed",
	},
	{
		name: "what was skipped is told", play: skippedIsTold,
		rule: "Outcomes: IsSkipped where it was parked, and skipped; before any handler: for each of its projector's; a marker comes before it",
	},
}

// unregistered is a message of a type that the projector did not know.
func unregistered(id, key string) projector.Parked {
	p := poison(id, key)
	p.Handler, p.Type, p.Code, p.Attempts = "", "review.liked", "unregistered", 1
	return p
}

func parkedFilters(s *stage) {
	other, elsewhere, none := poison("m-3", "ben"), poison("m-4", "ann"), unregistered("m-5", "ann")
	other.Handler, other.Code = "ratings/other", "23505"
	elsewhere.Projector, elsewhere.Handler, elsewhere.Class = "stars", "stars/posted", projector.UnknownClass
	rows := s.setAside(poison("m-1", "ann"), waiting("m-2", "ann"), other, elsewhere, none, poison("m-6", "cid"), poison("m-7", "dan"), poison("m-8", "eve"))
	s.skipParked(projector.ParkedFilter{Key: "dan"}, 1)
	s.ok(s.replay(rows[7]), "replay")
	held, unknown := projector.HeldClass, projector.UnknownClass
	for name, c := range map[string]struct {
		f    projector.ParkedFilter
		want []string
	}{
		"everything":     {projector.ParkedFilter{}, []string{"m-1", "m-2", "m-3", "m-4", "m-5", "m-6"}},
		"a projector":    {projector.ParkedFilter{Projector: "stars"}, []string{"m-4"}},
		"a handler":      {projector.ParkedFilter{Handler: "ratings/posted"}, []string{"m-1", "m-2", "m-6"}},
		"a key":          {projector.ParkedFilter{Key: "ann"}, []string{"m-1", "m-2", "m-4", "m-5"}},
		"a class":        {projector.ParkedFilter{Class: &held}, []string{"m-2"}},
		"the zero class": {projector.ParkedFilter{Class: &unknown}, []string{"m-4"}},
		"a code":         {projector.ParkedFilter{Code: "unregistered"}, []string{"m-5"}},
		"some Seqs":      {projector.ParkedFilter{Seqs: []int64{rows[5].Seq, rows[0].Seq, rows[6].Seq}}, []string{"m-1", "m-6"}},
		"no Seqs":        {projector.ParkedFilter{Seqs: []int64{}}, []string{}},
		"a page":         {projector.ParkedFilter{After: rows[1].Seq, Limit: 2}, []string{"m-3", "m-4"}},
		"a key's page":   {projector.ParkedFilter{Key: "ann", After: rows[0].Seq, Limit: 2}, []string{"m-2", "m-4"}},
		"the skipped":    {projector.ParkedFilter{State: projector.Skipped}, []string{"m-7"}},
		"the replayed":   {projector.ParkedFilter{State: projector.Replayed}, []string{"m-8"}},
		"skipped of ann": {projector.ParkedFilter{State: projector.Skipped, Key: "ann"}, []string{}},
		"nothing":        {projector.ParkedFilter{Handler: "ratings"}, []string{}},
		"all at once": {projector.ParkedFilter{
			Projector: "ratings", Handler: "ratings/other", Key: "ben", Class: &rows[2].Class, Code: "23505", Seqs: []int64{rows[2].Seq, rows[3].Seq}, After: rows[1].Seq, Limit: 5,
		}, []string{"m-3"}},
	} {
		same(s, name, idsOfParked(s.listParked(c.f)), c.want)
	}
	for projectorName, want := range map[string]int64{"": 6, "ratings": 5, "stars": 1, "nobody": 0} {
		n, err := s.db.ParkedCount(s.ctx, projectorName)
		s.ok(err, "count parked messages")
		same(s, "count of "+projectorName, n, want)
	}
}

// parksBehind tells whether a unit parks one more message behind what is in the way of a. It ends the case if that leaves
// anything else.
func (s *stage) parksBehind(a projector.Attempt) bool {
	s.Helper()
	before := s.dump()
	id := newID()
	p := waiting(id, a.Key)
	p.Projector, p.Handler = a.Projector, a.Handler
	s.countAttempt(posted(id, ""), 1)
	w := projector.Work{Projector: a.Projector, Park: []projector.Parked{p}, Behind: &a, Forget: []projector.Attempt{posted(id, "")}}
	err := s.do(s.ctx, w, nil)
	if err == nil {
		same(s, "messages parked", len(s.dump().parked), len(before.parked)+1)
		s.countAttempt(posted(id, ""), 1)
		s.skipParked(projector.ParkedFilter{Class: new(projector.HeldClass), Limit: 1000}, 1)
		return true
	}
	s.classed(err, "a unit that parks behind nothing", projector.PermanentClass)
	s.holds(errors.Is(err, projector.ErrNotHeld), "the error %v is ErrNotHeld", err)
	s.unchanged(before, "a unit that parks behind nothing")
	s.countAttempt(posted(id, ""), 2)
	return false
}

func parkBehind(s *stage) {
	ben, cid, dan, eve := unregistered("m-2", "ben"), poison("m-3", "cid"), poison("m-4", "dan"), poison("m-5", "eve")
	cid.Handler, cid.Type = "ratings/other", "review.liked"
	dan.Holds = false
	eve.Projector, eve.Handler = "stars", ""
	rows := s.setAside(poison("m-1", "ann"), ben, cid, dan, eve, poison("m-6", ""))
	renamed, takesBoth := posted("m-9", "ann"), posted("m-9", "cid")
	renamed.Handler, renamed.Was = "ratings/given", []string{"ratings/rated", "ratings/posted"}
	takesBoth.Takes = []string{"review.posted", "review.liked"}
	for what, c := range map[string]struct {
		a    projector.Attempt
		want bool
	}{
		"one for the same handler":          {posted("m-9", "ann"), true},
		"one for the handler's old name":    {renamed, true},
		"one for no handler":                {posted("m-9", "ben"), true},
		"one of a type that is not taken":   {posted("m-9", "cid"), true},
		"one that this handler has applied": {takesBoth, false},
		"one that does not hold":            {posted("m-9", "dan"), false},
		"one of another projector":          {posted("m-9", "eve"), false},
		"one without a key, without a key":  {posted("m-9", ""), false},
		"nothing of its key":                {posted("m-9", "nobody"), false},
		"nothing of its key, spelled so":    {posted("m-9", "Ann"), false},
	} {
		same(s, "parked behind "+what, s.parksBehind(c.a), c.want)
	}
	s.skipParked(projector.ParkedFilter{Key: "ann"}, 1)
	same(s, "parked behind one that was skipped", s.parksBehind(posted("m-9", "ann")), false)
	renamed.Key, renamed.Takes = "ben", nil
	r := replayOf(rows[1])
	s.ok(s.do(s.ctx, projector.Work{Projector: "ratings", Replay: []projector.Replay{r}}, nil), "replay")
	same(s, "parked behind one that was replayed", s.parksBehind(renamed), false)
}

func notBehindItself(s *stage) {
	a := posted("m-1", "ann")
	w := work("m-1")
	w.Park, w.Behind = []projector.Parked{poison("m-1", "ann"), poison("m-2", "ann")}, &a
	w.Fresh = func(int) { s.Errorf("Fresh is told of a unit that failed") }
	err := s.do(s.ctx, w, adds("k", 1))
	s.holds(errors.Is(err, projector.ErrNotHeld), "the error %v is ErrNotHeld", err)
	s.classed(err, "a unit that parks behind nothing", projector.PermanentClass)
	s.untouched("m-1", "a unit that parks behind nothing")
	s.setAside(poison("m-0", "ann"))
	w.Fresh = nil
	s.ok(s.do(s.ctx, w, adds("k", 1)), "park behind")
	same(s, "total", s.total("k"), 1)
	same(s, "parked", idsOfParked(s.parked("", 0, 0)), []string{"m-0", "m-1", "m-2"})
}

// staysInTheWay lets somebody skip what a message is being parked behind. Whoever comes first, it does not wait for nothing.
func staysInTheWay(s *stage) {
	for range 5 {
		first, id := poison(newID(), "ann"), newID()
		row := s.setAside(first)[0]
		skipped := make(chan error, 1)
		a := posted(id, "ann")
		w := projector.Work{Projector: "ratings", Park: []projector.Parked{waiting(id, "ann")}, Behind: &a}
		began := false
		err := s.do(s.ctx, w, func(unit) ([]outbox.Message, error) {
			if began {
				return nil, nil
			}
			began = true
			go func() {
				_, err := s.db.SkipParked(s.ctx, projector.ParkedFilter{Seqs: []int64{row.Seq}}, projector.Decision{By: "ann", Reason: "so"})
				skipped <- err
			}()
			select { // it waits for this unit, if the unit holds anything by now
			case err := <-skipped:
				skipped <- err
			case <-time.After(50 * time.Millisecond):
			}
			return nil, nil
		})
		s.holds(began, "apply runs behind what is there: %v", err)
		s.ok(<-skipped, "skip what is in the way")
		if err != nil {
			s.holds(errors.Is(err, projector.ErrNotHeld), "the error %v is ErrNotHeld", err)
			same(s, "parked behind nothing", len(s.parked("", 0, 0)), 0)
			continue
		}
		s.isDue("behind what was skipped meanwhile", nil, id)
		s.skipParked(projector.ParkedFilter{}, 1)
	}
}

func givingUp(s *stage) {
	rows := s.setAside(poison("m-1", "ann"), waiting("m-2", "ann"), poison("m-3", "ben"))
	s.advance(time.Hour)
	before := s.listParked(projector.ParkedFilter{}) // the clock may have gone by moving times
	d := projector.Decision{By: `o'hara "日本"`, Reason: strings.Repeat("why; ", 200)}
	n, err := s.db.SkipParked(s.ctx, projector.ParkedFilter{Seqs: []int64{rows[0].Seq}}, d)
	s.ok(err, "skip")
	same(s, "skipped", n, 1)
	got := s.listParked(projector.ParkedFilter{State: projector.Skipped})
	same(s, "messages skipped", len(got), 1)
	s.holds(got[0].ResolvedAt.Sub(got[0].At) >= time.Hour, "it was skipped at %v, an hour after %v", got[0].ResolvedAt, got[0].At)
	want := before[0]
	want.State, want.Decision, want.ResolvedAt = projector.Skipped, d, got[0].ResolvedAt
	same(s, "skipped message", got[0], want)
	same(s, "what is left", s.listParked(projector.ParkedFilter{}), before[1:])
	for _, f := range []projector.ParkedFilter{
		{Seqs: []int64{rows[0].Seq}}, {State: projector.Skipped}, {State: projector.Replayed}, {Key: "nobody"}, {Seqs: []int64{}},
	} {
		s.skipParked(f, 0)
	}
	same(s, "what was skipped first stays so", s.listParked(projector.ParkedFilter{State: projector.Skipped}), got)
	again := poison("m-1", "ann")
	again.Payload = []byte("another")
	s.ok(s.do(s.ctx, projector.Work{Projector: "ratings", Park: []projector.Parked{again}}, nil), "park what was skipped")
	same(s, "what is left", s.listParked(projector.ParkedFilter{}), before[1:])
	other := poison("m-1", "")
	other.Handler = "ratings/other"
	s.setAside(other)
}

func givingUpOnSome(s *stage) {
	var ps []projector.Parked
	for range 130 {
		ps = append(ps, poison(newID(), "ann"))
	}
	rows := s.setAside(ps...)
	s.setAside(poison("m-1", "ben"))
	s.skipParked(projector.ParkedFilter{Key: "ann", Limit: 7}, 7)
	s.skipParked(projector.ParkedFilter{After: rows[9].Seq, Limit: 3}, 3)
	same(s, "the first that is left", s.listParked(projector.ParkedFilter{Limit: 4})[3].Seq, rows[13].Seq)
	s.skipParked(projector.ParkedFilter{Projector: "ratings", Handler: "ratings/posted", Code: "panic", Class: new(projector.PermanentClass), Key: "ann"}, 120)
	same(s, "what is left", idsOfParked(s.parked("", 0, 0)), []string{"m-1"})
}

func badDecisions(s *stage) {
	s.setAside(poison("m-1", "ann"), waiting("m-2", "ann"))
	before := s.dump()
	for _, d := range []projector.Decision{
		{}, {By: "ann"}, {Reason: "why"}, {By: strings.Repeat("x", 256), Reason: "why"}, {By: "ann", Reason: strings.Repeat("x", 1001)},
	} {
		n, err := s.db.SkipParked(s.ctx, projector.ParkedFilter{}, d)
		s.holds(errors.Is(err, projector.ErrInput), "the error %v is ErrInput", err)
		same(s, "skipped", n, 0)
	}
	s.unchanged(before, "decisions of nobody")
	s.isDue("after decisions of nobody", nil)
	n, err := s.db.SkipParked(s.ctx, projector.ParkedFilter{}, projector.Decision{By: strings.Repeat("x", 255), Reason: strings.Repeat("x", 1000)})
	s.ok(err, "skip with a long decision")
	same(s, "skipped", n, 2)
}

func skippedIsTold(s *stage) {
	other := poison("at another", "")
	other.Handler = "ratings/other"
	rows := s.setAside(poison("skipped", ""), poison("parked", ""), unregistered("nowhere", ""), other, poison("replayed", ""),
		poison("both", ""), unregistered("both", ""), poison("applied", ""), poison("both too", ""), unregistered("both too", ""))
	for _, i := range []int{0, 2, 3, 5, 7, 9} {
		s.skipParked(projector.ParkedFilter{Seqs: []int64{rows[i].Seq}}, 1)
	}
	unmarked := projector.Work{Projector: "ratings", Replay: []projector.Replay{replayOf(rows[4])}}
	s.ok(s.do(s.ctx, unmarked, nil), "replay without markers")
	s.ok(s.do(s.ctx, work("applied"), nil), "apply")
	was := func(id string) marker.Key {
		return marker.Key{Handler: "ratings/given", Was: []string{"ratings/posted"}, MessageID: id}
	}
	for id, want := range map[string]projector.Outcome{
		"skipped": projector.IsSkipped, "parked": projector.IsParked, "nowhere": projector.IsSkipped, "at another": projector.Unseen,
		"replayed": projector.Unseen, "both": projector.IsParked, "both too": projector.IsParked, "applied": projector.Applied, "unseen": projector.Unseen,
	} {
		same(s, "outcomes of "+id, s.outcomes(key(id), was(id)), []projector.Outcome{want, want})
	}
	elsewhere := marker.Key{Handler: "stars/given", MessageID: "nowhere"}
	same(s, "outcome at another projector", s.outcomes(elsewhere)[0], projector.Unseen)
}
