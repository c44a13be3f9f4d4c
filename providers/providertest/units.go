package providertest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

var transactionCases = []testCase{
	{
		name: "all of a unit commits", play: allCommits,
		rule: "Do commits all of it: run's writes through tx, its result, the markers; others see it after the commit",
	},
	{
		// Promise: G4.4
		name: "nothing of a failed unit is left", play: failedUnit,
		rule: "If Do fails, nothing is committed, and a later unit works",
	},
	{
		name: "a panic leaves nothing", play: panickingRun,
		rule: "If run panics, nothing is committed, and the panic continues",
	},
	{
		name: "an ended goroutine leaves nothing", play: goexitingRun,
		rule: "If run calls runtime.Goexit, nothing is committed",
	},
	{
		name: "the class of an error", play: errorClasses,
		rule: "All errors are *Error, also those that handlers return. An error without a class becomes permanent if it is eventstore.ErrInvalid or ErrEventIDReused, else unknown; the wrapped error can be found",
	},
	{
		name: "an ended context", play: unitEndedContext,
		rule: "The end of ctx is never permanent; nothing is committed",
	},
	{
		name: "a context that ends while run runs", play: unitContextEndsMeanwhile,
		rule: "Do commits all of it, or nothing: the error says which",
	},
	{
		name: "a unit that ends its transaction", play: unitEndsTransaction,
		rule: "run must not end tx: then the unit fails with a permanent *Error",
	},
	{
		name: "the message of a failed statement", play: failedStatement,
		rule: "The error contains a *MessageError if a statement that failed belongs to a message (Found.Begin)",
	},
	{
		name: "output goes to the outbox once", play: outputOnce,
		rule: "Closing.Output goes into the outbox in the same transaction, in order, once for each id",
	},
	{
		name: "bad output leaves nothing", play: badOutput,
		rule: "If an output message is invalid, the error is an *Error that wraps *eventstore.InvalidError, and the whole unit is rolled back",
	},
	{
		name: "once", play: calledOnce,
		rule: "Unit.Once: run is called once, after the opening",
	},
	{
		name: "a unit without messages", play: emptyUnit,
		rule: "Do runs a unit without messages like any other",
	},
	{
		name: "a provider's Keeps", play: keepsAll,
		rule: "Keeps says what Do commits together with run's writes: markers, output, and that a failed unit has no effect",
	},
}

// full returns a unit that does all that a unit can do: it marks m-1, writes, parks another
// message, and has output.
func (s *stage) full(fail func(o opened) error) (provider.Unit, func(opened) (provider.Closing, error)) {
	u := s.of("m-1", "m-2")
	return u, func(o opened) (provider.Closing, error) {
		if err := o.add("k", 1); err != nil {
			return provider.Closing{}, err
		}
		return provider.Closing{
			Output: []outbox.Message{{ID: s.name + " from m-1", Topic: s.name}},
			Park:   []provider.Aside{{Message: 1, Parked: s.failed("m-2", "")}},
		}, fail(o)
	}
}

func succeed(opened) error { return nil }

// left fails the case unless the full unit has left all of its effects, or none, as expected.
func (s *stage) left(by string, all bool) {
	s.Helper()
	n, want := 0, []provider.Outcome{provider.OutcomeUnseen, provider.OutcomeUnseen}
	if all {
		n, want = 1, []provider.Outcome{provider.OutcomeApplied, provider.OutcomeWaiting}
	}
	got := []int{s.total("k"), len(s.entries(outbox.Filter{Topic: s.name})), len(s.rows())}
	same(s, "total, entries and parked messages after "+by, got, []int{n, n, n})
	s.outcomes("after "+by, []string{"m-1", "m-2"}, want...)
}

// works fails the case unless the full unit works now, once.
func (s *stage) works() {
	s.Helper()
	s.open(s.full(succeed))
	s.left("a unit", true)
}

func allCommits(s *stage) {
	s.open(s.full(func(opened) error {
		s.left("a unit that has not committed", false)
		return nil
	}))
	s.left("a unit", true)
}

func failedUnit(s *stage) {
	for range 2 {
		u, run := s.full(func(opened) error { return errRefused })
		err := s.do(s.ctx, u, run)
		s.require(errors.Is(err, errRefused), "the error %v wraps run's", err)
		s.left("a unit that failed", false)
	}
	s.works()
}

func panickingRun(s *stage) {
	u, run := s.full(func(opened) error { panic("poison") })
	recovered := func() (p any) {
		defer func() { p = recover() }()
		err := s.do(s.ctx, u, run)
		s.Errorf("a unit that panicked returned %v", err)
		return nil
	}()
	same(s, "what was recovered", recovered, any("poison"))
	s.left("a panic", false)
	s.works()
}

func goexitingRun(s *stage) {
	u, run := s.full(func(opened) error { runtime.Goexit(); return nil })
	together(1, func(int) {
		err := s.do(s.ctx, u, run)
		s.Errorf("a unit that ended its goroutine returned %v", err)
	})
	s.left("runtime.Goexit", false)
	s.works()
}

