package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRunsContinueAfterTheOnesOnRecord(t *testing.T) {
	t.Parallel()
	good := func(commit, kind string) Run { return Run{Commit: commit, Kind: kind, Passed: 9} }
	bad := func(commit, kind string) Run { return Run{Commit: commit, Kind: kind, Passed: 9, Failed: 1} }
	kinds := []string{"warm", "cold", "warm"}
	for name, c := range map[string]struct{ all, want any }{
		"nothing":                        {[]Run{}, kinds},
		"one of two":                     {[]Run{good("a", "warm")}, []string{"cold", "warm"}},
		"all":                            {[]Run{good("a", "warm"), good("a", "warm"), good("a", "cold")}, []string(nil)},
		"another commit":                 {[]Run{good("b", "warm")}, kinds},
		"a failure begins anew":          {[]Run{good("a", "warm"), bad("a", "cold")}, kinds},
		"runs since a failure":           {[]Run{bad("a", "warm"), good("a", "cold")}, []string{"warm", "warm"}},
		"a run that ran no tests":        {[]Run{{Commit: "a", Kind: "warm"}}, kinds},
		"a failure that no test reports": {[]Run{{Commit: "a", Kind: "warm", Passed: 9, Failures: []string{"exit status 2"}}}, kinds},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, c.want, left(c.all.([]Run), "a", kinds))
		})
	}
}

func TestTheLogOfARunIsRead(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "log")
	write := func(text string) { require.NoError(t, os.WriteFile(path, []byte(text), 0o600)) }
	write("   1s  ok  docs\n  9s  the fault suite, each cell for some seconds, with seed 77\n--- FAILED: cell kill\nlost 1\n\nwhat failed, again:\n--- FAILED: cell kill\nlost 1\n12 passed, 1 failed, 2 skipped\nexit status 1\nmake: *** [Makefile:19: test] Error 1\n")
	var r Run
	require.NoError(t, r.readLog(path))
	require.Equal(t, Run{Seed: 77, Passed: 12, Failed: 1, Skipped: 2, Last: "12 passed, 1 failed, 2 skipped", Failures: []string{"cell kill"}}, r)
	require.False(t, r.ok())

	write("make: *** [test] Error 1\n")
	r = Run{}
	require.NoError(t, r.readLog(path))
	require.Equal(t, "make: *** [test] Error 1", r.Last)
	require.False(t, r.ok())

	write("7 passed, 0 failed, 0 skipped\n")
	r = Run{}
	require.NoError(t, r.readLog(path))
	require.True(t, r.ok())
}

func TestTheRecordIsReadAsItIsWritten(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "steady.json")
	all, err := read(path)
	require.NoError(t, err)
	require.Empty(t, all)
	want := []Run{{Commit: "a", Kind: "cold", Passed: 9, Last: "9 passed, 0 failed, 0 skipped", On: "Debian bookworm, fresh"}}
	require.NoError(t, write(path, want))
	all, err = read(path)
	require.NoError(t, err)
	require.Equal(t, want, all)
}

// make steady ARGS="-commit C" must not start the tests with these arguments.
func TestTheArgumentsOfMakeAreNotHandedOn(t *testing.T) {
	t.Setenv("MAKEFLAGS", "w -- ARGS=-commit\\ HEAD")
	t.Setenv("MAKELEVEL", "1")
	t.Setenv("ARGS", "-commit HEAD")
	forgetMake()
	out, err := exec.CommandContext(t.Context(), "sh", "-c", `printf 'test:\n\t@echo "of make: $(ARGS)"\n' | make -f - test`).CombinedOutput()
	require.NoError(t, err)
	require.Equal(t, "of make: \n", string(out))
}
