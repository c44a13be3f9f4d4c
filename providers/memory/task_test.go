package memory_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
)

func draft(id string) provider.TaskDraft {
	return provider.TaskDraft{ID: id, Kind: "orders/fulfil", Input: json.RawMessage(`{}`)}
}

// addTasks adds tasks in one transaction.
func addTasks(t *testing.T, db *memory.DB, drafts ...provider.TaskDraft) {
	t.Helper()
	require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx *memory.Model) error {
		return db.TasksIn(tx).Enqueue(ctx, drafts...)
	}))
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// Tasks that wait do not make an empty claim slower. A scan of them would take hundreds of times as
// long.
func TestTasksThatWaitCostClaimsNothing(t *testing.T) {
	db, err := memory.New(nil)
	require.NoError(t, err)
	q := provider.TaskQuery{Kinds: []string{"orders/fulfil"}}
	claim := func() {
		found, err := db.TaskCandidates(t.Context(), q, 10)
		require.NoError(t, err)
		require.Empty(t, found)
	}
	before := patience.Fastest(50, claim)
	drafts := make([]provider.TaskDraft, 20_000)
	for i := range drafts {
		drafts[i] = draft(fmt.Sprint(i)).Later(time.Hour)
	}
	addTasks(t, db, drafts...)
	patience.Faster(t, 20*before+20*time.Microsecond, claim)
}

// Commits that make tasks due close the channel; a rollback and a claim do not.
func TestTasksDue(t *testing.T) {
	t.Parallel()
	db, err := memory.New(nil)
	require.NoError(t, err)
	ctx := t.Context()
	due := db.TasksDue()
	require.Error(t, db.Transact(ctx, func(ctx context.Context, tx *memory.Model) error {
		require.NoError(t, db.TasksIn(tx).Enqueue(ctx, draft("a")))
		return context.Canceled
	}))
	require.False(t, isClosed(due), "a rollback")
	require.NoError(t, db.Do(ctx, provider.Unit{}, func(ctx context.Context, tx *memory.Model, _ provider.Found) (provider.Closing, error) {
		err := db.TasksIn(tx).Enqueue(ctx, draft("a"))
		require.False(t, isClosed(due), "before the commit")
		return provider.Closing{}, err
	}))
	require.True(t, isClosed(due), "a unit")
	due = db.TasksDue()
	taken, err := provider.ClaimTasks(ctx, db, provider.TaskQuery{Kinds: []string{"orders/fulfil"}}, claim.Terms{})
	require.NoError(t, err)
	require.Len(t, taken, 1)
	require.False(t, isClosed(due), "a claim")
	_, err = db.ChangeTasks(ctx, []provider.TaskChange{{ID: "a", Token: taken[0].Token, To: provider.TaskPending}})
	require.NoError(t, err)
	require.True(t, isClosed(due), "a release")
}

// A task added by a foreign transaction, or one that is over, is refused.
func TestTasksInAnotherTransaction(t *testing.T) {
	t.Parallel()
	db, err := memory.New(nil)
	require.NoError(t, err)
	other, err := memory.New(nil)
	require.NoError(t, err)
	var over *memory.Model
	require.NoError(t, other.Transact(t.Context(), func(ctx context.Context, tx *memory.Model) error {
		require.ErrorContains(t, db.TasksIn(tx).Enqueue(ctx, draft("a")), "not a transaction of this store")
		over = tx
		return nil
	}))
	require.ErrorContains(t, other.TasksIn(over).Enqueue(t.Context(), draft("a")), "the transaction is over")
}
