package providertest

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

var checkpointCases = []testCase{
	{
		name: "a projector without a checkpoint", play: noCheckpoint,
		rule: "If a generation has no checkpoint, Checkpoint returns one with only Generation set. Its units work as without a log",
	},
	{
		name: "a checkpoint is kept", play: checkpointKept,
		rule: "SetCheckpoint replaces the whole checkpoint, and Checkpoint returns it",
	},
	{
		name: "a checkpoint that has changed", play: checkpointCompared,
		rule: "SetCheckpoint returns false, and changes nothing, unless the position, the mode and the token of the current checkpoint are those of from",
	},
	{
		name: "handlers that the caller has not changed", play: handlersKept,
		rule: "SetCheckpoint leaves the stored handlers as they are if those of to are those of from: another program may have changed them",
	},
	{
		name: "checkpoints of generations", play: checkpointOfGeneration,
		rule: "Each generation has its own checkpoint, and every method concerns that of the generation that it names",
	},
	{
		name: "a new handle knows the checkpoint", unless: Volatile, play: newHandleKnowsCheckpoint,
		rule: "A checkpoint outlives the process",
	},
	{
		// Promise: G7b.2
		name: "SetCheckpoint waits for an open unit", unless: Deferred, play: setCheckpointWaits,
		rule: "SetCheckpoint replaces the checkpoint while no unit of the projector is open: it waits for open units",
	},
	{name: "a checkpoint that cannot be stored", rule: "SetCheckpoint: to must have a mode", play: badCheckpoint},
	{name: "text that cannot be stored", rule: filterRule, play: badProgressText},
}

// place returns the place of an event with this position.
func place(position int64) provider.LogPlace {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678_901_000, time.UTC)
	return provider.LogPlace{Position: position, ID: fmt.Sprint("e-", position), RecordedAt: at.Add(time.Duration(position%1000) * time.Second)}
}

// checkpoint returns the checkpoint of the case's projector, without its Generation, in a form that
// reflect.DeepEqual can compare.
func (s *stage) checkpoint() provider.Checkpoint {
	s.Helper()
	c, err := s.db.Checkpoint(s.ctx, s.build())
	s.ok(err, "read the checkpoint")
	same(s, "generation of the checkpoint", c.Generation, s.generation)
	if c.Generation, c.Place.RecordedAt = 0, c.Place.RecordedAt.UTC(); c.Place.RecordedAt.IsZero() {
		c.Place.RecordedAt = time.Time{}
	}
	if len(c.Handlers) == 0 {
		c.Handlers = nil
	}
	return c
}

// set replaces the checkpoint, and fails the case if it is not from.
func (s *stage) set(from, to provider.Checkpoint) provider.Checkpoint {
	s.Helper()
	ok, err := s.db.SetCheckpoint(s.ctx, s.build(), from, to)
	s.ok(err, "set the checkpoint")
	same(s, "the checkpoint was set", ok, true)
	return to
}

// begins creates the checkpoint of the case's projector.
func (s *stage) begins(position int64, mode provider.Mode) provider.Checkpoint {
	s.Helper()
	return s.set(provider.Checkpoint{}, provider.Checkpoint{
		Place: place(position), Lineage: "a lineage", Mode: mode, Token: claim.NewToken(),
		Handlers: []provider.Began{{Handler: s.name + "/posted", Type: "review.posted", Position: position}},
	})
}

// mode changes the mode of the checkpoint c.
func (s *stage) mode(c provider.Checkpoint, to provider.Mode) provider.Checkpoint {
	s.Helper()
	next := c
	next.Mode = to
	return s.set(c, next)
}

// event returns the delivery of the event at this position of the log.
func (s *stage) event(position int64) provider.Message {
	m := s.message(fmt.Sprint("e-", position), "")
	m.Position = position
	return m
}

// events returns a unit of events at these positions.
func (s *stage) events(positions ...int64) provider.Unit {
	u := s.unit()
	for _, position := range positions {
		u.Messages = append(u.Messages, s.event(position))
	}
	return u
}

