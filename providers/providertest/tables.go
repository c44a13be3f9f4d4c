package providertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

var tableCases = []testCase{
	{
		// Promise: R1.1
		name: "emptied tables", play: tablesReset,
		rule: "Switch.Reset: the rows of the tables are deleted before run, in the transaction of the unit",
	},
	{
		// Promise: R2.1
		name: "a view in place of a table", play: tablesRenamed,
		rule: "Switch.Rename are tables to rename first, if they exist and are not views. Switch.Show are views to create or to replace",
	},
	{
		// Promise: R2.1
		name: "readers of a view that is replaced", play: tablesShown,
		rule: "Switch.Show: a reader of the view sees one of the tables: never neither, and never both",
	},
	{
		// Promise: R2.1
		name: "a switch of tables that fails", play: tablesRolledBack,
		rule: "Tables are reset, renamed, shown and repaired in the transaction of the unit: if it fails, nothing changes",
	},
	{
		// Promise: R7.1
		name: "differences", play: tablesCompared,
		rule: "Comparison.Found is called with the rows that are missing, extra or different, ordered by table and key. It sees the writes of run",
	},
	{
		name: "ignored columns, and a limit", play: tablesIgnored,
		rule: "Comparison.Ignore are columns that are not compared. Limit is the most differences to find",
	},
	{
		// Promise: R7.1
		name: "repaired rows", play: tablesRepaired,
		rule: "Comparison.Repair: the rows of Only that still differ are changed in Other to what they are in Table. Found gets these, and no other row changes",
	},
	{
		// Promise: R7.1
		name: "a comparison of one moment", play: tablesInSnapshot,
		rule: "Switch.Snapshot: the unit sees the whole store as of one moment, and its own writes. It is rolled back",
	},
	{
		// Promise: R6.1
		name: "tables of a retired generation", play: tablesDropped,
		rule: "ClearGeneration drops tables that exist, and the views that show them, once no row of the generation is left",
	},
	{
		name: "names that no table has", play: badTables,
		rule: "A name of a table has at most two parts, of 1 to 63 bytes each, without quotes and control characters: else ErrInput",
	},
}

// table returns a name that only this case has.
func (s *stage) table(name string) string { return s.name + "_" + name }

// tableRows returns rows with these keys, numbered from n.
func tableRows(n int, keys ...string) []Row {
	rows := []Row{}
	for i, key := range keys {
		rows = append(rows, Row{key, n + i, "note of " + key})
	}
	return rows
}

// fill creates a table and puts rows into it, in a separate unit.
func (s *stage) fill(table string, rows ...Row) {
	s.Helper()
	s.open(s.unit(), func(o opened) (provider.Closing, error) {
		return provider.Closing{}, errors.Join(o.create(s.table(table)), o.putAll(s.table(table), rows...))
	})
}

// putAll puts rows into a table.
func (o *opened) putAll(table string, rows ...Row) error {
	for _, row := range rows {
		if err := o.put(table, row); err != nil {
			return err
		}
	}
	return nil
}

// has fails the case unless these are the rows of a table.
func (s *stage) has(what, table string, want ...Row) {
	s.Helper()
	got, err := s.rowsOf(s.ctx, s.table(table))
	s.ok(err, "read a table")
	s.require(slices.Equal(got, want), "rows of %s %s: got %v, want %v", table, what, got, want)
}

// withTables runs a unit of generation 2 with Switch.
func (s *stage) withTables(sw provider.Switch, run func(o opened) (provider.Closing, error)) error {
	return s.do(s.ctx, provider.Unit{Projector: s.name, Generation: 2, Once: true, Switch: &sw}, run)
}

func (s *stage) pair(table, other string) provider.TablePair {
	return provider.TablePair{Table: s.table(table), Other: s.table(other)}
}

func tablesReset(s *stage) {
	s.fill("a", tableRows(1, "x", "y")...)
	s.fill("b", tableRows(5, "x")...)
	s.fill("c", tableRows(7, "x")...)
	reset := provider.Switch{Reset: []string{s.table("a"), s.table("b")}}
	s.ok(s.withTables(reset, func(o opened) (provider.Closing, error) {
		return provider.Closing{}, o.putAll(s.table("a"), tableRows(9, "y", "z")...)
	}), "reset tables")
	s.has("after it", "a", tableRows(9, "y", "z")...)
	s.has("after it", "b")
	s.has("that is not reset", "c", tableRows(7, "x")...)
	err := s.withTables(provider.Switch{Reset: []string{s.table("c")}}, func(opened) (provider.Closing, error) { return provider.Closing{}, errRefused })
	s.require(errors.Is(err, errRefused), "the error %v is run's", err)
	s.has("after a failed unit", "c", tableRows(7, "x")...)
}

