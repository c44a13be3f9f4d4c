package taskrow_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/taskrow"
	"github.com/kinora-go/kinora/provider"
)

var now = time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)

func rowIn(status provider.TaskStatus) taskrow.Row {
	return taskrow.Row{Task: provider.Task{
		ID: "a", Status: status, Version: 7, Attempts: 3, Vanished: 1, NextAt: now, State: map[string]provider.Slot{}, Token: claim.NewToken(), ClaimedBy: "w",
	}}
}

// What becomes of a task in each status.
func TestDecisions(t *testing.T) {
	t.Parallel()
	const (
		pending, claimed, failed, waiting = provider.TaskPending, provider.TaskClaimed, provider.TaskFailed, provider.TaskWaiting
		done, undone, abandoned           = provider.TaskDone, provider.TaskUndone, provider.TaskAbandoned
	)
	at := now.Add(time.Hour)
	for _, c := range []struct {
		decision taskrow.Decision
		changes  map[provider.TaskStatus]provider.TaskStatus // from and to; no other status changes
	}{
		{taskrow.Requeue, map[provider.TaskStatus]provider.TaskStatus{failed: pending, abandoned: pending}},
		{taskrow.Complete([]byte("1")), map[provider.TaskStatus]provider.TaskStatus{abandoned: pending}},
		{taskrow.Postpone(at), map[provider.TaskStatus]provider.TaskStatus{pending: pending, failed: pending, claimed: pending}},
		{taskrow.Cancel, map[provider.TaskStatus]provider.TaskStatus{
			pending: pending, claimed: claimed, failed: pending, waiting: pending, abandoned: pending,
		}},
	} {
		for _, from := range []provider.TaskStatus{pending, claimed, failed, waiting, done, undone, abandoned} {
			what := c.decision.What + " of " + string(from)
			was := rowIn(from)
			is, ok := was.Decide(c.decision, now)
			to, changes := c.changes[from]
			require.Equal(t, changes, ok, what)
			f, some := c.decision.Narrow(provider.TaskFilter{Status: []provider.TaskStatus{from}})
			require.Equal(t, changes, some, what)
			if !changes {
				require.Equal(t, was, is, what)
				continue
			}
			require.Equal(t, []provider.TaskStatus{from}, f.Status, what)
			require.Equal(t, to, is.Status, what)
			require.Equal(t, was.Version+1, is.Version, what)
			if to == pending {
				require.Zero(t, is.Attempts+is.Vanished, what)
				require.Zero(t, is.Token, what)
			} else {
				require.Equal(t, was.Token, is.Token, what)
			}
		}
	}
	is, _ := rowIn(abandoned).Decide(taskrow.Cancel, now)
	require.True(t, is.Undo)
	_, ok := is.Decide(taskrow.Cancel, now)
	require.False(t, ok, "it is being undone already")
	is, _ = rowIn(pending).Decide(taskrow.Postpone(at), now)
	require.Equal(t, at, is.NextAt)
	is.State["step"] = provider.Slot{Out: []byte("1")}
	_, ok = is.Decide(taskrow.Postpone(at), now)
	require.False(t, ok, "a step is recorded")
}

// What a claim finds of a task whose lease has ended.
func TestTake(t *testing.T) {
	t.Parallel()
	terms := claim.Terms{Token: claim.NewToken(), Holder: "me", Lease: time.Minute}
	for name, c := range map[string]struct {
		status             provider.TaskStatus
		vanished, attempts int
		suspect            bool
		limit              int
		taken, spent       bool
		want               int // attempts
	}{
		"pending":                            {status: provider.TaskPending, limit: 5, taken: true, want: 1},
		"failed at the limit":                {status: provider.TaskFailed, attempts: 5, limit: 5, taken: true, want: 6},
		"vanished":                           {status: provider.TaskClaimed, attempts: 1, limit: 5, taken: true, want: 2},
		"vanished at the limit":              {status: provider.TaskClaimed, attempts: 5, limit: 5, taken: true, spent: true, want: 5},
		"vanished twice at the limit":        {status: provider.TaskClaimed, vanished: 1, attempts: 5, limit: 5, taken: true, spent: true, want: 5},
		"vanished without a limit":           {status: provider.TaskClaimed, attempts: 50, taken: true, want: 51},
		"vanished twice":                     {status: provider.TaskClaimed, vanished: 1, attempts: 2, limit: 5, want: 2},
		"vanished twice, as a suspect again": {status: provider.TaskClaimed, vanished: 2, attempts: 2, suspect: true, limit: 5, taken: true, want: 3},
	} {
		was := rowIn(c.status)
		was.Vanished, was.Attempts, was.Suspect = c.vanished, c.attempts, c.suspect
		is, records, taken, ok := was.Take(c.limit, terms, now)
		require.Equal(t, c.taken, ok, name)
		require.Equal(t, c.want, is.Attempts, name)
		require.Equal(t, c.status == provider.TaskClaimed, len(records) == 1, name)
		require.Equal(t, was.Version, is.Version, "%s: a claim is no new version", name)
		if !ok {
			require.Equal(t, provider.TaskFailed, is.Status, name)
			require.True(t, is.Suspect, name)
			continue
		}
		require.Equal(t, []any{c.spent, terms.Token, now.Add(time.Minute)}, []any{taken.Spent, taken.Token, taken.NextAt}, name)
		require.Equal(t, []bool{true, false}, []bool{is.Doubt, taken.Doubt}, name)
	}
}
