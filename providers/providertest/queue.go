package providertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/provider"
)

var allStates = []provider.ParkedState{provider.StateWaiting, provider.StateStuck, provider.StateReplayed, provider.StateSkipped}

var (
	errRefused = errors.New("refused")
	ann        = provider.Decision{By: `o'hara "日本"`, Reason: "fixed; in v2"}
)

// handler returns a handler of the case's projector.
func (s *stage) handler(name string, was ...string) provider.Handler {
	return provider.Handler{Name: s.name + "/" + name, Was: was}
}

// laneOf returns the lane of a message: of its key or, without one, of its id.
func laneOf(id, key string) provider.Lane {
	if key == "" {
		return provider.LaneOfMessage(id)
	}
	return provider.LaneOfKey(key)
}

// message returns a delivery for the handler "posted", with a marker.
func (s *stage) message(id, key string) provider.Message {
	return provider.Message{ID: id, Lane: laneOf(id, key), Handlers: []provider.Handler{s.handler("posted")}, Mark: true}
}

func (s *stage) unit(ms ...provider.Message) provider.Unit {
	return provider.Unit{Projector: s.name, Generation: s.generation, Messages: ms}
}

// of returns a unit of deliveries without keys.
func (s *stage) of(ids ...string) provider.Unit {
	u := s.unit()
	for _, id := range ids {
		u.Messages = append(u.Messages, s.message(id, ""))
	}
	return u
}

// open runs a unit, fails the case on an error, and returns what run found in its last call.
func (s *stage) open(u provider.Unit, run func(o opened) (provider.Closing, error)) (last provider.Found) {
	s.Helper()
	s.ok(s.do(s.ctx, u, func(o opened) (provider.Closing, error) {
		last = o.Found
		return run(o)
	}), "run a unit")
	return last
}

// effects adds 1 to the total of a message for each fresh handler.
func effects(o opened) (provider.Closing, error) {
	for i, m := range o.unit.Messages {
		o.Begin(i)
		for _, fresh := range o.Fresh[i] {
			if !fresh {
				continue
			}
			if err := o.add(m.ID, 1); err != nil {
				return provider.Closing{}, err
			}
		}
	}
	return provider.Closing{}, nil
}

func nothing(opened) (provider.Closing, error) { return provider.Closing{}, nil }

// failed returns a message as it is parked after its first failure.
func (s *stage) failed(id, key string) provider.Parked {
	return provider.Parked{
		Projector: s.name, Generation: s.generation, Handler: s.name + "/posted", Handlers: []string{s.name + "/posted"}, MessageID: id, Topic: "review",
		Key: key, Lane: laneOf(id, key), Type: "review.posted", Payload: []byte("payload of " + id),
		Headers: map[string]string{provider.HeaderType: "review.posted"}, Class: provider.ClassUnknown, Code: "panic", Attempts: 1, Version: "v1",
	}
}

// behind returns a message that is parked because it waits for another.
func (s *stage) behind(id, key string) provider.Parked {
	p := s.failed(id, key)
	p.Handler, p.Class, p.Code, p.Attempts = "", provider.ClassHeld, "", 0
	return p
}

// untyped returns a message that is parked before its type is known.
func (s *stage) untyped(id, key string) provider.Parked {
	p := s.failed(id, key)
	p.Handler, p.Handlers, p.Type, p.Code = "", nil, "review.liked", "unregistered"
	return p
}

// delivery returns the delivery of the parked message p. It has a marker if it is parked for
// handlers.
func delivery(p provider.Parked) provider.Message {
	m := provider.Message{ID: p.MessageID, Lane: p.Lane, Mark: len(p.Handlers) > 0}
	for _, name := range p.Handlers {
		m.Handlers = append(m.Handlers, provider.Handler{Name: name})
	}
	return m
}

