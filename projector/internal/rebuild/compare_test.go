package rebuild

import (
	"errors"
	"fmt"
	"testing"

	"github.com/kinora-go/kinora/projector/internal/unit"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// A comparison is tried again after errors that may pass, and not if its generation has ended.
func TestComparisonsThatAreTriedAgain(t *testing.T) {
	t.Parallel()
	transient := func(code string, err error) error {
		return &provider.Error{Class: provider.ClassTransient, Code: code, Err: err}
	}
	for name, c := range map[string]struct {
		err   error
		again bool
	}{
		"the database is busy":       {transient("", errors.New("busy")), true},
		"a table is used":            {&provider.Error{Class: provider.ClassPermanent, Code: provider.CodeBusy, Err: errors.New("busy")}, true},
		"too many events":            {errMany, true},
		"messages are parked":        {fmt.Errorf("x: %w", unit.ErrParks), true},
		"another program has it":     {transient(provider.CodeFenced, provider.ErrFenced), false},
		"the generation has ended":   {transient(provider.CodeEnded, provider.ErrEnded), false},
		"something that will happen": {errors.New("no"), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, c.again, canRetry(c.err))
		})
	}
}
