package eventstore_test

import (
	"context"
	"encoding/json"
	"errors"
	"iter"
	"slices"
	"testing"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// history is an aggregate whose state depends on each event and their order.
type history struct {
	ID    string `json:"-"`
	Stars []int
}

func (h *history) Apply(event any) {
	if e, ok := event.(posted); ok {
		h.Stars = append(h.Stars, e.Stars)
	}
}

// counted counts the events that are read.
type counted struct {
	*memory.DB
	read int
}

func (c *counted) ReadStream(ctx context.Context, stream string, after int64) iter.Seq2[eventstore.Raw, error] {
	return func(yield func(eventstore.Raw, error) bool) {
		for raw, err := range c.DB.ReadStream(ctx, stream, after) {
			c.read++
			if !yield(raw, err) {
				return
			}
		}
	}
}

type histories struct {
	*eventstore.Repository[*history]
	db     *counted
	errs   []error
	stored int // stars posted so far
}

func newHistories(t *testing.T, db *memory.DB, schema string) *histories {
	t.Helper()
	h := &histories{db: &counted{DB: db}}
	var err error
	h.Repository, err = eventstore.NewRepository(h.db, types, "history", func(id string) *history { return &history{ID: id} },
		&eventstore.RepositoryConfig{Snapshots: eventstore.Snapshots{Every: 10, Schema: schema, OnError: func(stream string, err error) {
			require.Equal(t, "history-1", stream)
			h.errs = append(h.errs, err)
		}}})
	require.NoError(t, err)
	return h
}

// post appends one event, whose stars are its number.
func (h *histories) post(t *testing.T, times int) {
	t.Helper()
	for range times {
		h.stored++
		_, err := h.Update(t.Context(), "1", func(a *history) ([]any, error) {
			e := posted{Stars: len(a.Stars) + 1}
			a.Stars = nil // decide may change its aggregate
			return []any{e}, nil
		})
		require.NoError(t, err)
	}
}

// requireExact compares the loaded aggregate with the events themselves, and returns how many were read.
func (h *histories) requireExact(t *testing.T) (read int) {
	t.Helper()
	want := &history{ID: "1"}
	for raw, err := range h.db.DB.ReadStream(t.Context(), "history-1", 0) {
		require.NoError(t, err)
		var e posted
		require.NoError(t, json.Unmarshal(raw.Data, &e))
		want.Stars = append(want.Stars, e.Stars)
	}
	h.db.read = 0
	got, version, err := h.Load(t.Context(), "1")
	require.NoError(t, err)
	require.Equal(t, want, got)
	require.Equal(t, int64(len(want.Stars)), version)
	return h.db.read
}

// stored returns the only snapshot of history-1.
func stored(t *testing.T, h *histories, schemas ...string) eventstore.Snapshot {
	t.Helper()
	for _, schema := range schemas {
		s, err := h.db.LoadSnapshot(t.Context(), "history-1", schema)
		require.NoError(t, err)
		if s.Version > 0 {
			return s
		}
	}
	t.Fatal("there is no snapshot")
	return eventstore.Snapshot{}
}

// schemaOf returns the full schema that a repository saves under.
func schemaOf(t *testing.T, schema string) string {
	t.Helper()
	db := newDB(t)
	rec := &schemaRecorder{DB: db}
	r, err := eventstore.NewRepository(rec, types, "history", func(id string) *history { return &history{ID: id} },
		&eventstore.RepositoryConfig{Snapshots: eventstore.Snapshots{Every: 1, Schema: schema}})
	require.NoError(t, err)
	for range 2 {
		_, err = r.Update(t.Context(), "1", func(*history) ([]any, error) { return []any{posted{}}, nil })
		require.NoError(t, err)
	}
	return rec.schema
}

type schemaRecorder struct {
	*memory.DB
	schema string
}

func (r *schemaRecorder) SaveSnapshot(_ context.Context, _ string, s eventstore.Snapshot) error {
	r.schema = s.Schema
	return nil
}

func TestALoadReadsTheEventsAfterTheSnapshot(t *testing.T) {
	t.Parallel()
	h := newHistories(t, newDB(t), "1")
	h.post(t, 10)
	require.Equal(t, 10, h.requireExact(t))
	h.post(t, 1) // stores the state at version 10
	require.Equal(t, 2, h.requireExact(t), "the event of the snapshot, and the one after it")
	h.post(t, 89)
	require.LessOrEqual(t, h.requireExact(t), 11)
	require.Empty(t, h.errs)
}

// Promise: G1.8
func TestSnapshotsAreNotTrustedOverTheStream(t *testing.T) {
	t.Parallel()
	schema := schemaOf(t, "1")
	for name, damage := range map[string]func(s *eventstore.Snapshot){
		"state":        func(s *eventstore.Snapshot) { s.State[len(s.State)-2] ^= 1 },
		"checksum":     func(s *eventstore.Snapshot) { s.State[0] ^= 1 },
		"short":        func(s *eventstore.Snapshot) { s.State = s.State[:5] },
		"version":      func(s *eventstore.Snapshot) { s.Version-- },
		"later":        func(s *eventstore.Snapshot) { s.Version = 1000 },
		"event":        func(s *eventstore.Snapshot) { s.EventID = "7e2b2ad8-8b0c-4d5e-9a39-0a8f0f0b9b11" },
		"other stream": nil,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHistories(t, newDB(t), "1")
			h.post(t, 25)
			s := stored(t, h, schema)
			s.State = slices.Clone(s.State)
			if damage == nil { // the sealed snapshot of a stream with the same events
				other := newHistories(t, newDB(t), "1")
				for range 25 {
					_, err := other.Update(t.Context(), "2", func(*history) ([]any, error) { return []any{posted{Stars: 9}}, nil })
					require.NoError(t, err)
				}
				var err error
				s, err = other.db.LoadSnapshot(t.Context(), "history-2", schema)
				require.NoError(t, err)
			} else {
				damage(&s)
			}
			require.NoError(t, h.db.SaveSnapshot(t.Context(), "history-1", s))
			require.GreaterOrEqual(t, h.requireExact(t), 25)
			require.Len(t, h.errs, 1)
			require.ErrorIs(t, h.errs[0], eventstore.ErrSnapshot)
			h.post(t, 1) // stores a new one
			require.Equal(t, 2, h.requireExact(t))
		})
	}
}

