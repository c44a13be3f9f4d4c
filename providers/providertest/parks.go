package providertest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/provider"
)

var parksCases = []testCase{
	{
		// Promise: G6.7
		name: "a parked message is kept", play: parkedIsKept,
		rule: "A parked message keeps all that is needed to inspect it and to apply it later; the provider fills in Seq, At, DueAt and State",
	},
	{
		// Promise: G6.7
		name: "hostile text", play: hostileText,
		rule: "Any id, key, type, code and header is parked and returned byte for byte: with NUL, invalid UTF-8, or 10 kB",
	},
	{
		name: "parked with the commit", play: parkedWithCommit,
		rule: "Messages are parked with the unit's commit, and their markers stay: a redelivery is not fresh",
	},
	{
		name: "in order behind those of the lane", play: parkedInOrder,
		rule: "Deliveries become parked messages behind those of their lane, in order of Seq",
	},
	{
		name: "when a lane is due", play: parkedAfter,
		rule: "Aside.After is how long until its lane is due, if it is the first of its lane. Negative: it is stuck",
	},
	{
		name: "parked twice", play: parkedTwice,
		rule: "A message that is parked for the projector already, by its id, is not parked twice: its Handlers are added to the stored ones. A skipped one stays skipped",
	},
	{
		name: "parked again", play: parkedAgain,
		rule: "A replayed message can be parked again, behind those of its lane",
	},
	{
		name: "projectors and lanes are independent", play: lanesApart,
		rule: "A hold is of one projector and one lane",
	},
	{
		name: "a message parked many times at once", play: parkedAtOnce,
		rule: "A message that many units park at once is parked once",
	},
}

func parkedIsKept(s *stage) {
	var want []provider.Parked
	for class := provider.ClassUnknown; class <= provider.ClassHeld; class++ {
		p := s.failed(fmt.Sprint("m'\" 日本 ", class), fmt.Sprint("review-42-ann ", class))
		p.Topic, p.Payload = `t'o"p;ic`, []byte("binary \x00\xff"+class.String())
		p.Headers = map[string]string{provider.HeaderType: "review.posted", "o'dd": `v"\ 日本`, "empty": ""}
		p.Handlers = []string{s.name + "/posted", s.name + "/it's"}
		p.Class, p.Code, p.Error, p.Attempts, p.Type, p.Version = class, "23'505", "it's\n\x00 \xff a stack", 5+int(class), "review.posted'é", `v1.2-"日本"`
		want = append(want, p)
	}
	want = append(want, provider.Parked{Projector: s.name, Generation: s.generation, Payload: []byte("malformed: no id, no handler, no headers"), Class: provider.ClassPermanent, Attempts: 1, Lane: laneOf("none", "")})
	theirs := slices.Clone(want)
	theirs[0].Seq, theirs[0].State, theirs[0].At, theirs[0].DueAt = 77, provider.StateSkipped, time.Unix(0, 0), time.Unix(0, 0)
	s.park(time.Hour, theirs...)
	last := int64(0)
	for i, p := range s.rows() {
		s.require(p.Seq > last, "Seq %d is greater than %d", p.Seq, last)
		last = p.Seq
		due := p.DueAt.Sub(p.At)
		s.require(due > 50*time.Minute && due < 70*time.Minute, "its lane is due at %v, an hour after %v", p.DueAt, p.At)
		p.Seq, p.At, p.DueAt = 0, time.Time{}, time.Time{}
		same(s, "parked message", p, want[i])
	}
}

// hostileText parks text that no text column accepts, and finds and resolves it.
func hostileText(s *stage) {
	long := strings.Repeat("x", 10_000)
	var want []provider.Parked
	for i, text := range []string{"\x00", "a\x00b", "\xff", "\xfe", "\ufffd", `\ud800`, long, long + "y", long + "\x00\xff"} {
		p := s.failed(text, text)
		p.Type, p.Code, p.Headers = text, text, map[string]string{"k": text, text: "v"}
		// no runner marks such a message
		p.Payload, p.Handler, p.Handlers = fmt.Append(nil, i, text), "", nil
		want = append(want, p)
	}
	big := s.failed("big", "")
	big.Payload, big.Topic = make([]byte, 2*provider.DefaultMaxPayload), "a\x00b\xff"
	s.park(0, big)
	s.park(0, want...)
	rows := s.rows()[1:]
	for i, p := range rows {
		w := want[i]
		w.Seq, w.At, w.DueAt = p.Seq, p.At, p.DueAt
		same(s, "parked message", p, w)
		same(s, "selected by key and code", idsOfParked(s.list(provider.ParkedFilter{Projector: s.name, Key: w.Key, Code: w.Code})), []string{w.MessageID})
		same(s, "selected by type", idsOfParked(s.list(provider.ParkedFilter{Projector: s.name, Types: []string{w.Type}})), []string{w.MessageID})
	}
	same(s, "due", len(s.due()), len(rows)+1)
	live := slices.Repeat([]bool{true}, len(rows))
	same(s, "live", s.open(s.parkedUnit(rows...), nothing).Live, live)
	same(s, "left", idsOfParked(s.rows()), []string{"big"})
}

