package mutant

// untrusted are mutants of what protects from programs that may publish, but not append.
var untrusted = []Mutant{
	{
		Name:  "forged_payload",
		What:  "with Untrusted, the payload is applied that was delivered",
		Edits: []Edit{{File: "projector/source.go", Old: "if r.cfg.Untrusted {", New: "if false {"}},
		Tests: []Test{{"./internal/readmodeltest", "TestMessagesOfAnUntrustedSourceAreTakenFromTheLog/over_the_broker_only"}},
	},
	{
		Name:  "forged_id_as_of_an_event",
		What:  "a message that is not in the log is parked under its id, as if it were the event that is appended later",
		Edits: []Edit{{File: "projector/internal/model/receiver.go", Old: "const unknownID = \"unknown \"", New: "const unknownID = \"\""}},
		Tests: []Test{{"./projector", "TestForgedIDIsNotThatOfAnEventThatIsAppendedLater"}},
	},
	{
		Name:  "forged_key_held",
		What:  "a message that is not in the log holds its key",
		Edits: []Edit{{File: "projector/internal/model/receiver.go", Old: "d.IsUnknown, d.Key = true, \"\"", New: "d.IsUnknown = true"}},
		Tests: []Test{{"./internal/readmodeltest", "TestMessagesOfAnUntrustedSourceAreTakenFromTheLog/over_the_broker_only"}},
	},
	{
		Name:  "forged_payload_replayed",
		What:  "a tool applies a message that was not in the log",
		Edits: []Edit{{File: "projector/internal/model/receiver.go", Old: "} else if rejected || r.Untrusted {", New: "} else if r.Untrusted {"}},
		Tests: []Test{{"./internal/readmodeltest", "TestMessagesOfAnUntrustedSourceAreTakenFromTheLog/over_the_broker_only"}},
	},
	{
		Name:  "parked_payload_trusted",
		What:  "with Untrusted, a parked message is applied as it was delivered before",
		Edits: []Edit{{File: "projector/internal/model/receiver.go", Old: "} else if rejected || r.Untrusted {", New: "} else if rejected {"}},
		Tests: []Test{{"./projector", "TestParkedMessagesOfAnUntrustedRunnerAreTakenFromTheLog"}},
	},
	{
		Name:  "forged_message_waits",
		What:  "a message that is not in the log stops a program that does not feed the live read model",
		Edits: []Edit{{File: "projector/internal/deliver/pool.go", Old: "m.Position == 0 && !m.IsUnknown", New: "m.Position == 0"}},
		Tests: []Test{{"./projector", "TestForgedMessageStopsNoOther"}},
	},
	{
		Name:  "forged_message_halts",
		What:  "a message that is not in the log may halt a projector",
		Edits: []Edit{{File: "projector/runner.go", Old: "\t\tif f.Projector.Rules.Halts {", New: "\t\tif false {"}},
		Tests: []Test{{"./projector", "TestUntrustedIsRefusedWhereItCannotHold"}},
	},
	{
		Name:  "read_for_each_message",
		What:  "with Untrusted, the log is read for each message",
		Edits: []Edit{{File: "projector/internal/deliver/pool.go", Old: "for range len(in) {", New: "for range 0 * len(in) {"}},
		Tests: []Test{{"./projector", "TestUntrustedMessagesShareReads"}},
	},
}
