package memory_test

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
)

// rehearse is what a rehearsal of fn is told, as "table: before -> after".
func rehearse(t *testing.T, db *memory.DB, fn func(tx *memory.Model)) (told []string, err error) {
	t.Helper()
	err = db.Do(t.Context(), projector.Work{Projector: "p", Rehearse: func(changes []projector.Change) {
		for _, c := range changes {
			told = append(told, c.Table+": "+string(c.Before)+" -> "+string(c.After))
		}
	}}, func(_ context.Context, tx *memory.Model, _ []int) ([]outbox.Message, error) {
		fn(tx)
		return nil, nil
	})
	return told, err
}

func TestARehearsalTellsRows(t *testing.T) {
	t.Parallel()
	db := newDB(t, nil)
	never := make(chan int) // which JSON cannot take
	require.NoError(t, db.Tx(t.Context(), func(tx *memory.Model) error {
		tx.Put("letters", "a", 1)
		tx.Put("letters", "b", 2)
		tx.Put("letters", "c", map[string]int{"n": 3})
		tx.Put("letters", "never", never)
		return nil
	}))
	told, err := rehearse(t, db, func(tx *memory.Model) {
		tx.Put("others", "z", "Z")
		tx.Put("letters", "e", 5)
		tx.Delete("letters", "b")
		tx.Put("letters", "a", 7)
		tx.Put("letters", "a", 8)
		tx.Put("letters", "d", 4) // and deleted again
		tx.Delete("letters", "d")
		tx.Delete("letters", "c") // and put back
		tx.Put("letters", "c", map[string]int{"n": 3})
		tx.Delete("letters", "nothing")
	})
	require.NoError(t, err)
	require.Equal(t, []string{
		`letters: {"key":"a","value":1} -> {"key":"a","value":8}`,
		`letters: {"key":"b","value":2} -> `,
		`letters:  -> {"key":"e","value":5}`,
		`others:  -> {"key":"z","value":"Z"}`,
	}, told)
	db.View(func(m *memory.Model) {
		require.Equal(t, []string{"a", "b", "c", "never"}, keys(m, "letters"))
		require.Empty(t, keys(m, "others"))
	})
	for name, fn := range map[string]func(*memory.Model){
		"after":  func(tx *memory.Model) { tx.Put("letters", "a", never) },
		"before": func(tx *memory.Model) { tx.Delete("letters", "never") },
	} {
		told, err := rehearse(t, db, fn)
		require.Equal(t, projector.PermanentClass, projector.ClassOf(err), name)
		require.ErrorAs(t, err, new(*json.UnsupportedTypeError), name)
		require.Nil(t, told, name)
	}
}

// A handler that does not return goes on with a model of its own: it reads what it wrote, and nobody else does.
func TestAStuckHandlersModelIsItsOwn(t *testing.T) {
	t.Parallel()
	db := newDB(t, &memory.Config{Route: outbox.ByCategory})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	others, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- db.Do(ctx, projector.Work{Projector: "p"}, func(_ context.Context, tx *memory.Model, _ []int) ([]outbox.Message, error) {
			tx.Put("t", "k", "before")
			cancel()
			<-others
			v, _ := tx.Get("t", "k")
			tx.Put("t", "k", "after")
			if v != "before" || len(keys(tx, "t")) != 1 {
				t.Errorf("the handler's own model has %v, %v", v, keys(tx, "t"))
			}
			_, err := db.InTx(tx).Append(context.WithoutCancel(ctx), "thing-1", 0, drafted(t))
			return nil, err
		})
	}()
	<-ctx.Done()
	require.NoError(t, db.Tx(t.Context(), func(tx *memory.Model) error { // waits for its turn, and no longer than the grace
		tx.Put("t", "k", "others")
		tx.Put("t", "l", "others")
		return nil
	}))
	close(others)
	require.ErrorIs(t, <-done, context.Canceled)
	require.NoError(t, db.Tx(t.Context(), func(*memory.Model) error { return nil }), "there is one turn, and not two")
	db.View(func(m *memory.Model) {
		v, _ := m.Get("t", "k")
		require.Equal(t, "others", v)
	})
	for range db.ReadStream(t.Context(), "thing-1", 0) {
		t.Error("what it appended late is stored")
	}
}
