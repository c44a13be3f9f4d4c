package provider

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// Build identifies a generation of a read model: each rebuild creates one, with its own checkpoint, markers, parked
// messages and held lanes. The first is 1. Zero means the live one in Progress and Records, and 1 everywhere else.
type Build struct {
	Projector  string
	Generation int
}

// Number returns the generation, and 1 if it is zero.
func (b Build) Number() int { return max(b.Generation, 1) }

// String returns the projector's name, and the number of a later generation: "ratings@2". Leases have it in their names.
func (b Build) String() string {
	if b.Number() == 1 {
		return b.Projector
	}
	return b.Projector + "@" + strconv.Itoa(b.Generation)
}

// Builds stores which generations of read models exist, and which one is live. Each method is a separate
// transaction. A projector without rows has one generation: 1, which is live.
type Builds interface {
	// Generations returns the generations of a projector, or of all if its name is empty, in order of projector and number.
	Generations(ctx context.Context, projector string) ([]Generation, error)

	// SetGeneration stores generations of one projector, and adds one to the Revision of each. It returns false, and
	// changes nothing, if:
	//   - A Revision is not that of the stored row. A row that does not exist has Revision 0.
	//   - A stored generation is retired, and would not be.
	//   - Two generations of the projector would be live, or two would be requested or being built.
	//
	// In the same transaction it changes the checkpoint of a generation if the State is new: with GenerationStandby
	// its mode becomes ModeCatchUp and the tokens of it and its segments zero; with GenerationRetired its mode
	// becomes ModeEnded, and it is created if there is none, so that no unit of the generation can begin.
	SetGeneration(ctx context.Context, all ...Generation) (bool, error)

	// Unlogged returns the ids of messages of which a handler has a marker without a position: at most limit, in an order of
	// the store, those behind after. An id that markers do not have as it is, such as a long one, has another form.
	Unlogged(ctx context.Context, b Build, handler, after string, limit int) ([]string, error)

	// ClearGeneration deletes at most limit rows of a retired generation: markers of handlers, and parked messages with
	// their lanes. It returns their number. If no row is left it drops tables that exist, and the view of each that shows it, and
	// returns zero. The generation and its checkpoint stay. It returns ErrInput if the generation is not retired. The error
	// has CodeReferenced if another table has a foreign key to one of tables, or on PostgreSQL another view reads one.
	ClearGeneration(ctx context.Context, b Build, handlers []string, tables []TablePair, limit int) (int, error)
}

// Generation is a generation of a projector's read model.
type Generation struct {
	Build
	Revision  int64 // the number of changes of the row
	State     GenerationState
	Data      json.RawMessage // a JSON object of package projector
	CreatedAt time.Time       // on the store's clock, as ChangedAt
	ChangedAt time.Time       // when State changed last
}

// GenerationState is what a generation is for.
type GenerationState string

// The states of a generation. A projector has at most one live generation, and one that is requested or building.
const (
	GenerationRequested GenerationState = "requested" // no runner has taken the request up
	GenerationBuilding  GenerationState = "building"  // its reader applies the events of the log
	GenerationLive      GenerationState = "live"      // readers of the read model see it
	GenerationStandby   GenerationState = "standby"   // it was live, and is kept for a rollback
	GenerationRetired   GenerationState = "retired"   // it takes no more units, and its rows are deleted
)

// CheckGeneration returns an error for generations that SetGeneration cannot store.
func CheckGeneration(all ...Generation) error {
	if len(all) == 0 {
		return fmt.Errorf("%w: no generation is given", ErrInput)
	}
	for i, g := range all {
		isSame := func(o Generation) bool { return o.Build == g.Build }
		if g.Projector != all[0].Projector || slices.ContainsFunc(all[:i], isSame) {
			return fmt.Errorf("%w: generation %s: give each generation of one projector once", ErrInput, g.Build)
		}
		if err := checkGeneration(g); err != nil {
			return err
		}
	}
	return nil
}

