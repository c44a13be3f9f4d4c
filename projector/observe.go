package projector

import "time"

// Observer is told what a runner does, for metrics. Each function may be nil, and is then not called and costs
// nothing. They are called by the goroutines that do the work, several at a time: they must be quick, and must not
// change what they are given.
type Observer struct {
	// Handled: a unit of work of a handler has ended. skipped tells that it had taken effect before: its marker was there.
	// On the clocks of the store and of this process, waited is the time since the event was recorded; negative where
	// these differ, zero where the message does not say.
	Handled func(handler string, skipped bool, waited, took time.Duration, err error)
	// Retried: it failed, or to park a message did, and is tried again after this long. attempts are those that count
	// (see Class).
	Retried func(handler string, class Class, attempts int, after time.Duration)
	// Parked: a message is set aside. The handler is empty where it did not get as far as one. HeldClass: it waits behind another.
	Parked func(projector, handler string, class Class, code string)
	// Replayed: a parked message was handled again, by a person or because what it waited for is done; err says why it stays parked.
	Replayed func(projector, handler string, err error)
	// Pruned: so many markers past their window were deleted.
	Pruned func(markers int)
	// Unmarked: a handler with Options.Markers has run in a unit that cannot write them (Records.Marks).
	Unmarked func(handler string)
	// Queued: a message was read, and so many of its subscriber's, itself included, are in flight of as many as may be.
	Queued func(topic string, inFlight, most int)
}
