package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEndOfFuzzTimeIsNoFailure(t *testing.T) {
	t.Parallel()
	require.True(t, isOver([]byte("fuzz: elapsed: 7s\n--- FAIL: FuzzCheckJSON (7.06s)\n    context deadline exceeded\nFAIL\n")))
	require.False(t, isOver([]byte("--- FAIL: FuzzCheckJSON (0.02s)\n    --- FAIL: FuzzCheckJSON (0.00s)\n        x_test.go:7: no\n\n    Failing input written to testdata/fuzz/FuzzCheckJSON/1\n    context deadline exceeded\n")))
	require.False(t, isOver([]byte("panic: no\n")))
}
