package outbox

import "time"

// Observer is told what a relay does, for metrics. Each function may be nil, and is then not called and costs
// nothing. They are called by the goroutines that do the work, several at a time: they must be quick, and must
// not change what they are given.
type Observer struct {
	// Claimed: a claim has ended. Without entries it was an empty one. On the store's clock, an entry has waited
	// from CreatedAt to LastAttemptedAt; a Suspect one had a claim whose lease expired.
	Claimed func(entries []Entry, took time.Duration, err error)
	// Published: a call of the publisher has ended, with so many messages.
	Published func(topic string, messages int, took time.Duration, err error)
	// Marked: marks are recorded, renewals and releases among them, but for so many that were late: fenced, since
	// another relay has taken over.
	Marked func(marks []Mark, late int, took time.Duration, err error)
	// Paused: nothing of the topic gets through. It is tried again after this long.
	Paused func(topic string, d time.Duration)
	// Held: so many entries were held, behind others that wait for long.
	Held func(entries int)
	// Deleted: so many entries were deleted that were kept for long enough.
	Deleted func(entries int)
}

// since is how long ago begin was on the relay's clock. Nobody asks where nobody observes.
func (r *Relay) since(begin time.Time) time.Duration { return r.cfg.Clock().Sub(begin) }

func (r *Relay) begin(observed bool) (begin time.Time) {
	if observed {
		begin = r.cfg.Clock()
	}
	return begin
}
