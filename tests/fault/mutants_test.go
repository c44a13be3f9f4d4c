package main

import (
	"strings"
	"testing"

	"github.com/kinora-go/kinora/internal/mutant"
	"github.com/stretchr/testify/require"
)

func TestCellsOfMutantsExist(t *testing.T) {
	t.Parallel()
	for _, m := range mutant.All {
		if len(m.Cells) > 0 {
			_, err := choose(strings.Join(m.Cells, ","))
			require.NoError(t, err, m.Name)
		}
	}
}