// reading returns u as a unit of the reader that has set the checkpoint.
func (s *stage) reading(u provider.Unit) provider.Unit {
	s.Helper()
	c, err := s.db.Checkpoint(s.ctx, u.Build())
	s.ok(err, "read the checkpoint")
	u.Reader = &provider.Reader{Mode: c.Mode, Token: c.Token}
	return u
}

// upTo returns a unit of events that moves the checkpoint from c to a position.
func (s *stage) upTo(c provider.Checkpoint, to int64, positions ...int64) provider.Unit {
	u := s.events(positions...)
	u.Advance = &provider.Advance{From: c.Place.Position, To: place(to), Mode: c.Mode, Token: c.Token}
	return u
}

// moved returns c at another position.
func moved(c provider.Checkpoint, to int64) provider.Checkpoint {
	c.Place = place(to)
	return c
}

// move moves the checkpoint from c to a position, without messages.
func (s *stage) move(c provider.Checkpoint, to int64) provider.Checkpoint {
	s.Helper()
	s.open(s.upTo(c, to), nothing)
	return moved(c, to)
}

// effectsOf fails the case unless the events at these positions took effect so often, in total.
func (s *stage) effectsOf(what string, want int, positions ...int64) {
	s.Helper()
	n := 0
	for _, position := range positions {
		n += s.total(fmt.Sprint("e-", position))
	}
	same(s, "effects "+what, n, want)
}

// applied fails the case unless these of the positions are applied.
func (s *stage) applied(what string, positions []int64, want ...bool) {
	s.Helper()
	got, err := s.db.Unapplied(s.ctx, s.build(), s.events(positions...).Messages)
	s.ok(err, "look up markers")
	for i := range got {
		got[i] = !got[i]
	}
	same(s, "applied "+what, got, want)
}

// prunedApplied prunes markers of handlers up to the checkpoint, and fails the case unless it
// deletes so many.
func (s *stage) prunedApplied(what string, handlers []string, limit, want int) {
	s.Helper()
	full := make([]string, len(handlers))
	for i, h := range handlers {
		full[i] = s.name + "/" + h
	}
	n, err := s.db.PruneApplied(s.ctx, s.build(), full, limit)
	s.ok(err, "prune applied")
	same(s, "markers deleted "+what, n, want)
}

func noCheckpoint(s *stage) {
	same(s, "checkpoint", s.checkpoint(), provider.Checkpoint{})
	same(s, "fresh", s.open(s.events(5, 7), effects).Fresh, [][]bool{{true}, {true}})
	found := s.open(s.events(5, 7, 8), effects)
	same(s, "fresh again", found.Fresh, [][]bool{{false}, {false}, {true}})
	same(s, "left", found.Left, nil)
	s.applied("without a checkpoint", []int64{5, 7, 8, 9}, true, true, true, false)
	s.prunedApplied("without a checkpoint", []string{"posted"}, 10, 0)
	for _, u := range []provider.Unit{s.upTo(provider.Checkpoint{}, 9), s.upTo(provider.Checkpoint{Mode: provider.ModeLive}, 9, 9)} {
		s.fenced(s.do(s.ctx, u, effects), "a move of no checkpoint")
	}
	same(s, "checkpoint", s.checkpoint(), provider.Checkpoint{})
	s.effectsOf("without a checkpoint", 3, 5, 7, 8, 9)
}

func checkpointKept(s *stage) {
	c := s.begins(0, provider.ModeCatchUp)
	same(s, "checkpoint", s.checkpoint(), c)
	next := provider.Checkpoint{
		Place: place(1 << 40), Lineage: `o'hara "日本"`, Mode: provider.ModeLive, Token: claim.NewToken(),
		Handlers: []provider.Began{
			{Handler: s.name + "/rated", Type: "review.rated", Position: 1 << 40}, {Handler: s.name + "/it's", Type: `"é`, Position: 0},
		},
	}
	s.set(c, next)
	same(s, "checkpoint", s.checkpoint(), next)
	// a person chose this one
	least := provider.Checkpoint{Place: provider.LogPlace{Position: 3}, Mode: provider.ModeClosing}
	s.set(next, least)
	same(s, "checkpoint", s.checkpoint(), least)
	other, err := s.db.Checkpoint(s.ctx, provider.Build{Projector: s.name + "x"})
	s.ok(err, "read the checkpoint of another projector")
	same(s, "checkpoint of another projector", other, provider.Checkpoint{Generation: 1})
}

