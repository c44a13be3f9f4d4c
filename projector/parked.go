package projector

import (
	"context"
	"fmt"

	"github.com/kinora-go/kinora/provider"
)

// Parked is a message that was set aside (dead letter), with all that is needed to look into it and apply it later.
type Parked = provider.Parked

// ParkedState is what became of a message that was set aside.
type ParkedState = provider.ParkedState

// The states of a message that was set aside.
const (
	StateWaiting  = provider.StateWaiting
	StateStuck    = provider.StateStuck
	StateReplayed = provider.StateReplayed
	StateSkipped  = provider.StateSkipped
)

// ParkedFilter selects parked messages; the zero filter selects all that are not resolved.
type ParkedFilter = provider.ParkedFilter

// Decision says who decided about a parked message, and why.
type Decision = provider.Decision

// Replay makes the messages that f selects due again, with no attempts counted, and returns how many. It keeps d with
// them. The runners of their projectors apply them and those that wait behind them, in order. Projector.ApplyParked does
// it without a service.
//   - A message that waits behind an earlier stuck one of its key goes on waiting.
//   - A d without a name or a reason is ErrInput, and nothing is done.
func Replay(ctx context.Context, p provider.Parking, f ParkedFilter, d Decision) (int, error) {
	return decide(ctx, p, "replay", f, StateWaiting, d)
}

// Skip gives up for good on the messages that f selects, and returns how many. It keeps d with them. What waits behind
// them is due. If it is delivered again, a skipped message of a projector with markers is a duplicate.
//   - A d without a name or a reason is ErrInput, and nothing is done.
func Skip(ctx context.Context, p provider.Parking, f ParkedFilter, d Decision) (int, error) {
	return decide(ctx, p, "skip", f, StateSkipped, d)
}

// ApplyParked applies the parked messages of p that are due, and those that become due with them, and returns. Tools call it
// after Replay or Skip. It needs no service, and may run next to one. A nil cfg is the default.
//   - ErrHalted: p has the option Halt, and a message is stuck.
//   - If ctx ends, it returns nil after the message in hand.
func (p *Projector[Tx]) ApplyParked(ctx context.Context, db provider.Units[Tx], cfg *RunnerConfig) error {
	r, err := newRunner(db, Source{}, orZero(cfg), p)
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

func orZero(cfg *RunnerConfig) (zero RunnerConfig) {
	if cfg == nil {
		return zero
	}
	return *cfg
}

func decide(ctx context.Context, p provider.Parking, verb string, f ParkedFilter, to ParkedState, d Decision) (n int, err error) {
	if err = d.Validate(); err == nil {
		n, err = p.Decide(ctx, f, to, d)
	}
	if err != nil {
		return n, fmt.Errorf("%s parked messages: %w", verb, err)
	}
	return n, nil
}