func errorClasses(s *stage) {
	cause := errors.New("cause")
	for _, c := range []struct {
		returned error
		class    provider.Class
		code     string
	}{
		{cause, provider.ClassUnknown, ""},
		{fmt.Errorf("wrapped: %w", cause), provider.ClassUnknown, ""},
		{fmt.Errorf("decode: %w: %w", io.ErrUnexpectedEOF, cause), provider.ClassUnknown, ""},
		{fmt.Errorf("ask another service: %w: %w", &net.DNSError{Err: "no such host"}, cause), provider.ClassUnknown, ""},
		{&provider.Error{Class: provider.ClassTransient, Code: "busy", Err: cause}, provider.ClassTransient, "busy"},
		{&provider.Error{Class: provider.ClassPermanent, Code: "undecodable", Err: cause}, provider.ClassPermanent, "undecodable"},
		{fmt.Errorf("wrapped: %w", &provider.Error{Class: provider.ClassPermanent, Err: cause}), provider.ClassPermanent, ""},
		{fmt.Errorf("%w: %w", &eventstore.InvalidError{}, cause), provider.ClassPermanent, "invalid"},
		{fmt.Errorf("%w: %w", eventstore.ErrEventIDReused, cause), provider.ClassPermanent, "event_id_reused"},
	} {
		u, run := s.full(func(opened) error { return c.returned })
		err := s.do(s.ctx, u, run)
		e := s.classed(err, fmt.Sprintf("run returns %v", c.returned), c.class)
		same(s, "code", e.Code, c.code)
		s.require(errors.Is(err, cause), "the error %v wraps run's", err)
	}
	s.left("units that failed", false)
	err := s.switches(s.ctx, 2, provider.GenerationStandby, func(opened) (provider.Closing, error) { return provider.Closing{}, cause })
	s.classed(err, "a unit with Switch whose run fails", provider.ClassUnknown)
	s.require(errors.Is(err, cause), "the error %v wraps run's", err)
}

// notPermanent are the classes of errors that do not condemn a message.
var notPermanent = []provider.Class{provider.ClassUnknown, provider.ClassTransient, provider.ClassShutdown}

func unitEndedContext(s *stage) {
	ended, cancel := context.WithCancel(s.ctx)
	cancel()
	late, cancel := context.WithDeadline(s.ctx, time.Unix(0, 0))
	defer cancel()
	u, run := s.full(succeed)
	for _, ctx := range []context.Context{ended, late} {
		err := s.do(ctx, u, run)
		s.classed(err, "a unit whose context has ended", notPermanent...)
		_, dueErr := s.db.Due(ctx, provider.DueFilter{Builds: []provider.Build{s.build()}, Keys: 1, Each: 1})
		_, tryErr := s.db.Try(ctx, s.failed("m-1", ""), 1, time.Second)
		_, listErr := s.db.Parked(ctx, provider.ParkedFilter{})
		_, decideErr := s.db.Decide(ctx, provider.ParkedFilter{Projector: s.name}, provider.StateSkipped, ann)
		_, beatErr := s.db.Beat(ctx, s.name, time.Hour, time.Hour)
		_, outcomesErr := s.db.Outcomes(ctx, []provider.Question{s.question("m-1")})
		_, pruneErr := s.db.Prune(ctx, s.name, []string{s.name + "/posted"}, time.Hour, 1)
		_, generationsErr := s.db.Generations(ctx, s.name)
		_, setErr := s.db.SetGeneration(ctx, s.becomes(nil, 2, provider.GenerationRequested))
		_, clearErr := s.db.ClearGeneration(ctx, s.build(), nil, nil, 1)
		for _, err := range []error{
			err, dueErr, tryErr, listErr, decideErr, beatErr, outcomesErr, pruneErr, generationsErr, setErr, clearErr,
			s.switches(ctx, 2, provider.GenerationStandby, nothing),
			s.db.InFlight(ctx, s.build(), provider.Worker{Runner: s.name}, []string{"m-1"}),
		} {
			s.require(errors.Is(err, ctx.Err()), "the error %v wraps the context's", err)
		}
	}
	s.left("an ended context", false)
	s.works()
}

func unitContextEndsMeanwhile(s *stage) {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	u, run := s.full(func(opened) error { cancel(); return nil })
	err := s.do(ctx, u, run)
	if err != nil {
		s.classed(err, "a unit whose context ends", append(notPermanent, provider.ClassAmbiguous)...)
	}
	s.left("a context that ended", err == nil)
	if err != nil {
		s.works()
	}
}

func unitEndsTransaction(s *stage) {
	if !s.canEnd {
		s.Log("this provider's transaction type has no way to end it")
		return
	}
	u, run := s.full(func(o opened) error { o.end(); return nil })
	s.classed(s.do(s.ctx, u, run), "a unit that ends its transaction", provider.ClassPermanent)
	// If the type permits a commit, effect and marker were committed together.
	s.open(s.of("m-1"), func(o opened) (provider.Closing, error) {
		if !o.Fresh[0][0] {
			return provider.Closing{}, nil
		}
		return provider.Closing{}, o.add("k", 1)
	})
	same(s, "total", s.total("k"), 1)
	s.outcomes("after a later unit", []string{"m-1"}, provider.OutcomeApplied)
}

