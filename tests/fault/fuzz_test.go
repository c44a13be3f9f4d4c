package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEndOfFuzzTimeIsNoFailure(t *testing.T) {
	t.Parallel()
	require.True(t, isOver([]byte("fuzz: elapsed: 7s\n--- FAIL: FuzzCheckJSON (7.06s)\n    context deadline exceeded\nFAIL\n")))
	require.False(t, isOver([]byte("--- FAIL: FuzzCheckJSON (0.02s)\n    --- FAIL: FuzzCheckJSON (0.00s)\n        x_test.go:7: no\n\n    Failing input written to testdata/fuzz/FuzzCheckJSON/1\n    context deadline exceeded\n")))
	require.False(t, isOver([]byte("panic: no\n")))
}

// A fuzz test that is renamed or moved must not drop out of the cell.
func TestEveryFuzzTestIsInTheCell(t *testing.T) {
	t.Parallel()
	root := filepath.Join("..", "..")
	var found [][2]string
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && strings.HasPrefix(f.Name.Name, "Fuzz") {
				found = append(found, [2]string{filepath.ToSlash(dir), f.Name.Name})
			}
		}
		return err
	})
	require.NoError(t, err)
	require.ElementsMatch(t, found, fuzzers)
}
