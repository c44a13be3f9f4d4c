package providertest

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

const endedRule = "A unit of a generation whose checkpoint has ModeEnded fails with ErrEnded, whatever its messages are. Nothing is committed"

var endedCases = []testCase{
	// Promise: R6.1
	{name: "units of a retired generation", rule: endedRule, play: endedByState},
	// Promise: R6.1
	{name: "units of a retired generation without a checkpoint", rule: endedRule, play: endedWithoutCheckpoint},
	// Promise: R6.1
	{name: "units of a generation that a switch retires", rule: endedRule, play: endedBySwitch},
	{
		name: "the checkpoint of a retired generation", play: endedForEver,
		rule: "SetCheckpoint returns false, and changes nothing, if the checkpoint has ModeEnded",
	},
	{
		// Promise: R6.1
		name: "units while their generation is retired", play: endedInCrowd,
		rule: "Once a switch has retired a generation, none of its units commits any more, also one that began before",
	},
}

// retire makes a generation of the case's projector retired.
type retire func(s *stage, number int)

func endedByState(s *stage) {
	s.endedUnits(true, func(s *stage, number int) { s.becomesNow(number, retired, true) })
}

func endedWithoutCheckpoint(s *stage) {
	s.endedUnits(false, func(s *stage, number int) { s.becomesNow(number, retired, true) })
}

func endedBySwitch(s *stage) {
	s.endedUnits(true, func(s *stage, number int) {
		s.ok(s.switches(s.ctx, number+1, retired, nothing), "switch")
	})
}

// endedUnits prepares a unit of each kind in generation 1, retires it, and runs them.
func (s *stage) endedUnits(checkpoint bool, end retire) {
	s.Helper()
	var reader *provider.Reader
	advance := &provider.Advance{To: place(9), Mode: provider.ModeLive}
	if checkpoint {
		c := s.begins(5, provider.ModeLive)
		reader = &provider.Reader{Mode: c.Mode, Token: c.Token}
		advance = s.upTo(c, 9).Advance
	}
	s.open(s.of("done"), nothing)
	rows := s.park(0, s.behind("m-1", "ann"), s.failed("m-2", "ben"))
	tried, err := s.db.Try(s.ctx, rows[1], -1, time.Hour)
	s.ok(err, "try")
	same(s, "tried", tried, true)
	counted := rows[1]
	counted.Attempts++
	w := provider.Worker{Runner: "one " + s.name, Number: 1}
	s.inFlight(w, "m-9")
	end(s, 1)

	kinds := map[string]provider.Unit{
		"a move":               withUnit(s.unit(), func(u *provider.Unit) { u.Advance = advance }),
		"a move with an event": withUnit(s.events(6), func(u *provider.Unit) { u.Advance = advance }),
	}
	for kind, u := range s.endedKinds(rows[0], counted, w) {
		kinds[kind] = u
		kinds[kind+", once"] = withUnit(u, func(u *provider.Unit) { u.Once = true })
		kinds[kind+", serial"] = withUnit(u, func(u *provider.Unit) { u.Serial = true })
		if s.db.Keeps().DryRun {
			kinds[kind+", as a dry run"] = withUnit(u, func(u *provider.Unit) {
				u.DryRun = func([]provider.Change) { s.Errorf("DryRun is called for a unit with %s", kind) }
			})
		}
		if reader != nil {
			kinds[kind+", of the reader"] = withUnit(u, func(u *provider.Unit) { u.Reader = reader })
		}
	}
	before, was := s.dump(), s.checkpoint()
	for kind, u := range kinds {
		s.hasEnded(s.do(s.ctx, u, func(o opened) (provider.Closing, error) {
			_, err := effects(o)
			return provider.Closing{Output: []outbox.Message{{ID: newID(), Topic: s.name}}}, errors.Join(err, o.add("k", 1))
		}), "a unit with "+kind)
	}
	all := s.all()
	again := s.switching(all, 1, standby)
	again.Switch.Set = nil
	s.hasEnded(s.do(s.ctx, again, effects), "a unit with Switch")
	s.unchanged(before, "units of a retired generation")
	same(s, "checkpoint", s.checkpoint(), was)
	same(s, "generations", s.all(), all)
	for _, key := range []string{"k", "m-1", "m-2", "m-3", "e-6", "done"} {
		same(s, "total of "+key, s.total(key), 0)
	}
	s.outcomes("of a message with a marker", []string{"m-3", "e-6", "done"}, provider.OutcomeUnseen, provider.OutcomeUnseen, provider.OutcomeApplied)
	third := s.in(3)
	third.open(third.of("m-3"), effects)
	same(s, "total in another generation", s.total("m-3"), 1)
}