func failedStatement(s *stage) {
	for bad := range 3 {
		for _, careful := range []*provider.Worker{nil, {Runner: "r-" + s.name}} {
			u := s.of("m-0", "m-1", "m-2")
			u.Careful = careful
			err := s.do(s.ctx, u, func(o opened) (provider.Closing, error) {
				for i, m := range u.Messages {
					o.Begin(i)
					err := o.add(m.ID, 1)
					if err == nil && i == bad {
						err = o.fail()
					}
					if err = errors.Join(err, s.ctx.Err()); err != nil {
						return provider.Closing{}, err
					}
				}
				return provider.Closing{Output: []outbox.Message{{Topic: s.name}}}, nil
			})
			s.classed(err, "a unit with a bad statement", provider.ClassUnknown, provider.ClassPermanent)
			e, ok := errors.AsType[*provider.MessageError](err)
			if ok || s.deferred {
				s.require(ok && e.Message == bad, "the error %v names message %d: %+v", err, bad, e)
			}
		}
	}
	s.outcomes("after bad statements", []string{"m-0", "m-1"}, provider.OutcomeUnseen, provider.OutcomeUnseen)
}

func outputOnce(s *stage) {
	out := []outbox.Message{
		{ID: newID(), Topic: s.name, Key: "ann", Payload: []byte("1E5 \x00"), Headers: map[string]string{"k": "v"}},
		{ID: "not a uuid", Topic: s.name, Key: "ann", Payload: []byte("second")},
		{ID: newID(), Topic: s.name + " 2", Key: "ann"},
	}
	for range 2 {
		s.open(s.of("m-1"), func(opened) (provider.Closing, error) { return provider.Closing{Output: slices.Clone(out)}, nil })
		entries := append(s.entries(outbox.Filter{Topic: s.name}), s.entries(outbox.Filter{Topic: s.name + " 2"})...)
		same(s, "entries", len(entries), len(out))
		for i, e := range entries {
			same(s, "message", e.OutboxMessage, out[i])
			same(s, "status", e.Status, outbox.Pending)
		}
		s.require(entries[0].Seq < entries[1].Seq && entries[1].Seq < entries[2].Seq, "the entries %+v are in order", entries)
	}
	s.open(s.of("m-2"), func(opened) (provider.Closing, error) {
		return provider.Closing{Output: []outbox.Message{{Topic: s.name + " 3"}}}, nil
	})
	last := s.entries(outbox.Filter{Topic: s.name + " 3"})[0]
	s.require(last.ID != "" && last.Key == last.ID, "an output without id and key gets a new id %q, and that as its key %q", last.ID, last.Key)
}

func badOutput(s *stage) {
	for _, bad := range []outbox.Message{
		{}, {Topic: strings.Repeat("x", 256)}, {Topic: "t", ID: "\x00"}, {Topic: "t", Key: replacement},
		{Topic: "t", Payload: make([]byte, provider.DefaultMaxPayload+1)}, {Topic: "t", Headers: map[string]string{"": ""}},
	} {
		u, run := s.full(succeed)
		err := s.do(s.ctx, u, func(o opened) (provider.Closing, error) {
			c, err := run(o)
			c.Output = append(c.Output, bad)
			return c, err
		})
		s.classed(err, "a unit with bad output", provider.ClassUnknown, provider.ClassPermanent)
		s.invalid(err, "a unit with bad output")
		s.left("bad output", false)
	}
	s.works()
}

func calledOnce(s *stage) {
	s.open(s.of("m-1"), effects)
	s.park(0, s.failed("m-3", "ann"))
	u, calls := s.of("m-1", "m-2"), 0
	u.Messages = append(u.Messages, s.message("m-4", "ann"))
	u.Once = true
	s.open(u, func(o opened) (provider.Closing, error) {
		calls++
		same(s, "fresh", o.Fresh, [][]bool{{false}, {true}, {true}})
		same(s, "held", o.Held, []bool{false, false, true})
		return effects(o)
	})
	same(s, "calls", calls, 1)
	same(s, "totals", []int{s.total("m-1"), s.total("m-2")}, []int{1, 1})
}

func emptyUnit(s *stage) {
	for i := range 2 {
		found := s.open(s.unit(), func(o opened) (provider.Closing, error) { return provider.Closing{}, o.add("k", 1) })
		same(s, "messages found", []int{len(found.Fresh), len(found.Held), len(found.Suspect), len(found.Live)}, []int{0, 0, 0, 0})
		same(s, "total", s.total("k"), i+1)
	}
}

func keepsAll(s *stage) {
	keeps := s.db.Keeps()
	s.require(keeps.Atomic && keeps.Markers && keeps.Output, "the provider keeps all that the other cases require: %+v", keeps)
}
