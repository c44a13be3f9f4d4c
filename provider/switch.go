package provider

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
)

// Switch makes a unit change which generation is live, or compare two generations. Such a unit has
// these steps:
//   - It waits until no other unit of the projector is open, in any generation. After a second the error is
//     ClassTransient with CodeBusy. Units that open later wait for it. With Snapshot neither waits.
//   - It compares Set with the stored generations (ErrFenced).
//   - It calls Last, and opens the unit with the messages that Last returned.
//   - It empties the tables of Reset, and calls run, which must not park messages.
//   - It checks Create, renames, shows and compares tables, stores the generations of Set, and commits. With
//     Snapshot it is rolled back instead.
//
// Unit.Once must be set, and Unit.Messages must be empty. The tables need Keeps.Tables.
type Switch struct {
	Snapshot bool // see the whole store as of one moment, and the unit's own writes, and roll back
	// Last returns the messages of the unit; nil means none. The live generation does not change until the
	// unit ends.
	Last func(ctx context.Context, live Live) ([]Message, error)
	// Set are generations to store together, as SetGeneration does: one can become live when another ceases to be.
	Set []Generation
	// Create are the tables of a new generation, which run creates. Their names end with its number:
	// "ratings_g2". The error has CodeReferenced if one of them has a foreign key to a table of another
	// generation, if another table has one to them or to a table that would be renamed when this generation becomes
	// live, or if the store could never delete their rows.
	Create []string
	// Reset are tables whose rows are deleted. The error has CodeReferenced if another table has a foreign key to
	// one of them.
	Reset []string
	// Rename are tables to rename before the views are created, if they exist and are not views. The error has
	// CodeReferenced if another table has a foreign key to one of them.
	Rename []TablePair
	// Show are views to create or to replace. Who could read the view, or the table of its name, can read the new one.
	Show    []TablePair
	Compare *Comparison // if not nil, compare tables
}

// OpenSwitch does the second and the third step of a unit with Switch. stored are the generations of the projector, and
// live reads one of them.
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
// table in Switch.Show, the table to compare it with in Comparison. Names may have a schema:
// "reports.ratings". They are quoted, so they are case-sensitive.
type TablePair struct{ Table, Other string }

// Comparison compares the rows of tables by their primary keys, or as a whole if a table has none.
type Comparison struct {
	// Pairs are the tables to compare. Table has the right rows, Other may have wrong ones. Only columns that
	// both have are compared.
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
