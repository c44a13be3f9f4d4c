package projector

// Options configure a projector; the zero value is the default.
type Options struct {
	// Markers makes each handler's effect happen once for each message (an idempotent projector), by a marker in the
	// transaction of the effect. Without it nothing is written or read for that, and a redelivered message takes
	// effect again.
	Markers bool
	// Parking says what happens to the messages behind one that is parked.
	Parking Parking
	// Unknown says what happens to a message of an unregistered type. Messages of a registered type that no handler
	// takes are skipped.
	Unknown Unknown
}

// Parking says what happens to the messages behind one that cannot be applied.
type Parking int

const (
	// ParkKey: later messages of its key are parked behind it, and applied in order once it is applied or skipped.
	// It holds for all handlers of the projector. A message without a key holds back nothing.
	ParkKey Parking = iota
	// ParkMessage: it is parked alone. Then no order is promised for its key.
	ParkMessage
	// Halt: as ParkKey; and once a message is stuck, the runner ends with ErrHalted, and does not start until the
	// message is replayed or skipped. That stops all projectors of the runner: give this one a runner of its own.
	Halt
)

// Unknown says what happens to a message of an unregistered type.
type Unknown int

const (
	ParkUnknown Unknown = iota // it is parked, as a producer may be deployed first, and applied once a runner knows the type
	SkipUnknown                // it is acked and forgotten
)
