package provider

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"time"
)

// Operations is a capability of a provider: what tools for operators read, and the records of what they do.
type Operations interface {
	Registry
	Acts
	// Survey returns what is stored, as far as limit rows of each kind show it. Its cost does not
	// depend on the number of events, entries, parked messages and tasks.
	Survey(ctx context.Context, limit int) (Survey, error)
	// Streams lists streams in order of their ids.
	Streams(ctx context.Context, f StreamFilter) ([]Stream, error)
	// SchemaVersion returns the version of the tables, 0 if there are none, and the one that this program
	// knows. It needs no right except on the table of the versions.
	SchemaVersion(ctx context.Context) (database, program int64, err error)
}

// StreamFilter selects streams. The zero filter selects all. CheckStreamFilter says what is invalid.
type StreamFilter struct {
	Category string // the part of the id before the first "-"
	After    string // only greater ids; for the next page, the last ID of this one
	Limit    int    // zero means 100
}

// CheckStreamFilter checks the texts of a filter.
func CheckStreamFilter(f StreamFilter) error {
	return cmp.Or(CheckStorable("filter.Category", f.Category), CheckStorable("filter.After", f.After))
}

// Stream is a stream in a list.
type Stream struct {
	ID      string `json:"id"`
	Version int64  `json:"version"` // the number of its events
}

// OperationsOf returns the Operations of a store, or those of the second store of Combine; else nil.
func OperationsOf(store any) Operations {
	if pair, ok := store.(interface{ recorder() any }); ok {
		store = pair.recorder()
	}
	o, _ := store.(Operations)
	return o
}

// Registry records which services are alive, and what is paused. Each method is a separate transaction.
type Registry interface {
	// Report records that a service is alive until lease from now, on the store's clock. A lease of
	// zero records a clean end: the row is deleted. Rows of other services are deleted when their
	// leases ended longer than ReportKept ago. A crash of the database may lose the rows.
	Report(ctx context.Context, r ServiceReport, lease time.Duration) error
	// Services returns the services that are alive, at most MaxServices.
	Services(ctx context.Context) ([]ServiceReport, error)
	// Pauses returns what is paused, in order of kind and name.
	Pauses(ctx context.Context) ([]Pause, error)
	// SetPause pauses p, or resumes it if paused is false, and adds an Act, which is done. It returns false,
	// and changes nothing, if that is so already. It returns the error of CheckPause.
	SetPause(ctx context.Context, p Pause, paused bool) (bool, error)
}

// Limits of the reports of services.
const (
	ReportKept  = time.Hour // how long one is kept after the service ended without a clean end
	MaxServices = 1000      // that Registry.Services returns
)

// ServiceReport is what a service reports about itself.
type ServiceReport struct {
	ID      string       `json:"id"`
	Kind    string       `json:"kind"`    // "relay", "runner" or "worker"
	Holder  string       `json:"holder"`  // its name in claims and leases
	Process string       `json:"process"` // host and process id
	Version string       `json:"version,omitempty"`
	Can     []Capability `json:"can,omitempty"`   // of a runner: by projector
	Kinds   []string     `json:"kinds,omitempty"` // of a worker: the kinds of tasks and of groups that it defines, sorted
	Outages []Outage     `json:"outages,omitempty"`
	// Clock is the time of the service when it sent the report. In a Survey it is Skew: how far that clock
	// was ahead of the store's when the report arrived, the way to the store included.
	Clock time.Time     `json:"-"`
	Skew  time.Duration `json:"skew_ns"`
	// On the store's clock; set by the store.
	StartedAt time.Time `json:"started_at"`
	SeenAt    time.Time `json:"seen_at"`
	ExpiresAt time.Time `json:"expires_at"` // in the past: it ended without a clean end
}

// Capability is what a runner can do for a projector.
type Capability struct {
	Projector string   `json:"projector"`
	Version   int      `json:"version"` // projector.Options.Version
	Has       []string `json:"has"`     // of what messages may need (Parked.Needs), sorted
}

