package providertest

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

var holdCases = []testCase{
	{
		name: "held after the wait for a marker", play: heldAfterWait,
		rule: "The opening checks which lanes are held with a snapshot newer than its wait for markers: a message does not pass one of its lane that was parked meanwhile",
	},
	{
		name: "held until the unit ends", play: heldUntilEnd,
		rule: "Found.Held: its lane is held, and stays held until the unit ends: no message is parked behind a resolved one",
	},
	{
		name: "a try waits for its lane", play: tryWaitsForLane,
		rule: "If another unit has the lane of a parked message with attempts (Parking.Try), the unit waits for the lane",
	},
	{
		name: "a try of a lane in use", play: tryOfLaneInUse,
		rule: "Try is false if another unit has the lane; the attempt is not counted then",
	},
	{
		name: "a decision about a lane in use", play: decisionOfLaneInUse,
		rule: "A message that a unit is applying is either applied or skipped",
	},
}

// heldAfterWait: the first unit parks m-1. The second delivers m-1 and m-2, and waits for the
// marker of m-1.
func heldAfterWait(s *stage) {
	for range 3 {
		key, first, second := newID(), newID(), newID()
		u, run := s.parking(0, s.failed(first, key))
		wait := func() error { return nil }
		var held []bool
		calls := 0
		s.open(u, func(o opened) (provider.Closing, error) {
			// a deferred unit that parks writes its markers before the second call
			if calls++; calls > 1 || !s.deferred {
				wait = begin(func() error {
					return s.do(s.ctx, s.unit(s.message(first, key), s.message(second, key)), func(o opened) (provider.Closing, error) {
						held = o.Held
						return nothing(o)
					})
				})
			}
			return run(o)
		})
		s.ok(wait(), "a unit that waits for a marker")
		same(s, "held", held, []bool{true, true})
	}
}

// heldUntilEnd skips the message behind which a unit parks another one.
func heldUntilEnd(s *stage) {
	for range 3 {
		front, id := s.park(0, s.failed(newID(), "ann"))[0], newID()
		p, wait := s.behind(id, "ann"), func() error { return nil }
		calls, parked := 0, false
		s.open(s.unit(s.message(id, "ann")), func(o opened) (provider.Closing, error) {
			if calls++; o.Held[0] && calls <= 2 {
				wait = begin(func() error {
					_, err := s.db.Decide(s.ctx, provider.ParkedFilter{Seqs: []int64{front.Seq}}, provider.StateSkipped, ann)
					return err
				})
			}
			if parked = o.Held[0]; parked {
				return provider.Closing{Park: []provider.Aside{{Parked: p}}}, nil
			}
			return provider.Closing{}, nil
		})
		s.ok(wait(), "skip")
		same(s, "parked behind a held lane", parked, true)
		s.isDue("behind a skipped message", id)
		s.skip(s.rows()[0])
		s.isHeld("afterwards", "ann", false)
	}
}

// tryWaitsForLane opens a counted try while a delivery of its lane is open.
func tryWaitsForLane(s *stage) {
	row := s.park(0, s.failed("m-1", "ann"))[0]
	tried, err := s.db.Try(s.ctx, row, -1, time.Hour)
	s.ok(err, "try")
	same(s, "tried", tried, true)
	row.Attempts++
	var live []bool
	wait, calls := func() error { return nil }, 0
	s.open(s.unit(s.message("m-2", "ann")), func(o opened) (provider.Closing, error) {
		if calls++; o.Held[0] && calls <= 2 {
			wait = begin(func() error {
				return s.do(s.ctx, s.parkedUnit(row), func(o opened) (provider.Closing, error) {
					live = o.Live
					return effects(o)
				})
			})
		}
		return provider.Closing{Park: []provider.Aside{{Parked: s.behind("m-2", "ann")}}}, nil
	})
	s.ok(wait(), "a unit with a counted try")
	same(s, "live", live, []bool{true})
	s.isDue("after the try", "m-2")
}

// tryOfLaneInUse tries a message while a unit applies it.
func tryOfLaneInUse(s *stage) {
	row := s.park(0, s.behind("m-1", "ann"))[0]
	var tried bool
	wait := func() error { return nil }
	s.open(s.parkedUnit(row), func(o opened) (provider.Closing, error) {
		wait = begin(func() (err error) {
			tried, err = s.db.Try(s.ctx, row, -1, time.Hour)
			return err
		})
		return effects(o)
	})
	s.ok(wait(), "try")
	same(s, "tried", tried, false)
	same(s, "left", len(s.rows()), 0)
	same(s, "total", s.total("m-1"), 1)
}

