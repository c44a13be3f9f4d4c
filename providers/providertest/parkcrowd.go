package providertest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

var parkCrowdCases = []testCase{
	{
		// Promise: G6.8
		name: "a crowd around parked messages", play: parkCrowd,
		rule: "Messages may be delivered twice, fail, be parked, tried and replayed at the same time: each takes effect once, in the order of its lane, and none stays parked",
	},
}

const (
	crowdLanes    = 6
	crowdMessages = 30 // of each lane; one in three fails at first
	crowdCopies   = 2  // deliveries of each message, by different runners
	crowdDrainers = 4
)

// parkCrowd delivers the messages of several lanes in order, by two runners at once, while others
// run due messages and decide about stuck ones. The outputs of the units list the effects in
// order.
func parkCrowd(s *stage) {
	var delivering atomic.Int32
	delivering.Store(crowdLanes * crowdCopies)
	errs := make([]error, crowdLanes*crowdCopies+crowdDrainers)
	seed := rand.Uint64()
	together(len(errs), func(i int) {
		random := rand.New(rand.NewPCG(seed, uint64(i)))
		if i < crowdLanes*crowdCopies {
			errs[i] = s.deliverLane(fmt.Sprint("lane ", i/crowdCopies), random)
			delivering.Add(-1)
			return
		}
		for idle := 0; errs[i] == nil && idle < 3; {
			var left []provider.Parked
			busy := delivering.Load() > 0
			errs[i] = s.drain(random)
			if left, _ = s.db.Parked(s.ctx, provider.ParkedFilter{Projector: s.name, Limit: 1}); !busy && len(left) == 0 {
				idle++
			}
			if pause(s.ctx, nil) && errs[i] == nil {
				errs[i] = fmt.Errorf("messages stay parked, such as %+v", left)
			}
		}
	})
	s.ok(errors.Join(errs...), fmt.Sprintf("deliver and drain (seed %d)", seed))
	for lane := range crowdLanes {
		key, got, want := fmt.Sprint("lane ", lane), []string{}, []string{}
		for _, e := range s.entries(outbox.Filter{Topic: s.name, Key: key}) {
			got = append(got, e.ID)
		}
		for n := range crowdMessages {
			want = append(want, crowdID(key, n))
			same(s, "effects of "+crowdID(key, n), s.total(crowdID(key, n)), 1)
		}
		s.require(slices.Equal(got, want), "the effects of %s are in order: %q (seed %d)", key, got, seed)
		s.isHeld("in the end", key, false)
	}
}

func crowdID(key string, n int) string { return fmt.Sprintf("%s %02d", key, n) }

// failsAt reports whether the nth message of a lane fails at its first runs, and whether it is
// then stuck.
func failsAt(n int) (fails, stuck bool) { return n%3 == 1, n%6 == 1 }

// deliverLane delivers the messages of a lane in order, several in a unit.
func (s *stage) deliverLane(key string, random *rand.Rand) error {
	for n := 0; n < crowdMessages; {
		u := s.unit()
		first := n
		for n < crowdMessages && len(u.Messages) <= random.IntN(4) {
			u.Messages = append(u.Messages, s.message(crowdID(key, n), key))
			n++
		}
		for {
			err := s.do(s.ctx, u, func(o opened) (provider.Closing, error) { return s.deliverSome(o, key, first) })
			if err == nil {
				break
			}
			if provider.ClassOf(err) != provider.ClassTransient && provider.ClassOf(err) != provider.ClassAmbiguous || s.ctx.Err() != nil {
				return fmt.Errorf("deliver %s: %w", crowdID(key, first), err)
			}
		}
	}
	return nil
}

// deliverSome applies fresh messages until one fails. It parks that one, and the later ones
// behind it.
func (s *stage) deliverSome(o opened, key string, first int) (c provider.Closing, err error) {
	held := false
	for i, m := range o.unit.Messages {
		fails, stuck := failsAt(first + i)
		switch {
		case !o.Fresh[i][0]:
		case held || o.Held[i]:
			c.Park = append(c.Park, provider.Aside{Message: i, Parked: s.behind(m.ID, key)})
		case fails:
			a := provider.Aside{Message: i, Parked: s.failed(m.ID, key)}
			if held = true; stuck {
				a.After = -1
			}
			c.Park = append(c.Park, a)
		default:
			c, err = takeEffect(o, c, i, key)
		}
		if err != nil {
			return c, err
		}
	}
	return c, nil
}

// takeEffect applies message i of a unit.
func takeEffect(o opened, c provider.Closing, i int, key string) (provider.Closing, error) {
	m := o.unit.Messages[i]
	o.Begin(i)
	topic, _, _ := strings.Cut(m.Handlers[0].Name, "/")
	c.Output = append(c.Output, outbox.Message{ID: m.ID, Topic: topic, Key: key})
	return c, o.add(m.ID, 1)
}

// drain runs the due messages: a failed one as a try, and the others of several lanes in one
// unit. Sometimes it decides about stuck ones.
func (s *stage) drain(random *rand.Rand) error {
	if random.IntN(3) == 0 {
		f := provider.ParkedFilter{Projector: s.name, States: []provider.ParkedState{provider.StateStuck}}
		if _, err := s.db.Decide(s.ctx, f, provider.StateWaiting, ann); err != nil {
			return fmt.Errorf("decide: %w", err)
		}
	}
	due, err := s.db.Due(s.ctx, provider.DueFilter{Builds: []provider.Build{s.build()}, Keys: 1 + random.IntN(4), Each: 1 + random.IntN(5)})
	if err != nil {
		return fmt.Errorf("list due messages: %w", err)
	}
	var waiting []provider.Parked
	for _, p := range due {
		if p.Class == provider.ClassHeld {
			waiting = append(waiting, p)
			continue
		}
		tried, err := s.db.Try(s.ctx, p, -1, time.Millisecond)
		if err != nil {
			return fmt.Errorf("try: %w", err)
		}
		if p.Attempts++; tried {
			if err := s.drainUnit(random, p); err != nil {
				return err
			}
		}
	}
	if len(waiting) == 0 {
		return nil
	}
	return s.drainUnit(random, waiting...)
}

// drainUnit runs parked messages in one unit. Some units fail.
func (s *stage) drainUnit(random *rand.Rand, rows ...provider.Parked) error {
	fails := random.IntN(4) == 0
	err := s.do(s.ctx, s.parkedUnit(rows...), func(o opened) (c provider.Closing, err error) {
		for i := range o.unit.Messages {
			if o.Live[i] && err == nil {
				c, err = takeEffect(o, c, i, rows[i].Key)
			}
		}
		if fails {
			err = errors.Join(err, errRefused)
		}
		return c, err
	})
	if errors.Is(err, errRefused) { // the first message has failed
		p := rows[0]
		p.Class, p.Code, p.Attempts = provider.ClassUnknown, "refused", max(1, p.Attempts)
		after := time.Duration(random.IntN(3)-1) * time.Millisecond
		err = s.do(s.ctx, s.parkedUnit(rows[0]), func(opened) (provider.Closing, error) {
			return provider.Closing{Park: []provider.Aside{{Parked: p, After: after}}}, nil
		})
	}
	if provider.ClassOf(err) == provider.ClassTransient || provider.ClassOf(err) == provider.ClassAmbiguous {
		return nil
	}
	if err != nil {
		return fmt.Errorf("run parked messages: %w", err)
	}
	return nil
}
