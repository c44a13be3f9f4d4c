package projector_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/projector"
)

func TestDecisionOfNobodyIsRefused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		d  projector.Decision
		ok bool
	}{
		"who and why":       {projector.Decision{By: "ann", Reason: "fixed in v2"}, true},
		"both at the limit": {projector.Decision{By: strings.Repeat("x", 255), Reason: strings.Repeat("x", 1000)}, true},
		"neither":           {projector.Decision{}, false},
		"nobody":            {projector.Decision{Reason: "fixed in v2"}, false},
		"no reason":         {projector.Decision{By: "ann"}, false},
		"a long name":       {projector.Decision{By: strings.Repeat("x", 256), Reason: "why"}, false},
		"a long reason":     {projector.Decision{By: "ann", Reason: strings.Repeat("x", 1001)}, false},
		"bytes, not runes":  {projector.Decision{By: strings.Repeat("é", 128), Reason: "why"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := c.d.Validate()
			if c.ok {
				require.NoError(t, err)
				return
			}
			require.ErrorIs(t, err, projector.ErrInput)
			if len(c.d.Reason) > 100 {
				require.NotContains(t, err.Error(), c.d.Reason, "what a person wrote is not in the error")
			}
		})
	}
}
