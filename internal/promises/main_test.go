package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/mutant"
)

// Every promise has a test, every comment names a promise, and docs/evidence.md is up to date.
func TestTheEvidenceIsThatOfTheTests(t *testing.T) {
	t.Parallel()
	want, err := evidence("../..")
	require.NoError(t, err)
	page, err := os.ReadFile(filepath.Join("../..", evidencePage))
	require.NoError(t, err)
	require.True(t, want == string(page), "%s is out of date: run make evidence", evidencePage)
}

const page = `# Guarantees

## G1: append, twice

**G1.1** Events of a [batch](x.md) commit together: all of them,
or none. More.

**G1.2** A stale version is refused.

Not promised: anything else.
`

var sources = map[string]string{
	promisesPage: page,
	"eventstore/a_test.go": `package eventstore

// TestA: a rule.
// Promise: G1.2, G1.1
func TestA(t *testing.T) {}

// Promise: G1.2
func FuzzB(f *testing.F) {}
`,
	suites + "/append.go": `package providertest

var appendCases = []testCase{
	{
		// Promise: G1.1
		name: "a caller's append", play: play,
	},
	// Promise: G1.2
	{name: "two, at once", play: play},
}

func EventStore[Tx any](t *testing.T) { run(t, appendCases) }
`,
	faults + "/cell.go": `package main

var killCell = &cell{
	// Promise: G1.1
	name: "kill", run: run,
}
`,
}

func TestEvidence(t *testing.T) {
	t.Parallel()
	root := write(t, sources)
	got, err := evidence(root)
	require.NoError(t, err)
	require.Equal(t, beginning+
		"| [G1.1](guarantees.md#g1-append-twice) Events of a batch commit together: all of them, or none | "+
		"every provider: `EventStore/a_caller's_append`<br>eventstore: `TestA` | `kill` |  |\n"+
		"| [G1.2](guarantees.md#g1-append-twice) A stale version is refused | "+
		"every provider: `EventStore/two,_at_once`<br>eventstore: `FuzzB`, `TestA` |  |  |\n", got)

	require.Zero(t, run([]string{root}, nil))
	written, err := os.ReadFile(filepath.Join(root, evidencePage))
	require.NoError(t, err)
	require.Equal(t, got, string(written))
}

// Each mistake is named with its place, and no page is written.
func TestMistakes(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ file, text, want string }{
		"a promise without a test": {promisesPage, page + "\n**G2.1** New.\n",
			"docs/guarantees.md:12: no test names G2.1: name it in one, or state a limit without a number\n"},
		"a cell that names no promise": {faults + "/cell.go", "package main\n\nvar c = &cell{\n\t// Promise: G1.3\n\tname: \"kill\",\n}\n",
			"tests/fault/cell.go:4: \"G1.3\" is not a promise of docs/guarantees.md\n"},
		"two promises with one number": {promisesPage, page + "\n**G1.1** New.\n",
			"docs/guarantees.md:12: G1.1 is the number of line 5 too\n"},
		"a promise that is written otherwise": {promisesPage, page + "\n**G2.1:** New.\n",
			"docs/guarantees.md:12: want \"**G1.3** text\"\n"},
		"no such promise": {"eventstore/b_test.go", "package eventstore\n\n// Promise: G9.9\nfunc TestB(t *testing.T) {}\n",
			"eventstore/b_test.go:3: \"G9.9\" is not a promise of docs/guarantees.md\n"},
		"a comment of a helper": {"eventstore/b_test.go", "package eventstore\n\n// Promise: G1.1\nfunc helper() {}\n",
			"eventstore/b_test.go:3: this comment belongs to no test: write it in the doc comment of a test, or above the name of a case or a cell\n"},
		"a comment in a test": {"eventstore/b_test.go", "package eventstore\n\nfunc TestB(t *testing.T) {\n\t// Promise: G1.1\n}\n",
			"eventstore/b_test.go:4: this comment belongs to no test: write it in the doc comment of a test, or above the name of a case or a cell\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := write(t, sources)
			require.NoError(t, os.WriteFile(filepath.Join(root, c.file), []byte(c.text), 0o600))
			var out bytes.Buffer
			require.Equal(t, 1, run([]string{root}, &out))
			require.Equal(t, c.want, out.String())
			require.NoFileExists(t, filepath.Join(root, evidencePage))
		})
	}
}

func TestIncludes(t *testing.T) {
	t.Parallel()
	of := func(pkg, name string) test { return test{pkg: pkg, name: name} }
	for _, c := range []struct {
		test test
		part mutant.Test
		want bool
	}{
		{of("task", "TestA"), mutant.Test{Package: "./task", Name: "TestA"}, true},
		{of("task", "TestA"), mutant.Test{Package: "./task", Name: "TestA/part"}, true},
		{of("task", "TestA"), mutant.Test{Package: "./outbox", Name: "TestA"}, false},
		{of(".", "TestA"), mutant.Test{Package: ".", Name: "TestA"}, true},
		{of(suites, "Tasks/a_lease"), mutant.Test{Package: "./providers/memory", Name: "TestConformance/Tasks/Claim/a_lease"}, true},
		{of(suites, "Tasks/a_lease"), mutant.Test{Package: "./providers/memory", Name: "TestConformance/Outbox/Claim/a_lease"}, false},
		{of(suites, "Units/a_lease"), mutant.Test{Package: "./providers/postgres", Name: "TestBatchedConformance/Careful/a_lease"}, true},
		{test{pkg: faults, name: "kill", isCell: true}, mutant.Test{Package: "./tests/fault", Name: "kill"}, false},
	} {
		require.Equal(t, c.want, c.test.includes(c.part), "%v %v", c.test, c.part)
	}
}

// write writes files to a new directory.
func write(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	return root
}
