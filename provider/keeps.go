package provider

import "encoding/json"

// Keeps lists what Units.Do can commit together with the writes of handlers.
type Keeps struct {
	Atomic  bool // a unit that fails has no effect; if false, units have one message
	Markers bool // markers of Message.Mark
	Output  bool // Closing.Output
	DryRun  bool // Unit.DryRun is supported
	Tables  bool // Unit.Switch can reset, rename, show and compare tables
}

// Change is a row that a dry run inserted (no Before), updated, or deleted (no After).
type Change struct {
	Table  string          // with its schema unless that is the default schema
	Before json.RawMessage // an object of the columns
	After  json.RawMessage
}