func tablesRenamed(s *stage) {
	first, second := tableRows(1, "a", "b"), tableRows(5, "b", "c")
	s.fill("r", first...)
	s.fill("r_g2", second...)
	rename := []provider.TablePair{s.pair("r", "r_g1"), s.pair("none", "none_g1")}
	for i, shown := range []string{"r_g2", "r_g1", "r_g2"} { // then it is a view, and is not renamed
		s.ok(s.withTables(provider.Switch{Rename: rename, Show: []provider.TablePair{s.pair(shown, "r")}}, nothing), "show a table")
		s.has("after a switch", "r", [][]Row{second, first, second}[i]...)
		s.has("that was renamed", "r_g1", first...)
		s.has("of the second generation", "r_g2", second...)
	}
	s.open(s.unit(), func(o opened) (provider.Closing, error) {
		return provider.Closing{}, o.putAll(s.table("r_g2"), tableRows(5, "d")...)
	})
	s.has("after a write to its table", "r", append(second, tableRows(5, "d")...)...)
	s.ok(s.withTables(provider.Switch{Reset: []string{s.table("r_g1")}}, nothing), "reset a table that is not shown")
	s.has("after a reset of the other table", "r", append(second, tableRows(5, "d")...)...)
}

// tablesShown reads a table that becomes a view, and then shows one table after the other.
func tablesShown(s *stage) {
	const readers, switches = 3, 10
	of := [][]Row{tableRows(1, "a", "b", "c"), tableRows(5, "b", "c", "d")}
	s.fill("r", of[0]...)
	s.fill("r_g2", of[1]...)
	over, errs, wrong := make(chan struct{}), make([]error, readers+1), make([][]Row, readers)
	together(len(errs), func(i int) {
		if i == readers {
			defer close(over)
			for n := 0; n < switches && errs[i] == nil; n++ {
				sw := provider.Switch{
					Rename: []provider.TablePair{s.pair("r", "r_g1")}, Show: []provider.TablePair{s.pair([]string{"r_g2", "r_g1"}[n%2], "r")},
				}
				errs[i] = unlessBusy(func() error { return s.withTables(sw, nothing) })
			}
			return
		}
		for errs[i] == nil && wrong[i] == nil {
			var got []Row
			if got, errs[i] = s.rowsOf(s.ctx, s.table("r")); errs[i] == nil && !slices.Equal(got, of[0]) && !slices.Equal(got, of[1]) {
				wrong[i] = append(got, Row{Key: "the end"})
			}
			select {
			case <-over:
				return
			default:
			}
		}
	})
	s.ok(errors.Join(errs...), "read and switch at once")
	for _, rows := range wrong {
		s.require(rows == nil, "a reader sees one of the tables, not %v", rows)
	}
}

func tablesRolledBack(s *stage) {
	first, second := tableRows(1, "a", "b"), tableRows(5, "b", "c")
	s.fill("r", first...)
	s.fill("r_g2", second...)
	s.fill("t", tableRows(3, "a")...)
	sw := provider.Switch{
		Rename: []provider.TablePair{s.pair("r", "r_g1")}, Show: []provider.TablePair{s.pair("r_g2", "r")}, Reset: []string{s.table("t")},
	}
	for what, run := range map[string]func(opened) (provider.Closing, error){
		"an error of run":     func(opened) (provider.Closing, error) { return provider.Closing{}, errRefused },
		"a failed statement":  func(o opened) (provider.Closing, error) { return provider.Closing{}, o.fail() },
		"output that is poor": func(opened) (provider.Closing, error) { return provider.Closing{Output: []outbox.Message{{}}}, nil },
	} {
		s.require(s.withTables(sw, run) != nil, "a unit fails with %s", what)
		s.has("after "+what, "r", first...)
		s.has("after "+what, "r_g1")
		s.has("after "+what, "t", tableRows(3, "a")...)
	}
	missing := sw
	missing.Show = []provider.TablePair{s.pair("r_g2", "r"), s.pair("none", "v")}
	missing.Set = []provider.Generation{s.becomes(nil, 2, live)}
	if err := s.withTables(missing, nothing); err != nil { // in a store without schemas every table exists
		s.has("after a table that does not exist", "r", first...)
		s.isLive(1)
	}
	s.ok(s.withTables(sw, nothing), "switch")
	s.has("after a switch", "r", second...)
}