// TestASnapshotOfARestoredDatabase: the snapshot is newer than the stream, or the stream has gone another
// way since.
// Promise: G1.8
func TestASnapshotOfARestoredDatabase(t *testing.T) {
	t.Parallel()
	schema := schemaOf(t, "1")
	before := newHistories(t, newDB(t), "1")
	before.post(t, 31)
	for name, events := range map[string]int{"shorter stream": 5, "another stream of that length": 40} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHistories(t, newDB(t), "1")
			for range events {
				_, err := h.Update(t.Context(), "1", func(*history) ([]any, error) { return []any{posted{Stars: 3}}, nil })
				require.NoError(t, err)
			}
			require.NoError(t, h.db.SaveSnapshot(t.Context(), "history-1", stored(t, before, schema)))
			require.GreaterOrEqual(t, h.requireExact(t), events)
			require.ErrorIs(t, h.errs[0], eventstore.ErrSnapshot)
		})
	}
}

// Promise: G1.8
func TestASnapshotOfAnotherSchemaIsNotUsed(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	h := newHistories(t, db, "1")
	h.post(t, 20)
	require.LessOrEqual(t, h.requireExact(t), 11)
	again := newHistories(t, db, "2")
	require.Equal(t, 20, again.requireExact(t))
	again.post(t, 1)
	require.Equal(t, 2, again.requireExact(t))
	require.LessOrEqual(t, h.requireExact(t), 12, "a program of the version before still has its own")
	require.Empty(t, append(h.errs, again.errs...))
}

// wider has one field more than history.
type wider struct {
	Stars []int
	More  int
}

func (w *wider) Apply(event any) {
	if e, ok := event.(posted); ok {
		w.Stars, w.More = append(w.Stars, e.Stars), w.More+1
	}
}

// Promise: G1.8
func TestASnapshotOfAnotherTypeIsNotUsed(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	newHistories(t, db, "1").post(t, 20)
	r, err := eventstore.NewRepository(db, types, "history", func(string) *wider { return &wider{} },
		&eventstore.RepositoryConfig{Snapshots: eventstore.Snapshots{Every: 10, Schema: "1"}})
	require.NoError(t, err)
	w, _, err := r.Load(t.Context(), "1")
	require.NoError(t, err)
	require.Equal(t, 20, w.More)
}

func TestUpdateTxSavesASnapshotWithItsEvents(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	h := newHistories(t, db, "1")
	h.post(t, 10)
	undo := errors.New("undo")
	update := func(end error) error {
		return db.Transact(t.Context(), func(ctx context.Context, tx *memory.Model) error {
			_, err := h.UpdateTx(ctx, db.InTx(tx), "1", func(a *history) ([]any, error) { return []any{posted{Stars: 11}}, nil })
			require.NoError(t, err)
			return end
		})
	}
	require.ErrorIs(t, update(undo), undo)
	require.Equal(t, 10, h.requireExact(t), "no snapshot")
	require.NoError(t, update(nil))
	require.Equal(t, 2, h.requireExact(t))
}

