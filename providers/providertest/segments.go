package providertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

var segmentCases = []testCase{
	{
		name: "a split and its segments", play: splitKept,
		rule: "SetCheckpoint replaces the Splits. TakeSegment creates a segment of the current one at the place of the checkpoint",
	},
	{
		name: "a segment that cannot be taken", play: segmentRefused,
		rule: "TakeSegment returns false, and changes nothing, if the current Split does not have the segment, or if the mode is not ModeCatchUp",
	},
	{
		name: "a unit of a segment", play: segmentMoves,
		rule: "With Unit.Segment, Advance moves the segment instead of the checkpoint, in the transaction of the unit. What is not behind the segment is not fresh",
	},
	{
		// Promise: G7.8
		name: "a fenced unit of a segment", play: segmentFenced,
		rule: "ErrFenced: the segment is not as Unit.Advance says, or it does not exist, or the current Split does not have it. Nothing was committed",
	},
	{
		name: "a segment is taken over", play: segmentTakenOver,
		rule: "After TakeSegment, units with the token before are ErrFenced",
	},
	{
		name: "a segment moves past a poison event", play: segmentParks,
		rule: "A unit with Segment parks and holds like any other",
	},
	{
		name: "a new split", play: splitReplaced,
		rule: "SetCheckpoint returns false unless the Splits are those of from. Segments with numbers below those of to.Splits are deleted, the others stay as they are",
	},
	{
		// Promise: G7.8
		name: "a new split waits for an open unit", unless: Deferred, play: newSplitWaits,
		rule: "A new Split is set while no unit of the projector is open",
	},
	{
		name: "segments of a generation that ends", play: segmentsEnd,
		rule: "With GenerationStandby the tokens of segments become zero; with GenerationRetired their units fail with ErrEnded",
	},
	{
		name: "segments of generations", play: segmentsOfGenerations,
		rule: "Each generation has its own segments",
	},
	{
		// Promise: G7.8
		name: "segments at once", play: segmentsAtOnce,
		rule: "Units of different segments are open at the same time. Of several units of one segment with the same Advance.From, exactly one commits",
	},
	{
		name: "a split that cannot be stored", play: badSplit,
		rule: "SetCheckpoint: First must be at least 1 and Count at least 0",
	},
}

// split sets the Splits of a checkpoint.
func (s *stage) split(c provider.Checkpoint, all ...provider.Split) provider.Checkpoint {
	s.Helper()
	to := c
	to.Splits = all
	return s.set(c, to)
}

// take takes a segment, and returns it as it is then.
func (s *stage) takeSegment(number int) provider.Segment {
	s.Helper()
	token := claim.NewToken()
	is, ok, err := s.db.TakeSegment(s.ctx, s.build(), number, token)
	s.ok(err, "take a segment")
	same(s, "the segment was taken", ok, true)
	same(s, "number of the segment", is.Number, number)
	is.Token = token
	return is
}

// inSegment returns a unit of events that moves a segment to a position.
func (s *stage) inSegment(of provider.Segment, to int64, positions ...int64) provider.Unit {
	u := s.events(positions...)
	u.Segment = of.Number
	u.Reader = &provider.Reader{Mode: provider.ModeCatchUp, Token: of.Token}
	u.Advance = &provider.Advance{From: of.Place.Position, To: place(to), Mode: provider.ModeCatchUp, Token: of.Token}
	return u
}

// segments returns the segments, in a form that reflect.DeepEqual can compare.
func (s *stage) segments() []provider.Segment {
	s.Helper()
	all := s.checkpoint().Segments
	for i := range all {
		all[i].Place.RecordedAt = all[i].Place.RecordedAt.UTC()
	}
	return all
}

// at returns a segment at another position.
func at(of provider.Segment, position int64) provider.Segment {
	of.Place = place(position)
	return of
}

