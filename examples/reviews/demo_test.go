package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// demoJSON runs the demo and returns the content of --json by key.
func demoJSON(t *testing.T, args ...string) (outcome, map[string]any) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "result.json")
	o := reviews(t, append([]string{"demo", "--json", path}, args...)...)
	text, err := os.ReadFile(path)
	require.NoError(t, err, "%s\n%s", o.stdout, o.stderr)
	var result map[string]any
	require.NoError(t, json.Unmarshal(text, &result))
	return o, result
}

func intAt(t *testing.T, result map[string]any, path string) int {
	t.Helper()
	var at any = result
	for key := range strings.SplitSeq(path, ".") {
		at = at.(map[string]any)[key]
	}
	n, ok := at.(float64)
	require.True(t, ok, path)
	return int(n)
}

// requireNoTrouble requires that the demo logged nothing, except that a lease of a worker was not renewed in time, or was
// lost: the leases last a second, which a busy machine may need for something else.
func requireNoTrouble(t *testing.T, o outcome) {
	t.Helper()
	for line := range strings.Lines(o.stderr) {
		require.Regexp(t, `WARN (runner lease not renewed|claims not renewed|marked too late: another relay has taken over) `, line)
	}
}

// TestDemo: with kills and duplicates the projector with markers is exact, and the control is not.
// Promise: G4.1
func TestDemo(t *testing.T) {
	t.Parallel()
	o, result := demoJSON(t, "--commands", "400", "--products", "8", "--kills", "2", "--duplicates", "0.5")
	require.Zero(t, o.code, "%s\n%s", o.stdout, o.stderr)
	requireNoTrouble(t, o)
	n := func(path string) int { return intAt(t, result, path) }
	require.Equal(t, true, result["ok"])
	require.Equal(t, 400, n("commands"))
	require.Equal(t, 400, n("accepted")+n("rejected"))
	require.Positive(t, n("rejected"))
	require.Equal(t, 2, n("kills"))
	require.Zero(t, n("exactly_once.wrong_products"))
	require.Positive(t, n("control.wrong_products"))
	for _, of := range []string{"reviews", "stars"} {
		require.Equal(t, n("expected."+of), n("exactly_once."+of))
		require.Positive(t, n("expected."+of))
	}
	require.Positive(t, n("concurrent_duplicates"))
	require.GreaterOrEqual(t, n("duplicates"), n("concurrent_duplicates"))
	require.Equal(t, n("deliveries"), n("events")+n("duplicates"), "every event was delivered")
	require.Len(t, result, 12)
	require.Equal(t, 2, strings.Count(o.stdout, "between a handler's start and its ack"))
	require.Contains(t, o.stdout, "of 8 products, exactly once has 0 wrong, the control has ")
}

// TestDemoKeepsNamedDatabase: a database given by --db is kept and matches the result.
func TestDemoKeepsNamedDatabase(t *testing.T) {
	t.Parallel()
	db := filepath.Join(t.TempDir(), "demo.db")
	args := []string{"--db", "sqlite:" + db, "--commands", "100", "--products", "4", "--kills", "0", "--duplicates", "0", "--seed", "3"}
	o, result := demoJSON(t, args...)
	require.Zero(t, o.code, "%s\n%s", o.stdout, o.stderr)
	require.Contains(t, o.stdout, "seed 3,")
	require.Equal(t, intAt(t, result, "events"), queryInt(t, db, countEvents))
	require.Equal(t, intAt(t, result, "expected.stars"), queryInt(t, db, `select sum(stars) from demo_exactly_once_ratings`))
	require.Zero(t, intAt(t, result, "control.wrong_products"), "there were no duplicates")

	o = reviews(t, append([]string{"demo"}, args...)...)
	require.Equal(t, 1, o.code)
	require.Contains(t, o.stderr, "already exists")
}

// TestDemoMemory: the demo works without kills in one process: this one, so that the race detector
// sees it.
func TestDemoMemory(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "result.json")
	c := &demoCmd{DB: database{kind: "memory"}, Commands: 1000, Products: 10, Duplicates: 0.9, JSON: path}
	require.NoError(t, c.Validate())
	require.NoError(t, c.Run(t.Context()))
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var result map[string]any
	require.NoError(t, json.Unmarshal(text, &result))
	require.Equal(t, true, result["ok"])
	require.Zero(t, intAt(t, result, "exactly_once.wrong_products"))
	require.Positive(t, intAt(t, result, "control.wrong_products"))
	require.Equal(t, intAt(t, result, "deliveries"), intAt(t, result, "events")+intAt(t, result, "duplicates"))
}

func TestDemoRefuses(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		want string
		args []string
	}{
		{"--kills 0", []string{"--db", "memory"}},
		{"--duplicates must be 0 to 1", []string{"--duplicates", "1.1"}},
		{"--kills must be at least 0", []string{"--kills=-1"}},
		{"must be at least 1", []string{"--commands", "0"}},
		{"must be at least 1", []string{"--products", "0"}},
		{`use "sqlite:PATH", "postgres://…" or "memory"`, []string{"--db", "mysql://x"}},
	} {
		o := reviews(t, append([]string{"demo"}, c.args...)...)
		require.NotZero(t, o.code, c.args)
		require.Contains(t, o.stderr, c.want)
	}
}

// TestDemoLeavesNoProcess: no worker outlives Ctrl-C or a kill of the parent. Ctrl-C leaves no
// file.
func TestDemoLeavesNoProcess(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		signal os.Signal
	}{{"Ctrl-C", os.Interrupt}, {"SIGKILL", os.Kill}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			tmp := t.TempDir()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			cmd := exec.CommandContext(ctx, reviewsBin, "demo", "--commands", "1000000", "--kills", "0")
			cmd.Env = append(os.Environ(), "TMPDIR="+tmp)
			// The worker inherits this pipe, so the read ends only when both processes have ended.
			pipe, err := cmd.StderrPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			var output bytes.Buffer
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				_, _ = io.Copy(&output, pipe)
			}()
			defer func() {
				if t.Failed() {
					_, _ = cmd.Process.Kill(), pipe.Close()
					<-gone
					t.Logf("output of the demo:\n%s", &output)
				}
			}()
			require.Eventually(t, func() bool {
				dbs, _ := filepath.Glob(filepath.Join(tmp, "*", "demo.db"))
				return len(dbs) == 1 && queryInt(t, dbs[0], `select count(*) from sqlite_master where name = 'demo_control_ratings'`) == 1 &&
					queryInt(t, dbs[0], `select count(*) from demo_control_ratings`) > 0
			}, patience, 10*time.Millisecond)
			require.NoError(t, cmd.Process.Signal(c.signal))
			select {
			case <-gone:
			case <-time.After(patience):
				require.Fail(t, "a process is still running")
			}
			require.Error(t, cmd.Wait())
			if c.signal == os.Interrupt {
				left, err := filepath.Glob(filepath.Join(tmp, "*"))
				require.NoError(t, err)
				require.Empty(t, left)
			}
		})
	}
}

// TestWorkerGroupDrains: after stop the group waits until no message is in flight before the last
// workers end.
func TestWorkerGroupDrains(t *testing.T) {
	t.Parallel()
	c := newWorkerGroup(func(context.Context) error { return errors.New("messages are in flight") })
	c.stop()
	require.ErrorContains(t, c.run(t.Context()), "messages are in flight")
	drained := false
	c = newWorkerGroup(func(context.Context) error { drained = true; return nil })
	c.stop()
	require.NoError(t, c.run(t.Context()))
	require.True(t, drained)
}
