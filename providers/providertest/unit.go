package providertest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

var unitCases = []testCase{
	{
		name: "what is recorded is declared", play: recordsDeclared,
		rule: "Records declares which parts of a unit's work are atomic with its effects: markers, parked messages, outbox; and that it can be rehearsed",
	},
	{
		name: "no marks", play: noMarks,
		rule: "With no marks, apply always runs, with a nil fresh, and no marker is written",
	},
	{
		name: "nothing to apply", play: nilApply,
		rule: "A nil apply only records the work",
	},
	{
		name: "a failing apply leaves nothing", play: failingApply,
		rule: "Do records the work, runs apply and enqueues what it returns: all of it commits, or nothing; a later try works",
	},
	{
		name: "a panic leaves nothing", play: panickingApply,
		rule: "If apply panics, nothing is recorded, and the panic goes on",
	},
	{
		name: "an ended goroutine leaves nothing", play: goexitingApply,
		rule: "If apply calls runtime.Goexit, nothing is recorded",
	},
	{
		name: "the class of an error", play: errorClasses,
		rule: "Errors are *Error: apply's own too: where it has no class yet, permanent for what eventstore refuses (ErrInvalid, ErrEventIDReused), else unknown; what it wraps is still found",
	},
	{
		name: "an ended context", play: unitEndedContext,
		rule: "A unit whose context has ended records nothing, and its *Error, which wraps the context's, says nothing against the message",
	},
	{
		name: "a context that ends while apply runs", play: unitContextEndsMeanwhile,
		rule: "All of a unit commits, or nothing: whichever it is, the returned error tells",
	},
	{
		name: "a unit that ends its transaction", play: unitEndsTransaction,
		rule: "apply must not end tx; a unit whose transaction it ended fails with a permanent *Error",
	},
	{
		name: "not seen before it commits", play: unitUnseen,
		rule: "A unit's writes, markers, parked messages and output show to others when it commits",
	},
}

// key is the mark of a message at the handler "ratings/posted".
func key(id string) marker.Key { return marker.Key{Handler: "ratings/posted", MessageID: id} }

// work is the work of one message with markers.
func work(ids ...string) projector.Work {
	w := projector.Work{Projector: "ratings"}
	for _, id := range ids {
		w.Marks = append(w.Marks, key(id))
	}
	return w
}

// adds is an apply that adds n to the total of key.
func adds(key string, n int) func(unit) ([]outbox.Message, error) {
	return func(u unit) ([]outbox.Message, error) { return nil, u.add(key, n) }
}

// outcomes asks what became of messages, and ends the case on an error.
func (s *stage) outcomes(keys ...marker.Key) []projector.Outcome {
	s.Helper()
	got, err := s.db.Outcomes(s.ctx, keys)
	s.ok(err, "look up outcomes")
	same(s, "outcomes", len(got), len(keys))
	return got
}

// untouched ends the case if a unit for the message id left anything.
func (s *stage) untouched(id, by string) {
	s.Helper()
	same(s, "total after "+by, s.total("k"), 0)
	same(s, "outcome after "+by, s.outcomes(key(id))[0], projector.Unseen)
	same(s, "entries after "+by, len(s.entries(outbox.Filter{})), 0)
	same(s, "parked after "+by, len(s.parked("", 0, 0)), 0)
}

// full is a unit's work with everything that can be recorded, and an apply that does everything.
func full(id string, fail func(u unit) error) (projector.Work, func(unit) ([]outbox.Message, error)) {
	w := work(id)
	w.Park = []projector.Parked{{Projector: "ratings", Handler: "ratings/other", MessageID: "poison " + id, Payload: []byte("x")}}
	return w, func(u unit) ([]outbox.Message, error) {
		if err := u.add("k", 1); err != nil {
			return nil, err
		}
		return []outbox.Message{{ID: "from " + id, Topic: "mail"}}, fail(u)
	}
}

