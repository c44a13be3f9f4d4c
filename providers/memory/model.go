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

// Model is the read model as a transaction sees it, its own writes included: tables of values under string
// keys. Others see the writes when the transaction commits. It is for one goroutine, and for as long as the
// function that it was handed to runs: any use after that panics.
//
// Values are kept as they are. To change one, put another in its place.
type Model struct {
	db       *Provider
	staged   state
	readOnly bool
	over     bool
	ended    atomic.Bool       // another transaction may be open
	wrote    map[cell]struct{} // the rows that a dry run has written; nil: no dry run
}

type cell struct{ table, key string }

// Get is the value of key in table.
func (m *Model) Get(table, key string) (any, bool) {
	return m.table(table).get(key)
}

// All yields the table's keys and values in order of keys, as they are at the start of the loop.
func (m *Model) All(table string) iter.Seq2[string, any] {
	return m.table(table).from("")
}

// Put sets the value of key in table.
func (m *Model) Put(table, key string, v any) {
	m.write(cell{table, key})
	m.staged.tables = m.staged.tables.put(table, m.table(table).put(key, v))
}

// Delete removes key from table. A key that is not there is no error.
func (m *Model) Delete(table, key string) {
	m.write(cell{table, key})
	m.staged.tables = m.staged.tables.put(table, m.table(table).drop(key))
}

func (m *Model) table(name string) *tree[string, any] {
	if m.over {
		panic("memory: " + errOver.Error())
	}
	t, _ := m.staged.tables.get(name)
	return t
}

func (m *Model) write(at cell) {
	if m.readOnly {
		panic("memory: a view is for reading: write in Tx, or in a handler")
	}
	if m.wrote != nil {
		m.wrote[at] = struct{}{}
	}
}

// changes lists the rows that a dry run has changed, by table and key.
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

// row returns a row as JSON, or nil if it is not there.
func (s *state) row(at cell) (json.RawMessage, error) {
	table, _ := s.tables.get(at.table)
	v, ok := table.get(at.key)
	if !ok {
		return nil, nil
	}
	return json.Marshal(struct {
		Key   string `json:"key"`
		Value any    `json:"value"`
	}{at.key, v})
}
