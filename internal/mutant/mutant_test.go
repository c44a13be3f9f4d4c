package mutant_test

import (
	"os/exec"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// Each mechanism, taken out, makes its named test fail: so the test would notice its loss.
var mutants = []struct {
	tag, pkg, test string
	failure        string // what the output must show, besides the named test's failure
}{}

func TestEveryMutantIsCaught(t *testing.T) {
	for _, m := range mutants {
		t.Run(m.tag+" "+m.pkg, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), "go", "test", "-count=1", "-timeout=2m", "-tags", "mutant_"+m.tag, "-run", m.test, m.pkg)
			cmd.Dir = "../.."
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit, "the mutant survived:\n%s", out)
			require.Regexp(t, `(?m)^\s*--- FAIL: `+regexp.QuoteMeta(m.failure), string(out))
			require.NotContains(t, string(out), "build failed")
		})
	}
}