// endedKinds returns units of each kind: with markers, without, with a position, and so on.
func (s *stage) endedKinds(row, counted provider.Parked, w provider.Worker) map[string]provider.Unit {
	unmarked := s.of("m-3")
	unmarked.Messages[0].Mark = false
	careful := s.of("m-3")
	careful.Careful = &w
	marked := s.parkedUnit(row)
	marked.Messages[0].Mark = true
	foreign := s.events(6)
	foreign.Messages = append(foreign.Messages, s.message("m-3", ""))
	return map[string]provider.Unit{
		"a marker": s.of("m-3"), "no marker": unmarked, "a position": s.events(6), "a position before the checkpoint": s.events(4),
		"an event and another message": foreign, "no messages": s.unit(), "a careful worker": careful, "a marker that exists": s.of("done"),
		"a parked message": s.parkedUnit(row), "a parked message with Mark": marked, "a parked message with attempts": s.parkedUnit(counted),
	}
}

// withUnit returns a changed copy of u.
func withUnit(u provider.Unit, change func(u *provider.Unit)) provider.Unit {
	u.Messages = slices.Clone(u.Messages)
	change(&u)
	return u
}

func endedForEver(s *stage) {
	c := s.begins(5, provider.ModeLive)
	for _, of := range []*stage{s, s.in(2)} {
		of.becomesNow(of.generation, retired, true)
		is := of.checkpoint()
		for what, from := range map[string]provider.Checkpoint{"what it was": c, "none": {}, "what it is": is} {
			to := from
			to.Mode = provider.ModeCatchUp
			ok, err := s.db.SetCheckpoint(s.ctx, of.build(), from, to)
			s.ok(err, "set the checkpoint")
			same(s, "the checkpoint was set, from "+what, ok, false)
			same(s, "checkpoint", of.checkpoint(), is)
		}
		of.hasEnded(s.do(s.ctx, of.of("m-1"), effects), "a unit of the retired generation")
	}
}

// endedInCrowd runs units of generation 1 until they end, and counts those that committed.
func endedInCrowd(s *stage) {
	const workers = 6
	c := s.begins(0, provider.ModeLive)
	reader := &provider.Reader{Mode: c.Mode, Token: c.Token}
	var committed atomic.Int64
	errs := make([]error, workers+1)
	var atSwitch int
	together(len(errs), func(i int) {
		if i == workers {
			for errs[i] == nil && committed.Load() < 3*workers {
				errs[i] = s.pause()
			}
			errs[i] = errors.Join(errs[i], unlessBusy(func() error { return s.switches(s.ctx, 2, retired, nothing) }))
			atSwitch = s.total("k")
			return
		}
		for n := 0; errs[i] == nil; n++ {
			u := s.of(fmt.Sprint("m-", i, "-", n))
			if n%2 == 0 {
				u = s.events(int64(workers*n + i + 1))
				u.Reader = reader
			}
			if n%3 == 0 {
				u = s.unit()
			}
			if errs[i] = s.do(s.ctx, u, func(o opened) (provider.Closing, error) { return provider.Closing{}, o.add("k", 1) }); errs[i] == nil {
				committed.Add(1)
			}
		}
	})
	s.ok(errs[workers], "switch")
	for _, err := range errs[:workers] {
		s.hasEnded(err, "the last unit of a worker")
	}
	same(s, "effects when the switch has committed", atSwitch, s.total("k"))
	same(s, "effects", s.total("k"), int(committed.Load()))
}