// difference is a provider.Difference with its rows.
type difference struct {
	table, key string
	want, got  *Row
}

// rowOf returns the row that a JSON object has.
func (s *stage) rowOf(object json.RawMessage) (r *Row) {
	s.Helper()
	if object == nil {
		return nil
	}
	var columns struct {
		Key   string
		Value *Row
		Row
	}
	s.ok(json.Unmarshal(object, &columns), fmt.Sprintf("read the row %s", object))
	if r = &columns.Row; columns.Value != nil {
		r = columns.Value
	}
	r.Key = columns.Key
	return r
}

// differs runs a comparison and returns the differences.
func (s *stage) differs(c provider.Comparison, run func(o opened) (provider.Closing, error)) (found []provider.Difference) {
	s.Helper()
	calls := 0
	c.Found = func(all []provider.Difference) { calls, found = calls+1, all }
	s.ok(s.withTables(provider.Switch{Compare: &c}, run), "compare tables")
	same(s, "calls of Found", calls, 1)
	return found
}

// isDifferent fails the case unless these are the differences.
func (s *stage) isDifferent(what string, found []provider.Difference, want ...difference) {
	s.Helper()
	if len(found) != len(want) {
		s.Fatalf("differences %s: got %s, want %d", what, found, len(want))
	}
	for i, d := range found {
		key := s.rowOf(d.Key)
		got := difference{d.Table, key.Key, s.rowOf(d.Want), s.rowOf(d.Got)}
		for _, side := range [][2]*Row{{got.want, want[i].want}, {got.got, want[i].got}} {
			is := (side[0] == nil) == (side[1] == nil) && (side[0] == nil || *side[0] == *side[1])
			s.require(is, "difference %d %s: %s: it has the row %v, not %v", i, what, d, side[1], side[0])
		}
		same(s, fmt.Sprintf("table and key of difference %d %s", i, what), [2]string{got.table, got.key}, [2]string{s.table(want[i].table), want[i].key})
	}
}

// differ fills tables that differ: w1 should be as r1, and w2 as r2.
func (s *stage) differ() (all []difference, pairs []provider.TablePair) {
	s.Helper()
	odd := `o'hara "日本"`
	s.fill("r1", Row{"a", 1, "x"}, Row{"b", 2, "x"}, Row{"c", 3, "x"}, Row{odd, 4, "x"})
	s.fill("w1", Row{"a", 1, "x"}, Row{"b", 7, "x"}, Row{"d", 3, "x"}, Row{odd, 4, `"y"`})
	s.fill("r2", tableRows(1, "a")...)
	s.fill("w2", tableRows(1, "a", "b")...)
	return []difference{
		{"w1", "b", &Row{"b", 2, "x"}, &Row{"b", 7, "x"}}, {"w1", "c", &Row{"c", 3, "x"}, nil}, {"w1", "d", nil, &Row{"d", 3, "x"}},
		{"w1", odd, &Row{odd, 4, "x"}, &Row{odd, 4, `"y"`}}, {"w2", "b", nil, &tableRows(1, "a", "b")[1]},
	}, []provider.TablePair{s.pair("r2", "w2"), s.pair("r1", "w1")}
}

func tablesCompared(s *stage) {
	all, pairs := s.differ()
	s.isDifferent("of tables", s.differs(provider.Comparison{Pairs: pairs, Limit: 100}, nothing), all...)
	s.isDifferent("of equal tables", s.differs(provider.Comparison{Pairs: []provider.TablePair{s.pair("r1", "r1")}, Limit: 100}, nothing))
	mended := s.differs(provider.Comparison{Pairs: pairs[1:], Limit: 100}, func(o opened) (provider.Closing, error) {
		return provider.Closing{}, errors.Join(o.put(s.table("w1"), *all[0].want), o.put(s.table("w1"), *all[1].want), o.remove(s.table("w1"), "d"))
	})
	s.isDifferent("after the writes of run", mended, all[3])
	s.has("after a comparison", "w2", tableRows(1, "a", "b")...)
}

