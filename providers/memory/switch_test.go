package memory_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
)

type rating struct {
	Stars   int
	Updated string
}

// doSwitch runs a unit of generation 2 with Switch.
func doSwitch(t *testing.T, db *memory.DB, s provider.Switch, run func(tx *memory.Model)) error {
	t.Helper()
	u := provider.Unit{Projector: "ratings", Generation: 2, Once: true, Switch: &s}
	return db.Do(t.Context(), u, func(_ context.Context, tx *memory.Model, _ provider.Found) (provider.Closing, error) {
		if run != nil {
			run(tx)
		}
		return provider.Closing{}, nil
	})
}

func put(t *testing.T, db *memory.DB, table string, rows map[string]any) {
	t.Helper()
	require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx *memory.Model) error {
		for key, v := range rows {
			tx.Put(table, key, v)
		}
		return nil
	}))
}

func get(db *memory.DB, table, key string) (v any) {
	db.View(func(m *memory.Model) { v, _ = m.Get(table, key) })
	return v
}

func TestAViewShowsAnotherTable(t *testing.T) {
	t.Parallel()
	db := newDB(t, nil)
	put(t, db, "ratings", map[string]any{"a": 1})
	put(t, db, "ratings_g2", map[string]any{"a": 2, "b": 3})

	show := []provider.TablePair{{Table: "ratings_g2", Other: "ratings"}}
	require.ErrorContains(t, doSwitch(t, db, provider.Switch{Show: show}, nil), "show ratings_g2: ratings is a table")
	rename := []provider.TablePair{{Table: "ratings", Other: "ratings_g2"}}
	require.ErrorContains(t, doSwitch(t, db, provider.Switch{Rename: rename}, nil), "rename ratings: ratings_g2 exists")

	rename = []provider.TablePair{{Table: "ratings", Other: "ratings_g1"}}
	require.NoError(t, doSwitch(t, db, provider.Switch{Rename: rename, Show: show}, nil))
	require.NoError(t, doSwitch(t, db, provider.Switch{Rename: rename, Show: show}, nil), "a view is not renamed, and can be replaced")
	require.Equal(t, 1, get(db, "ratings_g1", "a"))
	require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx *memory.Model) error {
		require.Equal(t, []string{"a", "b"}, keys(tx, "ratings"))
		tx.Put("ratings", "c", 4)
		tx.Delete("ratings", "b")
		return nil
	}))
	db.View(func(m *memory.Model) { require.Equal(t, []string{"a", "c"}, keys(m, "ratings_g2")) })
	reported, err := dryRun(t, db, func(tx *memory.Model) { tx.Put("ratings", "a", 5) })
	require.NoError(t, err)
	require.Equal(t, []string{`ratings_g2: {"key":"a","value":2} -> {"key":"a","value":5}`}, reported)

	again := []provider.TablePair{{Table: "ratings_g2", Other: "ratings_old"}}
	require.NoError(t, doSwitch(t, db, provider.Switch{Rename: again}, nil))
	require.Equal(t, 2, get(db, "ratings", "a"), "the view shows the table under its new name")
	require.NoError(t, doSwitch(t, db, provider.Switch{Reset: []string{"ratings"}}, func(tx *memory.Model) {
		require.Empty(t, keys(tx, "ratings"))
		tx.Put("ratings", "a", 6)
	}))
	db.View(func(m *memory.Model) { require.Equal(t, []string{"a"}, keys(m, "ratings_old")) })
}

func TestCompareAndRepairRows(t *testing.T) {
	t.Parallel()
	db := newDB(t, nil)
	put(t, db, "right", map[string]any{"a": rating{1, "today"}, "b": rating{2, ""}, "c": rating{3, ""}, "e": 1})
	put(t, db, "wrong", map[string]any{"a": rating{1, "once"}, "b": rating{7, ""}, "d": rating{4, ""}, "e": 1.0})
	var found []provider.Difference
	compare := func(c provider.Comparison) {
		c.Pairs, c.Found = []provider.TablePair{{Table: "right", Other: "wrong"}}, func(all []provider.Difference) { found = all }
		require.NoError(t, doSwitch(t, db, provider.Switch{Compare: &c}, nil))
	}
	all := func() (list []string) {
		for _, d := range found {
			list = append(list, d.Table+string(d.Key)+": "+string(d.Want)+" <- "+string(d.Got))
		}
		return list
	}
	wrong := []string{
		`wrong{"key":"b"}: {"key":"b","value":{"Stars":2,"Updated":""}} <- {"key":"b","value":{"Stars":7,"Updated":""}}`,
		`wrong{"key":"c"}: {"key":"c","value":{"Stars":3,"Updated":""}} <- `,
		`wrong{"key":"d"}:  <- {"key":"d","value":{"Stars":4,"Updated":""}}`,
	}
	compare(provider.Comparison{Limit: 9})
	require.Len(t, found, 4)
	compare(provider.Comparison{Limit: 9, Ignore: []string{"Updated"}})
	require.Equal(t, wrong, all())
	compare(provider.Comparison{Limit: 2, Ignore: []string{"Updated"}})
	require.Equal(t, wrong[:2], all())
	compare(provider.Comparison{Limit: 9, Ignore: []string{"value"}})
	require.Equal(t, wrong[1:], all(), "only the keys are compared")

	// as it comes back from a JSON column
	only := []provider.Difference{{Table: "wrong", Key: []byte(`{"key": "c"}`)}, {Table: "wrong", Key: []byte(`{"key": "d"}`)}, {Table: "other", Key: []byte(`{"key": "b"}`)}}
	compare(provider.Comparison{Limit: 9, Repair: true, Only: only})
	require.Equal(t, wrong[1:], all())
	compare(provider.Comparison{Limit: 9, Repair: true, Only: only})
	require.Empty(t, found, "they do not differ any more")
	compare(provider.Comparison{Limit: 9, Ignore: []string{"Updated"}})
	require.Equal(t, wrong[:1], all(), "the other rows are not repaired")
}

