package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOddTurnsAreReportedWithFileAndLine(t *testing.T) {
	t.Parallel()
	const fence = "```"
	for name, c := range map[string]struct {
		file, text string
		want       []hit
	}{
		"a comment":                {"a.go", "package a\n\n// Nobody reads it.\nvar x int\n", []hit{{3, "Nobody"}}},
		"the end of a line":        {"a.go", "package a\n\nvar x int // read till the end\n", []hit{{3, "till"}}},
		"a block":                  {"a.go", "package a\n\n/*\nwaits\nin vain\n*/\n", []hit{{5, "in vain"}}},
		"over two lines":           {"a.go", "package a\n\n// A store, of\n// which there are two.\n", []hit{{3, "of which"}}},
		"a page":                   {"a.md", "# Title\n\nThe row tells whether it is held.\n", []hit{{3, "tells whether"}}},
		"two in a line":            {"a.md", "beside it, whoever reads\n", []hit{{1, "beside"}, {1, "whoever"}}},
		"a heading":                {"a.md", "## What is kept\n", []hit{{1, "What is"}}},
		"after a fence":            {"a.md", fence + "\nnobody\n" + fence + "\nnobody\n", []hit{{4, "nobody"}}},
		"a question as heading":    {"a.md", "## What is an event?\n", nil},
		"a code span":              {"a.md", "Do not write `of which` or `nobody`.\n", nil},
		"a code span in a comment": {"a.go", "package a\n\n// Not `till`.\n", nil},
		"indented code":            {"a.go", "package a\n\n// It runs:\n//\n//\tgrep nobody\n", nil},
		"an identifier":            {"a.go", "package a\n\n// nobodyReads, store.Nobody and nobody_reads are names.\n", nil},
		"a string":                 {"a.go", "package a\n\nvar x = \"nobody // nobody\"\n", nil},
		"two comments":             {"a.go", "package a\n\n// The end of\nvar x int\n\n// which is here.\n", nil},
		"another file":             {"a.txt", "nobody\n", nil},
		"plain English":            {"a.md", "A relay claims entries. Each claim has a lease, which it renews.\n", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), c.file)
			require.NoError(t, os.WriteFile(path, []byte(c.text), 0o600))
			_, hits, err := count(path)
			require.NoError(t, err)
			require.Equal(t, c.want, hits)
		})
	}
}

func TestOneOddTurnPerThousandWordsFails(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name string, words int) {
		text := bytes.Repeat([]byte("word "), words)
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), append(text, "nobody\n"...), 0o600))
	}
	var out bytes.Buffer
	write("page.md", 999)
	require.Equal(t, 1, run([]string{dir}, &out))
	require.Contains(t, out.String(), filepath.Join(dir, "page.md")+":1: nobody\n1 odd turns in 1000 words: 1.00 per 1,000\n")

	out.Reset()
	write("page.md", 1000)
	write("testdata/page.md", 0)
	require.Equal(t, 0, run([]string{dir}, &out))
	require.Equal(t, "1 odd turns in 1001 words: 1.00 per 1,000\n", out.String())

	require.Equal(t, 1, run([]string{filepath.Join(dir, "missing")}, &out))
}
