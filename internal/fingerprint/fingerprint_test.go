package fingerprint_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/fingerprint"
)

func TestAFingerprintChangesWithTheCodeOnly(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	git := func(args ...string) {
		cmd := exec.Command("git", args...)
		cmd.Dir = root
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	write := func(name, text string) {
		path := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	of := func() string {
		name, err := fingerprint.Of(t.Context(), root, true)
		require.NoError(t, err)
		return name
	}
	git("init", "-q")
	write("a/a.go", "package a")
	write("go.mod", "module a")
	write("README.md", "a")
	write("docs/b.go", "package b")
	git("add", ".")
	first := of()
	require.Regexp(t, "^[0-9a-f]{12}$", first)
	require.Equal(t, first, of())

	write("README.md", "b")
	write("docs/b.go", "package c")
	write("untracked.go", "package d")
	require.Equal(t, first, of())

	for _, name := range []string{"a/a.go", "go.mod"} {
		before := of()
		write(name, "other")
		require.NotEqual(t, before, of(), name)
	}
	before := of()
	git("add", "untracked.go")
	require.NotEqual(t, before, of())
	before = of()
	require.NoError(t, os.Remove(filepath.Join(root, "a/a.go")))
	require.NotEqual(t, before, of())

	without := func() string {
		name, err := fingerprint.Of(t.Context(), root, false)
		require.NoError(t, err)
		return name
	}
	require.Equal(t, of(), without())
	before = without()
	write("b_test.go", "package b")
	git("add", "b_test.go")
	require.Equal(t, before, without())
	require.NotEqual(t, before, of())
}

func TestAFingerprintRequiresACheckout(t *testing.T) {
	t.Parallel()
	_, err := fingerprint.Of(t.Context(), t.TempDir(), true)
	require.ErrorContains(t, err, "list the tracked files")
}
