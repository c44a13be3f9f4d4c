package mutant_test

import (
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kinora-go/kinora/internal/mutant"
	"github.com/stretchr/testify/require"
)

// Each test of a mutant fails with the mutant: the test notices the loss of the mechanism. This test
// runs every seventieth mutant; make mutants runs all.
func TestEveryMutantIsCaught(t *testing.T) {
	t.Parallel()
	root := root(t)
	places := make(chan struct{}, 3) // each test is a process, which may start a server; some tests wait for most of their time
	for i, m := range mutant.All {
		if i%70 != 35 {
			continue
		}
		files, err := m.Apply(root)
		require.NoError(t, err)
		overlay, err := mutant.Overlay(t.TempDir(), files)
		require.NoError(t, err)
		if len(m.Cells) > 0 { // make mutants runs the cells with it
			t.Run(m.Name+" compiles", func(t *testing.T) {
				t.Parallel()
				places <- struct{}{}
				defer func() { <-places }()
				cmd := exec.CommandContext(t.Context(), "go", "build", "-overlay", overlay)
				for file := range files {
					if filepath.Ext(file) == ".go" {
						cmd.Args = append(cmd.Args, filepath.Dir(file))
					}
				}
				cmd.Dir = root
				output, err := cmd.CombinedOutput()
				require.NoError(t, err, "%s", output)
			})
		}
		for _, test := range m.Tests {
			t.Run(m.Name+" "+test.Package, func(t *testing.T) {
				t.Parallel()
				places <- struct{}{}
				defer func() { <-places }()
				failure, output := test.Run(t.Context(), root, overlay)
				require.NotEmpty(t, failure, "the mutant survived, or the test did not run:\n%s", output)
			})
		}
	}
}

// Every mutant applies to the present source, is valid Go, and is noticed by a test or a cell.
func TestEveryMutantApplies(t *testing.T) {
	t.Parallel()
	root := root(t)
	names := map[string]bool{}
	for _, m := range mutant.All {
		require.False(t, names[m.Name], "two mutants have the name %s", m.Name)
		names[m.Name] = true
		require.NotEmpty(t, len(m.Tests)+len(m.Cells), "no test and no cell notices %s", m.Name)
		files, err := m.Apply(root)
		require.NoError(t, err)
		require.NotEmpty(t, files)
		for path, text := range files {
			if filepath.Ext(path) != ".go" {
				continue
			}
			_, err := parser.ParseFile(token.NewFileSet(), path, text, parser.SkipObjectResolution)
			require.NoError(t, err, m.Name)
		}
		for _, test := range m.Tests {
			require.True(t, declares(t, filepath.Join(root, test.Package), strings.Split(test.Name, "/")[0]),
				"%s: %s has no test %s", m.Name, test.Package, test.Name)
		}
	}
}

// declares reports whether a test file of the package in dir declares the test.
func declares(t *testing.T, dir, test string) bool {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	require.NoError(t, err)
	for _, path := range paths {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		if strings.Contains(string(text), "func "+test+"(") {
			return true
		}
	}
	return false
}

func TestMutantReportsWhyItNoLongerApplies(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a.go"), []byte("one two two"), 0o600))
	m := func(edits ...mutant.Edit) mutant.Mutant { return mutant.Mutant{Name: "x", Edits: edits} }

	_, err := m(mutant.Edit{File: "a.go", Old: "three"}).Apply(dir)
	require.EqualError(t, err, `mutant x no longer applies: text not found in a.go: "three"`)
	_, err = m(mutant.Edit{File: "a.go", Old: "two"}).Apply(dir)
	require.EqualError(t, err, `mutant x no longer applies: text found 2 times in a.go, want 1: "two"`)
	_, err = m(mutant.Edit{File: "b.go", Old: "two"}).Apply(dir)
	require.ErrorContains(t, err, "mutant x no longer applies: open "+filepath.Join(dir, "b.go"))

	files, err := m(mutant.Edit{File: "a.go", Old: "two", New: "2", Count: 2}, mutant.Edit{File: "a.go", Old: "one 2", New: "1 2"}).Apply(dir)
	require.NoError(t, err)
	require.Equal(t, map[string]string{filepath.Join(dir, "a.go"): "1 2 2"}, files)
}

func root(t *testing.T) string {
	root, err := mutant.Root(t.Context())
	require.NoError(t, err)
	return root
}