func splitKept(s *stage) {
	c := s.begins(3, provider.ModeCatchUp)
	c = s.split(c, provider.Split{First: 1, Count: 4})
	same(s, "checkpoint", s.checkpoint(), c)
	two := s.takeSegment(2)
	same(s, "place of a new segment", two.Place, place(3))
	one := s.takeSegment(1)
	c.Segments = []provider.Segment{one, two}
	is := s.checkpoint()
	is.Segments = s.segments()
	same(s, "checkpoint with segments", is, c)
	later := moved(c, 5)
	s.set(c, later)
	four := s.takeSegment(4)
	same(s, "place of a segment that is created later", four.Place, place(5))
	same(s, "segments", s.segments(), []provider.Segment{one, two, four})
}

func segmentRefused(s *stage) {
	refused := func(what string, number int) {
		s.Helper()
		_, ok, err := s.db.TakeSegment(s.ctx, s.build(), number, claim.NewToken())
		s.ok(err, "take a segment")
		same(s, "segment taken "+what, ok, false)
	}
	refused("without a checkpoint", 1)
	c := s.begins(3, provider.ModeCatchUp)
	refused("without a split", 1)
	c = s.split(c, provider.Split{First: 3, Count: 2}, provider.Split{First: 1, Count: 2})
	for _, number := range []int{0, 1, 2, 5, -1} {
		refused(fmt.Sprintf("that the split does not have: %d", number), number)
	}
	c = s.split(c, provider.Split{First: 5}, provider.Split{First: 3, Count: 2})
	refused("after the split", 5)
	c = s.split(c, provider.Split{First: 5, Count: 2})
	c = s.mode(c, provider.ModeLive)
	refused("in another mode", 5)
	same(s, "checkpoint", s.checkpoint(), c)
}

func segmentMoves(s *stage) {
	c := s.split(s.begins(0, provider.ModeCatchUp), provider.Split{First: 1, Count: 2})
	one, two := s.takeSegment(1), s.takeSegment(2)
	s.open(s.inSegment(one, 4, 1, 3), effects)
	one = at(one, 4)
	same(s, "segments", s.segments(), []provider.Segment{one, two})
	is := s.checkpoint()
	is.Segments = nil
	same(s, "checkpoint", is, c)
	s.open(s.inSegment(one, 9), nothing)
	one = at(one, 9)
	same(s, "fresh", s.open(s.inSegment(one, 12, 8, 9, 11), effects).Fresh, [][]bool{{false}, {false}, {true}})
	one = at(one, 12)
	s.open(s.inSegment(two, 6, 2, 6), effects)
	same(s, "segments", s.segments(), []provider.Segment{one, at(two, 6)})
	s.effectsOf("of the segments", 5, 1, 2, 3, 6, 11)
	s.applied("by segments", []int64{1, 3, 11}, false, false, false) // that is the checkpoint
	err := s.do(s.ctx, s.inSegment(one, 20, 13), func(o opened) (provider.Closing, error) {
		closing, err := effects(o)
		return closing, errors.Join(err, errRefused)
	})
	s.require(errors.Is(err, errRefused), "the error %v is run's", err)
	same(s, "segments after a unit that failed", s.segments(), []provider.Segment{one, at(two, 6)})
	s.effectsOf("of a unit that failed", 0, 13)
}

func segmentFenced(s *stage) {
	c := s.split(s.begins(5, provider.ModeCatchUp), provider.Split{First: 1, Count: 2})
	one := s.takeSegment(1)
	s.open(s.inSegment(one, 7, 6, 7), effects)
	one = at(one, 7)
	fenced := func(what string, of provider.Segment) {
		s.Helper()
		for _, positions := range [][]int64{nil, {8, 9}} {
			s.fenced(s.do(s.ctx, s.inSegment(of, 9, positions...), effects), "a move of "+what)
		}
	}
	as := func(fn func(*provider.Segment)) provider.Segment {
		is := one
		fn(&is)
		return is
	}
	fenced("an earlier position", as(func(is *provider.Segment) { is.Place = place(5) }))
	fenced("a later position", as(func(is *provider.Segment) { is.Place = place(8) }))
	fenced("another token", as(func(is *provider.Segment) { is.Token = claim.NewToken() }))
	fenced("the token of the checkpoint", as(func(is *provider.Segment) { is.Token = c.Token }))
	fenced("no token", as(func(is *provider.Segment) { is.Token = claim.Token{} }))
	fenced("a segment that was not taken", as(func(is *provider.Segment) { is.Number = 2 }))
	fenced("a segment that does not exist", as(func(is *provider.Segment) { is.Number = 3 }))
	c = s.split(c, provider.Split{First: 3, Count: 2}, provider.Split{First: 1, Count: 2})
	fenced("a segment of an earlier split", one)
	c = s.split(c, provider.Split{First: 5}, provider.Split{First: 3, Count: 2}, provider.Split{First: 1, Count: 2})
	fenced("a segment after the split", one)
	same(s, "segments", s.segments(), []provider.Segment{one})
	s.effectsOf("of fenced moves", 0, 8, 9)
	s.move(c, 8)
}

