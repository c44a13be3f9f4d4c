package projector

import (
	"context"

	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/provider"
)

// Parked is a parked message (dead letter). It has:
//   - the message: MessageID, Topic, Key, Type, Payload, Headers;
//   - why it is parked: Projector, Handler, Class, Code, Attempts, Version, At;
//   - its place: Seq (the order of parking), State, DueAt (when it is tried again);
//   - how it was resolved: ResolvedAt, and the Decision with By and Reason.
type Parked = provider.Parked

// ParkedState is the state of a parked message. Its String is "waiting", "stuck", "replayed" or
// "skipped".
type ParkedState = provider.ParkedState

// The states of a parked message.
const (
	StateWaiting  = provider.StateWaiting  // a runner tries it again
	StateStuck    = provider.StateStuck    // it waits for Replay or Skip
	StateReplayed = provider.StateReplayed // it was applied after Replay
	StateSkipped  = provider.StateSkipped  // Skip gave it up
)

// ParkedFilter selects parked messages by Projector, Handler, Key, Class, Code, Types, States and
// Seqs. The zero filter selects all that are waiting or stuck. Limit and After (a Seq) select a
// page: a zero Limit means 100 in a list, and no limit for Replay and Skip.
type ParkedFilter = provider.ParkedFilter

// Decision is who decided about a parked message (By, 1 to 255 bytes), and why (Reason, 1 to
// 1,000 bytes). It is stored with the message.
type Decision = provider.Decision

// Replay makes the messages that f selects due again, resets their attempts, stores d with them,
// and returns their number. The runners of their projectors apply them and those that wait behind
// them, in order. Without a running service, call Projector.ApplyParked afterwards.
//   - A message that waits behind an earlier stuck one of its key continues to wait.
//   - ErrInput: d has no By or no Reason, or one of them is too long, is not UTF-8 or has a NUL.
//     Nothing is changed.
func Replay(ctx context.Context, p provider.Parking, f ParkedFilter, d Decision) (int, error) {
	return decide(ctx, p, "replay", f, StateWaiting, d)
}

// Skip gives up the messages that f selects, stores d with them, and returns their number. The zero
// filter selects the messages of all projectors. Skip cannot be undone. The messages that wait
// behind them become due. If a projector has markers, a redelivery of a skipped message is ignored.
//   - ErrInput: d has no By or no Reason, or one of them is too long, is not UTF-8 or has a NUL.
//     Nothing is changed.
func Skip(ctx context.Context, p provider.Parking, f ParkedFilter, d Decision) (int, error) {
	return decide(ctx, p, "skip", f, StateSkipped, d)
}

// ApplyParked applies the parked messages of p that are due, and those that become due with them,
// and returns. Tools call it after Replay or Skip. It needs no running service, and may run next
// to one. A nil cfg means the default.
//   - A message that fails again is not an error: it stays parked. List the parked messages
//     afterwards.
//   - ErrGeneration: no generation of the read model is that of p's Version.
//   - ErrHalted: p has the option Halt, and a message is stuck.
//   - A message that a Decoder has read requires cfg.Decode. Without it, the message and those behind
//     it continue to wait, the others are applied, and the error has the code "no_decoder".
//   - If ctx ends, it returns nil after the message in flight.
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

func decide(
	ctx context.Context, p provider.Parking, verb string, f ParkedFilter, to ParkedState, d Decision,
) (n int, err error) {
	defer check.Wrap(&err, "%s parked messages", verb)
	if err = d.Validate(); err == nil {
		n, err = p.Decide(ctx, f, to, d)
	}
	return n, err
}