func tablesIgnored(s *stage) {
	all, pairs := s.differ()
	without := slices.Concat(all[:3], all[4:])
	s.isDifferent("without the notes", s.differs(provider.Comparison{Pairs: pairs, Limit: 100, Ignore: []string{"note", "other"}}, nothing), without...)
	pairs = pairs[1:]
	s.isDifferent("without numbers and notes", s.differs(provider.Comparison{Pairs: pairs, Limit: 100, Ignore: []string{"n", "note"}}, nothing), all[1:3]...)
	for limit := range len(all) {
		found := s.differs(provider.Comparison{Pairs: pairs, Limit: limit + 1}, nothing)
		same(s, "differences up to a limit", len(found), min(limit+1, 4))
	}
}

func tablesRepaired(s *stage) {
	all, pairs := s.differ()
	found := s.differs(provider.Comparison{Pairs: pairs, Limit: 100}, nothing)
	repair := provider.Comparison{Pairs: pairs, Limit: 100, Repair: true, Only: slices.Concat(found[:3], found[4:])}
	err := s.withTables(provider.Switch{Compare: &provider.Comparison{
		Pairs: pairs, Limit: 100, Repair: true, Only: found, Found: func([]provider.Difference) {},
	}}, func(o opened) (provider.Closing, error) { return provider.Closing{}, errRefused })
	s.require(errors.Is(err, errRefused), "the error %v is run's", err)
	s.isDifferent("after a repair that failed", s.differs(provider.Comparison{Pairs: pairs, Limit: 100}, nothing), all...)
	s.open(s.unit(), func(o opened) (provider.Closing, error) { // row c is there now, and row e is new
		return provider.Closing{}, o.putAll(s.table("w1"), *all[1].want, Row{"e", 9, "new"})
	})
	s.isDifferent("that were mended", s.differs(repair, nothing), all[0], all[2], all[4])
	extra := difference{"w1", "e", nil, &Row{"e", 9, "new"}}
	left := []difference{extra, all[3]}
	s.isDifferent("after a repair", s.differs(provider.Comparison{Pairs: pairs, Limit: 100}, nothing), left...)
	s.isDifferent("that were mended again", s.differs(repair, nothing))
	none := repair
	none.Only = []provider.Difference{}
	s.isDifferent("that were mended of no rows", s.differs(none, nothing))
	s.has("after all", "w2", tableRows(1, "a")...)
	w1, _ := s.rowsOf(s.ctx, s.table("w1"))
	same(s, "rows of w1", len(w1), 5)
}

// tablesInSnapshot changes a table, a marker and the checkpoint while a snapshot compares.
func tablesInSnapshot(s *stage) {
	c := s.begins(5, provider.ModeLive)
	s.fill("r", tableRows(1, "a", "b")...)
	s.fill("w", tableRows(1, "a")...)
	var wait func() error
	var found []provider.Difference
	var unapplied []bool
	var position int64
	sw := &provider.Switch{
		Snapshot: true,
		Last: func(ctx context.Context, l provider.Live) (_ []provider.Message, err error) {
			wait = beginFor(time.Second, func() error { // it waits in a store with a single writer
				write := s.do(s.ctx, s.upTo(c, 7, 6), func(o opened) (provider.Closing, error) {
					_, err := effects(o)
					return provider.Closing{}, errors.Join(err, o.put(s.table("w"), Row{"b", 77, "of the other"}))
				})
				return errors.Join(write, s.do(s.ctx, s.events(9), effects))
			})
			position = l.Checkpoint.Place.Position
			unapplied, err = l.Unapplied(ctx, s.events(5, 6, 9).Messages)
			return s.events(5).Messages, err
		},
		Compare: &provider.Comparison{
			Pairs: []provider.TablePair{s.pair("r", "w")}, Limit: 10, Found: func(all []provider.Difference) { found = all },
		},
	}
	u := provider.Unit{Projector: s.name, Generation: 2, Once: true, Switch: sw}
	var fresh [][]bool
	s.open(u, func(o opened) (provider.Closing, error) {
		fresh = o.Fresh
		return provider.Closing{}, errors.Join(o.add("k", 1), o.put(s.table("w"), Row{"c", 3, "of the unit"}))
	})
	s.ok(wait(), "a unit of the live generation")
	same(s, "fresh", fresh, [][]bool{{true}})
	same(s, "position of the live checkpoint", position, int64(5))
	same(s, "unapplied", unapplied, []bool{false, true, true})
	s.isDifferent("of one moment", found, difference{"w", "b", &tableRows(1, "a", "b")[1], nil}, difference{"w", "c", nil, &Row{"c", 3, "of the unit"}})
	s.has("after it", "w", tableRows(1, "a")[0], Row{"b", 77, "of the other"})
	same(s, "total", s.total("k"), 0)
	s.in(2).outcomes("in the generation of the snapshot", []string{"e-5"}, provider.OutcomeUnseen)
	s.effectsOf("of the live generation", 2, 6, 9)
}

