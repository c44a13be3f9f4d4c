package memory_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
)

// unit runs a unit without messages.
func unit(ctx context.Context, db *memory.DB, run func(ctx context.Context, tx *memory.Model) error) error {
	return db.Do(ctx, provider.Unit{Projector: "p"}, func(ctx context.Context, tx *memory.Model, _ provider.Found) (provider.Closing, error) {
		return provider.Closing{}, run(ctx, tx)
	})
}

// dryRun returns the changes that a dry run of fn reports, as "table: before -> after".
func dryRun(t *testing.T, db *memory.DB, fn func(tx *memory.Model)) (reported []string, err error) {
	t.Helper()
	u := provider.Unit{Projector: "p", DryRun: func(changes []provider.Change) {
		for _, c := range changes {
			reported = append(reported, c.Table+": "+string(c.Before)+" -> "+string(c.After))
		}
	}}
	err = db.Do(t.Context(), u, func(_ context.Context, tx *memory.Model, _ provider.Found) (provider.Closing, error) {
		fn(tx)
		return provider.Closing{}, nil
	})
	return reported, err
}

func TestDryRunReportsRows(t *testing.T) {
	t.Parallel()
	db := newDB(t, nil)
	unknown := make(chan int) // JSON has no channels
	require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx *memory.Model) error {
		tx.Put("letters", "a", 1)
		tx.Put("letters", "b", 2)
		tx.Put("letters", "c", map[string]int{"n": 3})
		tx.Put("letters", "unknown", unknown)
		return nil
	}))
	reported, err := dryRun(t, db, func(tx *memory.Model) {
		tx.Put("others", "z", "Z")
		tx.Put("letters", "e", 5)
		tx.Delete("letters", "b")
		tx.Put("letters", "a", 7)
		tx.Put("letters", "a", 8)
		tx.Put("letters", "d", 4)
		tx.Delete("letters", "d") // it did not exist before
		tx.Delete("letters", "c")
		tx.Put("letters", "c", map[string]int{"n": 3}) // unchanged
		tx.Delete("letters", "nothing")
	})
	require.NoError(t, err)
	require.Equal(t, []string{
		`letters: {"key":"a","value":1} -> {"key":"a","value":8}`,
		`letters: {"key":"b","value":2} -> `,
		`letters:  -> {"key":"e","value":5}`,
		`others:  -> {"key":"z","value":"Z"}`,
	}, reported)
	db.View(func(m *memory.Model) {
		require.Equal(t, []string{"a", "b", "c", "unknown"}, keys(m, "letters"))
		require.Empty(t, keys(m, "others"))
	})
	for name, fn := range map[string]func(*memory.Model){
		"after":  func(tx *memory.Model) { tx.Put("letters", "a", unknown) },
		"before": func(tx *memory.Model) { tx.Delete("letters", "unknown") },
	} {
		reported, err := dryRun(t, db, fn)
		require.Equal(t, provider.ClassPermanent, provider.ClassOf(err), name)
		require.ErrorAs(t, err, new(*json.UnsupportedTypeError), name)
		require.Nil(t, reported, name)
	}
}

// A handler that runs on after its context has ended keeps its own model: it reads its writes,
// and others do not.
func TestAHandlerThatOutlivesItsContextKeepsItsOwnModel(t *testing.T) {
	t.Parallel()
	db := newDB(t, &memory.Config{Route: outbox.ByCategory})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	others, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- unit(ctx, db, func(ctx context.Context, tx *memory.Model) error {
			tx.Put("t", "k", "before")
			cancel()
			<-others
			v, _ := tx.Get("t", "k")
			tx.Put("t", "k", "after")
			if v != "before" || len(keys(tx, "t")) != 1 {
				t.Errorf("the handler's own model has %v, %v", v, keys(tx, "t"))
			}
			_, err := db.InTx(tx).Append(context.WithoutCancel(ctx), "thing-1", 0, drafted(t))
			return err
		})
	}()
	<-ctx.Done()
	// begins after the second has passed
	require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx *memory.Model) error {
		tx.Put("t", "k", "others")
		tx.Put("t", "l", "others")
		return nil
	}))
	close(others)
	require.ErrorIs(t, <-done, context.Canceled)
	require.NoError(t, db.Transact(t.Context(), func(_ context.Context, _ *memory.Model) error { return nil }), "the write lock was released twice")
	db.View(func(m *memory.Model) {
		v, _ := m.Get("t", "k")
		require.Equal(t, "others", v)
	})
	for range db.ReadStream(t.Context(), "thing-1", 0) {
		t.Error("an event that the handler appended late is stored")
	}
}

// The error of a wait for other units is transient, because the message is not to blame. If the
// handler is slow, the message may be.
func TestDeadlinesHaveAClass(t *testing.T) {
	t.Parallel()
	db := newDB(t, nil)
	require.NoError(t, db.Transact(t.Context(), func(_ context.Context, _ *memory.Model) error {
		ctx, cancel := context.WithTimeout(t.Context(), soon)
		defer cancel()
		err := unit(ctx, db, func(context.Context, *memory.Model) error { return nil })
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, provider.ClassTransient, provider.ClassOf(err))
		return nil
	}))
	ctx, pass := patience.Deadline(t)
	err := unit(ctx, db, func(ctx context.Context, tx *memory.Model) error {
		pass()
		tx.Put("t", "k", 1)
		<-ctx.Done()
		return nil
	})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, provider.ClassUnknown, provider.ClassOf(err))
	require.Equal(t, provider.CodeDeadline, provider.CodeOf(err))
	db.View(func(m *memory.Model) { require.Empty(t, keys(m, "t")) })
}

// A handler that begins another transaction with a context from outside waits for its own until that context ends.
func TestANestedTransactionEndsWithItsContext(t *testing.T) {
	t.Parallel()
	db := newDB(t, &memory.Config{Route: outbox.ByCategory})
	ctx, pass := patience.Deadline(t)
	err := unit(ctx, db, func(context.Context, *memory.Model) error {
		time.AfterFunc(soon, pass) // the wait may begin later
		_, err := db.Append(ctx, "thing-1", eventstore.Any, drafted(t))
		return err
	})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, provider.ClassUnknown, provider.ClassOf(err), "the handler is to blame, so the attempt is counted")

	// Through the view there is one transaction.
	require.NoError(t, unit(t.Context(), db, func(ctx context.Context, tx *memory.Model) error {
		_, err := db.InTx(tx).Append(ctx, "thing-1", eventstore.NoStream, drafted(t))
		return err
	}))
	counts, err := db.StatusCounts(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 1, counts[outbox.Pending])
}
