//go:build !kinora_fault

package crash

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPointCostsNothingInOrdinaryBuild(t *testing.T) {
	said, err := exec.CommandContext(t.Context(), "go", "build", "-gcflags=-m=2", ".").CombinedOutput()
	require.NoError(t, err, "%s", said)
	var point string
	for line := range strings.Lines(string(said)) {
		if strings.Contains(line, "can inline Point") {
			point = strings.TrimSpace(line)
		}
	}
	require.True(t, strings.HasSuffix(point, "as: func(string) {  }"), "Point must be inlined and empty: %s", said)
	require.Zero(t, testing.AllocsPerRun(100, func() { Point("commit: after") }))
}
