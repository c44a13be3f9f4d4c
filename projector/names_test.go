package projector

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// counting is a journal that only counts, and knows whose names were taken back.
type counting struct {
	Journal
	back []string
}

func (c *counting) CountAttempt(_ context.Context, runner string, _ Attempt, _ int) (int, error) {
	c.back = append(c.back, runner)
	return 1, nil
}

// A count takes the name back where nobody else in the runner is at the message, or asks for it: one that asks may be named already,
// and not have heard of it. What a count may have left is told once more.
func TestACountLeavesTheNameOfAnotherDelivery(t *testing.T) {
	t.Parallel()
	a := Attempt{Projector: "p", Handler: "p/a", MessageID: "m"}
	for asking, want := range map[int]string{0: "me", 1: ""} {
		j := &counting{}
		n := &names{
			journal: j, runner: "me", timeout: time.Second, turn: make(chan struct{}, 1),
			under: map[nameKey]int{a.name(): 1 + asking}, named: map[nameKey]int{a.name(): 1},
		}
		_, _, err := n.count(t.Context(), a, true, 5)
		require.NoError(t, err)
		require.Equal(t, []string{want}, j.back)
		require.Equal(t, []Attempt{a}, n.done)
	}
}
