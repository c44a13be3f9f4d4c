package projector

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/presence"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// RunnerConfig configures a Runner. The zero value is the default.
type RunnerConfig struct {
	// Concurrency is the number of workers, and so of concurrent transactions, of each projector.
	// Messages of one key stay in order. Zero means 1.
	Concurrency int
	// Log is the log of the events, if it is in another database than the read models. Nil means
	// that of the store. A runner FromLog ignores it.
	Log provider.Log
	// Grace is how long a broker may take to deliver an event. After that the event is read from
	// the log. Zero means 5s.
	Grace time.Duration
	// Batch is the most messages of a transaction, at most 10,000. Zero means 32, and 500 for
	// events that are read from the log.
	Batch int
	// Timeout is how long a handler may take for one message, and how long opening a unit and
	// committing it may take, each. Zero means 30s.
	Timeout time.Duration
	// Retry is the backoff of a message that failed alone. Zero means 100ms doubling to 30s; the
	// message is stuck after 5 attempts.
	Retry claim.Backoff
	// Drain is how long Run may continue after its ctx ends. Zero means 10s.
	Drain time.Duration
	// Lease is how long a runner counts as alive after its process was killed, at least 1s. Zero
	// means 15s.
	Lease time.Duration
	// Record is how long after a process was killed a broker may redeliver its messages. Zero
	// means 1h.
	Record time.Duration
	// Careful records each message as in flight before it runs. Without it, only messages that
	// may have been in flight when a process was killed are recorded.
	Careful bool
	// Markers is how long markers, and replayed and skipped messages, are kept. The runner
	// deletes older ones.
	Markers marker.Retention
	// Decode decodes messages of other software. Nil means that they are parked as malformed.
	Decode Decoder
	// Untrusted takes each delivered event from the log (Log, or that of the store) by its id, with one read for all
	// that wait: its type, schema, data, metadata, stream, version and position. A message whose id is not in the log
	// is parked with the code no_event, without a marker, and holds no key. This includes all messages of other
	// software and of other logs: give these a runner of their own. An event that is delivered early changes the order
	// of its stream, unless the projector has Options.Ordered. Log must not be a replica, which may have an event
	// later than the broker. Without Untrusted, who may publish may write the read models. Untrusted excludes Decode
	// and Halt. A runner FromLog ignores it.
	Untrusted bool
	// Version is the version of the program, stored with parked messages. Empty means that of its
	// build info.
	Version string

	Classify  func(error) Class // may return another class for an error of ClassUnknown
	Observer  RunnerObserver    // receives what the runner does
	Clock     func() time.Time  // measures durations; must never go back; nil means time.Now
	Logger    *slog.Logger      // nil means slog.Default()
	LogErrors bool              // also log the texts of errors, which may contain user data
}

func (c *RunnerConfig) validate() error {
	c.Timeout, c.Drain = cmp.Or(c.Timeout, 30*time.Second), cmp.Or(c.Drain, 10*time.Second)
	c.Lease, c.Record = cmp.Or(c.Lease, 15*time.Second), cmp.Or(c.Record, time.Hour)
	c.Concurrency, c.Grace = cmp.Or(c.Concurrency, 1), cmp.Or(c.Grace, 5*time.Second)
	if c.Timeout < 0 || c.Grace < 0 || c.Drain < 0 || c.Record < 0 || c.Concurrency < 0 || c.Batch < 0 || c.Batch > model.MaxBatch {
		return fmt.Errorf("timeout %s, drain %s, record %s, grace %s, concurrency %d, batch %d: must be at least 0, and batch at most %d",
			c.Timeout, c.Drain, c.Record, c.Grace, c.Concurrency, c.Batch, model.MaxBatch)
	}
	if c.Lease < time.Second {
		return fmt.Errorf("lease %s: must be at least 1s", c.Lease)
	}
	c.Version = cmp.Or(c.Version, presence.Version())
	if c.Version != "" {
		if err := provider.CheckText("version", c.Version, provider.MaxIDBytes); err != nil {
			return err
		}
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

func (c *RunnerConfig) model() model.Config {
	return model.Config{
		Concurrency: c.Concurrency, Batch: c.Batch, Timeout: c.Timeout, Grace: c.Grace, Lease: c.Lease, Record: c.Record, Retry: c.Retry,
		Careful: c.Careful, LogErrors: c.LogErrors, Version: c.Version, Classify: c.Classify, Observer: model.Observer(c.Observer),
		Clock: c.Clock, Logger: c.Logger,
	}
}

// Decoder returns the event in a message of other software. Package decode has decoders for common
// forms. A runner calls its decoder (RunnerConfig.Decode) for each message that has no header
// kinora_type, and again when the message was parked and is applied later.
//
// Of the event, a decoder sets:
//   - ID: the same on each delivery of the message, and on no other message of the projector. It has
//     1 to 255 bytes of UTF-8 without control characters. m.UUID is such an id only if the producer
//     sets it: some subscribers make a new one per delivery.
//   - Type: a stored name of the projector's types.
//   - Data: what the codec of the type decodes. That is JSON unless the type has its own codec.
//   - Stream: the ordering key. Empty means that of the header kinora_key, or none.
//   - Schema, Version, Metadata, RecordedAt: optional. A zero Schema means 1, a zero RecordedAt the
//     time in the header kinora_recorded_at, or none. RecordedAt is in the years 1 to 9999.
//
// Position is ignored: the event is in no log, so only its marker shows that it was applied, and it
// is not part of a rebuild.
//
// If the decoder returns an error or panics, or one of these is missing or invalid, the message is
// parked with the code malformed. A decoder must not retain m, must not change its payload, and must
// return soon: later messages of the topic wait. It may be called by several goroutines at once.
type Decoder func(topic string, m *message.Message) (eventstore.Raw, error)

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
	// that failed, or "" if none did. ClassHeld: the message waits behind another one. ClassUnable: it waits for a program
	// that meets its needs.
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
