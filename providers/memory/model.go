package memory

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"iter"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/kinora-go/kinora/provider"
)

// Model is the read model as a transaction sees it, its own writes included: tables of values by
// string keys. A table can also be read and written under the names of its views
// (provider.Switch). Other transactions see the writes after the commit. A Model must be used by one
// goroutine, and only until the function that received it returns: any later use panics.
//
// Values are stored as they are, not copied. Do not change a stored value: Put a new one.
type Model struct {
	db       *Provider
	staged   state
	readOnly bool
	over     bool
	ended    atomic.Bool       // set once the write lock is released
	discard  bool              // it is not committed
	wrote    map[cell]struct{} // rows that a dry run wrote; nil if this is no dry run
}

type cell struct{ table, key string }

// Get returns the value of key in table.
func (m *Model) Get(table, key string) (any, bool) {
	return m.table(table).get(key)
}

// All yields the keys and values of table in order of keys, as they are when the loop begins.
func (m *Model) All(table string) iter.Seq2[string, any] {
	return m.table(table).from("")
}

// Put sets the value of key in table.
func (m *Model) Put(table, key string, v any) {
	table = m.staged.shownBy(table)
	m.write(cell{table, key})
	m.staged.tables = m.staged.tables.put(table, m.table(table).put(key, v))
}

// Delete removes key from table. A key that does not exist is not an error.
func (m *Model) Delete(table, key string) {
	table = m.staged.shownBy(table)
	m.write(cell{table, key})
	m.staged.tables = m.staged.tables.put(table, m.table(table).drop(key))
}

func (m *Model) table(name string) *tree[string, any] {
	if m.over {
		panic("memory: " + errOver.Error())
	}
	t, _ := m.staged.tables.get(m.staged.shownBy(name))
	return t
}

func (m *Model) write(at cell) {
	if m.readOnly {
		panic("memory: a Model from View is read-only: write in Transact or in a handler")
	}
	if m.wrote != nil {
		m.wrote[at] = struct{}{}
	}
}

// changes lists the rows that a dry run changed, by table and key.
func (m *Model) changes() ([]provider.Change, error) {
	var changes []provider.Change
	was := m.db.committed.Load()
	inOrder := func(a, b cell) int { return cmp.Or(cmp.Compare(a.table, b.table), cmp.Compare(a.key, b.key)) }
	for _, at := range slices.SortedFunc(maps.Keys(m.wrote), inOrder) {
		before, errBefore := was.row(at)
		after, errAfter := m.staged.row(at)
		if err := cmp.Or(errBefore, errAfter); err != nil {
			return nil, &provider.Error{Class: provider.ClassPermanent, Err: fmt.Errorf("dry run: table %s, key %q: %w", at.table, at.key, err)}
		}
		if !bytes.Equal(before, after) {
			changes = append(changes, provider.Change{Table: at.table, Before: before, After: after})
		}
	}
	return changes, nil
}

// row returns a row as JSON, or nil if the row does not exist.
func (s *state) row(at cell) (json.RawMessage, error) {
	table, _ := s.tables.get(s.shownBy(at.table))
	v, ok := table.get(at.key)
	if !ok {
		return nil, nil
	}
	return json.Marshal(struct {
		Key   string `json:"key"`
		Value any    `json:"value"`
	}{at.key, v})
}
