package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Programs read these lines.
func TestEachCellEndsWithALine(t *testing.T) {
	t.Parallel()
	results := []result{
		{Cell: "kill", ranOnce: ranOnce{OK: true, Duration: 12.34}},
		{Cell: "zombie", ranOnce: ranOnce{Duration: 2}, Failures: []string{"lost 1\nmore", "second"}},
		{Cell: "disk", ranOnce: ranOnce{OK: true}, Note: "skipped: cannot mount"},
	}
	var out strings.Builder
	for _, r := range results {
		r.line(&out)
	}
	tally(&out, results, 2)
	require.Equal(t, "ok      kill  12.3s\nFAILED  zombie  2.0s  lost 1\nskipped disk  0.0s  skipped: cannot mount\n1 passed, 1 failed, 3 skipped\n", out.String())
}