// Capability returns what a service can do for a projector, or nil if it does not apply its messages.
func (r *ServiceReport) Capability(projector string) *Capability {
	for i := range r.Can {
		if r.Can[i].Projector == projector {
			return &r.Can[i]
		}
	}
	return nil
}

// Serves reports whether a runner applies messages to a projector.
func (r *ServiceReport) Serves(projector string) bool { return r.Capability(projector) != nil }

// Defines reports whether a worker defines all these kinds.
func (r *ServiceReport) Defines(kinds ...string) bool {
	return r.Kind == "worker" && !slices.ContainsFunc(kinds, func(kind string) bool { return !slices.Contains(r.Kinds, kind) })
}

// Served names what a service works for: a projector and, unless it is 1, its version; or a kind of tasks or of groups.
func (r *ServiceReport) Served() (names []string) {
	for _, c := range r.Can {
		name := c.Projector
		if c.Version > 1 {
			name += fmt.Sprintf(" (version %d)", c.Version)
		}
		names = append(names, name)
	}
	return append(names, r.Kinds...)
}

// Outage is why a service waits by itself: a relay claims no entries of a topic while every publish fails, and a worker
// of a runner waits before its next message after three in a row that failed for one cause that may pass.
type Outage struct {
	Topic     string    `json:"topic,omitempty"`     // of a relay
	Projector string    `json:"projector,omitempty"` // of a runner
	Handler   string    `json:"handler,omitempty"`   // of a runner: the one that failed; it may be unknown
	Class     string    `json:"class"`               // of the last error
	Code      string    `json:"code,omitempty"`      // of a runner: that of the last error
	Until     time.Time `json:"until"`               // when the next one is tried, on the service's clock
}

// What can be paused.
const (
	PauseProjector = "projector" // runners apply nothing to it
	PauseTopic     = "topic"     // relays claim none of its entries
)

// Pause is a projector or a topic that a person has paused.
type Pause struct {
	Kind string    `json:"kind"` // PauseProjector or PauseTopic
	Name string    `json:"name"`
	At   time.Time `json:"at"`
	Decision
}

// CheckPause returns ErrInput for a pause that no store can have.
func CheckPause(p Pause) error {
	if p.Kind != PauseProjector && p.Kind != PauseTopic || p.Name == "" || len(p.Name) > MaxIDBytes {
		return fmt.Errorf("%w: pause.Kind is %q and Name has %d bytes: use a constant, and a name of 1 to %d bytes", ErrInput, p.Kind, len(p.Name), MaxIDBytes)
	}
	return cmp.Or(CheckStorable("pause.Name", p.Name), checkDecision(p.Decision))
}

func checkDecision(d Decision) error { return cmp.Or(d.Validate(), CheckDecision(StateWaiting, d)) }

// Acts stores what operators did, and requests that services take up. What has a record of its own
// (parked messages, tasks, generations) is not stored here. Each method is a separate transaction.
type Acts interface {
	// AddAct stores an act, and returns its number, or the error of CheckAct. In the same transaction it
	// deletes at most 100 acts that ended longer than ActsKept ago.
	AddAct(ctx context.Context, a Act) (int64, error)
	// Acts returns the acts that f selects, the newest first.
	Acts(ctx context.Context, f ActFilter) ([]Act, error)
	// TakeAct takes a requested act, or a running one whose lease ended, for lease. It returns false for another one.
	TakeAct(ctx context.Context, id int64, holder string, lease time.Duration) (bool, error)
	// ChangeAct stores the progress of a running act and renews its lease, or ends the act as done or failed.
	// It returns false, and changes nothing, if the holder does not have the act any more.
	ChangeAct(ctx context.Context, id int64, holder string, c ActChange, lease time.Duration) (bool, error)
	// CancelAct cancels a requested or running act. It returns false if it is over.
	CancelAct(ctx context.Context, id int64, d Decision) (bool, error)
}

// Limits of acts.
const (
	ActsKept    = 90 * 24 * time.Hour // how long they are kept after their end
	MaxActBytes = 1 << 20             // of Act.Detail, and of Act.Outcome
)

