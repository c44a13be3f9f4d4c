package apply

import (
	"errors"
	"fmt"
	"testing"

	"github.com/kinora-go/kinora/projector/internal/unit"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// What follows the end of a unit.
func TestVerdicts(t *testing.T) {
	t.Parallel()
	of := func(class provider.Class, code string) error {
		return &provider.Error{Class: class, Code: code, Err: errors.New("no")}
	}
	unknown, transient := of(provider.ClassUnknown, ""), of(provider.ClassTransient, "")
	only := &provider.Error{Class: provider.ClassPermanent, Err: &provider.MessageError{Message: 1, Others: true, Err: errors.New("no")}}
	for name, c := range map[string]struct {
		failure
		verdict
	}{
		"it was committed":                                   {failure{size: 9, at: -1}, finish},
		"the runner has ended":                               {failure{err: unknown, size: 1, over: true}, end},
		"another reader moves the checkpoint":                {failure{err: fmt.Errorf("x: %w", provider.ErrFenced), size: 1}, end},
		"the generation is retired":                          {failure{err: provider.ErrEnded, size: 1}, end},
		"the reader applies the last events":                 {failure{err: of(provider.ClassTransient, provider.CodeClosing), size: 9, at: -1}, closing},
		"the database is busy":                               {failure{err: transient, size: 9, at: -1}, again},
		"the database is busy, for one message":              {failure{err: transient, size: 1, at: 0}, again},
		"the reply to the commit was lost":                   {failure{err: of(provider.ClassAmbiguous, ""), size: 9, at: -1}, again},
		"a message that is to be set aside cannot be":        {failure{err: unknown, size: 1, at: 0, aside: true}, again},
		"a message fails alone":                              {failure{err: unknown, size: 1, at: 0}, setAside},
		"the only message fails, and it is not known where":  {failure{err: unknown, size: 1, at: -1}, setAside},
		"a message fails in company":                         {failure{err: unknown, size: 9, at: 4}, split},
		"a message can never be applied":                     {failure{err: of(provider.ClassPermanent, ""), size: 9, at: 4}, split},
		"something fails, and it is not known what":          {failure{err: unknown, size: 9, at: -1}, halve},
		"a handler does not return":                          {failure{err: unit.ErrStuck, size: 9, at: 4}, setAside},
		"a message is applied in part, and cannot be undone": {failure{err: of(provider.ClassPermanent, provider.CodePartly), size: 9, at: 4}, setAside},
		"a message fails, and the others are applied":        {failure{err: only, size: 9, at: 1}, setAside},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, c.verdict, judge(c.failure))
		})
	}
}
