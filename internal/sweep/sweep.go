// Package sweep deletes old rows in steps, in one process at a time.
package sweep

import (
	"context"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

// length is how long the lease of a process that was killed keeps others from taking over.
const length = 15 * time.Second

// Turn is the lease of the process that deletes.
type Turn struct {
	Leases provider.Leases // nil means that no process waits for another
	Name   string          // of the lease
	Holder string
	Clock  func() time.Time
}

// Run calls step until it returns false or an error.
//
// The first step needs no lease: it looks for old rows, and every process may do that. If there
// are more, Run acquires the lease for the other steps, and releases the lease at the end. If
// another process has the lease, Run returns nil.
func Run(ctx context.Context, t Turn, step func(ctx context.Context) (more bool, err error)) error {
	more, err := step(ctx)
	if !more || err != nil {
		return err
	}
	terms, asked := claim.Terms{Holder: t.Holder, Token: claim.NewToken(), Lease: length, Limit: 1}, time.Time{}
	if t.Leases != nil {
		defer func() {
			limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			_ = t.Leases.ReleaseLease(limited, t.Name, terms.Token) // otherwise the lease expires
		}()
	}
	for more && err == nil {
		if t.Leases != nil && t.Clock().Sub(asked) > length/3 {
			asked = t.Clock()
			if more, err = t.Leases.AcquireLease(ctx, t.Name, terms); !more || err != nil {
				break
			}
		}
		more, err = step(ctx)
	}
	return err
}
