package provider

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// Survey is what a store has. Numbers are exact up to the limit. Times are on the store's clock, UTC.
type Survey struct {
	Now      time.Time
	Head     LogPlace     // the last visible event
	Settled  int64        // no event at or before it is missing
	Waiting  []OpenAppend // what keeps Settled behind Head
	Builds   []SurveyedBuild
	Stuck    []StuckLane // the first of each projector, at most 10
	Entries  []EntryCount
	Tasks    []TaskCount
	DueTasks []DueTask // of each kind that has a task that is due, the first one
	Services []ServiceReport
	Leases   []NamedLease
	InFlight map[string]int64 // messages in flight, by the id of their runner
	Waits    []Wait
}

// Count is a number of rows. AtLeast: there are more than were counted.
type Count struct {
	N       int64 `json:"n"`
	AtLeast bool  `json:"at_least,omitempty"`
}

// SurveyedBuild is a generation of a projector that has a checkpoint or parked messages.
type SurveyedBuild struct {
	Build
	Checkpoint Checkpoint
	Parked     Count     // messages that are waiting or stuck
	Lanes      Count     // keys with such messages
	StuckLanes Count     // keys that wait for an operator
	Oldest     time.Time // when the first of Parked was parked; zero if there is none
}

// StuckLane is a key that waits for an operator.
type StuckLane struct {
	First  Parked // the message that is stuck, without Payload and Headers
	Behind Count  // messages that wait behind it
}

// EntryCount is the number of entries with a status. Published and skipped entries are not counted.
type EntryCount = HeldCount[EntryStatus]

// TaskCount is the number of tasks with a status. Done and undone tasks are not counted.
type TaskCount = HeldCount[TaskStatus]

// HeldCount is the number of rows with a status and a holder.
type HeldCount[Status ~string] struct {
	Status Status `json:"status"`
	Holder string `json:"holder,omitempty"` // of claimed rows
	Count
	Oldest time.Time `json:"oldest"`         // when the first was created
	Until  time.Time `json:"until,omitzero"` // of claimed rows: the end of the last lease
}

// DueTask is the first task of a kind that is due.
type DueTask struct {
	Kind string    `json:"kind"`
	Due  time.Time `json:"due"`
}

// NamedLease is a lease on a name. It has expired if ExpiresAt is in the past.
type NamedLease struct {
	Name      string    `json:"name"`
	Holder    string    `json:"holder"`
	ExpiresAt time.Time `json:"expires_at"`
}

// Wait is a transaction that others wait for.
type Wait struct {
	What    string  `json:"what"` // "append": readers of the log wait; "lock": Waiter waits for a lock
	Blocker Backend `json:"blocker"`
	Waiter  Backend `json:"waiter,omitzero"`
}

// Backend is a session of the server, or a prepared transaction.
type Backend struct {
	Name        string    `json:"name"` // the server's name of it, such as the pid
	Application string    `json:"application,omitempty"`
	User        string    `json:"user,omitempty"`
	State       string    `json:"state,omitempty"`
	Query       string    `json:"query,omitempty"` // the last statement, which may have data
	Since       time.Time `json:"since,omitzero"`  // the begin of its transaction; of a Waiter, of its wait. Zero: hidden from this role
	End         string    `json:"end,omitempty"`   // the statement that ends it
	Transaction string    `json:"-"`               // the server's name of its transaction, of a Blocker of "append"
}

// Urgency of a Finding: a smaller one comes first.
type Urgency int

// The checks of a diagnosis, the most urgent first.
const (
	FindingWait Urgency = iota + 1
	FindingGone
	FindingPaused
	FindingRebuild
	FindingParked
	FindingLag
	FindingSnapshot
	FindingSchema
	FindingRights
	FindingPooler
	FindingClock
	FindingSequence
	FindingAbandoned
)

var findingNames = []string{
	"", "wait", "gone", "paused", "rebuild", "parked", "lag", "snapshot", "schema", "rights", "pooler", "clock", "sequence", "abandoned",
}

// Checks returns all checks, the most urgent first.
func Checks() (all []Urgency) {
	for u := FindingWait; u <= FindingAbandoned; u++ {
		all = append(all, u)
	}
	return all
}

// String returns the name of the check: "wait" for FindingWait.
func (u Urgency) String() string {
	if u > 0 && int(u) < len(findingNames) {
		return findingNames[u]
	}
	return fmt.Sprintf("Urgency(%d)", int(u))
}

// MarshalText returns the name of the check.
func (u Urgency) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// UnmarshalText reads the name of a check.
func (u *Urgency) UnmarshalText(text []byte) error {
	i := slices.Index(findingNames, string(text))
	if i < 1 {
		return fmt.Errorf("%w: %q is no check", ErrInput, text)
	}
	*u = Urgency(i)
	return nil
}

// Finding is something that is wrong.
type Finding struct {
	Check   Urgency  `json:"check"`
	Title   string   `json:"title"`
	Meaning string   `json:"meaning"`
	Facts   []Fact   `json:"facts,omitempty"`
	Remedy  []string `json:"remedy"`            // lines to copy
	Blocks  bool     `json:"blocks,omitempty"`  // the other checks were left out: they cannot be made before this is repaired
	Private []Fact   `json:"private,omitempty"` // what may be data of users, such as the text of a statement
	Cause   string   `json:"cause,omitempty"`   // of FindingWait and FindingSnapshot: Backend.Name
}

// Diagnosis is what is wrong, and what could not be checked.
type Diagnosis struct {
	Findings  []Finding   `json:"findings"`
	Unchecked []Unchecked `json:"unchecked"`
}

// Unchecked is something that a diagnosis could not look at.
type Unchecked struct {
	What   string   `json:"what"`
	Why    string   `json:"why"`
	Remedy []string `json:"remedy"` // what would let it look: lines to copy
}

// Blocks reports whether one of the findings left checks out.
func (d *Diagnosis) Blocks() bool {
	return slices.ContainsFunc(d.Findings, func(f Finding) bool { return f.Blocks })
}

// Fact is a named fact of a finding.
type Fact struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// DiagnosisLimits say from when on something is a finding. Zero means the default.
type DiagnosisLimits struct {
	OpenTransaction time.Duration // how long a transaction may keep others waiting; zero means 5s
	Snapshot        time.Duration // how long a transaction may keep dead rows; zero means 10m
	Lag             time.Duration // how old the first event that is not applied may be; zero means 30s
	Watch           time.Duration // how long a lag is watched, to see whether it grows; zero means 2s
	Skew            time.Duration // how much clocks may differ; zero means 2s
}

// WithDefaults returns l with its zero fields filled in.
func (l DiagnosisLimits) WithDefaults() DiagnosisLimits {
	for _, d := range []struct {
		of  *time.Duration
		def time.Duration
	}{{&l.OpenTransaction, 5 * time.Second}, {&l.Snapshot, 10 * time.Minute}, {&l.Lag, 30 * time.Second}, {&l.Watch, 2 * time.Second}, {&l.Skew, 2 * time.Second}} {
		if *d.of <= 0 {
			*d.of = d.def
		}
	}
	return l
}

// Diagnoser is a capability of a provider: the checks that depend on its server, without migrated tables.
type Diagnoser interface {
	// Diagnose returns what is wrong with the server, the roles and the way to it, in any order, and changes nothing.
	Diagnose(ctx context.Context, l DiagnosisLimits) (Diagnosis, error)
}
