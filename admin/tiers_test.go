package admin_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
)

// ofEvents, ofProjectors and ofTasks are stores that have not all parts.
type (
	ofEvents     struct{ admin.Store }
	ofProjectors struct {
		admin.Store
		admin.Projectors
	}
	ofTasks struct {
		ofProjectors
		provider.TaskInspector
	}
)

// troubled is a store with an abandoned entry, a stuck message with one behind it, and a reader.
func troubled(t *testing.T) *memory.DB {
	t.Helper()
	db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
	require.NoError(t, err)
	_, err = db.Append(t.Context(), "product-tea", eventstore.Any, drafts(t, 1, 2))
	require.NoError(t, err)
	taken, err := provider.ClaimEntries(t.Context(), db, provider.EntryQuery{}, claim.Terms{Limit: 1})
	require.NoError(t, err)
	_, err = db.MarkEntries(t.Context(), []provider.EntryMark{{Seq: taken[0].Seq, Token: taken[0].Token, To: outbox.Abandoned}})
	require.NoError(t, err)
	lane := provider.LaneOfKey("tea")
	u := provider.Unit{Projector: "prices", Messages: []provider.Message{{ID: "m-1", Lane: lane}, {ID: "m-2", Lane: lane}}}
	require.NoError(t, db.Do(t.Context(), u, func(context.Context, *memory.Model, provider.Found) (provider.Closing, error) {
		parked := func(i int, c provider.Class) provider.Aside {
			return provider.Aside{Message: i, After: -1, Parked: provider.Parked{MessageID: u.Messages[i].ID, Key: "tea", Lane: lane, Class: c}}
		}
		return provider.Closing{Park: []provider.Aside{parked(0, provider.ClassPermanent), parked(1, provider.ClassHeld)}}, nil
	}))
	ok, err := db.AcquireLease(t.Context(), "reader/stock@2", claim.Terms{Token: claim.NewToken(), Lease: time.Hour})
	require.NoError(t, err)
	require.True(t, ok)
	return db
}

// With each part that a store has, operators can do more. Missing parts are named.
func TestAStoreOfEachTier(t *testing.T) {
	t.Parallel()
	db := troubled(t)
	for _, c := range []struct {
		store    admin.Store
		missing  []string
		findings int
		names    []string // of projectors
	}{
		{ofEvents{db}, []string{"projectors", "tasks", "operations"}, 1, nil},
		{ofProjectors{db, db}, []string{"tasks", "operations"}, 2, []string{"prices", "stock@2"}},
		{ofTasks{ofProjectors{db, db}, db}, []string{"operations"}, 2, []string{"prices", "stock@2"}},
		{db, nil, 2, []string{"prices"}},
	} {
		ops := adminOf(t, c.store)
		require.Equal(t, c.missing, ops.Missing())
		f, err := ops.Facts(t.Context())
		require.NoError(t, err)
		require.Equal(t, c.missing, f.Missing)
		require.Equal(t, int64(2), f.Log.Head)
		require.Equal(t, int64(2), f.Log.Settled)
		require.False(t, f.Log.HeadAt.IsZero())
		counts := map[outbox.Status]int64{}
		for _, e := range f.Outbox {
			counts[e.Status] += e.N
			require.False(t, e.Oldest.IsZero())
		}
		require.Equal(t, map[outbox.Status]int64{outbox.Abandoned: 1, outbox.Pending: 1}, counts)
		var names []string
		for _, p := range f.Projectors {
			names = append(names, provider.Build{Projector: p.Name, Generation: p.Generation}.String())
			if p.Name == "prices" {
				require.Equal(t, []int64{2, 1, 1}, []int64{p.Parked.N, p.Keys.N, p.StuckKeys.N})
			}
		}
		require.Equal(t, c.names, names)
		found, err := findings(ops.Doctor(t.Context(), provider.DiagnosisLimits{}))
		require.NoError(t, err)
		require.Len(t, found, c.findings, titles(found))
		require.Equal(t, "Entries of the outbox are abandoned", found[len(found)-1].Title)
		if c.findings == 2 {
			require.Contains(t, value(found[0], "message 1"), "1 wait behind it")
		}
	}
}

// An act that requires a part that the store does not have is refused, and says which.
func TestActsOfAStoreWithoutAPart(t *testing.T) {
	t.Parallel()
	db, ctx := troubled(t), t.Context()
	ops := adminOf(t, ofEvents{db})
	for what, act := range map[string]func() error{
		"projectors": func() error { _, err := ops.Replay(ctx, projector.ParkedFilter{Projector: "prices"}, by); return err },
		"tasks":      func() error { _, err := ops.Tasks(); return err },
		"operations": func() error { _, err := ops.Pause(ctx, provider.PauseTopic, "product", by); return err },
	} {
		err := act()
		require.EqualError(t, err, "the store keeps no "+what)
		require.ErrorIs(t, err, errors.ErrUnsupported)
	}
	for _, err := range []error{
		failure(ops.SkipParked(ctx, projector.ParkedFilter{Projector: "prices"}, by)), failure(ops.Parked(ctx, projector.ParkedFilter{})),
		failure(ops.Rebuild(ctx, "prices", projector.Rebuild{})), ops.Control(ctx, "prices", 1, projector.Cancel, by),
		failure(ops.MarkedHandlers(ctx)), failure(ops.DropMarkers(ctx, "prices/priced", by)), failure(ops.Failed(ctx, "prices", 1)),
		failure(ops.Acts(ctx, provider.ActFilter{})), failure(ops.Verify(ctx, "prices", provider.VerifyRequest{}, by)), failure(ops.Cancel(ctx, 1, by)),
	} {
		require.ErrorIs(t, err, errors.ErrUnsupported)
	}
	_, err := ops.Requeue(ctx, outbox.Filter{}, admin.Decision{})
	require.ErrorIs(t, err, provider.ErrInput, "a decision is required, although there is no place for it")
	n, err := ops.Requeue(ctx, outbox.Filter{}, by)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	n, err = adminOf(t, ofProjectors{db, db}).Replay(ctx, projector.ParkedFilter{Projector: "prices"}, by)
	require.NoError(t, err)
	require.Equal(t, 2, n)
}

func failure[T any](_ T, err error) error { return err }
