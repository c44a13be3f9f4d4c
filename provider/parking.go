package provider

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Parking stores parked messages, as one queue per lane. Each method is a separate transaction.
type Parking interface {
	// Due returns the first messages of due lanes, by build and lane, the lanes in order of their due time: of each
	// one message, or up to f.Each if these are ClassHeld or ClassUnable. A lane whose first message is stuck is never
	// due. One whose first message is unable (Parked.IsUnable) is due if f.Needs has its need, and comes first.
	Due(ctx context.Context, f DueFilter) ([]Parked, error)

	// Needs returns what the first messages of lanes wait for, by the builds of after: each need of a build once, in
	// order, those after its Needs, at most MaxNeeds of a build. The cost grows with the number of needs, and not with that
	// of messages. It may return needs of other open messages too.
	Needs(ctx context.Context, after []Need) ([]Need, error)

	// Try counts an attempt at p, which Due has returned, and makes its lane due only after again has passed. So
	// no other runner tries it until then, and the attempt counts even if the process ends.
	//   - It returns false if p has changed since, its lane is not due, or another unit has its lane.
	//   - If p has limit attempts already, it returns false and p is stuck. A negative limit means no limit.
	Try(ctx context.Context, p Parked, limit int, again time.Duration) (bool, error)

	// Parked returns the messages that f selects in order of Seq. DueAt is that of the lane.
	Parked(ctx context.Context, f ParkedFilter) ([]Parked, error)

	// Decide changes the waiting and stuck messages that f selects, and returns their number. With StateWaiting
	// they are due now and their attempts are reset. With StateSkipped they are skipped, and the messages
	// behind them are due. d is stored with them unless it is zero. It returns the error of CheckDecision.
	Decide(ctx context.Context, f ParkedFilter, to ParkedState, d Decision) (int, error)
}

// Parked is a parked message (dead letter), with all that is needed to inspect and to apply it.
type Parked struct {
	Seq        int64  `json:"seq"` // the order of parking
	Projector  string `json:"projector"`
	Generation int    `json:"generation"`        // of the read model; see Build
	Handler    string `json:"handler,omitempty"` // the full name of the handler that failed, or ""
	// Handlers are the full names of those that must run. Empty: all of its type that have not applied it.
	Handlers  []string          `json:"handlers,omitempty"`
	MessageID string            `json:"message_id,omitempty"` // empty if the message had none
	Topic     string            `json:"topic,omitempty"`      // the topic of the delivery
	Key       string            `json:"key,omitempty"`        // its ordering key, or ""
	Lane      Lane              `json:"-"`                    // the lane that it holds until it is resolved
	Type      string            `json:"type,omitempty"`       // of its event, or ""
	Payload   []byte            `json:"payload,omitempty"`
	Headers   map[string]string `json:"headers,omitempty"`
	Class     Class             `json:"class"` // ClassHeld: the message has not failed, but waits behind an earlier one
	// Needs is what a program must have to apply it, one thing a line (see NeedEvent). Only of ClassUnable.
	Needs    string    `json:"needs,omitempty"`
	Code     string    `json:"code,omitempty"`    // a SQLSTATE or a word; see docs/operations.md
	Error    string    `json:"error,omitempty"`   // the text of the last error, with the stack of a panic; at most MaxParkedError bytes
	Attempts int       `json:"attempts"`          // attempts that failed or have begun, in any process
	Version  string    `json:"version,omitempty"` // projector.RunnerConfig.Version of the program that parked it or failed last
	At       time.Time `json:"at"`
	DueAt    time.Time `json:"due_at,omitzero"` // when a runner tries its lane again; zero if it waits for an operator, or is unable

	State      ParkedState `json:"state"`
	ResolvedAt time.Time   `json:"resolved_at,omitzero"` // when it was replayed or skipped
	Decision               // the last decision of an operator
}

// MaxParkedError is the most bytes of Parked.Error. Runners cut longer texts.
const MaxParkedError = 4096

// ParkedState is the state of a parked message.
type ParkedState int

const (
	StateWaiting  ParkedState = iota // a runner tries it again
	StateStuck                       // it waits for an operator
	StateReplayed                    // it was applied after the decision of an operator
	StateSkipped                     // an operator gave it up
)

var states = [...]string{"waiting", "stuck", "replayed", "skipped"}

func (s ParkedState) String() string { return wordOf(states[:], s, StateWaiting) }

