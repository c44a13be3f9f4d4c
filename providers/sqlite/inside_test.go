package sqlite_test

import (
	"context"
	"database/sql"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/providertest"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// A call that would wait for the transaction of its own context is refused at once, whichever it is: with the pools of
// Open, and with a pool that has one connection.
// Promise: G2.2
func TestACallInsideATransactionIsRefused(t *testing.T) {
	t.Parallel()
	one := pooled(t, migrated(t), immediate)
	one.SetMaxOpenConns(1)
	ofOne, err := sqlite.New(one, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, ofOne.Close()) })
	for name, db := range map[string]*sqlite.DB{"Open": open(t, nil), "New": ofOne} {
		t.Run(name, func(t *testing.T) { refusesCallsInside(t, db, db != ofOne) })
	}
}

func refusesCallsInside(t *testing.T, db *sqlite.DB, owned bool) {
	t.Helper()
	inUnit := func(ctx context.Context, fn func(ctx context.Context, tx *sql.Tx) error) error {
		return db.Do(ctx, provider.Unit{Projector: "p"}, func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
			return provider.Closing{}, fn(ctx, tx)
		})
	}
	calls := map[string]func(ctx context.Context) error{
		"claim": func(ctx context.Context) error {
			_, err := provider.ClaimEntries(ctx, db, provider.EntryQuery{}, claim.Terms{})
			return err
		},
		"claim of tasks": func(ctx context.Context) error {
			_, err := provider.ClaimTasks(ctx, db, provider.TaskQuery{Kinds: []string{"k"}}, claim.Terms{})
			return err
		},
		"lease": func(ctx context.Context) error {
			terms, err := claim.Terms{}.WithDefaults()
			require.NoError(t, err)
			_, err = db.AcquireLease(ctx, "l", terms)
			return err
		},
		"unit": func(ctx context.Context) error {
			return inUnit(ctx, func(context.Context, *sql.Tx) error { return nil })
		},
		"transaction": func(ctx context.Context) error {
			return db.Transact(ctx, func(context.Context, *sql.Tx) error { return nil })
		},
		"migration": db.Migrate,
	}
	if owned {
		calls["transaction of the pool"] = func(ctx context.Context) error {
			tx, err := db.SQL().BeginTx(ctx, nil)
			if err == nil {
				err = tx.Rollback()
			}
			return err
		}
	} else {
		calls["read"] = func(ctx context.Context) error {
			_, err := db.EntryCandidates(ctx, provider.EntryQuery{}, 1)
			return err
		}
	}
	var kept context.Context
	for name, begin := range map[string]func(ctx context.Context, fn func(context.Context, *sql.Tx) error) error{"Transact": db.Transact, "Do": inUnit} {
		require.NoError(t, begin(patience.Context(t), func(ctx context.Context, _ *sql.Tx) error {
			for call, fn := range calls {
				err := fn(ctx)
				require.ErrorIs(t, err, provider.ErrInTransaction, "%s inside %s", call, name)
				require.ErrorIs(t, err, eventstore.ErrInvalid, "%s inside %s", call, name)
			}
			providertest.Inside(ctx, t, db, patience.Limit())
			kept = ctx
			return nil
		}), name)
	}
	err := inUnit(t.Context(), func(ctx context.Context, _ *sql.Tx) error { return calls["lease"](ctx) })
	require.Equal(t, provider.ClassPermanent, provider.ClassOf(err), "a handler that does it is stuck at once: %v", err)
	require.NoError(t, calls["lease"](kept), "the transaction is over")
}