// A snapshot waits for no transaction, and no transaction waits for it. It sees its own writes,
// which are dropped.
func TestASnapshotHoldsNoLock(t *testing.T) {
	t.Parallel()
	db := newDB(t, nil)
	put(t, db, "t", map[string]any{"k": 1})
	require.NoError(t, db.Transact(t.Context(), func(_ context.Context, outer *memory.Model) error {
		outer.Put("t", "k", 2)
		return doSwitch(t, db, provider.Switch{Snapshot: true, Set: []provider.Generation{build(2, provider.GenerationLive)}}, func(tx *memory.Model) {
			v, _ := tx.Get("t", "k")
			require.Equal(t, 1, v)
			tx.Put("t", "k", 3)
			_, err := db.InTx(tx).Append(t.Context(), "thing-1", eventstore.NoStream, drafted(t))
			require.NoError(t, err)
		})
	}))
	require.NoError(t, doSwitch(t, db, provider.Switch{Snapshot: true}, func(*memory.Model) {
		put(t, db, "t", map[string]any{"k": 4})
	}))
	require.Equal(t, 4, get(db, "t", "k"))
	all, err := db.Generations(t.Context(), "")
	require.NoError(t, err)
	require.Empty(t, all)
	_, err = db.Append(t.Context(), "thing-1", eventstore.NoStream, drafted(t))
	require.NoError(t, err)
}

func build(number int, state provider.GenerationState) provider.Generation {
	return provider.Generation{Build: provider.Build{Projector: "ratings", Generation: number}, State: state}
}

func TestASwitchIsBusyAfterASecond(t *testing.T) {
	t.Parallel()
	db := newDB(t, nil)
	require.NoError(t, db.Transact(t.Context(), func(_ context.Context, _ *memory.Model) error {
		err := doSwitch(t, db, provider.Switch{}, nil)
		require.Equal(t, provider.ClassTransient, provider.ClassOf(err))
		require.Equal(t, provider.CodeBusy, provider.CodeOf(err))
		return nil
	}))
	require.NoError(t, doSwitch(t, db, provider.Switch{}, nil))
}

// Last can call the other methods of the store while the unit is open.
func TestLastReadsTheStore(t *testing.T) {
	t.Parallel()
	db := newDB(t, nil)
	_, err := db.Append(t.Context(), "thing-1", eventstore.NoStream, drafted(t))
	require.NoError(t, err)
	live := provider.Checkpoint{Mode: provider.ModeLive, Place: provider.LogPlace{Position: 1}}
	set, err := db.SetCheckpoint(t.Context(), provider.Build{Projector: "ratings"}, provider.Checkpoint{}, live)
	require.NoError(t, err)
	require.True(t, set)
	handlers := []provider.Handler{{Name: "ratings/posted"}}
	last := func(ctx context.Context, is provider.Live) ([]provider.Message, error) {
		live.Generation = 1
		require.Equal(t, live, is.Checkpoint)
		page, err := db.LogPage(ctx, provider.LogQuery{})
		require.NoError(t, err)
		m := provider.Message{ID: page.Events[0].ID, Position: page.Events[0].Position, Handlers: handlers, Mark: true}
		unapplied, err := is.Unapplied(ctx, []provider.Message{m, {ID: "b", Position: 2, Handlers: handlers}})
		require.NoError(t, err)
		require.Equal(t, []bool{false, true}, unapplied)
		unapplied, err = db.Unapplied(ctx, provider.Build{Projector: "ratings", Generation: 2}, []provider.Message{m})
		require.NoError(t, err)
		require.Equal(t, []bool{true}, unapplied)
		return []provider.Message{m}, nil
	}
	u := provider.Unit{Projector: "ratings", Generation: 2, Once: true, Switch: &provider.Switch{Last: last, Set: []provider.Generation{build(2, provider.GenerationLive)}}}
	ran := false
	require.NoError(t, db.Do(t.Context(), u, func(_ context.Context, _ *memory.Model, found provider.Found) (provider.Closing, error) {
		ran = true
		require.Equal(t, [][]bool{{true}}, found.Fresh)
		return provider.Closing{}, nil
	}))
	require.True(t, ran)
	outcomes, err := db.Outcomes(t.Context(), []provider.Question{{Handler: "ratings/posted", MessageID: drafted(t)[0].ID}})
	require.NoError(t, err)
	require.Equal(t, []provider.Outcome{provider.OutcomeApplied}, outcomes, "generation 2 is live now, and has a marker")
}
