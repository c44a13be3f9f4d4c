package outbox

import "time"

// RelayObserver reports what a relay does, for metrics. A function that is nil is not called and costs nothing. The
// goroutines that do the work call them, several at a time: they must be quick, and must not change their arguments.
type RelayObserver struct {
	// Claimed: a claim has ended; it may have no entries. On the store's clock, an entry has waited from CreatedAt
	// to LastAttemptedAt; a Malformed one may have no CreatedAt. A Suspect one had a claim whose lease expired.
	Claimed func(entries []Entry, took time.Duration, err error)
	// Published: a call of the publisher has ended, with so many messages.
	Published func(topic string, messages int, took time.Duration, err error)
	// Marked: marks are stored, including renewals and releases. So many of them were late: they changed nothing,
	// because another relay had taken over.
	Marked func(marks []Mark, late int, took time.Duration, err error)
	// Paused: every publish of the topic fails. It is tried again after d.
	Paused func(topic string, d time.Duration)
	// Held: so many entries were held, behind others that wait for long.
	Held func(entries int)
	// Deleted: so many entries were deleted at the end of their retention.
	Deleted func(entries int)
}
