package readmodeltest_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// The tables of a forgotten projector are kept, and dropped on request, with the view that shows them. A view of the
// application that reads them stays, and what is left is dropped by another call.
// Promise: O5.3
func TestTheTablesOfAForgottenProjector(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, db *database) {
		p := model{
			tables: []string{"plants"},
			create: func(name func(string) string) []string {
				return []string{"create table " + name("plants") + " (n int primary key)"}
			},
			plant: func(name func(string) string) []string {
				return []string{"insert into " + name("plants") + " values (" + name("n") + ")"}
			},
		}.define(projector.Options{})
		db.plant(t, 1, 2)
		plants := func() []string { return db.rows(t, "select cast(n as text) from plants") }
		require.NoError(t, p.Create(t.Context(), db.Provider, &quiet))
		_, stop := start(t, db, p)
		patience.Until(t, func() bool { return slices.Equal(plants(), []string{"1", "2"}) }, "the events to be applied")
		require.NoError(t, stop())

		f, err := projector.Forget(t.Context(), db.Provider, "plants", projector.ForgetOptions{}, ann)
		require.NoError(t, err)
		require.Equal(t, []string{"plants_g1", "plants"}, f.Tables)
		require.Equal(t, []string{"1", "2"}, plants())
		require.NoError(t, projector.Release(t.Context(), db.Provider, "plants", ann)) // another generation is the next tombstone
		if db.isPostgres {
			db.exec(t, "create view tall as select * from plants")
			_, err = projector.Forget(t.Context(), db.Provider, "plants", projector.ForgetOptions{DropTables: true}, ann)
			require.Equal(t, provider.CodeReferenced, provider.CodeOf(err), err)
			require.Equal(t, []string{"1", "2"}, plants())
			db.exec(t, "drop view tall")
		}
		_, err = projector.Forget(t.Context(), db.Provider, "plants", projector.ForgetOptions{DropTables: true}, ann)
		require.NoError(t, err)
		require.Empty(t, db.generated(t))
		db.exec(t, "create table plants (n int)") // the name is free
	})
}
