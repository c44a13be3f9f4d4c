package providertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

var journalCases = []testCase{
	{
		name: "an attempt whose message is parked", play: settledAttempts,
		rule: "Settled: its message is parked for this handler, by any of its names, or for none, or was skipped; its own parking (Attempt.Seq) does not settle it",
	},
	{
		name: "an attempt behind a parked message", play: heldAttempts,
		rule: "A parked message that holds, of the same projector and key, is in the way of the attempt where it is parked for the same handler, by any of its names, or for none, or is of a type that the handler does not take",
	},
	{
		name: "only earlier ones are in the way of a replay", play: heldBySmaller,
		rule: "Attempt.Seq: only messages with a smaller Seq are in the way of a parked message which is replayed",
	},
	{
		name: "the order of verdicts", play: orderOfVerdicts,
		rule: "Begin gives the verdict of each attempt, in order: Settled before Held before Suspect before Clear",
	},
	{
		name: "attempts under way are named", play: namedAttempts,
		rule: "Begin names those that are clear as under way with runner, and no others; an attempt that runner itself has named is clear, one that another has named is suspect",
	},
	{
		name: "names are taken back", play: namesTakenBack,
		rule: "Begin takes back the names of done, which are runner's own; also of an attempt that begins again in the same call",
	},
	{
		name: "whatever came can be an attempt", play: oddAttempts,
		rule: "What is parked, counted and held may have any id and any key, also such as no text column takes",
	},
	{
		name: "the journal with an ended context", play: journalEndedContext,
		rule: "A call whose context has ended does nothing, and its error wraps the context's",
	},
}

// posted is an attempt of a message at ratings/posted, which takes only review.posted.
func posted(id, key string) projector.Attempt {
	return projector.Attempt{Projector: "ratings", Handler: "ratings/posted", MessageID: id, Key: key, Takes: []string{"review.posted"}}
}

// poison is a message for which ratings/posted had failed for good.
func poison(id, key string) projector.Parked {
	return projector.Parked{
		Projector: "ratings", Handler: "ratings/posted", MessageID: id, Topic: "review", Key: key, Type: "review.posted", Holds: true,
		Payload: []byte("payload of " + id), Headers: map[string]string{outbox.HeaderType: "review.posted"},
		Class: projector.PermanentClass, Code: "panic", Attempts: 3, Version: "v1",
	}
}

// waiting is a message that waits behind a parked one.
func waiting(id, key string) projector.Parked {
	p := poison(id, key)
	p.Class, p.Code, p.Attempts = projector.HeldClass, "", 0
	return p
}

// setAside parks messages, and returns what is stored of them.
func (s *stage) setAside(ps ...projector.Parked) []projector.Parked {
	s.Helper()
	var after int64
	for state := projector.StillParked; state <= projector.Skipped; state++ {
		for _, p := range s.listParked(projector.ParkedFilter{State: state, Limit: 10_000}) {
			after = max(after, p.Seq)
		}
	}
	s.ok(s.do(s.ctx, projector.Work{Projector: "ratings", Park: ps}, nil), "park")
	stored := s.listParked(projector.ParkedFilter{After: after, Limit: 10_000})
	same(s, "messages parked", len(stored), len(ps))
	return stored
}

// skipParked gives up on what f picks, and ends the case if that is not so many.
func (s *stage) skipParked(f projector.ParkedFilter, want int) {
	s.Helper()
	n, err := s.db.SkipParked(s.ctx, f, projector.Decision{By: "ann", Reason: "broken for good"})
	s.ok(err, "skip parked messages")
	same(s, "parked messages skipped", n, want)
}

func (s *stage) begin(runner string, attempts ...projector.Attempt) []projector.Verdict {
	s.Helper()
	verdicts, err := s.db.Begin(s.ctx, runner, attempts, nil)
	s.ok(err, "begin")
	same(s, "verdicts", len(verdicts), len(attempts))
	return verdicts
}

