package outbox

import (
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// RelayObserver has functions that a relay calls, for metrics. A nil function is not called and
// costs nothing. Several goroutines of the relay call them at the same time: they must be quick,
// and must not change their arguments.
type RelayObserver struct {
	// Claimed: a claim has ended; it may have no entries. An entry has waited from CreatedAt to
	// LastAttemptedAt, on the store's clock; a Malformed one may have no CreatedAt. The lease of
	// an earlier claim of a Suspect entry expired.
	Claimed func(entries []Entry, took time.Duration, err error)
	// Publishing: a Publish call begins. It may call Message.SetContext, and must not change the
	// messages otherwise. The function that it returns, unless nil, is called when the call has
	// ended.
	Publishing func(topic string, messages []*message.Message) (ended func(err error))
	// Published: a Publish call with this number of messages has ended.
	Published func(topic string, messages int, took time.Duration, err error)
	// Marked: marks were stored, including renewals and releases. late is the number of those
	// that changed nothing, because another relay had taken the entry over.
	Marked func(marks []Mark, late int, took time.Duration, err error)
	// Paused: every publish of the topic fails. The relay tries the topic again after d.
	Paused func(topic string, d time.Duration)
	// Held: this number of entries is now held, behind others that wait for long.
	Held func(entries int)
	// Deleted: this number of entries was deleted at the end of their retention.
	Deleted func(entries int)
}
