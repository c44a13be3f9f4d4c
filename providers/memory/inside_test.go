package memory_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/providers/providertest"
)

// A call that would wait for the transaction of its own context is refused at once, whichever it is.
// Promise: G2.2
func TestACallInsideATransactionIsRefused(t *testing.T) {
	t.Parallel()
	db := newDB(t, nil)
	calls := map[string]func(ctx context.Context) error{
		"claim": func(ctx context.Context) error {
			_, err := provider.ClaimEntries(ctx, db, provider.EntryQuery{}, claim.Terms{})
			return err
		},
		"claim of a task": func(ctx context.Context) error {
			_, err := provider.ClaimTasks(ctx, db, provider.TaskQuery{}, claim.Terms{})
			return err
		},
		"lease": func(ctx context.Context) error {
			terms, err := claim.Terms{}.WithDefaults()
			require.NoError(t, err)
			_, err = db.AcquireLease(ctx, "l", terms)
			return err
		},
		"unit": func(ctx context.Context) error {
			return unit(ctx, db, func(context.Context, *memory.Model) error { return nil })
		},
		"transaction": func(ctx context.Context) error {
			return db.Transact(ctx, func(context.Context, *memory.Model) error { return nil })
		},
	}
	var kept context.Context
	inside := func(ctx context.Context, _ *memory.Model) error {
		for name, call := range calls {
			err := call(ctx)
			require.ErrorIs(t, err, provider.ErrInTransaction, name)
			require.ErrorIs(t, err, eventstore.ErrInvalid, name)
		}
		providertest.Inside(ctx, t, db, patience.Limit())
		kept = ctx
		return nil
	}
	for name, begin := range map[string]func(fn func(context.Context, *memory.Model) error) error{
		"Transact": func(fn func(context.Context, *memory.Model) error) error { return db.Transact(patience.Context(t), fn) },
		"Do":       func(fn func(context.Context, *memory.Model) error) error { return unit(patience.Context(t), db, fn) },
	} {
		require.NoError(t, begin(inside), name)
		for call, fn := range calls {
			require.NoError(t, fn(kept), "%s after %s: the transaction is over", call, name)
		}
	}
	err := unit(t.Context(), db, func(ctx context.Context, _ *memory.Model) error { return calls["lease"](ctx) })
	require.Equal(t, provider.ClassPermanent, provider.ClassOf(err), "a handler that does it is stuck at once: %v", err)
}
