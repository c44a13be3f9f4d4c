package provider

import "encoding/json"

// Keeps says what Units.Do commits together with what handlers write.
type Keeps struct {
	// Atomic: a unit that fails has no effect. Without it runners make units of one message.
	Atomic  bool
	Markers bool
	Output  bool // Closing.Output
	DryRun  bool // Unit.DryRun is possible
}

// Change is a row that a dry run inserted (no Before), changed, or deleted (no After).
type Change struct {
	Table  string          // with its schema unless that is the usual one
	Before json.RawMessage // an object of its columns
	After  json.RawMessage
}
