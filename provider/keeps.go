package provider

import "encoding/json"

// Keeps lists what Units.Do can commit together with the writes of handlers.
type Keeps struct {
	// Atomic: a unit that fails has no effect. If false, the messages of a unit are applied one after
	// another, and a unit that fails may have applied some of them. Their markers show which. Without
	// markers, MessageError.Others does.
	Atomic  bool
	Markers bool // markers of Message.Mark
	Output  bool // Closing.Output
	DryRun  bool // Unit.DryRun is supported
	Tables  bool // Unit.Switch can rename, show and compare tables
	Reset   bool // Unit.Switch can empty tables
}

// Change is a row that a dry run inserted (no Before), updated, or deleted (no After).
type Change struct {
	Table  string          `json:"table"`            // with its schema unless that is the default schema
	Before json.RawMessage `json:"before,omitempty"` // an object of the columns
	After  json.RawMessage `json:"after,omitempty"`
}