// parking returns a unit that parks each of ps, and its function.
func (s *stage) parking(after time.Duration, ps ...provider.Parked) (provider.Unit, func(opened) (provider.Closing, error)) {
	u, c := s.unit(), provider.Closing{}
	for i, p := range ps {
		u.Messages = append(u.Messages, delivery(p))
		c.Park = append(c.Park, provider.Aside{Message: i, Parked: p, After: after})
	}
	return u, func(opened) (provider.Closing, error) { return c, nil }
}

// park parks messages in one unit, and returns them as they are stored.
func (s *stage) park(after time.Duration, ps ...provider.Parked) []provider.Parked {
	s.Helper()
	last := int64(0)
	for _, p := range s.list(provider.ParkedFilter{States: allStates, Limit: 10_000}) {
		last = p.Seq
	}
	s.open(s.parking(after, ps...))
	stored := s.list(provider.ParkedFilter{After: last, Limit: 10_000})
	same(s, "messages parked", len(stored), len(ps))
	return stored
}

// parkedUnit returns a unit that runs parked messages.
func (s *stage) parkedUnit(rows ...provider.Parked) provider.Unit {
	u := s.unit()
	for _, p := range rows {
		m := delivery(p)
		m.Mark, m.Parked = false, &p
		u.Messages = append(u.Messages, m)
	}
	return u
}

// runs runs parked messages, and fails the case unless these are live.
func (s *stage) runs(what string, rows []provider.Parked, live ...bool) {
	s.Helper()
	same(s, "live, "+what, s.open(s.parkedUnit(rows...), effects).Live, live)
}

// fails runs a parked message that fails: it stays with p's error, and its lane is due after this
// time.
func (s *stage) fails(p provider.Parked, after time.Duration) {
	s.Helper()
	found := s.open(s.parkedUnit(p), func(opened) (provider.Closing, error) {
		return provider.Closing{Park: []provider.Aside{{Parked: p, After: after}}}, nil
	})
	same(s, "live", found.Live, []bool{true})
}

// list returns what f selects, with times and empty values in one form.
func (s *stage) list(f provider.ParkedFilter) []provider.Parked {
	s.Helper()
	got, err := s.db.Parked(s.ctx, f)
	s.ok(err, "list parked messages")
	for i := range got {
		got[i] = plainParked(got[i])
	}
	return got
}

// rows returns the waiting and stuck messages of the case's projector.
func (s *stage) rows() []provider.Parked {
	s.Helper()
	rows := s.list(provider.ParkedFilter{Projector: s.name, Limit: 10_000})
	if c, ok := s.store.(parkedCounter); ok {
		n, err := c.ParkedCount(s.ctx, s.name)
		s.ok(err, "count parked messages")
		same(s, "count of parked messages", n, int64(len(rows)))
	}
	return rows
}

// parkedCounter is a capability: ParkedCount returns how many messages of a projector's live generation wait
// or are stuck. If the name is empty, it counts those of all projectors.
type parkedCounter interface {
	ParkedCount(ctx context.Context, projector string) (int64, error)
}

// row returns one parked message as it is stored, in any state.
func (s *stage) row(seq int64) provider.Parked {
	s.Helper()
	rows := s.list(provider.ParkedFilter{Seqs: []int64{seq}, States: allStates})
	same(s, "parked messages of that Seq", len(rows), 1)
	return rows[0]
}

// states fails the case unless the states of rows are these.
func (s *stage) states(what string, rows []provider.Parked, want ...provider.ParkedState) {
	s.Helper()
	got := []provider.ParkedState{}
	for _, p := range rows {
		got = append(got, s.row(p.Seq).State)
	}
	same(s, "states, "+what, got, want)
}

// plainParked returns p in a form that reflect.DeepEqual can compare.
func plainParked(p provider.Parked) provider.Parked {
	for _, at := range []*time.Time{&p.At, &p.DueAt, &p.ResolvedAt} {
		if *at = at.UTC().Round(0); at.IsZero() {
			*at = time.Time{}
		}
	}
	if len(p.Headers) == 0 {
		p.Headers = nil
	}
	if len(p.Payload) == 0 {
		p.Payload = nil
	}
	if len(p.Handlers) == 0 {
		p.Handlers = nil
	}
	return p
}