// ParseParkedState is the inverse of ParkedState.String. Any other text is StateStuck.
func ParseParkedState(s string) ParkedState {
	if i := slices.Index(states[:], s); i >= 0 {
		return ParkedState(i)
	}
	return StateStuck
}

// MarshalText returns String.
func (s ParkedState) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText is ParseParkedState.
func (s *ParkedState) UnmarshalText(text []byte) error {
	*s = ParseParkedState(string(text))
	return nil
}

// ErrInput: an argument is invalid, and nothing was changed.
var ErrInput = errors.New("invalid input")

// IsOpen reports whether a message is waiting or stuck.
func (s ParkedState) IsOpen() bool { return s == StateWaiting || s == StateStuck }

// ParkedFilter selects parked messages. The zero filter selects all that are waiting or stuck.
type ParkedFilter struct {
	Projector string `json:"projector,omitempty"`
	// Generation is one of the projector's. Zero means all.
	Generation int           `json:"generation,omitempty"`
	Handler    string        `json:"handler,omitempty"` // the full name of the handler that failed: "balances/deposited"
	Key        string        `json:"key,omitempty"`
	Class      *Class        `json:"class,omitempty"`
	Code       string        `json:"code,omitempty"`
	Types      []string      `json:"types,omitzero"`  // event types; nil means all, empty means none
	States     []ParkedState `json:"states,omitzero"` // nil means waiting and stuck, empty means none
	Seqs       []int64       `json:"seqs,omitzero"`   // nil means all, empty means none
	After      int64         `json:"after,omitempty"` // only greater Seqs; for the next page, the last Seq of this one
	Limit      int           `json:"limit,omitempty"` // zero means 100 for Parking.Parked, and no limit for Parking.Decide
}

// InStates returns f.States, or waiting and stuck if it is nil.
func (f *ParkedFilter) InStates() []ParkedState {
	if f.States == nil {
		return []ParkedState{StateWaiting, StateStuck}
	}
	return f.States
}

// DueFilter selects the messages that Parking.Due returns.
type DueFilter struct {
	Builds []Build
	Lanes  []Lane // nil means all, empty means none
	Needs  []Need // those that the program has; Since does not count
	Keys   int    // the most lanes of each projector
	Each   int    // the most messages of a lane
}

// Decision is who decided, and why. The zero Decision is that of a runner; for tasks it is refused.
type Decision struct {
	By     string `json:"by,omitempty"`
	Reason string `json:"reason,omitempty"`
}

// Validate returns ErrInput unless By (at most 255 bytes) and Reason (at most 1000 bytes) are given, and not blank.
func (d Decision) Validate() error {
	if strings.TrimSpace(d.By) == "" || strings.TrimSpace(d.Reason) == "" || len(d.By) > 255 || len(d.Reason) > 1000 {
		return fmt.Errorf("%w: decision: By has %d bytes and Reason %d: give who decides (1 to 255) and why (1 to 1000), and not only spaces",
			ErrInput, len(d.By), len(d.Reason))
	}
	return nil
}

// CheckDecision returns ErrInput unless to is StateWaiting or StateSkipped, and d is zero or valid. If the text
// of d is not UTF-8 or has a NUL, the error is also an *eventstore.InvalidError.
func CheckDecision(to ParkedState, d Decision) error {
	if to != StateWaiting && to != StateSkipped {
		return fmt.Errorf("%w: a decision can make messages waiting or skipped, not %s", ErrInput, to)
	}
	if d == (Decision{}) {
		return nil
	}
	if err := d.Validate(); err != nil {
		return err
	}
	if err := cmp.Or(CheckStored("decision.by", d.By), CheckStored("decision.reason", d.Reason)); err != nil {
		return fmt.Errorf("%w: %w", ErrInput, err)
	}
	return nil
}

// Lane identifies a queue of messages that wait for each other: those of one ordering key, or a single one.
type Lane [sha256.Size]byte

// MarshalText returns the lane in hexadecimal.
func (l Lane) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, l[:]), nil }

// Scan implements sql.Scanner for []byte. Shorter values are padded with zeros, and longer ones cut.
func (l *Lane) Scan(src any) error {
	b, ok := src.([]byte)
	if !ok {
		return fmt.Errorf("lane: cannot scan %T: must be []byte", src)
	}
	*l = Lane{}
	copy(l[:], b)
	return nil
}

// LaneOfKey returns the lane of the messages with an ordering key.
func LaneOfKey(key string) Lane { return sha256.Sum256([]byte("key\x00" + key)) }

