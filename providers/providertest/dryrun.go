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
	"github.com/kinora-go/kinora/provider"
)

var dryRunCases = []testCase{
	{
		name: "changed rows", play: dryRunReports,
		rule: "Unit.DryRun gets the rows that the handlers changed: an inserted row has no Before, a deleted one no After",
	},
	{
		name: "a row changed twice", play: changedTwice,
		rule: "A row that is changed twice is one Change, from its first value to its last; an unchanged row is none",
	},
	{
		name: "many rows", play: changedMany,
		rule: "Unit.DryRun gets all rows, ordered by table and key",
	},
	{
		name: "a dry run leaves nothing", play: dryRunLeavesNothing,
		rule: "Unit.DryRun makes the unit a dry run: it is rolled back instead of committed. Rows of the provider's own tables are not reported",
	},
	{
		name: "a dry run of a redelivery", play: dryRunOfRedelivery,
		rule: "A dry run runs the same handlers as the unit: a message whose marker exists is not fresh",
	},
	{
		name: "a dry run of parked messages", play: dryRunOfParked,
		rule: "In a dry run a parked message may be stuck, and its lane need not be due; the message is not changed",
	},
	{
		name: "a dry run that fails", play: dryRunFails,
		rule: "DryRun is not called if Do returns an error. The error is the one that the unit would return",
	},
	{
		name: "dry runs and units at once", play: dryRunsAtOnce,
		rule: "A dry run reports the changes of its own unit, whatever others do at the same time, and does not affect theirs",
	},
}

// dryRun runs a unit as a dry run and returns its changes. It fails the case unless DryRun is
// called once and nothing is left.
func (s *stage) dryRun(u provider.Unit, run func(opened) (provider.Closing, error)) []provider.Change {
	s.Helper()
	before := s.dump()
	var reported [][]provider.Change
	u.DryRun = func(changes []provider.Change) { reported = append(reported, changes) }
	s.open(u, run)
	same(s, "calls of DryRun", len(reported), 1)
	s.unchanged(before, "a dry run")
	return reported[0]
}

// was is a row of totals; nil: no row.
type was struct {
	key string
	n   int
}

// changed fails the case unless the changes are of these rows, in order.
func (s *stage) changed(got []provider.Change, want ...[2]*was) {
	s.Helper()
	if len(got) != len(want) {
		s.Fatalf("got %d changes, want %d: %s", len(got), len(want), got)
	}
	for i, c := range got {
		s.require(c.Table != "" && c.Table == got[0].Table, "the table %q of change %d is the one of the totals", c.Table, i)
		for j, row := range []json.RawMessage{c.Before, c.After} {
			s.require(s.isTotal(row, want[i][j]), "side %d of change %d, %s, is %+v", j, i, row, want[i][j])
		}
	}
}

// isTotal reports whether row is an object with the key and the total, and no other column.
func (s *stage) isTotal(row json.RawMessage, want *was) bool {
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
		case s.name + " " + want.key:
			keys++
		case json.Number(fmt.Sprint(want.n)):
			numbers++
		}
	}
	return keys == 1 && numbers == 1 && len(columns) == 2
}

// addsAll adds to totals, in order.
func addsAll(rows ...was) func(opened) (provider.Closing, error) {
	return func(o opened) (provider.Closing, error) {
		for _, row := range rows {
			if err := o.add(row.key, row.n); err != nil {
				return provider.Closing{}, err
			}
		}
		return provider.Closing{}, nil
	}
}

// changeOf returns the rows before and after a change; 0: no row.
func changeOf(key string, before, after int) (c [2]*was) {
	if before != 0 {
		c[0] = &was{key, before}
	}
	if after != 0 {
		c[1] = &was{key, after}
	}
	return c
}

func dryRunReports(s *stage) {
	odd := `o'hara "日本" \\`
	s.open(s.unit(), addsAll(was{"a", 1}, was{"b", 2}, was{"c", 3}))
	for range 2 {
		changes := s.dryRun(s.of("m-1"), addsAll(was{odd, 5}, was{"c", -1}, was{"a", 41}))
		s.changed(changes, changeOf("a", 1, 42), changeOf("c", 3, 2), changeOf(odd, 0, 5))
		same(s, "totals", []int{s.total("a"), s.total("b"), s.total("c"), s.total(odd)}, []int{1, 2, 3, 0})
	}
	s.changed(s.dryRun(s.unit(), addsAll(was{"b", 1 << 40})), changeOf("b", 2, 1<<40+2))
	s.open(s.of("m-1"), addsAll(was{odd, 5}, was{"c", -1}, was{"a", 41}))
	same(s, "totals", []int{s.total("a"), s.total("b"), s.total("c"), s.total(odd)}, []int{42, 2, 2, 5})
}

func changedTwice(s *stage) {
	s.open(s.unit(), addsAll(was{"a", 1}, was{"b", 2}, was{"c", 3}))
	s.changed(s.dryRun(s.of("m-1"), addsAll(
		was{"d", 1}, was{"b", 5}, was{"a", 1}, was{"c", 0}, was{"a", 2}, was{"b", -5}, was{"d", 1}, was{"a", 4},
	)), changeOf("a", 1, 8), changeOf("d", 0, 2))
}

func changedMany(s *stage) {
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
			want = append(want, changeOf(row.key, (i+1)*((i+1)%2), (i+1)*(1+(i+1)%2)))
		}
	}
	s.open(s.unit(), addsAll(before...))
	s.changed(s.dryRun(s.of("m-1"), addsAll(add...)), want...)
}

