package outbox

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/presence"
	"github.com/kinora-go/kinora/provider"
)

// RelayConfig configures a Relay. The zero value is the default.
type RelayConfig struct {
	// Topics are the topics to publish. Nil means all; an empty list is an error.
	Topics []string
	// Batch is the number of entries in one claim, at most 1,000,000. Zero means 50.
	Batch int
	// Bytes is the payload in one claim, unless a single entry has more. Zero means 8 MiB.
	Bytes int
	// Lease is how long a claim protects its entries, at least 1ms. It is renewed while a batch
	// takes longer. The entries of a relay that crashed wait until it ends. Zero means 5m.
	Lease time.Duration
	// Backoff is the delay after a failed publication. Zero means 30s doubling to 1h, 8 attempts.
	Backoff claim.Backoff
	// OrderedPublisher: one Publish call keeps the order of its messages. Otherwise a call has at
	// most one message per key.
	OrderedPublisher bool
	// Unordered: no message waits for another, for consumers that do not need order. All relays
	// of a store must have the same setting.
	Unordered bool
	// Keep is how long published and skipped entries are kept.
	Keep EntryRetention
	// Poll is the longest pause of an idle relay, and the interval between scans of all entries,
	// unless these take long. Zero means 1s.
	Poll time.Duration
	// Drain is how long Run may continue after its ctx ends. Zero means 10s.
	Drain time.Duration
	// Holder is the relay's name in claims and logs; only people read it. Empty means host and
	// process.
	Holder string

	Logger    *slog.Logger  // nil means slog.Default()
	LogErrors bool          // also log the texts of publish errors, which may contain user data
	Observer  RelayObserver // receives what the relay does
}

func (c *RelayConfig) validate() error {
	terms, err := claim.Terms{Lease: c.Lease, Limit: c.Batch}.WithDefaults()
	if err != nil {
		return err
	}
	c.Lease, c.Batch = terms.Lease, terms.Limit
	if c.Batch > batchMax {
		return fmt.Errorf("%w: batch %d: at most %d is allowed", claim.ErrTerms, c.Batch, batchMax)
	}
	if c.Topics != nil && len(c.Topics) == 0 {
		return errors.New("topics is empty: use nil for all topics")
	}
	for i, topic := range c.Topics {
		if err := provider.CheckText(fmt.Sprintf("topics[%d]", i), topic, provider.MaxIDBytes); err != nil {
			return err
		}
	}
	if c.Backoff, err = c.Backoff.WithDefaults(); err != nil {
		return err
	}
	if c.Keep, err = c.Keep.WithDefaults(); err != nil {
		return err
	}
	c.Bytes, c.Poll, c.Drain = cmp.Or(c.Bytes, 8<<20), cmp.Or(c.Poll, time.Second), cmp.Or(c.Drain, 10*time.Second)
	if c.Poll < 0 || c.Drain < 0 || c.Bytes < 0 {
		return fmt.Errorf("poll %s, drain %s, bytes %d: must not be negative", c.Poll, c.Drain, c.Bytes)
	}
	c.Holder = cmp.Or(c.Holder, presence.Process())
	if err := provider.CheckText("holder", c.Holder, provider.MaxIDBytes); err != nil {
		return err
	}
	c.Logger = cmp.Or(c.Logger, slog.Default())
	return nil
}

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