func decisionOfLaneInUse(s *stage) {
	for _, fails := range []bool{false, true} {
		id := newID()
		row := s.park(0, s.behind(id, "ann"))[0]
		n, wait := 0, func() error { return nil }
		err := s.do(s.ctx, s.parkedUnit(row), func(o opened) (provider.Closing, error) {
			wait = begin(func() (err error) {
				n, err = s.db.Decide(s.ctx, provider.ParkedFilter{Seqs: []int64{row.Seq}}, provider.StateSkipped, ann)
				return err
			})
			c, err := effects(o)
			if fails {
				err = errors.Join(err, errRefused)
			}
			return c, err
		})
		same(s, "the unit fails", err != nil, fails)
		s.ok(wait(), "skip")
		same(s, "applied, skipped", []int{s.total(id), n}, map[bool][]int{false: {1, 0}, true: {0, 1}}[fails])
	}
}

var carefulCases = []testCase{
	{
		name: "suspects", play: suspects,
		rule: "Found.Suspect: the message is in flight in another runner (Liveness.InFlight). It is set only if Unit.Careful is",
	},
	{
		// Promise: G6.11
		name: "names are deleted with the commit", play: inFlightDeleted,
		rule: "Unit.Careful: this worker's messages in flight are deleted with the commit, and only then",
	},
	{
		// Promise: G6.11
		name: "a careful unit asks first", play: asksFirst,
		rule: "If u.Careful is set, run is not called again: it is called with the result of the opening",
	},
}

// isSuspect fails the case unless these are the suspects among messages, as another runner sees
// them.
func (s *stage) isSuspect(what string, ids []string, want ...bool) {
	s.Helper()
	u := s.of(ids...)
	for i := range u.Messages {
		u.Messages[i].Mark = false
	}
	u.Careful = &provider.Worker{Runner: "observer " + s.name}
	same(s, "suspects, "+what, s.open(u, nothing).Suspect, want)
}

func (s *stage) inFlight(w provider.Worker, ids ...string) {
	s.Helper()
	s.ok(s.db.InFlight(s.ctx, s.build(), w, ids), "record the messages in flight")
}

func suspects(s *stage) {
	one := provider.Worker{Runner: "one " + s.name, Number: 3}
	s.inFlight(one, "m-1", "m-2", "m'\" 日本")
	ids := []string{"m-1", "m-2", "m-3", "m'\" 日本", "M-1"}
	s.isSuspect("in flight in another runner", ids, true, true, false, true, false)
	own := s.of(ids...)
	own.Careful = &provider.Worker{Runner: one.Runner, Number: 4}
	same(s, "suspects, in flight in another worker of the runner", s.open(own, nothing).Suspect, []bool{false, false, false, false, false})
	s.require(!slices.Contains(s.open(s.of("m-1"), nothing).Suspect, true), "a unit that is not careful has no suspects")
	elsewhere := own
	elsewhere.Projector, elsewhere.Careful = s.name+"x", &provider.Worker{Runner: "observer " + s.name}
	same(s, "suspects at another projector", s.open(elsewhere, nothing).Suspect, []bool{false, false, false, false, false})
	row := s.park(0, s.behind("m-2", "ann"), s.behind("m-3", "ann"))
	parked := s.parkedUnit(row...)
	parked.Careful = elsewhere.Careful
	same(s, "suspects among parked messages", s.open(parked, nothing).Suspect, []bool{true, false})
}

func inFlightDeleted(s *stage) {
	one, two := provider.Worker{Runner: "one " + s.name, Number: 1}, provider.Worker{Runner: "one " + s.name, Number: 2}
	s.inFlight(one, "m-1", "m-2")
	s.inFlight(two, "m-1", "m-3")
	ids := []string{"m-1", "m-2", "m-3"}
	u := s.of("m-1")
	u.Careful = &one
	err := s.do(s.ctx, u, func(opened) (provider.Closing, error) { return provider.Closing{}, errRefused })
	s.require(errors.Is(err, errRefused), "the error %v is run's", err)
	s.isSuspect("after a unit that failed", ids, true, true, true)
	if s.db.Keeps().DryRun {
		u.DryRun = func([]provider.Change) {}
		s.open(u, nothing)
		s.isSuspect("after a dry run", ids, true, true, true)
	}
	u.DryRun, u.Careful = nil, nil
	s.open(u, nothing)
	s.isSuspect("after a unit that is not careful", ids, true, true, true)
	u.Careful = &one
	s.open(u, nothing)
	s.isSuspect("after the worker's commit", ids, true, false, true)
	u.Careful = &two
	s.open(u, nothing)
	s.isSuspect("after the other worker's commit", ids, false, false, false)
}

func asksFirst(s *stage) {
	s.inFlight(provider.Worker{Runner: "one " + s.name}, "m-2")
	s.open(s.of("m-1"), nothing)
	s.park(0, s.failed("m-9", "ann"))
	u, calls := s.of("m-1", "m-2"), 0
	u.Messages = append(u.Messages, s.message("m-3", "ann"))
	u.Careful = &provider.Worker{Runner: "two " + s.name}
	s.open(u, func(o opened) (provider.Closing, error) {
		calls++
		same(s, "suspects", o.Suspect, []bool{false, true, false})
		same(s, "fresh", o.Fresh, [][]bool{{false}, {true}, {true}})
		same(s, "held", o.Held, []bool{false, false, true})
		return nothing(o)
	})
	same(s, "calls", calls, 1)
}

