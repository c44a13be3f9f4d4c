package sent

import (
	"context"
	"errors"
	"slices"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/projector/internal/lease"
	"github.com/kinora-go/kinora/projector/internal/model"
)

// ErrTurn: another program applies contested messages of the projector.
var ErrTurn = errors.New("another program applies parked messages")

// Turn is the right of one applier to apply contested messages: of the generations that apply a parked
// message, only the first sends its output.
type Turn struct {
	Asker *Asker
	has   bool
}

// For calls apply, which applies messages that ask has asked about. If one of them is contested, it takes the
// turn meanwhile, and asks again.
func (t *Turn) For(
	ctx, hard context.Context, msgs []*model.Message, ask func(context.Context) error, apply func(ctx, hard context.Context) error,
) error {
	if t.has || !slices.ContainsFunc(msgs, func(m *model.Message) bool { return m.Contested }) {
		return apply(ctx, hard)
	}
	return t.Take(ctx, hard, func(ctx, hard context.Context) error {
		if err := ask(ctx); err != nil {
			return err
		}
		return apply(ctx, hard)
	})
}

// turnTries is how often Take asks for the lease, with pauses.
const turnTries = 50

// Take calls fn while it holds the lease for contested messages. The contexts of fn end if the lease is
// lost. If others hold it for too long, it returns ErrTurn.
func (t *Turn) Take(ctx, hard context.Context, fn func(ctx, hard context.Context) error) error {
	leases, name := &t.Asker.Host.Leases, "output/"+t.Asker.Projector.Name
	for tries := 0; ; tries++ {
		had, err := leases.While(ctx, name, claim.NewToken(), func(held context.Context) error {
			hard, stop := context.WithCancel(hard)
			defer stop()
			defer context.AfterFunc(held, func() {
				if errors.Is(context.Cause(held), lease.ErrLost) && ctx.Err() == nil { // this lease, and not that of the reader
					stop()
				}
			})()
			t.has = true
			defer func() { t.has = false }()
			return fn(held, hard)
		})
		if had || err != nil {
			return err
		}
		if tries == turnTries {
			return ErrTurn
		}
		model.Wait(ctx, model.Soon)
	}
}