func parkedWithCommit(s *stage) {
	u, run := s.parking(0, s.failed("m-1", "ann"))
	err := s.do(s.ctx, u, func(o opened) (provider.Closing, error) {
		c, _ := run(o)
		return c, errRefused
	})
	s.require(errors.Is(err, errRefused), "the error %v is run's", err)
	same(s, "parked by a unit that failed", len(s.rows()), 0)
	s.isHeld("after a unit that failed", "ann", false)
	s.open(u, run)
	same(s, "parked", len(s.rows()), 1)
	s.isHeld("after the unit", "ann", true)
	same(s, "fresh when it is redelivered", s.open(s.unit(s.message("m-1", "ann")), effects).Fresh, [][]bool{{false}})
	s.outcomes("of a parked message", []string{"m-1"}, provider.OutcomeWaiting)
	row := s.rows()[0]
	s.runs("the parked message", []provider.Parked{row}, true)
	same(s, "fresh after it was applied", s.open(s.unit(s.message("m-1", "ann")), effects).Fresh, [][]bool{{false}})
	same(s, "total", s.total("m-1"), 1)
	s.outcomes("of an applied message", []string{"m-1"}, provider.OutcomeApplied)
	s.isHeld("after it was applied", "ann", false)
}

func parkedInOrder(s *stage) {
	var want []string
	for i := range 3 {
		var ps []provider.Parked
		for j := range 4 {
			id := fmt.Sprint("m-", i, j)
			want = append(want, id)
			ps = append(ps, s.behind(id, "ann"), s.behind(id+"b", "ben"))
		}
		s.park(0, ps...)
	}
	rows := slices.DeleteFunc(s.rows(), func(p provider.Parked) bool { return p.Key != "ann" })
	same(s, "in order of Seq", idsOfParked(rows), want)
	due, err := s.db.Due(s.ctx, provider.DueFilter{Builds: []provider.Build{s.build()}, Lanes: []provider.Lane{provider.LaneOfKey("ann")}, Keys: 1, Each: 100})
	s.ok(err, "list due messages")
	same(s, "due", idsOfParked(due), want)
}

func parkedAfter(s *stage) {
	s.park(-1, s.failed("stuck", "ann"))
	s.park(0, s.behind("behind stuck", "ann"))
	s.park(2*time.Hour, s.failed("late", "ben"))
	s.park(0, s.behind("behind late", "ben"))
	u, _ := s.parking(0, s.failed("first", "cid"), s.behind("second", "cid"))
	// the first message of a lane counts, also within one unit
	s.open(u, func(opened) (provider.Closing, error) {
		return provider.Closing{Park: []provider.Aside{
			{Message: 0, Parked: s.failed("first", "cid"), After: time.Hour}, {Message: 1, Parked: s.behind("second", "cid")},
		}}, nil
	})
	s.park(0, s.failed("now", "dan"))
	s.park(-1, s.failed("stuck behind", "dan"))
	s.isDue("at first", "now")
	s.advance(90 * time.Minute)
	s.isDue("after 90 minutes", "first", "now")
	s.advance(time.Hour)
	s.isDue("after 150 minutes", "now", "first", "late")
	s.advance(10_000 * time.Hour)
	s.isDue("a long time later", "now", "first", "late")
	rows := s.rows()
	s.states("as parked", rows, provider.StateStuck, provider.StateWaiting, provider.StateWaiting, provider.StateWaiting, provider.StateWaiting,
		provider.StateWaiting, provider.StateWaiting, provider.StateStuck)
	s.require(rows[0].DueAt.IsZero() && rows[1].DueAt.IsZero(), "a lane whose first message is stuck is never due: %v, %v", rows[0].DueAt, rows[1].DueAt)
	s.outcomes("in a stuck lane", []string{"stuck", "behind stuck", "late", "stuck behind"},
		provider.OutcomeStuck, provider.OutcomeStuck, provider.OutcomeWaiting, provider.OutcomeStuck)
	s.runs("the first of a lane whose next is stuck", []provider.Parked{rows[6]}, true)
	s.isDue("once the stuck message is the first", "first", "late")
}

func parkedTwice(s *stage) {
	row := s.park(time.Hour, s.failed("m-1", "ann"))[0]
	late := s.failed("m-1", "ann")
	late.Handlers, late.Payload, late.Code, late.Attempts = []string{s.name + "/posted", s.name + "/late"}, []byte("late"), "late", 7
	s.open(s.parking(0, late))
	row.Handlers = append(row.Handlers, s.name+"/late")
	same(s, "a message that is parked twice", s.rows(), []provider.Parked{row})
	s.isDue("after it was parked twice")

	s.decide(provider.ParkedFilter{}, provider.StateWaiting, 1)
	row = s.row(row.Seq)
	row.DueAt = time.Time{}
	late.Handlers = []string{s.name + "/later"}
	s.open(s.parking(-1, late))
	row.Handlers = append(row.Handlers, s.name+"/later")
	got := s.row(row.Seq)
	got.DueAt = time.Time{}
	same(s, "a message that is parked once more", got, row)
	s.isDue("after it was parked once more", "m-1")

	s.skip(row)
	row = s.row(row.Seq)
	late.Handlers = []string{s.name + "/last"}
	s.open(s.parking(0, late))
	same(s, "a skipped message that is parked", s.row(row.Seq), row)
	same(s, "parked", len(s.rows()), 0)
	s.isHeld("after a skipped message is parked", "ann", false)
	parkedUntypedTwice(s)
	nameless := s.untyped("", "cid")
	same(s, "messages without an id", len(s.park(0, nameless, nameless)), 2)
}