// verdict ends the case if the verdict of a is another one. It asks in the name of a new runner, and names nothing for longer.
func (s *stage) verdict(what string, a projector.Attempt, want projector.Verdict) {
	s.Helper()
	asks := newID()
	same(s, "verdict of "+what, s.begin(asks, a)[0], want)
	s.ok(s.db.Alive(s.ctx, asks, 0), "end a runner")
}

func settledAttempts(s *stage) {
	none, other, elsewhere := poison("m-2", ""), poison("m-3", ""), poison("m-4", "")
	none.Handler, other.Handler, elsewhere.Projector, elsewhere.Handler = "", "ratings/other", "stars", "stars/posted"
	rows := s.setAside(poison("m-1", ""), none, other, elsewhere, poison("m-5", ""), poison("m-6", ""), unregistered("m-8", ""))
	s.skipParked(projector.ParkedFilter{Seqs: []int64{rows[4].Seq}}, 1)
	s.skipParked(projector.ParkedFilter{Seqs: []int64{rows[1].Seq}}, 1)
	s.ok(s.replay(rows[5]), "replay")
	for id, want := range map[string]projector.Verdict{
		"m-1": projector.Settled, "m-2": projector.Settled, "m-3": projector.Clear, "m-4": projector.Clear, "m-5": projector.Settled,
		"m-6": projector.Clear, "m-7": projector.Clear, "m-8": projector.Settled,
	} {
		s.verdict(id, posted(id, ""), want)
		renamed := posted(id, "")
		renamed.Handler, renamed.Was = "ratings/given", []string{"ratings/rated", "ratings/posted"}
		s.verdict(id+" at a renamed handler", renamed, want)
	}
	withdrawn := posted("m-1", "")
	withdrawn.Handler = "ratings/withdrawn"
	s.verdict("m-1 at another handler", withdrawn, projector.Clear)
	own := posted("m-1", "")
	own.Seq = rows[0].Seq
	s.verdict("m-1, replayed", own, projector.Clear)
	own.Seq = rows[2].Seq
	s.verdict("m-1, where another is replayed", own, projector.Settled)
}

func heldAttempts(s *stage) {
	ann, ben, cid, dan, eve, none := poison("m-1", "ann"), poison("m-2", "ben"), poison("m-3", "cid"), poison("m-4", "dan"), poison("m-5", "eve"), poison("m-6", "")
	ben.Handler, ben.Type = "", "review.liked"
	cid.Handler, cid.Type = "ratings/other", "review.liked"
	dan.Holds = false
	eve.Projector, eve.Handler = "stars", ""
	rows := s.setAside(ann, ben, cid, dan, eve, none)
	at := func(handler, key string, takes ...string) projector.Attempt {
		a := posted("m-9", key)
		a.Handler, a.Takes = handler, takes
		return a
	}
	renamed := at("ratings/given", "ann", "review.given", "review.posted")
	renamed.Was = []string{"ratings/rated", "ratings/posted"}
	for what, c := range map[string]struct {
		a    projector.Attempt
		want projector.Verdict
	}{
		"one for the same handler":                   {posted("m-9", "ann"), projector.Held},
		"one for the same handler, under its old":    {renamed, projector.Held},
		"one for another, of a type that it takes":   {at("ratings/other", "ann", "review.posted"), projector.Clear},
		"one for another, of a type that it did not": {at("ratings/other", "ann", "review.liked"), projector.Held},
		"one for another, where it takes nothing":    {at("ratings/other", "ann"), projector.Held},
		"one for no handler":                         {posted("m-9", "ben"), projector.Held},
		"one for no handler, of a type that it took": {at("ratings/other", "ben", "review.liked"), projector.Held},
		"one for the last, of a type of its own":     {posted("m-9", "cid"), projector.Held},
		"one for the last, of a type of both":        {at("ratings/posted", "cid", "review.posted", "review.liked"), projector.Clear},
		"one that does not hold":                     {posted("m-9", "dan"), projector.Clear},
		"one of another projector":                   {posted("m-9", "eve"), projector.Clear},
		"nothing of its key":                         {posted("m-9", "ANN"), projector.Clear},
		"nothing, without a key":                     {posted("m-9", ""), projector.Clear},
	} {
		s.verdict("an attempt behind "+what, c.a, c.want)
	}
	s.skipParked(projector.ParkedFilter{Seqs: []int64{rows[1].Seq}}, 1)
	s.verdict("an attempt behind one that was skipped", posted("m-9", "ben"), projector.Clear)
	s.ok(s.replay(rows[0]), "replay")
	s.verdict("an attempt behind one that was replayed", posted("m-9", "ann"), projector.Clear)
}

