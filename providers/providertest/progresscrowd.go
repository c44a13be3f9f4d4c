package providertest

import (
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/provider"
)

var progressCrowdCases = []testCase{
	{
		// Promise: G7.7
		name: "several readers at once", play: readersAtOnce,
		rule: "Of several units that move the checkpoint from one position, exactly one commits. The others are ErrFenced",
	},
	{
		name: "several SetCheckpoint at once", play: setAtOnce,
		rule: "Of several SetCheckpoint from one checkpoint, exactly one returns true",
	},
	{
		// Promise: G4.7
		name: "deliveries and the reader at once", play: deliveredAndRead,
		rule: "Each event takes effect once, while deliveries and units of the reader apply it, the checkpoint moves and PruneApplied deletes markers",
	},
	{
		// Promise: G4.7
		name: "deliveries and changes of the mode at once", play: modesAtOnce,
		rule: "Units that open after SetCheckpoint see the new mode",
	},
	{
		// Promise: G4.7
		name: "deliveries while the reader goes live", play: goesLiveAtOnce,
		rule: "Each event takes effect once, while the projector catches up, closes and goes live",
	},
}

// only fails the case unless one of errs is nil and the others are ErrFenced.
func (s *stage) only(errs []error) {
	s.Helper()
	won := 0
	for _, err := range errs {
		if err == nil {
			won++
		} else {
			s.fenced(err, "a move at the same time")
		}
	}
	same(s, "moves that committed", won, 1)
}

func readersAtOnce(s *stage) {
	const readers = 12
	c := s.begins(0, provider.ModeCatchUp)
	for range 3 {
		errs, at := make([]error, readers), c.Place.Position
		together(readers, func(i int) {
			errs[i] = s.do(s.ctx, s.upTo(c, at+10, at+1, at+2, at+3), effects)
		})
		s.only(errs)
		c = moved(c, at+10)
		same(s, "checkpoint", s.checkpoint(), c)
		s.effectsOf("of a round", 3, at+1, at+2, at+3)
		together(readers, func(i int) { errs[i] = s.do(s.ctx, s.upTo(c, at+11+int64(i)), nothing) })
		s.only(errs)
		c = s.checkpoint()
	}
}

func setAtOnce(s *stage) {
	const readers = 12
	for round := range int64(3) {
		var c provider.Checkpoint
		if round > 0 {
			c = s.checkpoint()
		}
		won, errs := make([]bool, readers), make([]error, readers)
		together(readers, func(i int) {
			to := provider.Checkpoint{Place: place(100*round + int64(i) + 1), Mode: provider.ModeLive}
			won[i], errs[i] = s.db.SetCheckpoint(s.ctx, s.build(), c, to)
		})
		s.ok(errors.Join(errs...), "set the checkpoint at once")
		n := 0
		for i := range won {
			if won[i] {
				n++
				same(s, "checkpoint", s.checkpoint().Place, place(100*round+int64(i)+1))
			}
		}
		same(s, "calls that set the checkpoint", n, 1)
	}
}

// deliveredAndRead delivers each event twice, in any order, while a reader applies all in batches,
// moves the checkpoint and prunes.
func deliveredAndRead(s *stage) {
	const events, batch, workers = 240, 20, 4
	c := s.begins(0, provider.ModeLive)
	var done atomic.Int64 // workers that have ended
	errs := make([]error, workers+1)
	together(len(errs), func(i int) {
		if i < workers {
			defer done.Add(1)
			for _, n := range append(rand.Perm(events), rand.Perm(events)...) {
				u := s.events(int64(n + 1))
				if n%3 == 0 && n > 0 {
					u = s.events(int64(n+1), int64(n))
				}
				if errs[i] = s.do(s.ctx, u, effects); errs[i] != nil {
					return
				}
			}
			return
		}
		for c.Place.Position < events && errs[i] == nil {
			from := c.Place.Position
			u := s.unit()
			for at := from + 1; at <= from+batch; at++ {
				u.Messages = append(u.Messages, s.event(at))
			}
			_, err := s.db.PruneApplied(s.ctx, s.build(), []string{s.name + "/posted"}, batch)
			errs[i] = errors.Join(err, s.do(s.ctx, s.reading(u), effects), s.do(s.ctx, s.upTo(c, from+batch), nothing))
			c = moved(c, from+batch)
		}
	})
	s.ok(errors.Join(errs...), "deliver and read at once")
	for at := range int64(events) {
		s.effectsOf("of an event", 1, at+1)
	}
	for n := 1; n > 0; {
		var err error
		n, err = s.db.PruneApplied(s.ctx, s.build(), []string{s.name + "/posted"}, 100)
		s.ok(err, "prune applied")
	}
	handlers, err := s.db.MarkedHandlers(s.ctx)
	s.ok(err, "list handlers")
	for _, h := range handlers {
		s.require(h != s.name+"/posted", "no marker is left at the checkpoint")
	}
}

