package memory

import "iter"

// Model is the read model as a transaction sees it, its own writes included: tables of values under string
// keys. Others see the writes when the transaction commits. It is for one goroutine, and for as long as the
// function that it was handed to runs: any use after that panics.
//
// Values are kept as they are. To change one, put another in its place.
type Model struct {
	db       *DB
	staged   state
	readOnly bool
	over     bool
}

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
	m.mustWrite()
	m.staged.tables = m.staged.tables.put(table, m.table(table).put(key, v))
}

// Delete removes key from table. A key that is not there is no error.
func (m *Model) Delete(table, key string) {
	m.mustWrite()
	m.staged.tables = m.staged.tables.put(table, m.table(table).drop(key))
}

func (m *Model) table(name string) *tree[string, any] {
	if m.over {
		panic("memory: " + errOver.Error())
	}
	t, _ := m.staged.tables.get(name)
	return t
}

func (m *Model) mustWrite() {
	if m.readOnly {
		panic("memory: a view is for reading: write in Tx, or in a handler")
	}
}