func tablesDropped(s *stage) {
	next := s.in(2)
	next.open(next.of("m-1", "m-2", "m-3"), nothing)
	s.fill("a", tableRows(1, "a")...)
	s.fill("b", tableRows(1, "a")...)
	s.fill("c", tableRows(1, "a")...)
	tables := []provider.TablePair{{Table: s.table("a")}, {Table: s.table("none")}, {Table: s.table("b")}}
	_, err := s.db.ClearGeneration(s.ctx, next.build(), []string{s.name + "/posted"}, tables, 2)
	s.require(errors.Is(err, provider.ErrInput), "the error %v is ErrInput", err)
	next.becomesNow(2, retired, true)
	for _, want := range []int{2, 1, 0} {
		s.has("before the last row is deleted", "a", tableRows(1, "a")...)
		n, err := s.db.ClearGeneration(s.ctx, next.build(), []string{s.name + "/posted"}, tables, 2)
		s.ok(err, "clear a generation")
		same(s, "rows deleted", n, want)
	}
	s.has("that was dropped", "a")
	s.has("that was dropped", "b")
	s.has("of another name", "c", tableRows(1, "a")...)
	n, err := s.db.ClearGeneration(s.ctx, next.build(), []string{s.name + "/posted"}, tables, 2)
	s.ok(err, "clear a generation again")
	same(s, "rows deleted", n, 0)
	s.fill("a", tableRows(1, "b")...)
	s.has("that was created again", "a", tableRows(1, "b")...)

	s.ok(s.do(s.ctx, provider.Unit{Projector: s.name, Once: true, Switch: &provider.Switch{Show: []provider.TablePair{s.pair("a", "v")}}}, nothing), "show a table")
	s.has("that is shown", "v", tableRows(1, "b")...)
	n, err = s.db.ClearGeneration(s.ctx, next.build(), nil, []provider.TablePair{{Table: s.table("none"), Other: s.table("v")}}, 2)
	s.ok(err, "drop a table with the name of a view of another one")
	same(s, "rows deleted", n, 0)
	s.has("that is shown", "v", tableRows(1, "b")...)
	n, err = s.db.ClearGeneration(s.ctx, next.build(), nil, []provider.TablePair{{Table: s.table("none"), Other: s.table("c")}}, 2)
	s.ok(err, "drop a table with a name of a view that a table has")
	same(s, "rows deleted", n, 0)
	s.has("that is no view", "c", tableRows(1, "a")...)
	n, err = s.db.ClearGeneration(s.ctx, next.build(), nil, []provider.TablePair{s.pair("a", "v")}, 2)
	s.ok(err, "drop a table and its view")
	same(s, "rows deleted", n, 0)
	s.fill("v", tableRows(1, "c")...) // the name is free
	s.has("with the name of the view", "v", tableRows(1, "c")...)
	s.fill("a")
	s.has("that was shown", "a")
}

func badTables(s *stage) {
	s.fill("a", tableRows(1, "a")...)
	s.in(2).becomesNow(2, retired, true)
	good := s.table("a")
	for _, bad := range []string{"", ".", "a.", ".a", "a.b.c", `a"`, "a'", "a`b", "a\x00", "a\xff", strings.Repeat("x", 64)} {
		for what, sw := range map[string]provider.Switch{
			"Reset":   {Reset: []string{good, bad}},
			"Rename":  {Rename: []provider.TablePair{{Table: good, Other: bad}}},
			"Show":    {Show: []provider.TablePair{{Table: bad, Other: good}}},
			"Compare": {Compare: &provider.Comparison{Pairs: []provider.TablePair{{Table: good, Other: bad}}, Limit: 1, Found: func([]provider.Difference) {}}},
		} {
			err := s.withTables(sw, nothing)
			s.require(errors.Is(err, provider.ErrInput), "the error %v of %s with %q is ErrInput", err, what, bad)
		}
		_, err := s.db.ClearGeneration(s.ctx, s.in(2).build(), nil, []provider.TablePair{{Table: good}, {Table: bad}}, 1)
		s.require(errors.Is(err, provider.ErrInput), "the error %v of ClearGeneration with %q is ErrInput", err, bad)
	}
	s.has("after it", "a", tableRows(1, "a")...)
}