// LaneOfMessage returns the lane of a single message: it waits for no other, and no other waits for it.
func LaneOfMessage(id string) Lane { return sha256.Sum256([]byte("id\x00" + id)) }

// The functions below are the rules of parked messages, row by row, in a transaction. now is the store's time.

// Selects reports whether f selects p, apart from f.After and f.Limit.
func (f *ParkedFilter) Selects(p *Parked) bool {
	return slices.Contains(f.InStates(), p.State) &&
		(f.Projector == "" || p.Projector == f.Projector) &&
		(f.Generation == 0 || p.Generation == f.Generation) &&
		(f.Handler == "" || p.Handler == f.Handler) &&
		(f.Key == "" || p.Key == f.Key) &&
		(f.Class == nil || p.Class == *f.Class) &&
		(f.Code == "" || p.Code == f.Code) &&
		(f.Types == nil || slices.Contains(f.Types, p.Type)) &&
		(f.Seqs == nil || slices.Contains(f.Seqs, p.Seq))
}

// IsDue reports whether p, which is the first message of its lane, can be tried.
func (p *Parked) IsDue(now time.Time) bool { return !p.DueAt.IsZero() && !p.DueAt.After(now) }

// IsUnable reports whether p, while it waits, waits for a program that meets its needs. The class decides: a program that
// does not know Needs gives p another class and leaves its Needs. Without Needs, p has a due time as others do.
func (p *Parked) IsUnable() bool { return p.Class == ClassUnable && p.Needs != "" }

// has reports whether p waits, is unable, and f has its need.
func (f *DueFilter) has(p *Parked) bool {
	return p.State == StateWaiting && p.IsUnable() && slices.ContainsFunc(f.Needs, func(n Need) bool {
		return n.Projector == p.Projector && n.Number() == p.Generation && n.Needs == p.Needs
	})
}

// Due returns the messages of a build that f selects. firsts are those of all lanes, and lane returns the first n of one.
func (f *DueFilter) Due(firsts []Parked, lane func(first Parked, n int) []Parked, now time.Time) (due []Parked) {
	firsts = slices.DeleteFunc(firsts, func(p Parked) bool {
		return !p.IsDue(now) && !f.has(&p) || f.Lanes != nil && !slices.Contains(f.Lanes, p.Lane)
	})
	slices.SortStableFunc(firsts, func(a, b Parked) int { return a.DueAt.Compare(b.DueAt) })
	for _, first := range firsts[:min(f.Keys, len(firsts))] {
		for i, p := range lane(first, f.Each) {
			waits := p.Class == ClassHeld && p.State == StateWaiting || f.has(&p)
			if i == 0 || waits {
				p.DueAt = first.DueAt
				due = append(due, p)
			}
			if !waits {
				break
			}
		}
	}
	return due
}

// Try is the rule of Parking.Try. p is the first message of its lane. It returns whether p can be tried, and whether it changed.
func (p *Parked) Try(listed *Parked, limit int, again time.Duration, now time.Time) (ok, changed bool) {
	if !p.IsDue(now) || p.Seq != listed.Seq || !p.Unchanged(listed) {
		return false, false
	}
	if limit >= 0 && p.Attempts >= limit {
		p.Wait(-1, now)
		return false, true
	}
	p.Attempts++
	p.Wait(again, now)
	return true, true
}

// Wait makes p wait for this time from now, once it is the first of its lane. A negative time makes it stuck. One
// that is unable waits without a due time.
func (p *Parked) Wait(after time.Duration, now time.Time) {
	p.State, p.DueAt = StateWaiting, now.Add(after)
	if after < 0 {
		p.State = StateStuck
	}
	if after < 0 || p.IsUnable() {
		p.DueAt = time.Time{}
	}
}

// Fail gives p what a unit has set in an Aside.
func (p *Parked) Fail(as Parked) {
	p.Class, p.Needs, p.Code, p.Error = as.Class, as.Needs, as.Code, as.Error
	p.Attempts, p.Handler, p.Version = as.Attempts, as.Handler, as.Version
	if len(as.Handlers) > 0 {
		p.Handlers = slices.Clone(as.Handlers)
	}
}

// AddHandlers adds the handlers of a delivery to those of the same message, which is parked.
func (p *Parked) AddHandlers(handlers []string) {
	isThere := func(handler string) bool { return slices.Contains(p.Handlers, handler) }
	p.Handlers = slices.Concat(p.Handlers, slices.DeleteFunc(slices.Clone(handlers), isThere))
}
