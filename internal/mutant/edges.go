package mutant

// edges lists the mutants of what a user relies on at the edges of a service.
var edges = []Mutant{
	{
		Name:  "start_no_wiring",
		What:  "Start does not look at subscribed topics",
		Edits: []Edit{{File: "wiring.go", Old: "range runner.Topics {", New: "range runner.Topics[:0] {"}},
		Tests: []Test{{".", "TestStartReportsWhatIsNotConnected"}, {".", "TestStartRefusesARelayWithoutARoute"}},
	},
}
