package projector

import (
	"context"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
)

// RunnerObserver has functions that a runner calls, for metrics. A nil function is not called and
// costs nothing. Several goroutines of the runner call them at the same time: they must be quick,
// and must not change their arguments.
type RunnerObserver struct {
	// Processing: a unit with these messages, at least one, begins. Handlers see the values of the
	// context that it returns, before those of the message's own context. Its end does not matter.
	// The function that it returns, unless nil, is called when the unit has ended.
	Processing func(projector string, messages []eventstore.Raw) (values context.Context, ended func(err error))
	// Emitting: a handler has returned output. It may change the Headers of the messages, which
	// already have those of the cause. ctx is that of the handler.
	Emitting func(ctx context.Context, handler string, output []outbox.Message)
	// Handled: a handler has applied a message and its unit is committed, or the handler failed
	// for this message alone. skipped: the marker says that the handler had applied the message
	// before. waited is the time from the recording of the event to the end of the unit, by the
	// clocks of the store and of this process. It is negative if the clocks differ, and zero if
	// the message has no time. took is the time that the handler itself took.
	Handled func(handler string, skipped bool, waited, took time.Duration, err error)
	// Unit: a unit with this number of messages has ended.
	Unit func(projector string, messages int, took time.Duration, err error)
	// Retried: a unit failed, which was not the fault of a message. It is tried again after this
	// time.
	Retried func(projector string, class Class, after time.Duration)
	// Parked: a message was parked, or stays parked after a failed attempt. handler is the one
	// that failed, or "" if none did. ClassHeld: the message waits behind another one.
	Parked func(projector, handler string, class Class, code string)
	// Replayed: a parked message was applied.
	Replayed func(projector string)
	// Pruned: a transaction has deleted this number of old rows: markers, and replayed or skipped
	// messages.
	Pruned func(rows int)
	// Completed: an event that was not delivered within RunnerConfig.Grace was read from the log
	// and applied. reason is a word; see docs/operations.md.
	Completed func(projector, reason string)
	// Unmarked: a handler of a projector with Options.Markers ran in a store that keeps no
	// markers (provider.Keeps).
	Unmarked func(handler string)
}