func heldBySmaller(s *stage) {
	rows := s.setAside(poison("m-1", "ann"), waiting("m-2", "ann"), poison("m-3", "ann"))
	for i, want := range []projector.Verdict{projector.Clear, projector.Held, projector.Held} {
		s.verdict("the replay of "+rows[i].MessageID, replayOf(rows[i]).Attempt, want)
	}
	s.ok(s.replay(rows[0]), "replay the first")
	for i, want := range []projector.Verdict{projector.Clear, projector.Held} {
		s.verdict("the replay of "+rows[i+1].MessageID, replayOf(rows[i+1]).Attempt, want)
	}
	s.verdict("another attempt", posted("m-4", "ann"), projector.Held)
}

func orderOfVerdicts(s *stage) {
	a := posted("m-1", "ann")
	s.verdict("a new message", a, projector.Clear)
	same(s, "verdict for the first runner", s.begin("one", a)[0], projector.Clear)
	s.verdict("one that another has named", a, projector.Suspect)
	s.setAside(poison("m-0", "ann"))
	s.verdict("one that another has named, and that is held", a, projector.Held)
	same(s, "verdict of one's own that is held", s.begin("one", a)[0], projector.Held)
	s.setAside(waiting("m-1", "ann"))
	s.verdict("one that another has named, and that is held, and parked", a, projector.Settled)
	s.skipParked(projector.ParkedFilter{}, 2)
	s.verdict("one that another has named, and that was skipped", a, projector.Settled)
	same(s, "several verdicts", s.begin("two", posted("m-3", "ann"), a, posted("m-3", "ben"), posted("m-0", "ann"), posted("m-4", "")),
		[]projector.Verdict{projector.Clear, projector.Settled, projector.Clear, projector.Settled, projector.Clear})
	same(s, "no verdicts", len(s.begin("two")), 0)
}

func namedAttempts(s *stage) {
	many := []projector.Attempt{}
	for i := range 300 {
		many = append(many, posted(fmt.Sprint("m-", i), fmt.Sprint("key ", i%7)))
	}
	all := func(v projector.Verdict) []projector.Verdict { return slices.Repeat([]projector.Verdict{v}, len(many)) }
	for range 2 {
		same(s, "verdicts for the first runner", s.begin("one", many...), all(projector.Clear))
	}
	for range 2 {
		same(s, "verdicts for the second runner", s.begin("two", many...), all(projector.Suspect))
	}
	same(s, "verdicts for the first runner, still", s.begin("one", many...), all(projector.Clear))
	for i := range many {
		many[i].Handler = "ratings/other"
	}
	same(s, "verdicts at another handler", s.begin("two", many...), all(projector.Clear))

	held, settled := posted("m-held", "ann"), posted("m-0", "ann")
	rows := s.setAside(poison("m-0", "ann"))
	same(s, "verdicts of what must not run", s.begin("three", held, settled), []projector.Verdict{projector.Held, projector.Settled})
	s.ok(s.replay(rows[0]), "replay")
	same(s, "verdicts of what could not be named", s.begin("four", held), []projector.Verdict{projector.Clear})
}

