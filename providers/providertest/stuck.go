package providertest

import (
	"context"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

const stuckRule = "Where ctx ends and apply does not return within a second, its transaction is broken off: nothing is recorded, and others can have what it held. Do returns when apply does"

var stuckCases = []testCase{
	{name: "a handler that does not return", rule: stuckRule, play: stuckHandler},
	{name: "a replay that does not return", rule: stuckRule, play: stuckReplay},
	{name: "a rehearsal that does not return", rule: stuckRule, play: stuckRehearsal},
}

// stuck runs a unit whose context ends once apply runs, and whose apply goes on: it writes before, and once others, which
// run beside it, are done. It ends the case unless Do waits for apply and fails.
func (s *stage) stuck(w projector.Work, others func()) {
	s.Helper()
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	leave, done := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(done)
		done <- s.do(ctx, w, func(u unit) ([]outbox.Message, error) {
			_ = u.add("stuck", 1)
			cancel()
			<-leave
			late(u)
			return []outbox.Message{{ID: "stuck", Topic: "mail"}}, nil
		})
	}()
	var err error
	func() {
		defer func() { // also where others ends the case
			close(leave)
			err = <-done
		}()
		<-ctx.Done()
		others()
		select {
		case err := <-done:
			s.Fatalf("Do returned %v before apply did", err)
		default:
		}
	}()
	s.classed(err, "a unit whose handler did not return", append(notPermanent, projector.Ambiguous)...)
	same(s, "total of a handler that did not return", s.total("stuck"), 0)
	same(s, "its output", len(s.entries(outbox.Filter{})), 0)
}

// late uses a transaction that was broken off: an error is as good as no effect, and a panic too.
func late(u unit) {
	defer func() { _ = recover() }()
	for range 3 {
		_ = u.add("stuck", 10)
	}
}

// within ends the case if fn takes so long that somebody must have waited in vain.
func (s *stage) within(fn func(ctx context.Context) error, doing string) {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.ctx, patience/4)
	defer cancel()
	s.ok(fn(ctx), doing)
}

func stuckHandler(s *stage) {
	w := work("m-1", "m-2")
	w.Park = []projector.Parked{poison("m-3", "ann")}
	s.stuck(w, func() {
		s.within(func(ctx context.Context) error { return s.do(ctx, work("m-4"), adds("stuck", 0)) }, "a unit of the same total")
		s.within(func(ctx context.Context) error { return s.do(ctx, work("m-1"), adds("k", 1)) }, "a unit of the same message")
		same(s, "total while it is stuck", s.total("k"), 1)
		s.within(func(ctx context.Context) error {
			_, err := s.db.CountAttempt(ctx, "one", posted("m-1", ""), -1)
			return err
		}, "count an attempt")
	})
	same(s, "outcomes", s.outcomes(key("m-1"), key("m-2")), []projector.Outcome{projector.Applied, projector.Unseen})
	same(s, "total", s.total("k"), 1)
	same(s, "parked", len(s.parked("", 0, 0)), 0)
	s.ok(s.do(s.ctx, w, adds("k", 1)), "the unit again")
	same(s, "total", s.total("k"), 2)
	same(s, "parked", len(s.parked("", 0, 0)), 1)
}

func stuckReplay(s *stage) {
	rows := s.setAside(poison("m-1", "ann"), poison("m-2", "ann"))
	behind := posted("m-3", "ann")
	w := replays(rows[0])
	w.Park, w.Behind = []projector.Parked{waiting("m-3", "ann")}, &behind
	s.stuck(w, func() {
		s.within(func(ctx context.Context) error { return s.do(ctx, replays(rows[0]), adds("m-1", 1)) }, "replay the same message")
		s.within(func(ctx context.Context) error {
			_, err := s.db.SkipParked(ctx, projector.ParkedFilter{Key: "ann"}, because)
			return err
		}, "skip what it parked behind")
	})
	same(s, "parked", len(s.parked("", 0, 0)), 0)
	s.inState(rows[0], projector.Replayed)
	s.inState(rows[1], projector.Skipped)
	same(s, "total", s.total("m-1"), 1)
}

func stuckRehearsal(s *stage) {
	w := work("m-1")
	w.Rehearse = func([]projector.Change) { s.Errorf("Rehearse is told of a unit that was broken off") }
	s.stuck(w, func() {
		s.within(func(ctx context.Context) error { return s.do(ctx, work("m-1"), adds("k", 1)) }, "a unit of the same message")
	})
	same(s, "total", s.total("k"), 1)
}
