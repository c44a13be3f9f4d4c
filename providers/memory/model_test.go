package memory_test

import (
	"context"
	"errors"
	"maps"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/memory"
)

const soon = 20 * time.Millisecond // a deadline that a test lets pass

func newDB(t *testing.T, cfg *memory.Config) *memory.DB {
	t.Helper()
	db, err := memory.New(cfg)
	require.NoError(t, err)
	return db
}

func drafted(t *testing.T) []eventstore.Draft {
	t.Helper()
	return []eventstore.Draft{{ID: "0198a6b4-7c52-7d11-9a2e-5f0c3b1d2e4f", Type: "thing.happened", Schema: 1, Data: []byte(`{}`)}}
}

func TestNewRefusesANegativeSize(t *testing.T) {
	t.Parallel()
	_, err := memory.New(&memory.Config{RequeueWindow: -1})
	require.ErrorContains(t, err, "RequeueWindow")
	_, err = memory.New(&memory.Config{MaxPayload: -1})
	require.ErrorContains(t, err, "MaxPayload")
}

func TestModelSeesItsOwnWrites(t *testing.T) {
	t.Parallel()
	db := newDB(t, nil)
	require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx *memory.Model) error {
		for _, k := range []string{"b", "", "a", "c"} {
			tx.Put("letters", k, k+"!")
		}
		tx.Put("others", "a", 1)
		return nil
	}))
	require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx *memory.Model) error {
		tx.Delete("letters", "b")
		tx.Delete("letters", "not there")
		tx.Put("letters", "a", "A!")
		require.Equal(t, []string{"", "a", "c"}, keys(tx, "letters"), "in order of keys")
		v, ok := tx.Get("letters", "a")
		require.Equal(t, []any{"A!", true}, []any{v, ok})
		_, ok = tx.Get("letters", "b")
		require.False(t, ok)
		db.View(func(m *memory.Model) {
			require.Equal(t, []string{"", "a", "b", "c"}, keys(m, "letters"), "others see what was committed")
		})
		return nil
	}))
	db.View(func(m *memory.Model) {
		require.Equal(t, map[string]any{"": "!", "a": "A!", "c": "c!"}, maps.Collect(m.All("letters")))
		require.Equal(t, map[string]any{"a": 1}, maps.Collect(m.All("others")))
		require.Empty(t, keys(m, "nothing"))
	})
}

func keys(m *memory.Model, table string) (keys []string) {
	for k := range m.All(table) {
		keys = append(keys, k)
	}
	return keys
}

// View shows the state of one moment: it does not show a commit made while it is open.
func TestViewIsOfOneMoment(t *testing.T) {
	t.Parallel()
	db := newDB(t, nil)
	put := func(n int) {
		require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx *memory.Model) error {
			tx.Put("t", "a", n)
			tx.Put("t", "b", n)
			return nil
		}))
	}
	put(1)
	db.View(func(m *memory.Model) {
		a, _ := m.Get("t", "a")
		put(2)
		b, _ := m.Get("t", "b")
		require.Equal(t, a, b)
	})
}

func TestModelIsForItsFunctionOnly(t *testing.T) {
	t.Parallel()
	db := newDB(t, nil)
	var kept *memory.Model
	require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx *memory.Model) error { kept = tx; return nil }))
	require.Panics(t, func() { kept.Get("t", "k") })
	require.Panics(t, func() { kept.Put("t", "k", 1) })
	_, err := db.InTx(kept).Append(t.Context(), "thing-1", eventstore.Any, drafted(t))
	require.ErrorContains(t, err, "append thing-1: the transaction is over")
	require.ErrorContains(t, db.InTx(kept).Enqueue(t.Context(), outbox.Message{Topic: "t"}), "over")
	for _, err := range db.InTx(kept).ReadStream(t.Context(), "thing-1", 0) {
		require.ErrorContains(t, err, "over")
	}
	db.View(func(m *memory.Model) {
		kept = m
		require.Panics(t, func() { m.Put("t", "k", 1) })
		require.Panics(t, func() { m.Delete("t", "k") })
		_, err := db.InTx(m).Append(t.Context(), "thing-1", eventstore.Any, drafted(t))
		require.ErrorContains(t, err, "not a transaction")
	})
	require.Panics(t, func() { kept.Get("t", "k") })
	other := newDB(t, nil)
	require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx *memory.Model) error {
		require.ErrorContains(t, other.InTx(tx).Enqueue(t.Context(), outbox.Message{Topic: "t"}), "not a transaction of this store")
		return nil
	}))
}

func TestTxLeavesNothing(t *testing.T) {
	t.Parallel()
	db := newDB(t, nil)
	undo := errors.New("undo")
	write := func(tx *memory.Model) {
		tx.Put("t", "k", 1)
		_, err := db.InTx(tx).Append(t.Context(), "thing-1", eventstore.Any, drafted(t))
		require.NoError(t, err)
	}
	require.ErrorIs(t, db.Transact(t.Context(), func(_ context.Context, tx *memory.Model) error { write(tx); return undo }), undo)
	require.PanicsWithError(t, undo.Error(), func() {
		_ = db.Transact(t.Context(), func(_ context.Context, tx *memory.Model) error { write(tx); panic(undo) })
	})
	ctx, cancel := context.WithCancel(t.Context())
	err := db.Transact(ctx, func(_ context.Context, tx *memory.Model) error { write(tx); cancel(); return nil })
	require.ErrorIs(t, err, context.Canceled)
	db.View(func(m *memory.Model) { require.Empty(t, keys(m, "t")) })
	at, err := db.Append(t.Context(), "thing-1", eventstore.NoStream, drafted(t))
	require.NoError(t, err)
	require.False(t, at.Replayed)
}
