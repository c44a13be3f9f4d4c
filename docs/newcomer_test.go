//go:build unix

package docs_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Services that are not the guide's are built in clean folders with what README.md, the guide and go doc say: a bank
// with statements, and rooms with a waiting list. Each tests itself against an oracle of its own, with redelivery.
func TestServicesOfNewcomers(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"bank", "rooms"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newReader(t, "example.com/"+name)
			files, err := filepath.Glob("testdata/" + name + "/*.go")
			require.NoError(t, err)
			require.Len(t, files, 2)
			for _, path := range files {
				text, err := os.ReadFile(path)
				require.NoError(t, err)
				require.Less(t, strings.Count(string(text), "\n"), 250, "%s is not small", path)
				require.NoError(t, os.WriteFile(filepath.Join(r.dir, filepath.Base(path)), text, 0o600))
			}
			require.Empty(t, r.run(t, "gofmt -l ."))
			require.Regexp(t, `^ok\s`, r.run(t, "go test -vet=off ./..."))
		})
	}
}

// No program of the guide, of README.md or of a newcomer needs SQL on Kinora's tables.
func TestNoProgramReadsKinorasTables(t *testing.T) {
	t.Parallel()
	tables := kinoraTables(t)
	searched := 0
	search := func(name, text string) {
		searched++
		for _, m := range tables.FindAllString(text, -1) {
			t.Errorf("%s has SQL on a table of Kinora: %s", name, m)
		}
	}
	pages, err := filepath.Glob("guide/[0-9]*.md")
	require.NoError(t, err)
	for _, path := range append(pages, "../README.md") {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		for _, m := range fenceForm.FindAllStringSubmatch(string(text), -1) {
			search(path, m[2])
		}
	}
	programs, err := filepath.Glob("testdata/*/*.go")
	require.NoError(t, err)
	for _, path := range append(programs, "../examples/quickstart/main.go") {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		search(path, string(text))
	}
	require.Greater(t, searched, 100)
	require.Regexp(t, tables, `select count(*) from kinora.events`)
	require.Regexp(t, tables, `select * from "kinora_acme"."outbox"`)
	require.Regexp(t, tables, `delete from kinora_markers where true`)
}

// kinoraTables matches the names of Kinora's tables in SQL, in a schema of PostgreSQL and in SQLite.
func kinoraTables(t *testing.T) *regexp.Regexp {
	t.Helper()
	migrations, err := filepath.Glob("../providers/postgres/migrations/*.sql")
	require.NoError(t, err)
	var names []string
	for _, path := range migrations {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		for _, m := range regexp.MustCompile(`(?i)create (?:unlogged )?table (?:if not exists )?kinora\.(\w+)`).FindAllStringSubmatch(string(text), -1) {
			names = append(names, m[1])
		}
	}
	require.Greater(t, len(names), 10)
	all := strings.Join(names, "|")
	return regexp.MustCompile(`(?i)\bkinora(?:_\w+)?"?\."?(?:` + all + `)\b|\bkinora_(?:` + all + `)\b`)
}
