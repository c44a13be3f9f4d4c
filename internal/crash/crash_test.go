//go:build !kinora_fault

package crash

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPointCostsNothingInOrdinaryBuild(t *testing.T) {
	output, err := exec.CommandContext(t.Context(), "go", "build", "-gcflags=-m=2", ".").CombinedOutput()
	require.NoError(t, err, "%s", output)
	var point string
	for line := range strings.Lines(string(output)) {
		if strings.Contains(line, "can inline Point") {
			point = strings.TrimSpace(line)
		}
	}
	require.True(t, strings.HasSuffix(point, "as: func(string) {  }"), "Point must be inlined and empty: %s", output)
	require.Zero(t, testing.AllocsPerRun(100, func() { Point("commit: after") }))
}
