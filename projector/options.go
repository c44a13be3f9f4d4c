package projector

import "github.com/kinora-go/kinora/eventstore"

// Options configure a projector. The zero value is the default.
type Options struct {
	// Markers makes each handler apply each message once (deduplication), by a marker in the
	// transaction of the handler. Without markers a redelivered message takes effect again, and
	// nothing is written or read for it.
	Markers bool
	// RepeatSafe: the handlers may run again for a message that they have applied, for example because
	// they only replace values. Without Markers and without RepeatSafe, a runner that subscribes to a
	// broker warns once that redelivered messages take effect again.
	RepeatSafe bool
	// From is where a new projector begins to read the log. Zero means at the first event. It has
	// no effect once the projector has a checkpoint.
	From eventstore.From
	// BrokerOnly: events that the broker does not deliver are not read from the log. Without it, a
	// projector with Markers applies every event of its handlers that is in the log
	// (RunnerConfig.Log), whatever the topics of the subscription, and a new one begins at From.
	BrokerOnly bool
	// Ordered: a delivery brings the earlier events of its stream that are not applied yet, from
	// the log. Without it, an event that the broker lost is applied behind later ones of its
	// stream. It requires Markers and a log.
	Ordered bool
	// Segments is into how many segments the projector is split, if a runner reads it FromLog: shares of
	// the streams, at most 256. Runners with Segments in any number of processes each read a part of
	// them. Events of one stream stay in order; those of different streams are applied at the same time. The
	// number can be changed with any deployment: that of the runner that moves the checkpoint counts. A
	// runner without Segments reads none of them. Zero and 1 mean one reader.
	Segments int
	// Version is that of the handlers. Raise it when they write other rows than before. Runners with
	// different Versions feed different generations of the read model, if the newer one has
	// RebuildOnChange. Zero means 1.
	Version int
	// RebuildOnChange says how a runner rebuilds the read model if Version is higher than that of the
	// live one.
	RebuildOnChange RebuildHow
	// Tables are the names of the read model's tables, without a suffix (see Table), and with the
	// schema unless that is the default one: "reports.ratings". They are emptied before a rebuild in
	// place, unless there is OnReset. OnCreate creates them. They may refer to each other by foreign keys, in any
	// order of the list. A name has at most 63 bytes without its schema, with OnCreate 55: see Table.
	Tables []string
	// Parking is what happens to the messages behind a parked one.
	Parking Parking
	// SkipUnknown acks a message of an unregistered type, and stores nothing. Otherwise it is parked, and
	// applied once a runner has the type, so a producer may be deployed first. A message of a registered
	// type without a handler is always skipped.
	SkipUnknown bool
}

// Parking is what happens to the messages behind one that cannot be applied.
type Parking int

const (
	// ParkKey: later messages of its key are parked behind it, and applied in order after it is
	// applied or skipped. This holds for all handlers of the projector. A message without a key
	// holds back no other.
	ParkKey Parking = iota
	// ParkMessage: only the message itself is parked. Then the order in its key is not guaranteed.
	ParkMessage
	// Halt: like ParkKey. In addition, once a message is stuck the runner ends with ErrHalted,
	// and no runner starts until the message is replayed or skipped. This stops all projectors of
	// the runner: use a separate runner for this one.
	Halt
)
