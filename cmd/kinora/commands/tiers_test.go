package commands_test

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/cmd/kinora/commands"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
)

// The commands work with the parts of a store, and name the missing ones.
func TestTheCommandsOfAStoreOfEvents(t *testing.T) {
	t.Parallel()
	db, err := memory.New(nil)
	require.NoError(t, err)
	require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx *memory.Model) error {
		return db.InTx(tx).Enqueue(ctx, outbox.Message{Topic: "mail"})
	}))
	taken, err := provider.ClaimEntries(t.Context(), db, provider.EntryQuery{}, claim.Terms{})
	require.NoError(t, err)
	_, err = db.MarkEntries(t.Context(), []provider.EntryMark{{Seq: 1, Token: taken[0].Token, To: outbox.Abandoned}})
	require.NoError(t, err)
	run := func(args ...string) (status int, out, problems string) {
		var printed, said bytes.Buffer
		app := &commands.App{Out: &printed, Err: &said, Open: func(context.Context, commands.Database) (*commands.Session, error) {
			return &commands.Session{Store: struct{ admin.Store }{db}, Close: func() error { return nil }}, nil
		}}
		status = commands.Main(t.Context(), app, append(args, "--db", "sqlite:none"))
		return status, printed.String(), said.String()
	}
	status, out, said := run("status")
	require.Zero(t, status, said)
	for _, line := range []string{"PROJECTORS\nthe store keeps no projectors\n", "TASKS\nthe store keeps no tasks\n", "SERVICES\nthe store keeps no operations\n", "abandoned"} {
		require.Contains(t, out, line)
	}
	status, out, said = run("doctor")
	require.Equal(t, 1, status, "something is found")
	require.Contains(t, out, "1. Entries of the outbox are abandoned")
	require.Empty(t, said)
	for part, what := range map[string]string{"projectors": "lags and parked messages", "tasks": "tasks", "operations": "which services run, what is paused and requested, and clocks"} {
		require.Contains(t, out, "\nNot checked: "+what+"\n   because the store keeps no "+part+"\n")
	}
	for _, c := range []struct{ what, group, command string }{
		{"projectors", "parked", "ls"}, {"projectors", "markers", "ls"}, {"tasks", "tasks", "ls"}, {"operations", "acts", "ls"}, {"operations", "streams", "ls"},
		{"operations", "migrate", "status"},
	} {
		status, out, said = run(c.group, c.command)
		require.Equal(t, []any{1, "", "kinora: the store keeps no " + c.what + "\n"}, []any{status, out, said}, c.group)
	}
	status, out, said = run("outbox", "requeue", "--yes", "--seq", "1", "--reason", "fixed", "--by", "ann")
	require.Equal(t, []any{0, "1 requeued\n", "the store keeps no operations: this was not recorded\n"}, []any{status, out, said})
	status, out, said = run("doctor")
	require.Equal(t, []any{3, ""}, []any{status, said}, "not everything could be checked")
	require.Contains(t, out, "Nothing was found, but not everything could be checked.\n")
	status, _, _ = run("doctor", "--allow-unchecked")
	require.Zero(t, status)
}