func segmentTakenOver(s *stage) {
	s.split(s.begins(0, provider.ModeCatchUp), provider.Split{First: 1, Count: 2})
	one := s.takeSegment(1)
	s.open(s.inSegment(one, 2, 1, 2), effects)
	next := s.takeSegment(1)
	same(s, "place of a segment that is taken over", next.Place, place(2))
	s.fenced(s.do(s.ctx, s.inSegment(at(one, 2), 4, 3), effects), "a move of the reader before")
	s.open(s.inSegment(next, 4, 3), effects)
	s.effectsOf("of both readers", 3, 1, 2, 3)
}

func segmentParks(s *stage) {
	s.split(s.begins(0, provider.ModeCatchUp), provider.Split{First: 1, Count: 2})
	one := s.takeSegment(1)
	poison, next := s.failed("e-1", "ann"), s.behind("e-2", "ann")
	u := s.inSegment(one, 2)
	for i, p := range []provider.Parked{poison, next} {
		m := delivery(p)
		m.Position = int64(i + 1)
		u.Messages = append(u.Messages, m)
	}
	s.open(u, func(opened) (provider.Closing, error) {
		return provider.Closing{Park: []provider.Aside{{Message: 0, Parked: poison}, {Message: 1, Parked: next}}}, nil
	})
	one = at(one, 2)
	same(s, "segments", s.segments(), []provider.Segment{one})
	same(s, "parked", idsOfParked(s.rows()), []string{"e-1", "e-2"})
	s.isHeld("after the move", "ann", true)
}

func splitReplaced(s *stage) {
	c := s.split(s.begins(0, provider.ModeCatchUp), provider.Split{First: 1, Count: 2})
	one := s.takeSegment(1)
	s.open(s.inSegment(one, 4, 1, 3), effects)
	one = at(one, 4)
	was := c
	c = s.split(c, provider.Split{First: 3, Count: 3}, provider.Split{First: 1, Count: 2})
	for what, from := range map[string]provider.Checkpoint{"the splits before": was, "no splits": func() provider.Checkpoint { n := c; n.Splits = nil; return n }()} {
		set, err := s.db.SetCheckpoint(s.ctx, s.build(), from, moved(from, 1))
		s.ok(err, "set the checkpoint")
		same(s, "the checkpoint was set from "+what, set, false)
	}
	three := s.takeSegment(3)
	same(s, "segments of both splits", s.segments(), []provider.Segment{one, three})
	s.split(c, provider.Split{First: 3, Count: 3})
	same(s, "segments of the new split", s.segments(), []provider.Segment{three})
}

func newSplitWaits(s *stage) {
	c := s.split(s.begins(0, provider.ModeCatchUp), provider.Split{First: 1, Count: 2})
	one := s.takeSegment(1)
	changed := make(chan error, 1)
	s.open(s.inSegment(one, 2, 1), func(o opened) (provider.Closing, error) {
		to := c
		to.Splits = []provider.Split{{First: 3, Count: 1}, {First: 1, Count: 2}}
		go func() {
			set, err := s.db.SetCheckpoint(context.WithoutCancel(s.ctx), s.build(), c, to)
			if err == nil && !set {
				err = errors.New("the checkpoint was not set")
			}
			changed <- err
		}()
		select {
		case err := <-changed:
			return provider.Closing{}, fmt.Errorf("the split was set while a unit was open: %w", err)
		case <-time.After(200 * time.Millisecond): // a busy machine may need longer, and then the case checks less
		}
		return effects(o)
	})
	s.ok(<-changed, "set the checkpoint after the unit")
	one = at(one, 2)
	same(s, "segments", s.segments(), []provider.Segment{one})
	s.fenced(s.do(s.ctx, s.inSegment(one, 4, 3), effects), "a move after the new split")
}

