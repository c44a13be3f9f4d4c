package mutant

// events lists the mutants of the checks of event types.
var events = []Mutant{
	{
		Name:  "unread_fields",
		What:  "a stored field that its type does not read is no error",
		Edits: []Edit{{File: "eventstore/goldentest/golden.go", Old: `if !g.declared("-", path, g.d.Removed) {`, New: `if g.declared("-", path, g.d.Removed) && false {`}},
		Tests: []Test{{"./eventstore/goldentest", "TestGoldenTypesReportsAChange"}},
	},
	{
		Name:  "missing_fields",
		What:  "a field that old events do not have is no error",
		Edits: []Edit{{File: "eventstore/goldentest/golden.go", Old: `if !g.declared("+", path, g.d.Added) {`, New: `if g.declared("+", path, g.d.Added) && false {`}},
		Tests: []Test{{"./eventstore/goldentest", "TestGoldenTypesReportsAChange"}},
	},
	{
		Name:  "golden_values_follow_the_code",
		What:  "a sample that decodes to another value is recorded again without a request",
		Edits: []Edit{{File: "eventstore/goldentest/golden.go", Old: "	if g.update {\n		sample.Decoded", New: "	if true {\n		sample.Decoded"}},
		Tests: []Test{{"./eventstore/goldentest", "TestGoldenTypesNewVersion"}},
	},
	{
		Name:  "events_as_written",
		What:  "an event is decoded from the JSON that the store or the broker has",
		Edits: []Edit{{File: "internal/eventtype/eventtype.go", Old: "data = check.CanonicalJSON(data)", New: "_ = check.CanonicalJSON(data)"}},
		Tests: []Test{{"./providers/postgres", "TestAnEventHasOneForm"}},
	},
	{
		Name:  "results_as_written",
		What:  "the result of a step is decoded from the JSON that the handler returned, and later from that of the store",
		Edits: []Edit{{File: "task/definition.go", Old: "return json.Unmarshal(check.CanonicalJSON(data), into)", New: "_ = check.CanonicalJSON; return json.Unmarshal(data, into)"}},
		Tests: []Test{{"./providers/postgres", "TestAStepsResultHasOneForm"}},
	},
	{
		Name:  "numbers_by_digits",
		What:  "inputs of tasks whose numbers are equal, but written differently, differ on SQLite and in memory",
		Edits: []Edit{{File: "internal/check/json.go", Old: "bytes.IndexByte(out[start:], '.') >= 0 {", New: "start < 0 {"}},
		Tests: []Test{{"./providers/sqlite", "TestConformance/Tasks/Enqueue/inputs_that_are_equal_as_JSON"}},
	},
}
