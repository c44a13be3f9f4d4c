package projector

import "time"

// RunnerObserver receives what a runner does, for metrics. A function that is nil is not called and costs nothing. The
// goroutines that do the work call it, several at a time: it must be quick, and must not change what it is given.
type RunnerObserver struct {
	// Handled: a message was applied by a handler, and its unit is committed; or the handler failed at it alone.
	// skipped: the handler had applied it before, as its marker says. waited is the time from the recording of the
	// event to the end of its unit, by the clocks of the store and of this process: negative if these differ, zero
	// if the message does not say. took is the handler's own time.
	Handled func(handler string, skipped bool, waited, took time.Duration, err error)
	// Unit: a unit of this many messages ended.
	Unit func(projector string, messages int, took time.Duration, err error)
	// Retried: a unit failed for a reason that is no message's fault, and is tried again after this time.
	Retried func(projector string, class Class, after time.Duration)
	// Parked: a message was set aside, or stays parked after a failed attempt. The handler is the one that failed,
	// empty if none did. ClassHeld: the message waits behind another one.
	Parked func(projector, handler string, class Class, code string)
	// Replayed: a parked message was applied.
	Replayed func(projector string)
	// Pruned: a transaction deleted so many rows past their window: markers, and replayed or skipped messages.
	Pruned func(rows int)
	// Unmarked: a handler of a projector with Options.Markers ran in a unit that cannot keep them (provider.Keeps).
	Unmarked func(handler string)
}