func checkGeneration(g Generation) error {
	if err := CheckStorable("projector", g.Projector); err != nil {
		return err
	}
	switch g.State {
	case GenerationRequested, GenerationBuilding, GenerationLive, GenerationStandby, GenerationRetired:
	default:
		return fmt.Errorf("%w: generation.State is %q: use the constants", ErrInput, g.State)
	}
	if g.Generation < 1 || g.Revision < 0 {
		return fmt.Errorf("%w: generation.Generation is %d and Revision %d: they must be at least 1 and 0", ErrInput, g.Generation, g.Revision)
	}
	if len(g.Data) > 0 {
		return CheckJSON("generation.Data", g.Data, 0)
	}
	return nil
}

// LiveGeneration returns the number of the live generation of one projector's generations.
func LiveGeneration(all []Generation) int {
	for _, g := range all {
		if g.State == GenerationLive {
			return g.Generation
		}
	}
	return 1
}

// CanSet reports whether SetGeneration, or Switch.Set, can store set if a projector has the generations stored.
func CanSet(stored []Generation, set ...Generation) bool {
	after := make(map[int]Generation, len(stored)+len(set))
	for _, g := range stored {
		after[g.Generation] = g
	}
	for _, g := range set {
		was := after[g.Generation]
		if was.Revision != g.Revision || was.State == GenerationRetired && g.State != GenerationRetired {
			return false
		}
		g.Revision++
		after[g.Generation] = g
	}
	live, next := 0, 0
	for _, g := range after {
		switch g.State {
		case GenerationLive:
			live++
		case GenerationRequested, GenerationBuilding:
			next++
		case GenerationStandby, GenerationRetired:
		}
	}
	return live <= 1 && next <= 1
}

// Switch makes a unit change which generation is live, or compare two generations, in these steps:
//   - It waits until no other unit of the projector is open, in any generation. After a second the error is
//     ClassTransient with CodeBusy. Units that open later wait for it. With Snapshot neither waits.
//   - It compares Set with the stored generations (ErrFenced).
//   - It calls Last, and opens the unit with the messages that Last returned.
//   - It empties the tables of Reset, and calls run, which must not park messages.
//   - It checks Create, renames, shows and compares tables, stores Set, and commits, or with Snapshot rolls back.
//
// Unit.Once must be set, and Unit.Messages must be empty. The tables need Keeps.Tables.
type Switch struct {
	Snapshot bool // see the whole store as of one moment, and the unit's own writes, and roll back
	// Last returns the messages of the unit; nil means none. Until the unit ends, live does not change.
	Last func(ctx context.Context, live Live) ([]Message, error)
	// Set are generations to store together, as SetGeneration does: one can become live when another ceases to be.
	Set []Generation
	// Create are the tables of a new generation, which run creates: "ratings_g2". The error has CodeReferenced if one
	// has a foreign key to a table of another generation, if another table has one to them or to a table that would
	// be renamed when this generation becomes live, or if the store could never delete their rows.
	Create []string
	// Reset are tables to empty. The error has CodeReferenced if another table has a foreign key to one of them.
	Reset []string
	// Rename are tables to rename before the views are created, if they exist and are not views. The error has
	// CodeReferenced if another table has a foreign key to one of them.
	Rename []TablePair
	// Show are views to create or to replace. Who could read the view, or the table of its name, can read the new one.
	Show    []TablePair
	Compare *Comparison // if not nil, compare tables
}

// OpenSwitch does the second and the third step. stored are the generations of the projector, and live reads one.
func (u *Unit) OpenSwitch(ctx context.Context, stored []Generation, live func(context.Context, Build) (Live, error)) error {
	if !CanSet(stored, u.Switch.Set...) {
		return &Error{Class: ClassTransient, Code: CodeFenced, Err: ErrFenced}
	}
	if u.Switch.Last == nil {
		return nil
	}
	is, err := live(ctx, Build{Projector: u.Projector, Generation: LiveGeneration(stored)})
	if err == nil {
		u.Messages, err = u.Switch.Last(ctx, is)
	}
	if err == nil && slices.ContainsFunc(u.Messages, func(m Message) bool { return m.Parked != nil }) {
		err = invalidInput("switch.Last returned a parked message: it must return events")
	}
	return err
}