// works ends the case if the unit that failed before does not work now.
func (s *stage) works(id string) {
	s.Helper()
	w, apply := full(id, func(unit) error { return nil })
	s.ok(s.do(s.ctx, w, apply), "a later try")
	same(s, "total", s.total("k"), 1)
	same(s, "outcome", s.outcomes(key(id))[0], projector.Applied)
	same(s, "entries", len(s.entries(outbox.Filter{})), 1)
	same(s, "parked", len(s.parked("", 0, 0)), 1)
}

func recordsDeclared(s *stage) {
	s.works(newID()) // which sees all three
	same(s, "Records", s.db.Records(), projector.Records{Marks: true, Park: true, Outbox: true, Rehearse: true})
}

func noMarks(s *stage) {
	for i := range 3 {
		s.ok(s.do(s.ctx, projector.Work{Projector: "ratings"}, func(u unit) ([]outbox.Message, error) {
			s.holds(u.fresh == nil, "fresh is nil, not %v", u.fresh)
			return nil, u.add("k", 1)
		}), "a unit without marks")
		same(s, "total", s.total("k"), i+1)
	}
	same(s, "outcome of a message without a marker", s.outcomes(key("m-1"))[0], projector.Unseen)
}

func nilApply(s *stage) {
	w, _ := full("m-1", nil)
	s.ok(s.do(s.ctx, w, nil), "a unit that only records")
	same(s, "outcome", s.outcomes(key("m-1"))[0], projector.Applied)
	same(s, "parked", len(s.parked("", 0, 0)), 1)
	s.ok(s.do(s.ctx, projector.Work{Projector: "ratings"}, nil), "a unit that records nothing")
	s.ok(s.do(s.ctx, work("m-1"), adds("k", 1)), "a unit of what was recorded")
	same(s, "effects of a message that is marked", s.total("k"), 0)
}

func failingApply(s *stage) {
	cause := errors.New("cause")
	w, apply := full("m-1", func(unit) error { return cause })
	for range 3 {
		err := s.do(s.ctx, w, apply)
		s.holds(errors.Is(err, cause), "the error %v wraps apply's", err)
		s.untouched("m-1", "a failing apply")
	}
	s.works("m-1")
}

func panickingApply(s *stage) {
	w, apply := full("m-1", func(unit) error { panic("poison") })
	recovered := func() (p any) {
		defer func() { p = recover() }()
		err := s.do(s.ctx, w, apply)
		s.Errorf("a unit whose apply panicked returned %v", err)
		return nil
	}()
	same(s, "what was recovered", recovered, any("poison"))
	s.untouched("m-1", "a panic")
	s.works("m-1")
}

func goexitingApply(s *stage) {
	w, apply := full("m-1", func(unit) error { runtime.Goexit(); return nil })
	together(1, func(int) {
		err := s.do(s.ctx, w, apply)
		s.Errorf("a unit whose apply ended its goroutine returned %v", err)
	})
	s.untouched("m-1", "runtime.Goexit")
	s.works("m-1")
}

// classed ends the case if err is not an *Error of one of these classes.
func (s *stage) classed(err error, doing string, of ...projector.Class) *projector.Error {
	s.Helper()
	e, ok := errors.AsType[*projector.Error](err)
	if !ok {
		s.Fatalf("%s: got error %v, want a *projector.Error", doing, err)
	}
	for _, class := range of {
		if e.Class == class {
			return e
		}
	}
	s.Fatalf("%s: got class %s of error %v, want one of %v", doing, e.Class, err, of)
	return nil
}

