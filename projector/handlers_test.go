package projector_test

import (
	"testing"

	"github.com/kinora-go/kinora/projector"
	"github.com/stretchr/testify/require"
)

// Tools use these names to prune and to find orphans. Without the earlier names, the markers of
// those would look like orphans.
// Promise: G4.9
func TestHandlersReturnsEarlierNames(t *testing.T) {
	t.Parallel()
	p := projector.Define("p", types, marked,
		projector.On("renamed", add).Was("created", "old/created"),
		projector.On("again", add),
		projector.On("twice", add).Was("first").Was("second"))
	require.Equal(t, []string{"p/renamed", "p/created", "old/created", "p/again", "p/twice", "p/first", "p/second"}, p.Handlers())
}