// SwitchSteps are the steps of a unit with Switch that follow run, as a store does them.
type SwitchSteps struct {
	Rename, Show func(TablePair) error
	Compare      func(*Comparison) error
	Set          func([]Generation) error
}

// CheckClosing returns an error if u has Switch and run has parked messages.
func (u *Unit) CheckClosing(c *Closing) error {
	if u.Switch != nil && len(c.Park) > 0 {
		return invalidInput("a handler parked a message in a unit with Switch")
	}
	return nil
}

// Finish does the steps that follow run and the closing, in their order. The store checks Create and Rename before.
func (s *Switch) Finish(do SwitchSteps) error {
	for _, p := range s.Rename {
		if err := do.Rename(p); err != nil {
			return err
		}
	}
	for _, p := range s.Show {
		if err := do.Show(p); err != nil {
			return err
		}
	}
	if s.Compare != nil {
		if err := do.Compare(s.Compare); err != nil {
			return err
		}
	}
	if len(s.Set) == 0 || s.Snapshot {
		return nil
	}
	return do.Set(s.Set)
}

// invalidInput is an error that no retry can help, and an ErrInput.
func invalidInput(why string) error {
	return &Error{Class: ClassPermanent, Code: "invalid", Err: fmt.Errorf("%w: %s", ErrInput, why)}
}

// Live is the live generation, as the transaction of a unit with Switch sees it.
type Live struct {
	Checkpoint Checkpoint
	Unapplied  func(ctx context.Context, messages []Message) ([]bool, error) // as that of Progress
}

// TablePair is a table and its other name: the new name in Switch.Rename, the view that shows the
// table in Switch.Show and in ClearGeneration (empty: none), the table to compare it with in Comparison. Names may have a schema:
// "reports.ratings". They are quoted, so they are case-sensitive.
type TablePair struct{ Table, Other string }

// Comparison compares the rows of tables by their primary keys, or as a whole if a table has none.
type Comparison struct {
	// Pairs are the tables to compare, by the columns that both have. Table has the right rows.
	Pairs  []TablePair
	Ignore []string // columns that are not compared
	Limit  int      // the most differences to find
	// Repair: the rows of Only that still differ are changed in Other, so that they are as in Table. Found
	// gets these rows. Foreign keys hold at the end, in whatever order the tables are given.
	Repair bool
	Only   []Difference // nil means all rows; required for Repair
	// Found is called with the differences, ordered by table and key, before the commit.
	Found func([]Difference)
}

// Difference is a row that is missing (no Got), extra (no Want) or different in a read model.
type Difference struct {
	Table string          `json:"table"`          // TablePair.Other
	Key   json.RawMessage `json:"key"`            // an object of the columns of the primary key; of all columns if there is none
	Want  json.RawMessage `json:"want,omitempty"` // an object of the columns as they should be
	Got   json.RawMessage `json:"got,omitempty"`  // as they are
}

// Codes of an Error of a unit with Switch, and of ClearGeneration.
const (
	CodeBusy       = "busy"       // other units did not end within a second, or a table was in use for longer
	CodeReferenced = "referenced" // a foreign key keeps a table from being emptied, renamed or dropped
)

// Replaces returns g as SetGeneration stores it in the place of was, which may be zero, after CanSet.
func (g Generation) Replaces(was Generation, now time.Time) Generation {
	if g.CreatedAt, g.ChangedAt = was.CreatedAt, was.ChangedAt; was.Revision == 0 {
		g.CreatedAt = now
	}
	if g.State != was.State {
		g.ChangedAt = now
	}
	if g.Revision++; len(g.Data) == 0 {
		g.Data = []byte("{}")
	}
	return g
}

// ForgetStore is what projector.Forget needs of a store. Every provider has it.
type ForgetStore interface {
	Builds
	Progress
	Parking
	LeaseLister
}
