package provider

import "encoding/json"

// The verbs of acts that runners take up. The Kind is PauseProjector, and the Name that of the
// projector.
const (
	VerbDryRun = "dry-run" // Detail is a DryRunRequest, Outcome a DryRunReport
	VerbVerify = "verify"  // Detail is a VerifyRequest, Outcome a VerifyReport
)

// DryRunRequest asks a runner for a dry run of parked messages.
type DryRunRequest struct {
	Filter ParkedFilter `json:"filter"`
}

// VerifyRequest asks a runner to compare a read model with the log.
type VerifyRequest struct {
	Ignore []string `json:"ignore,omitempty"` // columns that are not compared
	Limit  int      `json:"limit,omitempty"`  // the most differences; zero means 1000
	Rate   int      `json:"rate,omitempty"`   // the most events per second; zero means no limit
	Repair bool     `json:"repair,omitempty"` // by the decision of the act
}

// DryRunReport is the outcome of a dry run.
type DryRunReport struct {
	Error    string          `json:"error,omitempty"` // why there is no result
	Messages int             `json:"messages"`        // that would be applied
	Waiting  int             `json:"waiting"`         // behind one that fails or was not selected
	Failures []DryRunFailure `json:"failures,omitempty"`
	Changes  []Change        `json:"changes,omitempty"`
	Output   []DryRunOutput  `json:"output,omitempty"`
	Cut      bool            `json:"cut,omitempty"` // it was longer than MaxActBytes: the rest is left out
}

// DryRunFailure is a message that would fail.
type DryRunFailure struct {
	Seq   int64  `json:"seq"`
	Class Class  `json:"class"`
	Code  string `json:"code,omitempty"`
	Error string `json:"error"` // may have data of users
}

// DryRunOutput is a message that a handler would send.
type DryRunOutput struct {
	Topic string `json:"topic"`
	ID    string `json:"id"`
	Key   string `json:"key,omitempty"`
}

// VerifyReport is the outcome of a verification.
type VerifyReport struct {
	Error       string       `json:"error,omitempty"`    // why there is no result
	Position    int64        `json:"position"`           // the checkpoint at which both were compared
	Events      int64        `json:"events"`             // that were applied to the new tables
	Parked      int          `json:"parked"`             // messages that failed there
	Differences []Difference `json:"differences"`        // at most VerifyRequest.Limit
	Repaired    int          `json:"repaired,omitempty"` // rows
	Cut         bool         `json:"cut,omitempty"`      // it was longer than MaxActBytes: the rest is left out
}

// Outcome returns the report as JSON of at most MaxActBytes. What does not fit is left out.
func (r DryRunReport) Outcome() json.RawMessage {
	return fitting(&r, func() bool {
		r.Cut = true
		if n := len(r.Changes); n > 0 {
			r.Changes = r.Changes[:n/2]
			return true
		}
		r.Failures, r.Output = r.Failures[:len(r.Failures)/2], r.Output[:len(r.Output)/2]
		return len(r.Failures)+len(r.Output) > 0
	})
}

// Outcome returns the report as JSON of at most MaxActBytes. What does not fit is left out.
func (r VerifyReport) Outcome() json.RawMessage {
	return fitting(&r, func() bool {
		n := len(r.Differences)
		r.Cut, r.Differences = true, r.Differences[:n/2]
		return n > 0
	})
}

// fitting returns a report as JSON. While it is too long, it calls shorten, which returns false if nothing is left to leave out.
func fitting(report any, shorten func() bool) json.RawMessage {
	for {
		text, err := json.Marshal(report)
		if err == nil && len(text) <= MaxActBytes {
			return text
		}
		if !shorten() {
			return json.RawMessage(`{"cut":true}`)
		}
	}
}
