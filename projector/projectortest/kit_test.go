package projectortest_test

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	. "github.com/kinora-go/kinora/projector/projectortest"
)

// The kit is for tests: no other package of the library imports it, and it imports the contracts and the
// standard library alone.
func TestNothingOfTheLibraryImportsTheKit(t *testing.T) {
	t.Parallel()
	const kit = "github.com/kinora-go/kinora/projector/projectortest"
	out, err := exec.Command("go", "list", "-f", `{{.ImportPath}}: {{join .Imports " "}}`, "github.com/kinora-go/kinora/...").CombinedOutput()
	require.NoError(t, err, string(out))
	packages := 0
	for line := range strings.Lines(string(out)) {
		name, imports, _ := strings.Cut(strings.TrimSpace(line), ": ")
		if packages++; name != kit {
			require.NotContains(t, strings.Fields(imports), kit, name)
			continue
		}
		for _, path := range strings.Fields(imports) {
			if root, _, _ := strings.Cut(path, "/"); strings.Contains(root, ".") {
				require.Contains(t, []string{
					"github.com/ThreeDotsLabs/watermill/message", "github.com/kinora-go/kinora/claim", "github.com/kinora-go/kinora/eventstore",
					"github.com/kinora-go/kinora/internal/pauses", "github.com/kinora-go/kinora/outbox", "github.com/kinora-go/kinora/projector", "github.com/kinora-go/kinora/provider",
				}, path)
			}
		}
	}
	require.Greater(t, packages, 20)
}

// A seed gives the same failure again.
func TestSeed(t *testing.T) {
	kit := New(openSQLite, byLast, readLatest)
	kit.Seed = 7
	first := failure(t, func(t testing.TB) { kit.Commutes(t, posts...) })
	require.Contains(t, first, "KINORA_TEST_SEED=7")
	kit.Seed = 0
	t.Setenv("KINORA_TEST_SEED", "7")
	again := failure(t, func(t testing.TB) { kit.Commutes(t, posts...) })
	require.Contains(t, again, "KINORA_TEST_SEED=7")
	if shortest(t, first, 2, 6) && shortest(t, again, 2, 6) {
		require.Equal(t, first, again)
	}
	t.Setenv("KINORA_TEST_SEED", "seven")
	require.Contains(t, failure(t, func(t testing.TB) { kit.Commutes(t, posts...) }), `KINORA_TEST_SEED is "seven": want a number`)
}