func dryRunLeavesNothing(s *stage) {
	s.park(0, s.failed("m-0", "ann"))
	u := s.of("m-1", "m-2")
	u.Messages = append(u.Messages, s.message("m-3", "ann"))
	for range 2 {
		changes := s.dryRun(u, func(o opened) (provider.Closing, error) {
			same(s, "held", o.Held, []bool{false, false, true})
			return provider.Closing{
				Output: []outbox.Message{{ID: newID(), Topic: s.name}, {Topic: s.name}},
				Park:   []provider.Aside{{Message: 1, Parked: s.failed("m-2", "ben")}, {Message: 2, Parked: s.behind("m-3", "ann")}},
			}, o.add("k", 1)
		})
		s.changed(changes, changeOf("k", 0, 1))
		same(s, "total", s.total("k"), 0)
		s.outcomes("after a dry run", []string{"m-1", "m-2"}, provider.OutcomeUnseen, provider.OutcomeUnseen)
		s.isHeld("after a dry run", "ben", false)
	}
	s.changed(s.dryRun(s.of("m-1"), nothing))
	same(s, "fresh after a dry run", s.open(u, nothing).Fresh, [][]bool{{true}, {true}, {true}})
}

func dryRunOfRedelivery(s *stage) {
	s.open(s.of("m-1"), effects)
	s.changed(s.dryRun(s.of("m-1"), effects))
	s.changed(s.dryRun(s.of("m-1", "m-2"), effects), changeOf("m-2", 0, 1))
}

func dryRunOfParked(s *stage) {
	s.park(-1, s.failed("m-1", "ann"))
	s.park(0, s.behind("m-2", "ann"))
	s.park(time.Hour, s.behind("m-3", "ben"), s.behind("m-4", "ben"))
	rows := s.rows()
	for _, c := range []struct {
		rows []provider.Parked
		live []bool
		want [][2]*was
	}{
		{rows, []bool{true, true, true, true}, [][2]*was{changeOf("m-1", 0, 1), changeOf("m-2", 0, 1), changeOf("m-3", 0, 1), changeOf("m-4", 0, 1)}},
		{rows[1:], []bool{false, true, true}, [][2]*was{changeOf("m-3", 0, 1), changeOf("m-4", 0, 1)}},
		{rows[3:], []bool{false}, nil},
	} {
		s.changed(s.dryRun(s.parkedUnit(c.rows...), func(o opened) (provider.Closing, error) {
			same(s, "live", o.Live, c.live)
			return effects(o)
		}), c.want...)
	}
	s.isDue("after a dry run")
}

func dryRunFails(s *stage) {
	before := s.dump()
	fails := func(ctx context.Context, run func(opened) (provider.Closing, error), want error) {
		s.Helper()
		u := s.of("m-2")
		u.DryRun = func([]provider.Change) { s.Errorf("DryRun is called after a unit that failed with %v", want) }
		err := s.do(ctx, u, run)
		s.require(errors.Is(err, want), "the error %v is %v", err, want)
		s.classed(err, "a dry run", provider.ClassUnknown, provider.ClassPermanent, provider.ClassTransient, provider.ClassShutdown)
		s.unchanged(before, "a dry run that fails")
		same(s, "total", s.total("k"), 0)
	}
	ended, cancel := context.WithCancel(s.ctx)
	cancel()
	fails(s.ctx, func(o opened) (provider.Closing, error) {
		return provider.Closing{}, errors.Join(o.add("k", 1), errRefused)
	}, errRefused)
	fails(s.ctx, func(o opened) (provider.Closing, error) {
		return provider.Closing{Output: []outbox.Message{{}}}, o.add("k", 1)
	}, eventstore.ErrInvalid)
	fails(ended, nothing, context.Canceled)
	meanwhile, cancel := context.WithCancel(s.ctx)
	defer cancel()
	fails(meanwhile, func(o opened) (provider.Closing, error) {
		cancel()
		return provider.Closing{}, o.ctx.Err()
	}, context.Canceled)
	s.outcomes("after dry runs", []string{"m-2"}, provider.OutcomeUnseen)
}

// dryRunsAtOnce makes every second unit a dry run. All units write one total, each for a separate
// message.
func dryRunsAtOnce(s *stage) {
	const units = 40
	s.open(s.unit(), addsAll(was{"k", 1}))
	errs, reported := make([]error, units), make([][]provider.Change, units)
	together(units, func(i int) {
		u := s.of(fmt.Sprint("m-", i+1))
		if i%2 == 0 {
			u.DryRun = func(changes []provider.Change) { reported[i] = changes }
		}
		errs[i] = s.do(s.ctx, u, addsAll(was{"k", 1}))
	})
	s.ok(errors.Join(errs...), "units and dry runs at once")
	same(s, "total", s.total("k"), 1+units/2)
	for i := 0; i < units; i += 2 {
		same(s, "rows reported", len(reported[i]), 1)
		fits := false
		for n := 1; n <= units/2+1 && !fits; n++ {
			fits = s.isTotal(reported[i][0].Before, &was{"k", n}) && s.isTotal(reported[i][0].After, &was{"k", n + 1})
		}
		s.require(fits, "a dry run adds 1: from %s to %s", reported[i][0].Before, reported[i][0].After)
	}
}
