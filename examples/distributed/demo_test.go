package main

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/internal/pgtest"
)

// demo runs the whole example in a process, in an empty temporary directory.
func demo(t *testing.T, out *output, args ...string) *exec.Cmd {
	t.Helper()
	program, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(program, append([]string{demoRole, "-limit", patience.Limit().String()}, args...)...)
	cmd.Env = append(os.Environ(), "KINORA_POSTGRES="+pgtest.Shared(t), "TMPDIR="+t.TempDir())
	cmd.Stdout, cmd.Stderr = out, out
	require.NoError(t, cmd.Start())
	return cmd
}

// TestDemo: three relays, three runners and a cluster of three NATS servers. Some of all of them are
// killed. The read models are exact, and each account's events are in order.
func TestDemo(t *testing.T) {
	t.Parallel()
	var out output
	cmd := demo(t, &out, "-events", longtest.Or("1000", "10000"), "-v")
	require.NoError(t, cmd.Wait(), &out.text)
	text := out.text.String()
	require.Contains(t, text, "deliveries is exact: ")
	require.Contains(t, text, "balances is exact: ")
	require.NotContains(t, text, "killed relay: 0\n")
	requireNothingLeft(t, cmd)
}

// TestDemoInterrupt: Ctrl-C ends everything that the example has started.
func TestDemoInterrupt(t *testing.T) {
	t.Parallel()
	var out output
	cmd := demo(t, &out, "-events", "5000")
	patience.Until(t, func() bool {
		out.mu.Lock()
		defer out.mu.Unlock()
		return bytes.Contains(out.text.Bytes(), []byte("a relay is killed"))
	}, "the end of a relay")
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	var ended *exec.ExitError
	require.ErrorAs(t, cmd.Wait(), &ended)
	require.Equal(t, 1, ended.ExitCode(), &out.text)
	requireNothingLeft(t, cmd)
}

// requireNothingLeft checks that no process has the temporary directory of an example in its
// environment, and that the directory is empty.
func requireNothingLeft(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	dir := cmd.Env[len(cmd.Env)-1]
	left, err := os.ReadDir(strings.TrimPrefix(dir, "TMPDIR="))
	require.NoError(t, err)
	require.Empty(t, left)
	all, err := os.ReadDir("/proc")
	require.NoError(t, err)
	for _, p := range all {
		env, err := os.ReadFile("/proc/" + p.Name() + "/environ")
		if err == nil && bytes.Contains(env, []byte(dir)) {
			require.Fail(t, "process "+p.Name()+" is left")
		}
	}
}