func segmentsEnd(s *stage) {
	s.split(s.begins(0, provider.ModeCatchUp), provider.Split{First: 1, Count: 2})
	one := s.takeSegment(1)
	g := provider.Generation{Build: s.build(), State: provider.GenerationStandby}
	g.Generation = max(g.Generation, 1)
	s.setGeneration(g)
	s.fenced(s.do(s.ctx, s.inSegment(one, 2, 1), effects), "a move in a standby")
	same(s, "token of a segment of a standby", s.segments()[0].Token, claim.Token{})
	one = s.takeSegment(1)
	s.open(s.inSegment(one, 2, 1), effects)
	g.Revision, g.State = 1, provider.GenerationRetired
	s.setGeneration(g)
	s.hasEnded(s.do(s.ctx, s.inSegment(at(one, 2), 4, 3), effects), "a move in a retired generation")
	_, ok, err := s.db.TakeSegment(s.ctx, s.build(), 1, claim.NewToken())
	s.ok(err, "take a segment")
	same(s, "segment of a retired generation taken", ok, false)
}

func (s *stage) setGeneration(g provider.Generation) {
	s.Helper()
	set, err := s.db.SetGeneration(s.ctx, g)
	s.ok(err, "set a generation")
	same(s, "the generation was set", set, true)
}

func segmentsOfGenerations(s *stage) {
	second := *s
	second.generation = 2
	for _, of := range []*stage{s, &second} {
		of.split(of.begins(0, provider.ModeCatchUp), provider.Split{First: 1, Count: 2})
	}
	one, other := s.takeSegment(1), second.takeSegment(1)
	s.open(s.inSegment(one, 2, 1), effects)
	same(s, "segment of another generation", second.segments(), []provider.Segment{other})
	second.open(second.inSegment(other, 5, 4), effects)
	same(s, "segment", s.segments(), []provider.Segment{at(one, 2)})
}

func segmentsAtOnce(s *stage) {
	const count, moves = 4, 6
	s.split(s.begins(0, provider.ModeCatchUp), provider.Split{First: 1, Count: count})
	all := make([]provider.Segment, count)
	for i := range all {
		all[i] = s.takeSegment(i + 1)
	}
	errs := make([]error, 2*count)
	together(2*count, func(n int) { // two with the same token
		of := all[n%count]
		for move := range moves {
			to := int64(move*count + of.Number)
			err := s.do(s.ctx, s.inSegment(of, to, to), effects)
			if !errors.Is(err, provider.ErrFenced) {
				errs[n] = errors.Join(errs[n], err)
			}
			of = at(of, to)
		}
	})
	s.ok(errors.Join(errs...), "move at once")
	for i := range all {
		all[i] = at(all[i], int64((moves-1)*count+i+1))
	}
	same(s, "segments", s.segments(), all)
	var positions []int64
	for at := range int64(count * moves) {
		positions = append(positions, at+1)
	}
	s.effectsOf("of all segments", count*moves, positions...)
}

func badSplit(s *stage) {
	c := s.begins(0, provider.ModeCatchUp)
	for _, bad := range []provider.Split{{}, {First: -1}, {First: 1, Count: -1}, {First: 1 << 40}} {
		to := c
		to.Splits = slices.Insert([]provider.Split{{First: 1}}, 0, bad)
		set, err := s.db.SetCheckpoint(s.ctx, s.build(), c, to)
		same(s, "the checkpoint was set", set, false)
		s.invalid(err, "a bad split")
	}
	same(s, "checkpoint", s.checkpoint(), c)
}
