package providertest

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

var outputCases = []testCase{
	{
		name: "output goes to the outbox once", play: outputOnce,
		rule: "Do puts what apply returns into the outbox, in order, in the same transaction: there once, however often the message comes",
	},
	{
		name: "bad output leaves nothing", play: badOutput,
		rule: "An output message that is invalid is an *Error that wraps *eventstore.InvalidError, and all that the unit did is undone",
	},
}

var parkCases = []testCase{
	{
		name: "a parked message is kept", play: parkedIsKept,
		rule: "A parked message keeps all that is needed to look into it and to handle it later; Seq and At are the provider's to fill in",
	},
	{
		name: "pages of parked messages", play: parkedPages,
		rule: "ParkedMessages lists at most limit (zero means 100) parked messages of projector, of all where it is empty, whose Seq is greater than after, in order",
	},
	{
		name: "parked together with marks", play: parkedWithMarks,
		rule: "Do records the marks and the parked messages, and runs apply: all of it commits, or nothing",
	},
	{
		name: "a message is parked once", play: parkedOnce,
		rule: "A message is set aside once for a projector and handler: where it has an id and is there already, the first stays",
	},
	{
		name: "whatever came can be parked", play: whateverCame,
		rule: "What cannot be handled is parked with its payload, never dropped: also a message whose id, key or headers no text column takes",
	},
}

func outputOnce(s *stage) {
	out := []outbox.Message{
		{ID: newID(), Topic: "mail", Key: "ann", Payload: []byte("1E5 \x00"), Headers: map[string]string{"k": "v"}},
		{ID: "not a uuid", Topic: "mail", Key: "ann", Payload: []byte("second")},
		{ID: newID(), Topic: "audit", Key: "ann"},
	}
	for range 3 {
		s.ok(s.do(s.ctx, work("m-1"), func(unit) ([]outbox.Message, error) { return slices.Clone(out), nil }), "deliver")
		entries := s.entries(outbox.Filter{})
		same(s, "entries", len(entries), len(out))
		for i, e := range entries {
			same(s, "message", e.Message, out[i])
			same(s, "status", e.Status, outbox.Pending)
		}
	}
	s.ok(s.do(s.ctx, work("m-2"), func(unit) ([]outbox.Message, error) {
		return []outbox.Message{out[0], {Topic: "mail"}}, nil
	}), "deliver a message with a repeated output, and one without an id")
	entries := s.entries(outbox.Filter{})
	same(s, "entries", len(entries), len(out)+1)
	last := entries[len(out)]
	s.holds(last.ID != "" && last.Key == last.ID, "an output without id and key has drawn an id %q, and has it as its key %q", last.ID, last.Key)
}

func badOutput(s *stage) {
	for i, bad := range []outbox.Message{
		{}, {Topic: strings.Repeat("x", 256)}, {Topic: "t", ID: "\x00"}, {Topic: "t", Key: replacement},
		{Topic: "t", Payload: make([]byte, eventstore.DefaultMaxPayload+1)}, {Topic: "t", Headers: map[string]string{"": ""}},
	} {
		id := fmt.Sprint("m-", i)
		w, _ := full(id, nil)
		err := s.do(s.ctx, w, func(u unit) ([]outbox.Message, error) {
			return []outbox.Message{{Topic: "good"}, bad}, u.add("k", 1)
		})
		s.classed(err, "a unit with bad output", projector.UnknownClass, projector.PermanentClass)
		s.invalid(err, "a unit with bad output")
		s.untouched(id, "bad output")
	}
	s.works("m-0")
}

// parked lists what is parked of a projector, and ends the case on an error.
func (s *stage) parked(of string, after int64, limit int) []projector.Parked {
	s.Helper()
	got := s.listParked(projector.ParkedFilter{Projector: of, After: after, Limit: limit})
	if after == 0 && limit == 0 && len(got) < 100 { // the page is all there is
		n, err := s.db.ParkedCount(s.ctx, of)
		s.ok(err, "count parked messages")
		same(s, "count of parked messages", n, int64(len(got)))
	}
	return got
}

