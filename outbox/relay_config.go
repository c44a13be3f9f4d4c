package outbox

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

// RelayConfig configures a Relay. The zero value is the default.
type RelayConfig struct {
	Topics           []string         // only these; nil: all; an empty list is refused
	Batch            int              // entries in one claim, at most 1,000,000; zero means 50
	Bytes            int              // payload in one claim, unless one entry has more; zero means 8 MiB
	Lease            time.Duration    // how long a claim protects its entries, renewed while a batch takes longer; those of a relay that died wait as long; zero means 5m
	Backoff          claim.Backoff    // after a failed publication; zero means 30s doubling to 1h, 8 attempts
	OrderedPublisher bool             // one Publish call keeps the order of its messages; otherwise a call has at most one message per key
	Unordered        bool             // no message waits for another: for consumers that need no order; not together with a relay that keeps it
	Keep             EntryRetention   // how long published and skipped entries are kept
	Poll             time.Duration    // the longest pause while idle, and the interval between full scans, unless these take long; zero means 1s
	Drain            time.Duration    // how long Run may continue after its ctx ends; zero means 10s
	Holder           string           // who claims, for people to read; empty: host and process
	Logger           *slog.Logger     // nil: slog.Default()
	LogErrors        bool             // also log the texts of publish errors, which may hold user data
	Observer         RelayObserver    // reports what the relay does
	Clock            func() time.Time // schedules the scans, and measures how long calls take; nil: time.Now
}

func (c *RelayConfig) validate() error {
	terms, err := claim.Terms{Lease: c.Lease, Limit: c.Batch}.WithDefaults()
	if err != nil {
		return err
	}
	c.Lease, c.Batch = terms.Lease, terms.Limit
	if c.Batch > batchMax {
		return fmt.Errorf("%w: a batch of %d, at most %d", claim.ErrTerms, c.Batch, batchMax)
	}
	if c.Topics != nil && len(c.Topics) == 0 {
		return errors.New("an empty list of topics: use nil for all")
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
	if c.Bytes == 0 {
		c.Bytes = 8 << 20
	}
	if c.Poll == 0 {
		c.Poll = time.Second
	}
	if c.Drain == 0 {
		c.Drain = 10 * time.Second
	}
	if c.Poll < 0 || c.Drain < 0 || c.Bytes < 0 {
		return fmt.Errorf("poll %s, drain %s, %d bytes: negative", c.Poll, c.Drain, c.Bytes)
	}
	if c.Holder == "" {
		host, _ := os.Hostname()
		c.Holder = fmt.Sprintf("%s/%d", host, os.Getpid())
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Clock == nil {
		c.Clock = time.Now //nolint:forbidigo // durations of calls, as this process sees them
	}
	return nil
}
