package readmodeltest_test

import (
	"strings"
	"testing"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// The longest names have room for the numbers of 999,999 generations. The next one is refused with the length.
// Promise: R7.1
func TestTheLongestNamesHaveRoomForTheNumberOfAGeneration(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, db *database) {
		long := strings.Repeat("x", 52)
		m := model{
			tables: []string{long + "_pa", long + "_pb"},
			create: func(name func(string) string) (all []string) {
				for _, table := range []string{long + "_pa", long + "_pb"} {
					all = append(all, `create table `+name(table)+` (id int primary key)`, `create index `+name(strings.Replace(table, "_p", "_i", 1))+` on `+name(table)+` (id)`)
				}
				return all
			},
			plant: func(name func(string) string) []string {
				return []string{`insert into ` + name(long+"_pa") + ` values (` + name("n") + `)`}
			},
		}
		db.plant(t, 1, 2)
		p := m.define(projector.Options{})
		_, stop := start(t, db, p)
		patience.Until(t, func() bool { return len(db.generated(t)) == 2 && len(db.rows(t, `select id from `+long+`_pa`)) == 2 }, "the events to be applied")
		require.NoError(t, stop())
		for _, last := range []int{8, 9, 999_997} {
			set, err := db.SetGeneration(t.Context(), provider.Generation{Build: provider.Build{Projector: "plants", Generation: last}, State: provider.GenerationRetired})
			require.NoError(t, err)
			if set {
				_, err = p.Verify(t.Context(), db.Provider, projector.Verification{}, &quiet)
				require.NoError(t, err, last)
			}
		}
		r, stop := start(t, db, p)
		require.NoError(t, r.Rebuild(t.Context(), "plants", projector.Rebuild{How: projector.BlueGreen, Decision: ann}))
		require.Contains(t, db.generated(t), long+"_pa_g999999")
		require.Len(t, db.rows(t, `select id from `+long+`_pa`), 2)
		require.NoError(t, stop())
		_, err := p.Verify(t.Context(), db.Provider, projector.Verification{}, &quiet)
		var invalid *eventstore.InvalidError
		require.ErrorAs(t, err, &invalid)
		require.Contains(t, invalid.Error(), "64 bytes: at most 63")
		require.Len(t, db.generated(t), 4)
	})
}