// listParked lists what f picks, with times and empty values in one form, and ends the case on an error.
func (s *stage) listParked(f projector.ParkedFilter) []projector.Parked {
	s.Helper()
	got, err := s.db.ParkedMessages(s.ctx, f)
	s.ok(err, "list parked messages")
	for i := range got {
		same(s, "zone of At", got[i].At.Location(), time.UTC)
		got[i] = plainParked(got[i])
	}
	return got
}

// plainParked is p in the one form that reflect.DeepEqual compares well.
func plainParked(p projector.Parked) projector.Parked {
	p.At, p.ResolvedAt = p.At.UTC().Round(0), p.ResolvedAt.UTC().Round(0)
	if len(p.Headers) == 0 {
		p.Headers = nil
	}
	if len(p.Payload) == 0 {
		p.Payload = nil
	}
	return p
}

func parkedIsKept(s *stage) {
	var want []projector.Parked
	for class := projector.UnknownClass; class <= projector.HeldClass; class++ {
		want = append(want, projector.Parked{
			Projector: "ratings", Handler: "ratings/posted", MessageID: fmt.Sprint("m'\" 日本 ", class), Topic: `t'o"p;ic`, Key: "review-42-ann",
			Payload: []byte("binary \x00\xff" + class.String()), Headers: map[string]string{outbox.HeaderType: "review.posted", "o'dd": `v"\ 日本`, "empty": ""},
			Class: class, Code: "23'505", Attempts: 5 + int(class), Type: "review.posted'é", Holds: class%2 == 0, Version: `v1.2-"日本"`,
		})
	}
	want = append(want, projector.Parked{Projector: "ratings", Payload: []byte("malformed: no id, no handler, no headers"), Class: projector.PermanentClass, Attempts: 1})
	theirs := slices.Clone(want[:2]) // the provider fills in what is its own to say
	theirs[0].Seq, theirs[0].State, theirs[0].At = 77, projector.Skipped, time.Unix(0, 0)
	theirs[0].ResolvedAt, theirs[0].Decision = time.Unix(0, 0), projector.Decision{By: "ann", Reason: "x"}
	s.ok(s.do(s.ctx, projector.Work{Projector: "ratings", Park: theirs}, nil), "park two")
	for _, p := range want[2:] {
		s.ok(s.do(s.ctx, projector.Work{Projector: "ratings", Park: []projector.Parked{p}}, nil), "park")
	}
	got := s.parked("ratings", 0, 0)
	same(s, "parked", len(got), len(want))
	last := int64(0)
	for i, p := range got {
		s.holds(p.Seq > last, "Seq %d is greater than %d", p.Seq, last)
		last = p.Seq
		s.holds(!p.At.IsZero(), "a parked message knows when it was parked")
		p.Seq, p.At = 0, want[i].At
		if len(p.Headers) == 0 {
			p.Headers = nil
		}
		same(s, "parked message", p, want[i])
	}
}

func parkedPages(s *stage) {
	var park []projector.Parked
	for i := range 150 {
		park = append(park, projector.Parked{Projector: []string{"ratings", "other", "ratings%"}[i%3], MessageID: fmt.Sprint(i), Payload: []byte("x")})
	}
	s.ok(s.do(s.ctx, projector.Work{Projector: "ratings", Park: park}, nil), "park")
	ids := func(ps []projector.Parked) (ids []string) {
		for _, p := range ps {
			ids = append(ids, p.MessageID)
		}
		return ids
	}
	of := func(first, step, n int) (ids []string) {
		for i := range n {
			ids = append(ids, fmt.Sprint(first+i*step))
		}
		return ids
	}
	same(s, "of all, without a limit", ids(s.parked("", 0, 0)), of(0, 1, 100))
	same(s, "of one, without a limit", ids(s.parked("other", 0, 0)), of(1, 3, 50))
	same(s, "of nobody", len(s.parked("nobody", 0, 0)), 0)
	first := s.parked("ratings", 0, 20)
	same(s, "first page", ids(first), of(0, 3, 20))
	second := s.parked("ratings", first[19].Seq, 20)
	same(s, "second page", ids(second), of(60, 3, 20))
	third := s.parked("ratings", second[19].Seq, 20)
	same(s, "last page", ids(third), of(120, 3, 10))
	same(s, "beyond the end", len(s.parked("ratings", third[9].Seq, 20)), 0)
	same(s, "the rest of all", ids(s.parked("", s.parked("", 0, 0)[99].Seq, 1000)), of(100, 1, 50))
}

