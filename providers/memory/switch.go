package memory

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/provider"
)

const busyAfter = time.Second // a unit with Switch waits this long for other transactions

// beginSwitch is begin for a unit with Switch. With Snapshot, the transaction has no write lock.
func (db *Provider) beginSwitch(ctx context.Context, s *provider.Switch) (*Model, error) {
	if s.Snapshot {
		m := &Model{db: db, staged: *db.committed.Load(), discard: true}
		m.ended.Store(true)
		return m, ctx.Err()
	}
	wait, cancel := context.WithTimeout(ctx, busyAfter)
	defer cancel()
	m, err := db.begin(wait)
	if err != nil && ctx.Err() == nil {
		err = &provider.Error{Class: provider.ClassTransient, Code: provider.CodeBusy, Err: err}
	}
	return m, err
}

// live reads a generation for Last.
func (m *Model) live(_ context.Context, b provider.Build) (provider.Live, error) {
	return provider.Live{
		Checkpoint: m.staged.checkpoint(b),
		Unapplied: func(_ context.Context, messages []provider.Message) ([]bool, error) {
			return m.staged.unapplied(b, messages), nil
		},
	}, nil
}

// reset deletes the rows of tables.
func (s *state) reset(tables []string) {
	for _, table := range tables {
		s.tables = s.tables.drop(s.shownBy(table))
	}
}

// finish runs the steps of a unit with Switch that follow the handlers.
func (m *Model) finish(s *provider.Switch, now time.Time) error {
	return s.Finish(provider.SwitchSteps{
		Rename: m.staged.rename, Show: m.staged.show, Compare: m.compare,
		Set: func(all []provider.Generation) error {
			for _, g := range all {
				m.staged.setGeneration(g, now)
			}
			return nil
		},
	})
}

func (s *state) show(p provider.TablePair) error {
	if s.tables.has(p.Other) {
		return fmt.Errorf("show %s: %s is a table: rename it first", p.Table, p.Other)
	}
	s.views = s.views.put(p.Other, s.shownBy(p.Table))
	return nil
}

// rename renames a table. A view that shows the table still does.
func (s *state) rename(p provider.TablePair) error {
	table, ok := s.tables.get(p.Table)
	if !ok {
		return nil
	}
	if s.tables.has(p.Other) || s.views.has(p.Other) {
		return fmt.Errorf("rename %s: %s exists", p.Table, p.Other)
	}
	s.tables = s.tables.drop(p.Table).put(p.Other, table)
	for view, of := range s.views.from("") {
		if of == p.Table {
			s.views = s.views.put(view, p.Other)
		}
	}
	return nil
}

// shownBy returns the table that a view shows, and other names as they are.
func (s *state) shownBy(name string) string {
	of, _ := s.views.get(name)
	return cmp.Or(of, name)
}

func (m *Model) compare(c *provider.Comparison) error {
	var found []provider.Difference
	pairs := slices.SortedFunc(slices.Values(c.Pairs), func(a, b provider.TablePair) int { return strings.Compare(a.Other, b.Other) })
	for _, p := range pairs {
		want := m.table(p.Table)
		keys := maps.Collect(want.from(""))
		maps.Insert(keys, m.table(p.Other).from(""))
		for _, key := range slices.Sorted(maps.Keys(keys)) {
			d, differs, err := m.staged.difference(p, key, c)
			if err != nil {
				return fmt.Errorf("compare %s with %s, key %q: %w", p.Other, p.Table, key, err)
			}
			if !differs || len(found) == c.Limit {
				continue
			}
			if found = append(found, d); !c.Repair {
				continue
			}
			if v, ok := want.get(key); ok {
				m.Put(p.Other, key, v)
			} else {
				m.Delete(p.Other, key)
			}
		}
	}
	c.Found(found)
	return nil
}

// difference compares the rows of a key, if c compares it.
func (s *state) difference(p provider.TablePair, key string, c *provider.Comparison) (d provider.Difference, differs bool, err error) {
	d.Table = p.Other
	d.Key, _ = json.Marshal(map[string]string{"key": key}) // cannot fail
	isAsked := func(o provider.Difference) bool { return o.Table == d.Table && check.SameJSON(o.Key, d.Key) }
	if c.Only != nil && !slices.ContainsFunc(c.Only, isAsked) {
		return d, false, nil
	}
	var errGot error
	d.Want, err = s.row(cell{p.Table, key})
	d.Got, errGot = s.row(cell{p.Other, key})
	return d, !check.SameJSON(without(d.Want, c.Ignore), without(d.Got, c.Ignore)), cmp.Or(err, errGot)
}

// without returns a row without these columns. The fields of a value that is an object are columns, too.
func without(row json.RawMessage, columns []string) json.RawMessage {
	var r, fields map[string]json.RawMessage
	if len(columns) == 0 || json.Unmarshal(row, &r) != nil {
		return row
	}
	ignore := func(name string, _ json.RawMessage) bool { return slices.Contains(columns, name) }
	if json.Unmarshal(r["value"], &fields) == nil && fields != nil {
		maps.DeleteFunc(fields, ignore)
		r["value"], _ = json.Marshal(fields) // it was JSON before
	}
	maps.DeleteFunc(r, ignore)
	row, _ = json.Marshal(r)
	return row
}