func namesTakenBack(s *stage) {
	a, b, c := posted("m-1", "ann"), posted("m-2", "ann"), posted("m-3", "ann")
	begin := func(runner string, attempts, done []projector.Attempt, want ...projector.Verdict) {
		s.Helper()
		got, err := s.db.Begin(s.ctx, runner, attempts, done)
		s.ok(err, "begin")
		s.holds(slices.Equal(got, want), "the verdicts for %s are %v, not %v", runner, want, got)
	}
	list := func(as ...projector.Attempt) []projector.Attempt { return as }
	begin("one", list(a, b), nil, projector.Clear, projector.Clear)
	begin("two", list(a, b), list(a, b), projector.Suspect, projector.Suspect) // they are not its own
	begin("two", list(a, b), nil, projector.Suspect, projector.Suspect)
	begin("one", list(c), list(a), projector.Clear)
	begin("two", list(a, b, c), nil, projector.Clear, projector.Suspect, projector.Suspect)
	begin("one", nil, list(b, c, posted("never", "begun")))
	begin("two", list(b, c), nil, projector.Clear, projector.Clear)
	begin("two", list(a), list(a, b), projector.Clear) // again, and still under way
	begin("one", list(a, b), nil, projector.Suspect, projector.Clear)
	otherwise := a
	otherwise.Handler = "ratings/other"
	begin("two", nil, list(otherwise))
	begin("three", list(a), nil, projector.Suspect)
}

func oddAttempts(s *stage) {
	odd := []string{"\x00", "a\x00b", replacement, "\xff\xfe", "日本", `'"\`, "%", strings.Repeat("x", 255), randomText(5000)}
	for _, text := range odd {
		a := posted(text, text)
		same(s, fmt.Sprintf("verdict of %.20q", text), s.begin("one", a)[0], projector.Clear)
		s.verdict(fmt.Sprintf("%.20q for another", text), a, projector.Suspect)
		s.countAttempt(a, 1)
		s.alone("two", a, 9, 2, 0)
		_, err := s.db.Begin(s.ctx, "two", nil, []projector.Attempt{a})
		s.ok(err, "be done")
		row := s.setAside(poison(text, text))[0]
		s.verdict(fmt.Sprintf("%.20q, parked", text), a, projector.Settled)
		later := posted("m-2", text)
		s.verdict(fmt.Sprintf("one behind %.20q", text), later, projector.Held)
		behind := projector.Work{Projector: "ratings", Park: []projector.Parked{waiting("behind "+newID(), text)}, Behind: &later, Forget: []projector.Attempt{a}}
		s.ok(s.do(s.ctx, behind, nil), "park behind it")
		s.skipParked(projector.ParkedFilter{Seqs: []int64{row.Seq}}, 1)
		due := s.due(nil)
		same(s, fmt.Sprintf("messages due behind %.20q", text), len(due), 1)
		s.skipParked(projector.ParkedFilter{Seqs: []int64{due[0].Seq}}, 1)
		s.countAttempt(a, 1)
	}
}

func journalEndedContext(s *stage) {
	a := posted("m-1", "ann")
	row := s.setAside(poison("m-0", "ann"))[0]
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	failed := row
	failed.Code = "deadline"
	_, beginErr := s.db.Begin(ctx, "one", []projector.Attempt{posted("m-1", "ben")}, nil)
	_, _, aloneErr := s.db.BeginAlone(ctx, "one", a, 3)
	_, countErr := s.db.CountAttempt(ctx, "one", a, -1)
	_, dueErr := s.db.DueParked(ctx, "ratings", nil, 0, 10)
	_, pruneErr := s.db.PruneJournal(ctx, "ratings", time.Hour, 10)
	_, skipErr := s.db.SkipParked(ctx, projector.ParkedFilter{}, projector.Decision{By: "ann", Reason: "why not"})
	_, markersErr := s.db.PruneMarkers(ctx, "ratings/posted", time.Hour, 10)
	_, floorErr := s.db.Floor(ctx, "ratings/posted")
	for i, err := range []error{
		beginErr, aloneErr, countErr, dueErr, pruneErr, skipErr, markersErr, floorErr,
		s.db.Alive(ctx, "one", time.Hour), s.db.FailParked(ctx, "one", failed, replayOf(row).Attempt),
	} {
		s.holds(errors.Is(err, context.Canceled), "the error %v of call %d is context.Canceled", err, i)
	}
	same(s, "what is parked", s.listParked(projector.ParkedFilter{}), []projector.Parked{row})
	s.countAttempt(a, 1)
	s.verdict("what did not begin", posted("m-1", "ben"), projector.Clear)
}
