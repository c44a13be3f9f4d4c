package providertest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

var parkCrowdCases = []testCase{
	{
		name: "a crowd around parked messages", play: parkCrowd, long: true,
		rule: "Messages of a key wait behind a parked one, are due when it is replayed, and come back in order: nobody stays behind nothing, nobody comes twice, and none before an earlier one of its key",
	},
}

const (
	parkKeys     = 6
	parkMessages = 24 // of each key; of them one in three fails at first
	parkLanes    = 2  // deliveries of each message, by runners of their own
)

// crowdID is the nth message of a key.
func crowdID(key string, n int) string { return fmt.Sprintf("%s %02d", key, n) }

// parkCrowd has the messages of several keys delivered in order, by two runners at once, while others replay what was parked
// and bring back what is due. The handler's output is the list of what took effect.
func parkCrowd(s *stage) {
	var delivering atomic.Int32
	delivering.Store(parkKeys * parkLanes)
	errs := make([]error, parkKeys*parkLanes+4)
	together(len(errs), func(i int) {
		switch {
		case i < parkKeys*parkLanes:
			errs[i] = s.deliverInCrowd(fmt.Sprint("runner ", i%parkLanes), fmt.Sprint("key ", i/parkLanes))
			delivering.Add(-1)
		default:
			for delivering.Load() > 0 && errs[i] == nil {
				if _, errs[i] = s.bringBack(i%2 == 0); pause(s.ctx, nil) {
					return
				}
			}
		}
	})
	s.ok(errors.Join(errs...), "deliver, replay and bring back")
	s.settleCrowd()
	for i := range parkKeys {
		key, got := fmt.Sprint("key ", i), []string{}
		for _, e := range s.entries(outbox.Filter{Key: key}) {
			got = append(got, e.ID)
		}
		want := []string{}
		for n := range parkMessages {
			want = append(want, crowdID(key, n))
		}
		s.holds(slices.Equal(got, want), "what took effect of %s is in order: %q", key, got)
		same(s, "total of "+key, s.total(key), parkMessages)
	}
}

// settleCrowd replays what is left, alone: of what is parked, something must always be able to go on.
func (s *stage) settleCrowd() {
	s.Helper()
	for left := s.parked("", 0, 1); len(left) > 0; left = s.parked("", 0, 1) {
		due, err := s.bringBack(true)
		s.ok(err, "bring back what is due")
		poisoned, err := s.bringBack(false)
		s.ok(err, "replay what failed")
		if due+poisoned == 0 {
			s.Fatalf("nobody brings these back: %+v", s.parked("", 0, 0))
		}
	}
}

// deliverInCrowd delivers the messages of a key in order: each takes effect, is parked behind another, or fails and is parked.
func (s *stage) deliverInCrowd(runner, key string) error {
	for n := range parkMessages {
		p := poison(crowdID(key, n), key)
		for done := false; !done; {
			var err error
			if done, err = s.deliverOnce(runner, p, n); err != nil {
				return fmt.Errorf("%s at message %s: %w", runner, p.MessageID, err)
			}
		}
	}
	return nil
}

// deliverOnce delivers the nth message. Now and then what it found in the way is replayed before it can park behind it, or while
// it does.
func (s *stage) deliverOnce(runner string, p projector.Parked, n int) (done bool, err error) {
	a := posted(p.MessageID, p.Key)
	verdicts, err := s.db.Begin(s.ctx, runner, []projector.Attempt{a}, nil)
	if err != nil {
		return false, err
	}
	switch {
	case verdicts[0] == projector.Settled:
		return true, nil
	case verdicts[0] == projector.Held:
		if n%4 == 0 {
			_, err = s.bringBack(false)
		}
		p.Class = projector.HeldClass
		err = cmp.Or(err, s.do(s.ctx, projector.Work{Projector: "ratings", Park: []projector.Parked{p}, Behind: &a}, func(unit) ([]outbox.Message, error) {
			if n%4 == 1 {
				pause(s.ctx, nil)
			}
			return nil, nil
		}))
		if errors.Is(err, projector.ErrNotHeld) { // not any more
			return false, nil
		}
	case n%3 == 1:
		err = s.do(s.ctx, projector.Work{Projector: "ratings", Park: []projector.Parked{p}}, nil)
	default:
		err = s.do(s.ctx, work(p.MessageID), tookEffect(p))
	}
	if err == nil {
		_, err = s.db.Begin(s.ctx, runner, nil, []projector.Attempt{a})
	}
	return err == nil, err
}

func tookEffect(p projector.Parked) func(unit) ([]outbox.Message, error) {
	return func(u unit) ([]outbox.Message, error) {
		return []outbox.Message{{ID: p.MessageID, Topic: "list", Key: p.Key}}, u.add(p.Key, 1)
	}
}

// bringBack replays what is due, or what failed, and returns how many it could.
func (s *stage) bringBack(due bool) (replayed int, err error) {
	failed := projector.PermanentClass
	list := func() ([]projector.Parked, error) {
		if due {
			return s.db.DueParked(s.ctx, "ratings", nil, 0, 10)
		}
		return s.db.ParkedMessages(s.ctx, projector.ParkedFilter{Class: &failed, Limit: 10})
	}
	ps, err := list()
	for _, p := range ps {
		if err != nil {
			break
		}
		err = s.do(s.ctx, replays(p), tookEffect(p))
		switch {
		case err == nil:
			replayed++
		case errors.Is(err, projector.ErrHeld) && due:
			p.Class = projector.HeldClass
			err = s.db.FailParked(s.ctx, "", p, replayOf(p).Attempt)
		case errors.Is(err, projector.ErrHeld), errors.Is(err, projector.ErrNotParked):
			err = nil
		}
	}
	if errors.Is(err, context.Canceled) {
		return replayed, fmt.Errorf("no end in sight: %w", err)
	}
	return replayed, err
}