// ActState is the state of an act.
type ActState string

// The states of an act.
const (
	ActRequested ActState = "requested" // no service has taken it up
	ActRunning   ActState = "running"
	ActDone      ActState = "done"
	ActFailed    ActState = "failed"
	ActCanceled  ActState = "canceled"
)

// IsOver reports whether the act never changes again.
func (s ActState) IsOver() bool { return s != ActRequested && s != ActRunning }

// Act is something that an operator did or asked for.
type Act struct {
	ID   int64  `json:"id"`
	Verb string `json:"verb"` // "pause", "resume", "requeue", "skip", "prune", "drop", "verify", "dry-run", "forget", "release"
	// Kind and Name are the target: "projector", "topic" and its name, "outbox", "markers" and a projector or handlers.
	Kind string `json:"kind"`
	Name string `json:"name"`
	Decision
	Detail    json.RawMessage `json:"detail,omitempty"` // what exactly: a JSON object
	State     ActState        `json:"state"`
	Holder    string          `json:"holder,omitempty"` // of a running act
	Applied   int64           `json:"applied,omitempty"`
	Total     int64           `json:"total,omitempty"`
	Outcome   json.RawMessage `json:"outcome,omitempty"` // of an act that is over: a JSON object
	At        time.Time       `json:"at"`
	ExpiresAt time.Time       `json:"expires_at,omitzero"` // the end of the lease of a running act
	EndedAt   time.Time       `json:"ended_at,omitzero"`
}

// ActChange is a change of a running act.
type ActChange struct {
	State          ActState // ActRunning, ActDone or ActFailed
	Applied, Total int64
	Outcome        json.RawMessage // stored if the act is over
}

// ActFilter selects acts. The zero filter selects all.
type ActFilter struct {
	IDs    []int64 // nil means all, empty means none
	Verbs  []string
	Kind   string
	Name   string
	States []ActState
	Before int64 // only smaller numbers; for the next page, the last ID of this one
	Limit  int   // zero means 100
}

// WithDefaults returns f with Before and Limit filled in.
func (f ActFilter) WithDefaults() ActFilter {
	if f.Before <= 0 {
		f.Before = math.MaxInt64
	}
	if f.Limit <= 0 {
		f.Limit = 100
	}
	return f
}

// OnlyOpen reports whether f selects only acts that are not over. Providers find these without reading others.
func (f ActFilter) OnlyOpen() bool {
	return len(f.States) > 0 && !slices.ContainsFunc(f.States, ActState.IsOver)
}

// CheckAct returns ErrInput for an act without a Verb, in another state than requested and done, or with an
// invalid Decision, and an *eventstore.InvalidError for a Detail that is not JSON or is longer than MaxActBytes.
func CheckAct(a Act) error {
	if a.Verb == "" || a.State != ActRequested && a.State != ActDone {
		return fmt.Errorf("%w: act.Verb is %q and State %q: give a verb, and requested or done", ErrInput, a.Verb, a.State)
	}
	if err := checkDecision(a.Decision); err != nil {
		return err
	}
	if err := cmp.Or(CheckStorable("act.Verb", a.Verb), CheckStorable("act.Kind", a.Kind), CheckStorable("act.Name", a.Name)); err != nil {
		return fmt.Errorf("%w: %w", ErrInput, err)
	}
	return checkActJSON("act.Detail", a.Detail)
}

// CheckActChange returns an error for a change that Acts.ChangeAct refuses.
func CheckActChange(c ActChange) error {
	if c.State != ActRunning && c.State != ActDone && c.State != ActFailed {
		return fmt.Errorf("%w: act.State is %q: a service can set running, done and failed", ErrInput, c.State)
	}
	return checkActJSON("act.Outcome", c.Outcome)
}

func checkActJSON(field string, text json.RawMessage) error {
	if len(text) == 0 {
		return nil
	}
	return CheckJSON(field, text, MaxActBytes)
}

// The verbs of acts that runners take up. The Kind is PauseProjector.
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