// parkedUntypedTwice: a message that is parked before its type is known has no markers.
func parkedUntypedTwice(s *stage) {
	row := s.park(0, s.untyped("m-2", "ben"))[0]
	s.open(s.parking(0, s.untyped("m-2", "ben")))
	same(s, "handlers of an untyped message", s.row(row.Seq).Handlers, nil)
	late := s.failed("m-2", "ben")
	s.open(s.parking(0, late))
	same(s, "handlers once its type is known", s.row(row.Seq).Handlers, late.Handlers)
	s.open(s.parking(0, s.untyped("m-2", "ben")))
	same(s, "handlers after an older program parked it", s.row(row.Seq).Handlers, late.Handlers)
	s.skip(row)
}

func parkedAgain(s *stage) {
	rows := s.park(0, s.failed("m-1", "ann"), s.failed("m-2", "ben"), s.behind("m-3", "ben"))
	s.runs("all", rows, true, true, true)
	first := s.park(0, s.behind("m-3", "ben"), s.failed("m-2", "ben"))
	same(s, "parked again", idsOfParked(first), []string{"m-3", "m-2"})
	s.decide(provider.ParkedFilter{}, provider.StateWaiting, 2)
	s.runs("all", s.rows(), true, true)
	s.states("after a decision", first, provider.StateReplayed, provider.StateReplayed)
	second := s.park(0, s.failed("m-2", "ben"))[0]
	s.require(second.Seq > first[1].Seq, "Seq %d is greater than %d", second.Seq, first[1].Seq)
	same(s, "its decision", []any{second.Decision, second.ResolvedAt.IsZero()}, []any{provider.Decision{}, true})
	s.states("of the first", first, provider.StateReplayed, provider.StateReplayed)
}

func lanesApart(s *stage) {
	s.park(0, s.failed("m-1", "ann"), s.failed("m-2", ""))
	for _, c := range []struct {
		projector string
		lane      provider.Lane
		want      bool
	}{
		{s.name, provider.LaneOfKey("ann"), true},
		{s.name, provider.LaneOfMessage("m-2"), true},
		{s.name, provider.LaneOfMessage("m-1"), false},
		{s.name, provider.LaneOfMessage("ann"), false},
		{s.name, provider.LaneOfKey("m-2"), false},
		{s.name, provider.LaneOfKey("Ann"), false},
		{s.name, provider.LaneOfKey(""), false},
		{s.name + "x", provider.LaneOfKey("ann"), false},
	} {
		u := provider.Unit{Projector: c.projector, Messages: []provider.Message{{ID: newID(), Lane: c.lane}}}
		same(s, fmt.Sprintf("held %+v", c), s.open(u, nothing).Held, []bool{c.want})
	}
	u := s.unit(s.message("m-3", "ann"), s.message("m-4", "ben"), s.message("m-5", "ann"), s.message("m-6", ""))
	same(s, "held in one unit", s.open(u, nothing).Held, []bool{true, false, true, false})
}

func parkedAtOnce(s *stage) {
	const n = 20
	errs := make([]error, n)
	together(n, func(i int) {
		p := s.failed("m-1", "ann")
		u, run := s.parking(0, p, s.behind(fmt.Sprint("other ", i), fmt.Sprint("key ", i)))
		errs[i] = s.do(s.ctx, u, func(o opened) (provider.Closing, error) {
			c, err := run(o)
			if !o.Fresh[0][0] {
				c.Park = c.Park[1:]
			}
			return c, err
		})
	})
	s.ok(errors.Join(errs...), "park at once")
	rows := s.rows()
	same(s, "parked", len(rows), n+1)
	once := slices.DeleteFunc(rows, func(p provider.Parked) bool { return p.MessageID != "m-1" })
	same(s, "parked with the one id", len(once), 1)

	unmarked := s.untyped("m-2", "ben")
	errs = errs[:4]
	together(len(errs), func(i int) { // without markers, the units do not wait for each other there
		u, run := s.parking(0, unmarked)
		for errs[i] = s.do(s.ctx, u, run); provider.CodeOf(errs[i]) == provider.CodeDeadlock; {
			errs[i] = s.do(s.ctx, u, run)
		}
	})
	s.ok(errors.Join(errs...), "park at once without markers")
	same(s, "parked", len(s.rows()), n+2)
}
