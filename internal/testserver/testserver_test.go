package testserver_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/kinora-go/kinora/internal/testserver"
	"github.com/stretchr/testify/require"
)

var errSilent = errors.New("no answer")

func silent(context.Context) error { return errSilent }

func TestAServerThatEndsWhileItStartsReportsItsLog(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p, err := testserver.Run(dir, `echo "unknown setting" > "$1/log"; read -r line; rm -rf "$1"`, dir)
	require.NoError(t, err)
	tries := 0
	err = p.Await(filepath.Join(dir, "log"), func(ctx context.Context) error {
		if tries++; tries == 50 {
			require.NoError(t, p.Send("end"))
		}
		return silent(ctx)
	})
	require.ErrorIs(t, err, errSilent)
	require.ErrorContains(t, err, "the server ended")
	require.ErrorContains(t, err, "unknown setting")
	p.Stop()
}

func TestAnotherServerOnThePortIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p, err := testserver.Run(dir, "cat > /dev/null")
	require.NoError(t, err)
	t.Cleanup(p.Stop)
	tries := 0
	err = p.Await(filepath.Join(dir, "log"), func(context.Context) error { tries++; return testserver.ErrOtherServer })
	require.ErrorIs(t, err, testserver.ErrOtherServer)
	require.Equal(t, 1, tries)
}

func TestStopEndsTheScriptAndRemovesItsDirectory(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "data")
	require.NoError(t, os.Mkdir(dir, 0o700))
	p, err := testserver.Run(dir, "cat > /dev/null")
	require.NoError(t, err)
	require.NoError(t, p.Await("", func(context.Context) error { return nil }))
	p.Stop()
	require.NoDirExists(t, dir)
}
