package providertest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

var rehearseCases = []testCase{
	{
		name: "a rehearsal tells what would change", play: rehearsalTells,
		rule: "Work.Rehearse is told the rows that the handlers changed: a row inserted has no Before, and each is as it was and as it would be",
	},
	{
		name: "a row that a rehearsal changes twice", play: rehearsedTwice,
		rule: "A row changed twice is told once, as it was first and as it would be last; one that is what it was is not told",
	},
	{
		name: "a rehearsal of many rows", play: rehearsedMany,
		rule: "Rehearse is told all rows, by table and place",
	},
	{
		name: "a rehearsal leaves nothing", play: rehearsalLeavesNothing,
		rule: "In a rehearsal everything is done, and undone instead of committed; rows of the provider's own tables are not told; Fresh is not called",
	},
	{
		name: "a rehearsal of nothing new", play: rehearsalOfNothing,
		rule: "A rehearsal does what the unit would do: where none of its marks is new, apply has no effect; it is told no rows",
	},
	{
		name: "a rehearsal that fails", play: rehearsalFails,
		rule: "Rehearse is never called where Do returns an error, which is the one that the unit would return",
	},
	{
		name: "rehearsals beside units", play: rehearsalsBesideUnits,
		rule: "A rehearsal tells what its own unit would have changed, whatever others do meanwhile, and they lose nothing by it",
	},
}

// rehearse rehearses a unit, and returns what was told. It ends the case unless that was told once, or if it leaves anything.
func (s *stage) rehearse(w projector.Work, apply func(unit) ([]outbox.Message, error)) []projector.Change {
	s.Helper()
	before := s.dump()
	var told [][]projector.Change
	w.Rehearse = func(changes []projector.Change) { told = append(told, changes) }
	w.Fresh = func(int) { s.Errorf("Fresh is told of a rehearsal") }
	s.ok(s.do(s.ctx, w, apply), "rehearse")
	same(s, "times that a rehearsal is told", len(told), 1)
	s.unchanged(before, "a rehearsal")
	return told[0]
}

// was is a row of totals; nil: none.
type was struct {
	key string
	n   int
}

// changed ends the case if the changes are not of these rows, in order.
func (s *stage) changed(got []projector.Change, want ...[2]*was) {
	s.Helper()
	if len(got) != len(want) {
		s.Fatalf("got %d changes, want %d: %s", len(got), len(want), got)
	}
	for i, c := range got {
		s.holds(c.Table != "" && c.Table == got[0].Table, "the table %q of change %d is that of the totals", c.Table, i)
		for j, row := range []json.RawMessage{c.Before, c.After} {
			s.holds(isTotal(row, want[i][j]), "side %d of change %d, %s, is %+v", j, i, row, want[i][j])
		}
	}
}

// isTotal tells whether row is an object that holds the key and the total, and no other number.
func isTotal(row json.RawMessage, want *was) bool {
	if want == nil {
		return row == nil
	}
	var columns map[string]any
	d := json.NewDecoder(bytes.NewReader(row))
	d.UseNumber()
	if d.Decode(&columns) != nil {
		return false
	}
	keys, numbers := 0, 0
	for _, v := range columns {
		switch v {
		case want.key:
			keys++
		case json.Number(fmt.Sprint(want.n)):
			numbers++
		}
	}
	return keys == 1 && numbers == 1 && len(columns) == 2
}

// addsAll is an apply that adds to totals, in order.
func addsAll(rows ...was) func(unit) ([]outbox.Message, error) {
	return func(u unit) ([]outbox.Message, error) {
		for _, row := range rows {
			if err := u.add(row.key, row.n); err != nil {
				return nil, err
			}
		}
		return nil, nil
	}
}

// from gives what a change is from and to; 0 for no row.
func from(key string, before, after int) (c [2]*was) {
	if before != 0 {
		c[0] = &was{key, before}
	}
	if after != 0 {
		c[1] = &was{key, after}
	}
	return c
}

