package mutant

// events lists the mutants of the checks of event types.
var events = []Mutant{
	{
		Name:  "unread_fields",
		What:  "a stored field that its type does not read is no error",
		Edits: []Edit{{File: "eventstore/golden.go", Old: `if !g.declared("-", path, g.d.removed) {`, New: `if g.declared("-", path, g.d.removed) && false {`}},
		Tests: []Test{{"./eventstore", "TestGoldenTypesReportsAChange"}},
	},
	{
		Name:  "missing_fields",
		What:  "a field that old events do not have is no error",
		Edits: []Edit{{File: "eventstore/golden.go", Old: `if !g.declared("+", path, g.d.added) {`, New: `if g.declared("+", path, g.d.added) && false {`}},
		Tests: []Test{{"./eventstore", "TestGoldenTypesReportsAChange"}},
	},
	{
		Name:  "golden_values_follow_the_code",
		What:  "a sample that decodes to another value is recorded again without a request",
		Edits: []Edit{{File: "eventstore/golden.go", Old: "	if g.update {\n		sample.Decoded", New: "	if true {\n		sample.Decoded"}},
		Tests: []Test{{"./eventstore", "TestGoldenTypesNewVersion"}},
	},
}