func checkpointCompared(s *stage) {
	refused := func(what string, from provider.Checkpoint) {
		is := s.checkpoint()
		ok, err := s.db.SetCheckpoint(s.ctx, s.build(), from, provider.Checkpoint{Place: place(99), Mode: provider.ModeLive, Token: claim.NewToken()})
		s.ok(err, "set the checkpoint")
		same(s, "the checkpoint was set, from "+what, ok, false)
		same(s, "checkpoint", s.checkpoint(), is)
	}
	refused("one that does not exist", provider.Checkpoint{Place: place(3), Mode: provider.ModeLive})
	c := s.begins(5, provider.ModeLive)
	refused("nothing", provider.Checkpoint{})
	refused("an earlier position", moved(c, 4))
	refused("a later position", moved(c, 6))
	for _, mode := range []provider.Mode{provider.ModeCatchUp, provider.ModeClosing} {
		other := c
		other.Mode = mode
		refused("another mode", other)
	}
	for _, token := range []claim.Token{{}, claim.NewToken()} {
		other := c
		other.Token = token
		refused("another token", other)
	}
	s.set(provider.Checkpoint{Place: provider.LogPlace{Position: 5}, Mode: c.Mode, Token: c.Token}, moved(c, 6)) // the rest is not compared
}

func handlersKept(s *stage) {
	c := s.begins(5, provider.ModeLive)
	other := c
	other.Handlers = append(slices.Clone(c.Handlers), provider.Began{Handler: s.name + "/rated", Was: []string{"was"}, Type: "review.rated", Position: 5})
	s.set(c, other)
	stale := c // read before
	stale.Mode = provider.ModeCatchUp
	s.set(c, stale)
	other.Mode = provider.ModeCatchUp
	same(s, "checkpoint", s.checkpoint(), other)
	fewer := other
	fewer.Handlers = c.Handlers
	s.set(other, fewer)
	same(s, "checkpoint", s.checkpoint(), fewer)
	none := fewer
	none.Handlers = nil
	s.set(fewer, none)
	same(s, "checkpoint", s.checkpoint(), none)
}

func checkpointOfGeneration(s *stage) {
	first := s.begins(5, provider.ModeLive)
	s.open(s.events(6), effects)
	next := s.in(2)
	same(s, "checkpoint of a new generation", next.checkpoint(), provider.Checkpoint{})
	next.prunedApplied("in a new generation", []string{"posted"}, 10, 0)
	next.applied("in a new generation", []int64{4, 6}, false, false)
	q := next.question("e-4")
	q.Position = 4
	same(s, "outcome in a new generation", s.answers(q), []provider.Outcome{provider.OutcomeUnseen})
	same(s, "fresh in a new generation", next.open(next.events(4, 6), effects).Fresh, [][]bool{{true}, {true}})
	next.fenced(s.do(s.ctx, next.upTo(first, 9), nothing), "a move of another generation's checkpoint")
	second := next.move(next.begins(0, provider.ModeLive), 6)
	next.prunedApplied("of the second generation", []string{"posted"}, 10, 2)
	same(s, "checkpoint of the first generation", s.checkpoint(), first)
	s.applied("in the first generation", []int64{4, 6, 7}, true, true, false)
	s.move(first, 6)
	s.prunedApplied("of the first generation", []string{"posted"}, 10, 1)
	same(s, "checkpoint of the second generation", next.checkpoint(), second)
}

