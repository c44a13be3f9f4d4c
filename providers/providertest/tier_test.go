package providertest

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
)

// recorder is a test that records why it failed.
type recorder struct {
	testing.TB
	failed []string
}

func (r *recorder) Helper()      {}
func (r *recorder) Failed() bool { return len(r.failed) > 0 }
func (r *recorder) FailNow()     { panic(r) }
func (r *recorder) Errorf(format string, args ...any) {
	r.failed = append(r.failed, fmt.Sprintf(format, args...))
}
func (r *recorder) Fatalf(format string, args ...any) {
	r.Errorf(format, args...)
	r.FailNow()
}

// unlike has all methods of a store of events, but one of them has another signature.
type unlike struct{ Events }

func (unlike) StatusCounts(context.Context) (int, error) { return 0, nil }

// forgetful is a store of projectors without markers of removed handlers.
type forgetful struct {
	Events
	provider.Units[*memory.Model]
	provider.Parking
	provider.Liveness
	provider.Records
	provider.Progress
	provider.Builds
}

func TestAProviderHasTheMethodsOfItsTier(t *testing.T) {
	t.Parallel()
	db, err := memory.New(nil)
	require.NoError(t, err)
	for _, c := range []struct {
		what   string
		tier   Tier
		store  any
		failed []string
	}{
		{what: "a whole provider", tier: TierOperations, store: db},
		{what: "a store of events", tier: TierEvents, store: struct{ Events }{db}},
		{what: "a store of projectors", tier: TierProjectors, store: struct{ Projectors[*memory.Model] }{db}},
		{"no tier", 0, db, []string{"tier 0 is not in the list"}},
		{"a tier too low", TierTasks, db, []string{"*memory.DB has all methods of TierOperations: declare this tier instead of TierTasks"}},
		{"a tier too high", TierProjectors, forgetful{Events: db}, []string{
			"a provider of TierProjectors has all methods of TierProjectors: providertest.forgetful lacks AcquireLease, DropMarkers, LeaseNames, MarkedHandlers, ReleaseLease"}},
		{"another signature", TierEvents, unlike{db}, []string{
			"a provider of TierEvents has all methods of TierEvents: providertest.unlike lacks StatusCounts(context.Context, ...provider.EntryStatus) " +
				"(map[provider.EntryStatus]int64, error) (it has other parameters or results)"}},
	} {
		r := &recorder{TB: t}
		func() {
			defer func() { _ = recover() }() // FailNow
			checkTier[*memory.Model](r, c.tier, c.store)
		}()
		require.Equal(t, c.failed, r.failed, c.what)
	}
}