func errorClasses(s *stage) {
	cause := errors.New("cause")
	for i, c := range []struct {
		returned error
		class    projector.Class
		code     string
	}{
		{cause, projector.UnknownClass, ""},
		{fmt.Errorf("wrapped: %w", cause), projector.UnknownClass, ""},
		{fmt.Errorf("decode: %w: %w", io.ErrUnexpectedEOF, cause), projector.UnknownClass, ""},
		{fmt.Errorf("ask another service: %w: %w", &net.DNSError{Err: "no such host"}, cause), projector.UnknownClass, ""},
		{projector.Permanent(cause), projector.PermanentClass, ""},
		{fmt.Errorf("wrapped: %w", projector.Permanent(cause)), projector.PermanentClass, ""},
		{&projector.Error{Class: projector.Transient, Code: "busy", Err: cause}, projector.Transient, "busy"},
		{&projector.Error{Class: projector.PermanentClass, Code: "undecodable", Err: cause}, projector.PermanentClass, "undecodable"},
		{fmt.Errorf("%w: %w", &eventstore.InvalidError{}, cause), projector.PermanentClass, "invalid"},
		{fmt.Errorf("%w: %w", eventstore.ErrEventIDReused, cause), projector.PermanentClass, "event_id_reused"},
	} {
		id := fmt.Sprint("m-", i)
		for _, w := range []projector.Work{work(id), {Projector: "ratings"}} {
			err := s.do(s.ctx, w, func(unit) ([]outbox.Message, error) { return nil, c.returned })
			e := s.classed(err, fmt.Sprintf("apply returns %v", c.returned), c.class)
			same(s, "code", e.Code, c.code)
			s.holds(errors.Is(err, cause), "the error %v wraps apply's", err)
		}
		s.untouched(id, "a failing apply")
	}
}

var notPermanent = []projector.Class{projector.UnknownClass, projector.Transient, projector.Shutdown}

func unitEndedContext(s *stage) {
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	late, cancel := context.WithDeadline(s.ctx, time.Unix(0, 0))
	defer cancel()
	w, apply := full("m-1", func(unit) error { return nil })
	for _, ctx := range []context.Context{ctx, late} {
		err := s.do(ctx, w, apply)
		s.classed(err, "a unit whose context has ended", notPermanent...)
		s.holds(errors.Is(err, ctx.Err()), "the error %v wraps the context's", err)
		_, err = s.db.Outcomes(ctx, w.Marks)
		s.holds(errors.Is(err, ctx.Err()), "the error %v wraps the context's", err)
		_, err = s.db.ParkedMessages(ctx, projector.ParkedFilter{})
		s.holds(errors.Is(err, ctx.Err()), "the error %v wraps the context's", err)
	}
	s.untouched("m-1", "an ended context")
	s.works("m-1")
}

func unitContextEndsMeanwhile(s *stage) {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	w, apply := full("m-1", func(unit) error { cancel(); return nil })
	if err := s.do(ctx, w, apply); err != nil {
		s.classed(err, "a unit whose context ends", append(notPermanent, projector.Ambiguous)...)
		s.untouched("m-1", "a context that ended")
		s.works("m-1")
		return
	}
	same(s, "total", s.total("k"), 1)
	same(s, "outcome", s.outcomes(key("m-1"))[0], projector.Applied)
	same(s, "entries", len(s.entries(outbox.Filter{})), 1)
	same(s, "parked", len(s.parked("", 0, 0)), 1)
}

func unitEndsTransaction(s *stage) {
	if !s.canEnd {
		s.Log("this provider's transaction type has no way to end it")
		return
	}
	w, apply := full("m-1", func(u unit) error { u.end(); return nil })
	err := s.do(s.ctx, w, apply)
	s.classed(err, "a unit that ends its transaction", projector.PermanentClass)
	// Where the type lets a commit through, effect and marker went with it, and together.
	s.ok(s.do(s.ctx, work("m-1"), adds("k", 1)), "a later try")
	same(s, "total", s.total("k"), 1)
	same(s, "outcome", s.outcomes(key("m-1"))[0], projector.Applied)
}

func unitUnseen(s *stage) {
	w, apply := full("m-1", func(unit) error {
		s.untouched("m-1", "a unit that has not committed")
		return nil
	})
	s.ok(s.do(s.ctx, w, apply), "a unit of work")
	same(s, "total", s.total("k"), 1)
}