func newHandleKnowsCheckpoint(s *stage) {
	c := s.begins(5, provider.ModeLive)
	s.open(s.events(6), effects)
	later := s.reopen()
	same(s, "checkpoint through a new handle", later.checkpoint(), c)
	same(s, "fresh through a new handle", later.open(later.events(4, 6, 7), effects).Fresh, [][]bool{{false}, {false}, {true}})
	c = later.move(c, 7)
	same(s, "checkpoint", s.checkpoint(), c)
}

func setCheckpointWaits(s *stage) {
	c := s.begins(0, provider.ModeLive)
	finish := s.inside(s.events(1), effects)
	next := c
	next.Mode = provider.ModeCatchUp
	var ok bool
	ended := make(chan error, 1)
	wait := begin(func() (err error) {
		ok, err = s.db.SetCheckpoint(s.ctx, s.build(), c, next)
		ended <- err
		return err
	})
	same(s, "SetCheckpoint has ended before the unit", len(ended), 0)
	s.ok(finish(), "the open unit")
	s.ok(wait(), "set the checkpoint")
	same(s, "the checkpoint was set", ok, true)
	s.applied("by the open unit", []int64{1}, true)
	same(s, "left by a later unit", s.open(s.events(2), effects).Left, []bool{true})
}

func badCheckpoint(s *stage) {
	c := s.begins(5, provider.ModeLive)
	for _, to := range []provider.Checkpoint{
		{}, {Mode: -1}, {Mode: provider.ModeEnded + 1}, {Mode: provider.ModeLive, Place: provider.LogPlace{Position: -1}},
		{Mode: provider.ModeLive, Place: provider.LogPlace{Position: 6, ID: newID(), RecordedAt: year(300_000)}}, {Mode: provider.ModeLive, Place: provider.LogPlace{Position: 6, ID: newID(), RecordedAt: year(-5000)}},
	} {
		s.invalid(failure(s.db.SetCheckpoint(s.ctx, s.build(), c, to)), fmt.Sprintf("set the checkpoint to %+v", to))
	}
	same(s, "checkpoint", s.checkpoint(), c)
}

func badProgressText(s *stage) {
	terms := claim.Terms{Token: claim.NewToken(), Lease: time.Hour, Limit: 1}
	message := func(handler string) []provider.Message {
		return []provider.Message{{ID: "m", Handlers: []provider.Handler{{Name: handler}}}}
	}
	s.refusesText([]filterCall{
		{"Checkpoint", func(ctx context.Context, text string) error {
			return failure(s.db.Checkpoint(ctx, provider.Build{Projector: text}))
		}},
		{"SetCheckpoint", func(ctx context.Context, text string) error {
			return failure(s.db.SetCheckpoint(ctx, provider.Build{Projector: text}, provider.Checkpoint{}, provider.Checkpoint{Mode: provider.ModeLive}))
		}},
		{"SetCheckpoint to a lineage", func(ctx context.Context, text string) error {
			return failure(s.db.SetCheckpoint(ctx, s.build(), provider.Checkpoint{}, provider.Checkpoint{Mode: provider.ModeLive, Lineage: text}))
		}},
		{"Unapplied of a projector", func(ctx context.Context, text string) error {
			return failure(s.db.Unapplied(ctx, provider.Build{Projector: text}, message(s.name+"/a")))
		}},
		{"Unapplied of a handler", func(ctx context.Context, text string) error {
			return failure(s.db.Unapplied(ctx, s.build(), message(text)))
		}},
		{"PruneApplied of a projector", func(ctx context.Context, text string) error {
			return failure(s.db.PruneApplied(ctx, provider.Build{Projector: text}, []string{s.name + "/a"}, 1))
		}},
		{"PruneApplied of a handler", func(ctx context.Context, text string) error {
			return failure(s.db.PruneApplied(ctx, s.build(), []string{s.name + "/a", text}, 1))
		}},
		{"AcquireLease", func(ctx context.Context, text string) error { return failure(s.db.AcquireLease(ctx, text, terms)) }},
		{"ReleaseLease", func(ctx context.Context, text string) error { return s.db.ReleaseLease(ctx, text, terms.Token) }},
	})
}
