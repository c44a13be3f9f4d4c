package mutant_test

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Each mechanism, taken out, makes its named test fail: so the test would notice its loss.
var mutants = []struct{ tag, pkg, test string }{
	{"no_marker", "./projector", "TestConcurrentDuplicatesTakeEffectOnce"},
	{"no_marker", "./providers/sqlite", "TestMessageDeliveredManyTimesAtOnceAppliesOnce"},
	{"no_fence", "./providers/sqlite", "TestLateMarkChangesNothing"},
	{"two_transactions", "./providers/sqlite", "TestEventsAndEntriesCommitTogether"},
	{"half_guard", "./providers/sqlite", "TestTakeDoesNotPassAnEarlierEntry"},
	{"half_guard", "./providers/postgres", "TestClaimStatementsThatOverlapDoNotSplitAKey"},
	{"no_fence", "./providers/postgres", "TestNoTwoRelaysHoldAClaim"},
	{"held_no_barrier", "./providers/postgres", "TestHeldEntriesKeepTheirPlace"},
	{"no_marker", "./providers/postgres", "TestOneMessageAHundredTimesThroughTwoProcesses"},
	{"clock_per_row", "./providers/postgres", "TestAClaimReadsTheClockOnce"},
	{"no_version_guard", "./providers/postgres", "TestAStaleVersionIsAConflict"},
	{"no_generation_fence", "./providers/postgres", "TestUnitsAndASwitchOfGenerationsFenceOneAnother"},
	{"batch_on_conflict", "./providers/postgres", "TestBatchedUnitsApplyOnce"},
}

func TestEveryMutantIsCaught(t *testing.T) {
	for _, m := range mutants {
		t.Run(m.tag+" "+m.pkg, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), "go", "test", "-count=1", "-timeout=2m", "-tags", "mutant_"+m.tag, "-run", "^"+m.test+"$", m.pkg)
			cmd.Dir = "../.."
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit, "the mutant survived:\n%s", out)
			require.Regexp(t, `(?m)^\s*--- FAIL: `+regexp.QuoteMeta(m.test), string(out))
		})
	}
}

// inSuite are the mutants that no test of a package shows: the fault suite does (make mutants).
var inSuite = []string{"marker_apart", "ack_early", "worker_clock"}

// The lists and the build tags are the same.
func TestEveryMutantIsListed(t *testing.T) {
	files, err := filepath.Glob("*_on.go")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, f := range files {
		tag := strings.TrimSuffix(f, "_on.go")
		require.True(t, slices.Contains(inSuite, tag) || slices.ContainsFunc(mutants, func(m struct{ tag, pkg, test string }) bool { return m.tag == tag }), tag)
	}
}