// lossy is an aggregate whose second state does not read back.
type lossy struct{ Any map[string]json.Number }

func (l *lossy) Apply(event any) {
	if e, ok := event.(posted); ok && e.Stars > 1 {
		l.Any = map[string]json.Number{"a": "not a number"}
	}
}

// Promise: G1.9
func TestAStateThatDoesNotReadBackIsNotStored(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	var errs []error
	r, err := eventstore.NewRepository(db, types, "history", func(string) *lossy { return &lossy{} },
		&eventstore.RepositoryConfig{Snapshots: eventstore.Snapshots{Every: 1, OnError: func(_ string, err error) { errs = append(errs, err) }}})
	require.NoError(t, err)
	for range 3 {
		_, err := r.Update(t.Context(), "1", func(*lossy) ([]any, error) { return []any{posted{Stars: 2}}, nil })
		require.NoError(t, err)
	}
	require.Len(t, errs, 2)
	require.ErrorIs(t, errs[0], eventstore.ErrSnapshot)
}

type unexported struct{ stars int }

func (h *unexported) Apply(any) { h.stars++ }

type faced struct{ Any any }

func (f *faced) Apply(any) {}

type own struct{ stars int }

func (o *own) Apply(any)                    { o.stars++ }
func (o *own) MarshalJSON() ([]byte, error) { return json.Marshal(o.stars) }
func (o *own) UnmarshalJSON(b []byte) error { return json.Unmarshal(b, &o.stars) }

// Promise: G1.9
func TestNewRepositoryRefusesSnapshotsThatLoseState(t *testing.T) {
	t.Parallel()
	open := func(s eventstore.Snapshots) *eventstore.RepositoryConfig {
		return &eventstore.RepositoryConfig{Snapshots: s}
	}
	some := eventstore.Snapshots{Every: 5}
	_, err := eventstore.NewRepository(newDB(t), types, "a", func(string) *unexported { return &unexported{} }, open(some))
	require.ErrorContains(t, err, "unexported.stars: export the field")
	require.ErrorIs(t, err, eventstore.ErrInvalid)
	_, err = eventstore.NewRepository(newDB(t), types, "a", func(string) *faced { return &faced{} }, open(some))
	require.ErrorContains(t, err, "faced.Any")
	_, err = eventstore.NewRepository(newDB(t), types, "a", func(string) *own { return &own{} }, open(some))
	require.NoError(t, err)
	_, err = eventstore.NewRepository(newDB(t), types, "a", func(string) *own { return &own{} }, open(eventstore.Snapshots{Every: -1}))
	require.ErrorContains(t, err, "Every")
	_, err = eventstore.NewRepository(struct{ eventstore.Store }{newDB(t)}, types, "a", func(string) *own { return &own{} }, open(some))
	require.ErrorContains(t, err, "SnapshotStore")
}

type (
	balance  int64
	embedded struct{ balance }
	under    struct{ Version int }
	twice    struct {
		under
		Version int
	}
	money  struct{ cents int }
	purses struct{ By map[string]money }
)

func (e *embedded) Apply(any) { e.balance++ }
func (*twice) Apply(any)      {}
func (*purses) Apply(any)     {}

func (m *money) MarshalJSON() ([]byte, error) { return json.Marshal(m.cents) }
func (m *money) UnmarshalJSON(b []byte) error { _ = json.Unmarshal(b, &m.cents); return nil }

func refused[A eventstore.Aggregate](t *testing.T, want string) {
	t.Helper()
	_, err := eventstore.NewRepository(newDB(t), types, "a", func(string) (a A) { return a },
		&eventstore.RepositoryConfig{Snapshots: eventstore.Snapshots{Every: 5}})
	require.ErrorContains(t, err, want)
}

// Promise: G1.9
func TestNewRepositoryRefusesWhatJSONDropsSilently(t *testing.T) {
	t.Parallel()
	refused[*embedded](t, "embedded.balance: export the field")
	refused[*twice](t, "two of the name Version")
	refused[*purses](t, "MarshalJSON of eventstore_test.money")
	_, err := eventstore.NewRepository(newDB(t), types, "a", func(string) *own { return &own{} },
		&eventstore.RepositoryConfig{Snapshots: eventstore.Snapshots{Every: 5, Schema: "a\x00"}})
	require.ErrorContains(t, err, "Schema")
}
