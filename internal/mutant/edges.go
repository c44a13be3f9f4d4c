package mutant

// edges lists the mutants of what a user relies on at the edges of a service.
var edges = []Mutant{
	{
		Name:  "start_no_wiring",
		What:  "Start does not look at subscribed topics",
		Edits: []Edit{{File: "wiring.go", Old: "range runner.Topics {", New: "range runner.Topics[:0] {"}},
		Tests: []Test{{".", "TestStartReportsWhatIsNotConnected"}, {".", "TestStartRefusesARelayWithoutARoute"}},
	},
	{
		Name:  "handler_no_cause",
		What:  "what a handler appends does not have its event as the cause",
		Edits: []Edit{{File: "projector/unit.go", Old: "u.call(withCause(parent, m.raw),", New: "u.call(parent,"}},
		Tests: []Test{{".", "TestContextFlows"}},
	},
	{
		Name:  "middleware_no_cause",
		What:  "what a handler in the middleware adds does not have its message as the cause",
		Edits: []Edit{{File: "projector/middleware.go", Old: "m.SetContext(withCause(ctx, cause))", New: "m.SetContext(ctx)"}},
		Tests: []Test{{"./internal/routertest", "TestMiddlewareContextFlows"}},
	},
	{
		Name:  "task_no_cause",
		What:  "a task's handler runs without the metadata that the task was added with",
		Edits: []Edit{{File: "task/attempt.go", Old: "eventstore.WithMetadata(a.work, t.Metadata)", New: "eventstore.WithMetadata(a.work, eventstore.Metadata{})"}},
		Tests: []Test{{".", "TestContextFlows"}},
	},
	{
		Name: "message_no_cause",
		What: "a message does not inherit from the context that it is added with",
		Edits: []Edit{{
			File: "provider/outbox_message.go", Old: "return m.Inherit(eventstore.MetadataFrom(ctx)), nil", New: "return m.Inherit(eventstore.Metadata{}), nil",
		}},
		Tests: []Test{{"./providers/memory", "TestConformance/Outbox/Entries/a_message_inherits"}, {".", "TestContextFlows"}},
	},
}
