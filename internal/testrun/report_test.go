package main

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	passes = `{"Action":"start","Package":"github.com/kinora-go/kinora/claim"}
{"Action":"run","Package":"github.com/kinora-go/kinora/claim","Test":"TestA"}
{"Action":"output","Package":"github.com/kinora-go/kinora/claim","Test":"TestA","Output":"=== RUN   TestA\n"}
{"Action":"pass","Package":"github.com/kinora-go/kinora/claim","Test":"TestA","Elapsed":0.1}
{"Action":"pass","Package":"github.com/kinora-go/kinora/claim","Elapsed":0.3}`
	skips = `{"Action":"run","Package":"p","Test":"TestB"}
{"Action":"output","Package":"p","Test":"TestB","Output":"    b_test.go:9: KINORA_SKIP=redis\n"}
{"Action":"output","Package":"p","Test":"TestB","Output":"--- SKIP: TestB (0.00s)\n"}
{"Action":"skip","Package":"p","Test":"TestB"}
{"Action":"pass","Package":"p"}`
	fails = `{"Action":"run","Package":"p","Test":"TestC"}
{"Action":"output","Package":"p","Test":"TestC","Output":"    c_test.go:9: wrong\n"}
{"Action":"fail","Package":"p","Test":"TestC"}
{"Action":"fail","Package":"p"}`
	panics = `{"Action":"run","Package":"p","Test":"TestD"}
{"Action":"output","Package":"p","Test":"TestD","Output":"panic: boom\n"}
{"Action":"fail","Package":"p"}`
	doesNotBuild = `{"ImportPath":"p","Action":"build-output","Output":"x.go:1:1: undefined: y\n"}
{"ImportPath":"p","Action":"build-fail"}
{"Action":"start","Package":"p"}
{"Action":"fail","Package":"p","FailedBuild":"p"}`
)

// printed returns what a run prints, and whether it is a success.
func printed(t *testing.T, lines string, ended error) (string, bool) {
	t.Helper()
	var out bytes.Buffer
	r := newReport(&out, io.Discard, 1)
	for line := range strings.SplitSeq(lines, "\n") {
		r.event(line)
	}
	r.commandEnded("go test", 0, ended)
	ok := r.end()
	return out.String(), ok
}

func TestTheLastLineCountsTests(t *testing.T) {
	t.Parallel()
	exit := errors.New("exit status 1")
	for name, c := range map[string]struct {
		lines string
		ended error
		last  string
		says  string
		ok    bool
	}{
		"a test that passes":          {passes, nil, "1 passed, 0 failed, 0 skipped", "0.3s  claim", true},
		"a skip is no pass":           {skips, nil, "0 passed, 0 failed, 1 skipped", "p TestB: b_test.go:9: KINORA_SKIP=redis", false},
		"a skip next to a pass":       {passes + "\n" + skips, nil, "1 passed, 0 failed, 1 skipped", "TestB", true},
		"a test that fails":           {passes + "\n" + fails, exit, "1 passed, 1 failed, 0 skipped", "c_test.go:9: wrong", false},
		"a panic":                     {passes + "\n" + panics, exit, "1 passed, 1 failed, 0 skipped", "panic: boom", false},
		"a package that is not built": {passes + "\n" + doesNotBuild, exit, "1 passed, 1 failed, 0 skipped", "undefined: y", false},
		"go itself fails":             {"go: no such package\n", exit, "0 passed, 1 failed, 0 skipped", "go: no such package", false},
		"go is ended":                 {passes + "\n" + `{"Action":"start","Package":"p"}`, exit, "1 passed, 1 failed, 0 skipped", "it has not ended", false},
		"nothing":                     {"", nil, "0 passed, 0 failed, 0 skipped", "done", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			text, ok := printed(t, c.lines, c.ended)
			require.Equal(t, c.ok, ok, text)
			require.Contains(t, text, c.says)
			require.True(t, strings.HasSuffix(text, "\n"+c.last+"\n"), text)
		})
	}
}

func TestCellsCountAsTests(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	r := newReport(&out, io.Discard, 1)
	for _, line := range []string{"seed 7", "   0.0s  kill       2: random kill -9, for 5s", "ok      zombie  9.1s", "FAILED  kill  12.3s  lost 1, doubled 0",
		"skipped disk  0.0s  skipped: cannot mount"} {
		r.cell(line)
	}
	require.False(t, r.end())
	require.Contains(t, out.String(), "--- FAILED: cell kill\nlost 1, doubled 0\n")
	require.True(t, strings.HasSuffix(out.String(), "\n1 passed, 1 failed, 1 skipped\n"))
	require.Contains(t, out.String(), "cell disk: skipped: cannot mount")
}

// A suite that does not build fails, also after tests that have failed.
func TestACommandThatFailsIsReported(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	r := newReport(&out, io.Discard, 1)
	r.failed = 1
	r.cell("build the children: undefined: x")
	r.commandEnded("go run ./tests/fault", 1, errors.New("exit status 1"))
	require.Equal(t, 2, r.failed)
	require.Contains(t, out.String(), "--- FAILED: go run ./tests/fault\nbuild the children: undefined: x\nexit status 1\n")
}

func TestARunSaysWhatHasBeenRunningForLong(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		r := newReport(&out, io.Discard, 3)
		r.built("internal/poll")
		r.progress()
		require.Contains(t, out.String(), "running: go build, 1 packages compiled; 0 of 3 packages have ended")
		r.event(`{"Action":"start","Package":"p"}`)
		r.event(`{"Action":"run","Package":"p","Test":"TestWaits"}`)
		r.event(`{"Action":"pause","Package":"p","Test":"TestWaits"}`)
		time.Sleep(time.Minute)
		r.event(`{"Action":"run","Package":"p","Test":"TestLong"}`)
		r.cell("   0.0s  kill       2: random kill -9, for 5s")
		time.Sleep(time.Minute)
		r.progress()
		require.Contains(t, out.String(), "running: cell kill for 1m0s, p for 2m0s (TestLong for 1m0s); 0 of 3")
	})
}