// modesAtOnce changes the mode while events are delivered. A delivery that begins after a change
// must see the new mode.
func modesAtOnce(s *stage) {
	const workers, events, changes = 4, 40, 10
	c := s.begins(0, provider.ModeLive)
	var mode, changing atomic.Int64 // changing: how often a change has begun
	mode.Store(int64(provider.ModeLive))
	var stale, over atomic.Bool
	errs := make([]error, workers+1)
	together(len(errs), func(i int) {
		if i == workers {
			defer over.Store(true)
			for n := 0; n < changes && errs[i] == nil; n++ {
				next := c
				next.Mode = provider.ModeCatchUp + provider.ModeLive - c.Mode
				changing.Add(1)
				_, errs[i] = s.db.SetCheckpoint(s.ctx, s.build(), c, next)
				c = next
				mode.Store(int64(next.Mode))
				changing.Add(1)
			}
			return
		}
		for at := int64(1); errs[i] == nil && (!over.Load() || at <= events); at++ {
			before, is := changing.Load(), provider.Mode(mode.Load())
			var left bool
			errs[i] = s.do(s.ctx, s.events(at%events+1), func(o opened) (provider.Closing, error) {
				left = o.Left != nil
				return effects(o)
			})
			if before%2 == 0 && before == changing.Load() && left != (is == provider.ModeCatchUp) {
				stale.Store(true)
			}
		}
	})
	s.ok(errors.Join(errs...), "deliver and change the mode at once")
	s.require(!stale.Load(), "a delivery sees the mode of the last SetCheckpoint")
	s.mode(c, provider.ModeClosing)
	var all []int64
	for at := range int64(events) {
		all = append(all, at+1)
	}
	s.open(s.reading(s.events(all...)), effects)
	for _, at := range all {
		s.effectsOf("of an event", 1, at)
	}
}

// goesLiveAtOnce delivers events, some of them twice, while a reader catches up with them.
func goesLiveAtOnce(s *stage) {
	const events, batch = 120, 10
	c := s.begins(0, provider.ModeCatchUp)
	var appended, delivered atomic.Int64
	errs := make([]error, 3)
	together(len(errs), func(i int) {
		switch i {
		case 0: // deliveries, in order, some of them twice
			for at := int64(1); at <= events && errs[i] == nil; at++ {
				appended.Store(at)
				errs[i] = s.deliver(at)
				delivered.Store(at)
			}
		case 1: // redeliveries
			for errs[i] == nil && delivered.Load() < events {
				if last := delivered.Load(); last > 0 {
					errs[i] = s.deliver(1 + rand.Int64N(last))
				}
			}
		case 2:
			errs[i] = s.goLive(c, batch, &appended)
		}
	})
	s.ok(errors.Join(errs...), "deliver while the reader goes live")
	same(s, "mode", s.checkpoint().Mode, provider.ModeLive)
	for at := range int64(events) {
		s.effectsOf("of an event", 1, at+1)
	}
}

// deliver delivers an event until its unit commits.
func (s *stage) deliver(at int64) error {
	for {
		err := s.do(s.ctx, s.events(at), effects)
		if provider.CodeOf(err) != provider.CodeClosing {
			return err
		}
		if err = s.pause(); err != nil {
			return err
		}
	}
}

// pause waits for a millisecond, before another look.
func (s *stage) pause() error {
	select {
	case <-time.After(time.Millisecond):
		return nil
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}

// goLive applies some batches of the log, closes, applies the rest and goes live. appended is the
// position of the last event of the log.
func (s *stage) goLive(c provider.Checkpoint, batch int64, appended *atomic.Int64) error {
	upTo := func(to int64) (positions []int64) {
		for at := c.Place.Position + 1; at <= to; at++ {
			positions = append(positions, at)
		}
		return positions
	}
	set := func(mode provider.Mode) error {
		next := c
		next.Mode = mode
		ok, err := s.db.SetCheckpoint(s.ctx, s.build(), c, next)
		if c = next; err == nil && !ok {
			err = errors.New("the checkpoint has changed")
		}
		return err
	}
	for c.Place.Position < 3*batch {
		to := min(appended.Load(), c.Place.Position+batch)
		if to == c.Place.Position {
			if err := s.pause(); err != nil {
				return err
			}
			continue
		}
		if err := s.do(s.ctx, s.upTo(c, to, upTo(to)...), effects); err != nil {
			return err
		}
		c = moved(c, to)
	}
	if err := set(provider.ModeClosing); err != nil {
		return err
	}
	return errors.Join(s.do(s.ctx, s.reading(s.events(upTo(appended.Load())...)), effects), set(provider.ModeLive))
}
