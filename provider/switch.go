package provider

import (
	"context"
	"encoding/json"
)

// Switch makes a unit change which generation is live, or compare two generations. Such a unit has
// these steps:
//   - It waits until no other unit of the projector is open, in any generation, for at most a
//     second: then the error is ClassTransient with CodeBusy. Units that open later wait for it. With
//     Snapshot it waits for none, and no unit waits for it.
//   - It compares Set with the stored generations (ErrFenced).
//   - It calls Last, and opens the unit with the messages that Last returned.
//   - It empties the tables of Reset.
//   - It calls run, which must not park messages.
//   - It checks Create, renames, shows and compares tables, stores the generations of Set, and commits. With
//     Snapshot it is rolled back instead.
//
// Unit.Once must be set, and Unit.Messages must be empty. The tables need Keeps.Tables.
type Switch struct {
	// Snapshot: the unit sees the whole store as of one moment, and its own writes. It is rolled
	// back.
	Snapshot bool
	// Last returns the messages of the unit. The live generation does not change until the unit
	// ends. Nil means no messages.
	Last func(ctx context.Context, live Live) ([]Message, error)
	// Set are generations to store, as SetGeneration does. They are stored together, so one of them
	// can become live when another one ceases to be.
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
	// Show are views to create or to replace. A role that could read the view, or the table that
	// had its name, can read the new view.
	Show []TablePair
	// Compare, if not nil, compares tables.
	Compare *Comparison
}

// Live is the live generation, as the transaction of a unit with Switch sees it.
type Live struct {
	Checkpoint Checkpoint
	// Unapplied is Progress.Unapplied for this generation.
	Unapplied func(ctx context.Context, messages []Message) ([]bool, error)
}

// TablePair is a table and its other name: the new name in Switch.Rename, the view that shows the
// table in Switch.Show, the table to compare it with in Comparison. Names may have a schema:
// "reports.ratings". They are quoted, so they are case-sensitive.
type TablePair struct{ Table, Other string }

// Comparison compares the rows of tables by their primary keys, or as a whole if a table has none.
type Comparison struct {
	// Pairs are the tables to compare. Table has the right rows, Other may have wrong ones. Only
	// columns that both have are compared.
	Pairs []TablePair
	// Ignore are columns that are not compared.
	Ignore []string
	// Limit is the most differences to find.
	Limit int
	// Repair: the rows of Only that still differ are changed in Other, so that they are as in
	// Table. Found gets these rows. Foreign keys hold at the end, in whatever order the tables are given.
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

// CodeBusy: other units of the projector did not end within a second, or a table was in use for
// longer.
const CodeBusy = "busy"

// CodeReferenced: a table has a foreign key to a table that cannot be emptied, renamed or dropped because of it.
const CodeReferenced = "referenced"
