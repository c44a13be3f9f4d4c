package mutant

// tables are mutants of read models whose tables refer to each other, and of names with a suffix.
var tables = []Mutant{
	{
		Name:  "repair_checks_at_once",
		What:  "PostgreSQL checks foreign keys after each statement of a repair",
		Edits: []Edit{{File: "providers/postgres/compare.go", Old: `if !k.Deferrable && k.Owned {`, New: "if false {"}},
		Tests: []Test{{"./internal/readmodeltest", "TestTablesThatReferToEachOther/checked_at_once"}},
	},
	{
		Name: "repair_cascades",
		What: "a repair deletes rows before those that refer to them by a foreign key with an action have been repaired",
		Edits: []Edit{
			{File: "providers/postgres/compare.go", Old: "(k.Acts || ", New: "("},
			{File: "providers/sqlite/compare.go", Old: "return r.acts && ", New: "return false && "},
		},
		Tests: []Test{{"./internal/readmodeltest", "TestTablesThatReferToEachOther/cascade"}},
	},
	{
		Name:  "children_last",
		What:  "SQLite deletes rows that others refer to with RESTRICT first",
		Edits: []Edit{{File: "internal/check/check.go", Old: "if refers(tables[i], tables[j]) {", New: "if refers(tables[j], tables[i]) {"}},
		Tests: []Test{{"./internal/readmodeltest", "TestTablesThatReferToEachOther/restrict"}},
	},
	{
		Name:  "emptied_at_once",
		What:  "SQLite checks foreign keys after each table that it empties or drops",
		Edits: []Edit{{File: "providers/sqlite/switch.go", Old: "u.tx.ExecContext(ctx, deferForeignKeys)", New: `u.tx.ExecContext(ctx, "")`}},
		Tests: []Test{{"./internal/readmodeltest", "TestTablesThatReferToEachOther/checked_at_once"}},
	},
	{
		Name:  "drops_of_others",
		What:  "SQLite drops tables that tables of the application refer to, with the rows of these",
		Edits: []Edit{{File: "providers/sqlite/switch.go", Old: "if isOneOf(r.to, tables) && !isOneOf(r.from, tables) {", New: "if false {"}},
		Tests: []Test{{"./internal/readmodeltest", "TestATableOfTheApplicationRefersToAReadModel"}},
	},
	{
		Name:  "refers_to_another_generation",
		What:  "the tables of a new generation may refer to those of another one",
		Edits: []Edit{{File: "projector/internal/rebuild/maker.go", Old: ", Create: to.Tables})", New: "})"}},
		Tests: []Test{{"./internal/readmodeltest", "TestTablesThatReferToAnotherGeneration"}},
	},
	{
		Name:  "repair_without_report",
		What:  "a repair is committed, and Verify returns an error because it could not drop its tables",
		Edits: []Edit{{File: "projector/verify.go", Old: "if result == nil {", New: "if true {"}},
		Tests: []Test{{"./projector", "TestVerifyReportsARepairThoughItsTablesStay"}},
	},
	{
		Name:  "long_names",
		What:  "names that PostgreSQL would cut in a later generation are accepted",
		Edits: []Edit{{File: "projector/internal/model/projector.go", Old: "n > maxSuffixed {", New: "n > maxSuffixed+1 {"}},
		Tests: []Test{{"./projector", "TestLongNamesOfTablesAreRefused"}},
	},
	{
		Name:  "long_names_of_indexes",
		What:  "OnCreate may create an index under a name that PostgreSQL cuts",
		Edits: []Edit{{File: "projector/internal/unit/handle.go", Old: "if s.Long != nil && s.Long.Load() != nil {", New: "if false {"}},
		Tests: []Test{{"./projector", "TestLongNamesOfTablesAreRefused"}},
	},
	{
		Name:  "cut_names",
		What:  "the tables of a generation may have names that PostgreSQL cuts",
		Edits: []Edit{{File: "provider/check.go", Old: "if len(part) > MaxTableBytes {", New: "if len(part) > MaxTableBytes+9 {"}},
		Tests: []Test{{"./internal/readmodeltest", "TestTheLongestNamesHaveRoomForTheNumberOfAGeneration"}},
	},
}