const contextEndsRule = "If ctx ends and run does not return within a second, the transaction is rolled back and its locks are released. Do returns when run does"

var contextEndsCases = []testCase{
	{name: "a handler that does not return", rule: contextEndsRule, play: handlerOutlivesContext},
	{name: "a parked message's handler that does not return", rule: contextEndsRule, play: parkedOutlivesContext},
	{name: "a dry run that does not return", rule: contextEndsRule, play: dryRunOutlivesContext},
}

// outlivesContext runs a unit whose context ends while run continues: run writes before that, and
// again after others has returned.
func (s *stage) outlivesContext(u provider.Unit, park []provider.Aside, others func()) {
	s.Helper()
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	resume, done := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(done)
		done <- s.do(ctx, u, func(o opened) (provider.Closing, error) {
			_ = o.add("outlives", 1)
			cancel()
			<-resume
			useEnded(o)
			return provider.Closing{Park: park, Output: []outbox.Message{{ID: s.name, Topic: s.name}}}, nil
		})
	}()
	var err error
	func() {
		defer func() { // even if others fails the case
			close(resume)
			err = <-done
		}()
		select {
		case <-ctx.Done():
		case <-done:
			s.Fatal("Do returned before run was called")
		}
		others()
		select {
		case err := <-done:
			s.Fatalf("Do returned %v before run did", err)
		default:
		}
	}()
	s.classed(err, "a unit whose handler did not return", append(notPermanent, provider.ClassAmbiguous)...)
	same(s, "total of a handler that did not return", s.total("outlives"), 0)
	same(s, "its output", len(s.entries(outbox.Filter{Topic: s.name})), 0)
}

// useEnded uses a transaction that was rolled back: it may fail, panic, or have no effect.
func useEnded(o opened) {
	defer func() { _ = recover() }()
	for range 3 {
		_ = o.add("outlives", 10)
	}
}

// meanwhile fails the case if fn waits for the unit that continues, which ends only after fn.
func (s *stage) meanwhile(doing string, fn func(ctx context.Context) error) {
	s.Helper()
	s.ok(fn(s.ctx), doing)
}

func handlerOutlivesContext(s *stage) {
	u := s.of("m-1", "m-2")
	park := []provider.Aside{{Message: 1, Parked: s.failed("m-2", "")}}
	s.outlivesContext(u, park, func() {
		s.meanwhile("a unit of the same total", func(ctx context.Context) error {
			return s.do(ctx, s.unit(), func(o opened) (provider.Closing, error) { return provider.Closing{}, o.add("outlives", 0) })
		})
		s.meanwhile("a unit of the same message", func(ctx context.Context) error { return s.do(ctx, s.of("m-1"), effects) })
		s.meanwhile("switch", func(ctx context.Context) error {
			return s.switches(ctx, 2, provider.GenerationStandby, nothing)
		})
	})
	s.outcomes("afterwards", []string{"m-1", "m-2"}, provider.OutcomeApplied, provider.OutcomeUnseen)
	same(s, "fresh afterwards", s.open(u, effects).Fresh, [][]bool{{false}, {true}})
	same(s, "parked", len(s.rows()), 0)
	same(s, "total", s.total("m-1"), 1)
}

func parkedOutlivesContext(s *stage) {
	rows := s.park(0, s.behind("m-1", "ann"), s.behind("m-2", "ann"), s.behind("m-3", "ben"))
	s.outlivesContext(s.parkedUnit(rows...), nil, func() {
		s.meanwhile("skip", func(ctx context.Context) error {
			_, err := s.db.Decide(ctx, provider.ParkedFilter{Seqs: []int64{rows[0].Seq}}, provider.StateSkipped, ann)
			return err
		})
		s.meanwhile("apply", func(ctx context.Context) error { return s.do(ctx, s.parkedUnit(rows[1:]...), effects) })
	})
	same(s, "left", len(s.rows()), 0)
	same(s, "totals", []int{s.total("m-1"), s.total("m-2"), s.total("m-3")}, []int{0, 1, 1})
}

func dryRunOutlivesContext(s *stage) {
	if !s.db.Keeps().DryRun {
		s.Log("this provider has no dry runs")
		return
	}
	u := s.of("m-1")
	u.DryRun = func([]provider.Change) { s.Errorf("DryRun is called after a unit that was rolled back") }
	s.outlivesContext(u, nil, func() {
		s.meanwhile("a unit of the same message", func(ctx context.Context) error { return s.do(ctx, s.of("m-1"), effects) })
	})
	same(s, "total", s.total("m-1"), 1)
}
