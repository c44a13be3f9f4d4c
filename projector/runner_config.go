package projector

import (
	"cmp"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/marker"
)

// RunnerConfig configures a Runner; the zero value is the default.
type RunnerConfig struct {
	Concurrency int              // workers of each projector, so its transactions at once; messages of one key stay in order; zero means 1
	Batch       int              // most messages of a transaction; zero means 32
	Timeout     time.Duration    // of a handler for one message, from its start; also of opening and committing a unit, each; zero means 30s
	Retry       claim.Backoff    // of a message that failed alone; zero means 100ms doubling to 30s, stuck after 5 attempts
	Drain       time.Duration    // how long Run may go on after its ctx ends; zero means 10s
	Lease       time.Duration    // how long a runner counts as alive after its process was killed; at least 1s; zero means 15s
	Record      time.Duration    // how long after a process was killed a broker may redeliver its messages; zero means 1h
	Careful     bool             // name every message before it runs, not only those that a killed process may have had
	Markers     marker.Retention // how long markers, and replayed and skipped messages, are kept; the runner deletes older ones
	Version     string           // of the program, kept with what is parked; empty: what its build info says

	Classify  func(error) Class // may choose the class of an error of ClassUnknown; nil: it stays that
	Observer  RunnerObserver    // receives what the runner does
	Clock     func() time.Time  // measures durations; must not be set back; nil: time.Now
	Logger    *slog.Logger      // nil: slog.Default()
	LogErrors bool              // also log the texts of errors, which may hold what users wrote
}

func (c *RunnerConfig) validate() error {
	c.Timeout, c.Drain = cmp.Or(c.Timeout, 30*time.Second), cmp.Or(c.Drain, 10*time.Second)
	c.Lease, c.Record = cmp.Or(c.Lease, 15*time.Second), cmp.Or(c.Record, time.Hour)
	c.Concurrency, c.Batch = cmp.Or(c.Concurrency, 1), cmp.Or(c.Batch, 32)
	if c.Timeout < 0 || c.Drain < 0 || c.Record < 0 || c.Concurrency < 0 || c.Batch < 0 || c.Batch > maxBatch {
		return fmt.Errorf("timeout %s, drain %s, record %s, concurrency %d, batch %d: give no negative value, and a batch of at most %d",
			c.Timeout, c.Drain, c.Record, c.Concurrency, c.Batch, maxBatch)
	}
	if c.Lease < time.Second {
		return fmt.Errorf("lease %s: give at least 1s", c.Lease)
	}
	if info, ok := debug.ReadBuildInfo(); ok { // the version of the main module has its revision in it
		c.Version = cmp.Or(c.Version, info.Main.Version)
	}
	if c.Clock == nil {
		c.Clock = time.Now //nolint:forbidigo // durations of units, as this process sees them
	}
	c.Logger = cmp.Or(c.Logger, slog.Default())
	c.Retry.Base, c.Retry.Attempts = cmp.Or(c.Retry.Base, 100*time.Millisecond), cmp.Or(c.Retry.Attempts, 5)
	c.Retry.Max = cmp.Or(c.Retry.Max, max(30*time.Second, c.Retry.Base))
	var err error
	if c.Markers, err = c.Markers.WithDefaults(); err != nil {
		return err
	}
	c.Retry, err = c.Retry.WithDefaults()
	return err
}

const maxBatch = 10_000
