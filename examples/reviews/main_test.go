package main

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	_ "modernc.org/sqlite"
)

// patience is how long a test waits for something that must happen. It only ends a test that hangs, so it is far beyond
// what a slow or busy machine needs.
const patience = 10 * time.Minute

// The paths of the programs. TestMain builds them once.
var reviewsBin, generateBin, distributedBin string

func TestMain(m *testing.M) {
	requestLimit = patience + time.Minute // of the services in this process
	dir, err := os.MkdirTemp("", "reviews-test-")
	if err != nil {
		panic(err)
	}
	code := 1
	if err := build(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else if code = m.Run(); code == 0 {
		// The tests' PostgreSQL ends with this process.
		if err := goleak.Find(goleak.IgnoreAnyFunction("os/exec.(*Cmd).Wait")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

func build(dir string) error {
	reviewsBin, generateBin, distributedBin = filepath.Join(dir, "reviews"), filepath.Join(dir, "generate"), filepath.Join(dir, "distributed")
	for module, programs := range map[string][]string{".": {".", "./generate"}, "../distributed": {"."}} {
		args := append([]string{"build", "-C", module, "-o", dir + string(filepath.Separator)}, programs...)
		if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("build: %w\n%s", err, out)
		}
	}
	return nil
}

// outcome is the result of a process.
type outcome struct {
	code           int
	stdout, stderr string
}

// reviews runs the program to its end.
func reviews(t *testing.T, args ...string) outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	return finish(t, exec.CommandContext(ctx, reviewsBin, args...))
}

func finish(t *testing.T, cmd *exec.Cmd) outcome {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if _, ok := errors.AsType[*exec.ExitError](err); !ok {
		require.NoError(t, err)
	}
	return outcome{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// report returns the JSON report of a SQLite file.
func report(t *testing.T, db string) []reportRow {
	t.Helper()
	o := reviews(t, "report", "--db", "sqlite:"+db, "--json")
	require.Zero(t, o.code, o.stderr)
	var rows []reportRow
	require.NoError(t, json.Unmarshal([]byte(o.stdout), &rows))
	return rows
}

// queryInt queries a number from the file itself.
func queryInt(t *testing.T, db, query string) int {
	t.Helper()
	pool, err := sql.Open("sqlite", "file:"+(&url.URL{Path: db}).EscapedPath()+"?mode=ro&_pragma=busy_timeout(600000)")
	require.NoError(t, err)
	defer pool.Close()
	var n int
	require.NoError(t, pool.QueryRowContext(t.Context(), query).Scan(&n))
	return n
}