func idsOfParked(ps []provider.Parked) []string {
	ids := []string{}
	for _, p := range ps {
		ids = append(ids, p.MessageID)
	}
	return ids
}

// due returns the due messages of the case's projector, up to ten of a lane.
func (s *stage) due() []provider.Parked {
	s.Helper()
	due, err := s.db.Due(s.ctx, provider.DueFilter{Builds: []provider.Build{s.build()}, Keys: 1000, Each: 10})
	s.ok(err, "list due messages")
	for i := range due {
		due[i] = plainParked(due[i])
	}
	return due
}

// isDue fails the case unless these are due. The order of lanes with the same time is free.
func (s *stage) isDue(when string, want ...string) {
	s.Helper()
	ids := idsOfParked(s.due())
	slices.Sort(ids)
	slices.Sort(want)
	s.require(slices.Equal(ids, want), "due %s: got %q, want %q", when, ids, want)
}

// isDueInOrder is isDue for lanes with different times.
func (s *stage) isDueInOrder(when string, want ...string) {
	s.Helper()
	same(s, "due "+when, idsOfParked(s.due()), want)
}

// isHeld fails the case unless the lane of a key is held, or is not, as expected.
func (s *stage) isHeld(when, key string, want bool) {
	s.Helper()
	m := provider.Message{ID: newID(), Lane: provider.LaneOfKey(key)}
	same(s, fmt.Sprintf("lane %s is held %s", key, when), s.open(s.unit(m), nothing).Held, []bool{want})
}

// decide decides about what f selects of the case's projector, and fails the case unless that is
// so many.
func (s *stage) decide(f provider.ParkedFilter, to provider.ParkedState, want int) {
	s.Helper()
	f.Projector = s.name
	n, err := s.db.Decide(s.ctx, f, to, ann)
	s.ok(err, "decide")
	same(s, "messages decided about", n, want)
}

func (s *stage) skip(p provider.Parked) {
	s.Helper()
	s.decide(provider.ParkedFilter{Seqs: []int64{p.Seq}}, provider.StateSkipped, 1)
}

// question asks for the outcome of a message at the handler "posted".
func (s *stage) question(id string) provider.Question {
	return provider.Question{Generation: s.generation, Handler: s.name + "/posted", MessageID: id}
}

// outcomes fails the case unless these are the outcomes of messages at the handler "posted".
func (s *stage) outcomes(what string, ids []string, want ...provider.Outcome) {
	s.Helper()
	qs := make([]provider.Question, len(ids))
	for i, id := range ids {
		qs[i] = s.question(id)
	}
	same(s, "outcomes, "+what, s.answers(qs...), want)
}

func (s *stage) answers(qs ...provider.Question) []provider.Outcome {
	s.Helper()
	got, err := s.db.Outcomes(s.ctx, qs)
	s.ok(err, "look up outcomes")
	same(s, "outcomes", len(got), len(qs))
	return got
}

// classed fails the case unless err is an *Error of one of these classes.
func (s *stage) classed(err error, doing string, of ...provider.Class) *provider.Error {
	s.Helper()
	e, ok := errors.AsType[*provider.Error](err)
	if !ok {
		s.Fatalf("%s: got error %v, want a *provider.Error", doing, err)
	}
	if !slices.Contains(of, e.Class) {
		s.Fatalf("%s: got class %s of error %v, want one of %v", doing, e.Class, err, of)
	}
	return e
}

// begin starts fn in a goroutine, and gives it a moment to begin its wait. wait returns fn's
// error. On a busy machine fn may begin later: then the case checks less.
func begin(fn func() error) (wait func() error) { return beginFor(50*time.Millisecond, fn) }

// beginFor is begin with a longer moment, so that fn can end in it.
func beginFor(moment time.Duration, fn func() error) (wait func() error) {
	done := make(chan error, 1)
	go func() { done <- fn() }()
	select {
	case err := <-done:
		done <- err
	case <-time.After(moment):
	}
	return func() error { return <-done }
}