func rehearsalTells(s *stage) {
	odd := `o'hara "日本" \`
	s.ok(s.do(s.ctx, work("m-0"), addsAll(was{"a", 1}, was{"b", 2}, was{"c", 3})), "a unit")
	for range 2 {
		changes := s.rehearse(work("m-1"), addsAll(was{odd, 5}, was{"c", -1}, was{"a", 41}))
		s.changed(changes, from("a", 1, 42), from("c", 3, 2), from(odd, 0, 5))
		same(s, "totals", []int{s.total("a"), s.total("b"), s.total("c"), s.total(odd)}, []int{1, 2, 3, 0})
	}
	unmarked := projector.Work{Projector: "ratings"}
	s.changed(s.rehearse(unmarked, addsAll(was{"b", 1 << 40})), from("b", 2, 1<<40+2))
	s.ok(s.do(s.ctx, work("m-1"), addsAll(was{odd, 5}, was{"c", -1}, was{"a", 41})), "the unit that was rehearsed")
	same(s, "totals", []int{s.total("a"), s.total("b"), s.total("c"), s.total(odd)}, []int{42, 2, 2, 5})
}

func rehearsedTwice(s *stage) {
	s.ok(s.do(s.ctx, work("m-0"), addsAll(was{"a", 1}, was{"b", 2}, was{"c", 3})), "a unit")
	s.changed(s.rehearse(work("m-1"), addsAll(
		was{"d", 1}, was{"b", 5}, was{"a", 1}, was{"c", 0}, was{"a", 2}, was{"b", -5}, was{"d", 1}, was{"a", 4},
	)), from("a", 1, 8), from("d", 0, 2))
}

func rehearsedMany(s *stage) {
	const n = 300
	var before, add []was
	var want [][2]*was
	for i := range n {
		row := was{fmt.Sprintf("k-%03d", i), i + 1}
		if i%2 == 0 {
			before = append(before, row)
		}
		if i%3 != 0 {
			add = append([]was{row}, add...)
			want = append(want, from(row.key, (i+1)*((i+1)%2), (i+1)*(1+(i+1)%2)))
		}
	}
	s.ok(s.do(s.ctx, work("m-0"), addsAll(before...)), "a unit")
	s.changed(s.rehearse(work("m-1"), addsAll(add...)), want...)
}

func rehearsalLeavesNothing(s *stage) {
	rows := s.setAside(poison("m-1", "ann"), waiting("m-2", "ann"))
	a, b := posted("m-1", "ann"), posted("m-4", "ann")
	s.countAttempt(a, 1)
	s.alive("one", time.Hour)
	s.begin("one", posted("m-5", ""))
	w := replays(rows[0])
	w.Park, w.Behind, w.Forget = []projector.Parked{waiting("m-3", "ann"), poison("m-6", "ben")}, &b, []projector.Attempt{a}
	for range 2 {
		changes := s.rehearse(w, func(u unit) ([]outbox.Message, error) {
			return []outbox.Message{{ID: newID(), Topic: "mail"}, {Topic: "mail"}}, u.add("k", 1)
		})
		s.changed(changes, from("k", 0, 1))
		same(s, "total", s.total("k"), 0)
		same(s, "outcomes", s.outcomes(key("m-1"), key("m-3")), []projector.Outcome{projector.IsParked, projector.Unseen})
		s.isDue("after a rehearsal", nil)
	}
	s.changed(s.rehearse(work("m-7"), nil))
	same(s, "outcome", s.outcomes(key("m-7"))[0], projector.Unseen)
	s.verdict("what was not parked", posted("m-6", "ben"), projector.Clear)
	s.countAttempt(a, 2)
	handlers, err := s.db.MarkedHandlers(s.ctx)
	s.ok(err, "list handlers")
	same(s, "handlers with markers", len(handlers), 0)
	s.ok(s.do(s.ctx, replays(rows[0]), adds("k", 1)), "what was rehearsed")
	same(s, "total", s.total("k"), 1)
}

func rehearsalOfNothing(s *stage) {
	s.ok(s.do(s.ctx, work("m-1"), adds("k", 1)), "a unit")
	s.changed(s.rehearse(work("m-1"), adds("k", 1)))
	s.changed(s.rehearse(work("m-1", "m-2"), func(u unit) ([]outbox.Message, error) {
		return nil, u.add("k", 10*len(u.fresh))
	}), from("k", 1, 11))
	s.changed(s.rehearse(projector.Work{Projector: "ratings"}, nil))
	row := s.setAside(poison("m-1", "ann"))[0] // applied, and parked
	s.changed(s.rehearse(replays(row), adds("k", 1)))
	s.inState(row, projector.StillParked)
}

func rehearsalFails(s *stage) {
	row := s.setAside(poison("m-0", "ann"), waiting("m-1", "ann"))[1]
	before := s.dump()
	fails := func(ctx context.Context, w projector.Work, apply func(unit) ([]outbox.Message, error), want error) {
		s.Helper()
		w.Rehearse = func([]projector.Change) { s.Errorf("Rehearse is told of a unit that failed with %v", want) }
		err := s.do(ctx, w, apply)
		s.holds(errors.Is(err, want), "the error %v is %v", err, want)
		s.classed(err, "a rehearsal", projector.UnknownClass, projector.PermanentClass, projector.Transient, projector.Shutdown)
		s.unchanged(before, "a rehearsal that fails")
		same(s, "total", s.total("k"), 0)
	}
	cause, a := errors.New("cause"), posted("m-2", "nobody")
	ended, cancel := context.WithCancel(s.ctx)
	cancel()
	failing := func(u unit) ([]outbox.Message, error) { return nil, errors.Join(u.add("k", 1), cause) }
	bad := func(u unit) ([]outbox.Message, error) { return []outbox.Message{{}}, u.add("k", 1) }
	fails(s.ctx, work("m-2"), failing, cause)
	fails(s.ctx, projector.Work{Projector: "ratings"}, failing, cause)
	fails(s.ctx, work("m-2"), bad, eventstore.ErrInvalid)
	fails(s.ctx, replays(row), adds("k", 1), projector.ErrHeld)
	fails(s.ctx, projector.Work{Projector: "ratings", Behind: &a}, adds("k", 1), projector.ErrNotHeld)
	fails(ended, work("m-2"), adds("k", 1), context.Canceled)
	meanwhile, cancel := context.WithCancel(s.ctx)
	defer cancel()
	fails(meanwhile, work("m-2"), func(u unit) ([]outbox.Message, error) {
		cancel()
		return nil, u.ctx.Err()
	}, context.Canceled)
	same(s, "outcome", s.outcomes(key("m-2"))[0], projector.Unseen)
}

// rehearsalsBesideUnits has every other unit rehearsed: all of one total, each with marks of its own.
func rehearsalsBesideUnits(s *stage) {
	const units = 40
	s.ok(s.do(s.ctx, work("m-0"), adds("k", 1)), "a unit")
	errs, told := make([]error, units), make([][]projector.Change, units)
	together(units, func(i int) {
		w := work(fmt.Sprint("m-", i+1))
		if i%2 == 0 {
			w.Rehearse = func(changes []projector.Change) { told[i] = changes }
		}
		errs[i] = s.do(s.ctx, w, adds("k", 1))
	})
	s.ok(errors.Join(errs...), "units and rehearsals at once")
	same(s, "total", s.total("k"), 1+units/2)
	for i := 0; i < units; i += 2 {
		same(s, "rows told", len(told[i]), 1)
		fits := false
		for n := 1; n <= units/2+1 && !fits; n++ {
			fits = isTotal(told[i][0].Before, &was{"k", n}) && isTotal(told[i][0].After, &was{"k", n + 1})
		}
		s.holds(fits, "a rehearsal adds 1: from %s to %s", told[i][0].Before, told[i][0].After)
	}
}