func parkedWithMarks(s *stage) {
	w, apply := full("m-1", func(unit) error { return projector.Permanent(eventstore.ErrUnregistered) })
	s.classed(s.do(s.ctx, w, apply), "a failing unit that parks", projector.PermanentClass)
	s.untouched("m-1", "a failing unit that parks")
	s.works("m-1")
	same(s, "parked message", s.parked("ratings", 0, 0)[0].MessageID, "poison m-1")
	same(s, "outcome of the parked message", s.outcomes(key("poison m-1"))[0], projector.Unseen) // it is parked at another handler
}

func parkedOnce(s *stage) {
	park := func(handler, id, payload string) {
		s.ok(s.do(s.ctx, projector.Work{Projector: "ratings", Park: []projector.Parked{
			{Projector: "ratings", Handler: handler, MessageID: id, Payload: []byte(payload), Attempts: 5},
		}}, nil), "park")
	}
	for _, payload := range []string{"first", "second"} {
		park("ratings/posted", "m-1", payload)
		park("ratings/other", "m-1", payload)
		park("", "m-1", payload)
		park("", "", payload)
	}
	var got []string
	for _, p := range s.parked("", 0, 0) {
		got = append(got, p.Handler+" "+p.MessageID+" "+string(p.Payload))
	}
	same(s, "parked", got, []string{"ratings/posted m-1 first", "ratings/other m-1 first", " m-1 first", "  first", "  second"})
	s.ok(s.do(s.ctx, work("m-2"), nil), "mark")
	w := work("m-2")
	w.Park = []projector.Parked{{Projector: "ratings", Handler: "ratings/other", MessageID: "m-2"}}
	s.ok(s.do(s.ctx, w, adds("k", 1)), "park beside a mark that is known")
	same(s, "effects", s.total("k"), 0)
	same(s, "parked beside a mark that is known", len(s.parked("", 0, 0)), 6)
}

func whateverCame(s *stage) {
	odd := []projector.Parked{
		{MessageID: "\x00"}, {MessageID: replacement}, {MessageID: strings.Repeat("x", 10_000)},
		{Key: "\x00"}, {Key: replacement}, {Key: strings.Repeat("x", 10_000)}, {Topic: "a\x00b"},
		{Headers: map[string]string{"\x00": "\x00"}}, {Headers: map[string]string{replacement: replacement}}, {Headers: map[string]string{"": ""}},
		{Headers: map[string]string{"k": strings.Repeat("x", 100_000)}}, {Headers: map[string]string{"k": `\ud800`}},
		{Payload: make([]byte, 2*eventstore.DefaultMaxPayload)},
	}
	for i := range odd {
		p := &odd[i]
		p.Projector, p.Class, p.Code, p.Attempts = "ratings", projector.PermanentClass, "malformed", 1
		if p.Payload == nil {
			p.Payload = fmt.Appendf(nil, "\x00\xff %d", i)
		}
		s.ok(s.do(s.ctx, projector.Work{Projector: "ratings", Park: []projector.Parked{*p}}, nil), fmt.Sprintf("park message %d", i))
	}
	got := s.parked("ratings", 0, 0)
	same(s, "parked", len(got), len(odd))
	for i, p := range got {
		s.holds(string(p.Payload) == string(odd[i].Payload), "payload %d is kept", i)
		same(s, "code", p.Code, "malformed")
	}
}
