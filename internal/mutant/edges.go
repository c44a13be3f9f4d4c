package mutant

// edges lists the mutants of what a user relies on at the edges of a service.
var edges = []Mutant{
	{
		Name:  "start_no_wiring",
		What:  "Start does not look at subscribed topics",
		Edits: []Edit{{File: "kinora.go", Old: "range runner.Topics {", New: "range runner.Topics[:0] {"}},
		Tests: []Test{{".", "TestStartReportsWhatIsNotConnected"}, {".", "TestStartRefusesARelayWithoutARoute"}},
	},
	{
		Name:  "handler_no_cause",
		What:  "what a handler appends does not have its event as the cause",
		Edits: []Edit{{File: "projector/internal/unit/handle.go", Old: "return model.WithCause(ctx, m.Raw)", New: "return ctx"}},
		Tests: []Test{{".", "TestContextFlows"}},
	},
	{
		Name:  "middleware_no_cause",
		What:  "what a handler in the middleware adds does not have its message as the cause",
		Edits: []Edit{{File: "projector/middleware.go", Old: "m.SetContext(model.WithCause(ctx, cause))", New: "m.SetContext(ctx)"}},
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
	{
		Name: "old_leases_stay",
		What: "leases of processes that were killed are never deleted",
		Edits: []Edit{
			{File: "providers/memory/progress.go", Old: "if l.until.Before(now.Add(-time.Hour)) {", New: "if l.until.IsZero() {"},
			{File: "providers/sqlite/progress.go", Old: "if err == nil && n == 1 {", New: "if err == nil && n < 0 {"},
			{File: "providers/postgres/operations.go", Old: "clock_timestamp() - interval '1 hour'", New: "clock_timestamp() - interval '1000 hours'"},
		},
		Tests: []Test{
			{"./providers/memory", "TestConformance/Operations/Leases/old_leases_are_deleted"},
			{"./providers/sqlite", "TestConformance/Operations/Leases/old_leases_are_deleted"},
			{"./providers/postgres", "TestConformance/Operations/Leases/old_leases_are_deleted"},
		},
	},
	{
		Name:  "empty_log_unread",
		What:  "ReadLog does not notice that an empty log cannot be read safely",
		Edits: []Edit{{File: "provider/log.go", Old: "first || q.After < head;", New: "first && q.After < head || q.After < head;"}},
		Tests: []Test{{"./providers/postgres", "TestReadyFailsOnAStandby"}},
	},
	{
		Name:  "read_only_file",
		What:  "services start on a file of SQLite that they cannot write",
		Edits: []Edit{{File: "providers/sqlite/migrate.go", Old: "if queryOnly || readOnly {", New: "if queryOnly && readOnly && conn == nil {"}},
		Tests: []Test{{"./providers/sqlite", "TestAReadOnlyFileIsNotReady"}},
	},
	{
		Name:  "refusals_logged",
		What:  "each live page that is refused is a line of the log",
		Edits: []Edit{{File: "admin/adminpage/page.go", Old: "at-last >= int64(h.times.refusedEvery) &&", New: ""}},
		Tests: []Test{{"./admin/adminpage", "TestLivePages"}},
	},
	{
		Name: "names_unchecked",
		What: "names of relays and versions of runners that no store can keep are taken",
		Edits: []Edit{
			{File: "outbox/relay_config.go", Old: `provider.CheckText("holder", c.Holder,`, New: `provider.CheckText("holder", "x",`},
			{File: "projector/runner_config.go", Old: `provider.CheckText("version", c.Version,`, New: `provider.CheckText("version", "x",`},
		},
		Tests: []Test{{"./outbox", "TestTheNameOfARelayMustBeStorable"}, {"./projector", "TestAVersionMustBeStorable"}},
	},
	{
		Name:  "lock_wait_blamed",
		What:  "a message whose handler waits for a lock until its time is over has failed",
		Edits: []Edit{{File: "providers/postgres/open.go", Old: "if w.Timeout > 0 {", New: "if false {"}},
		Tests: []Test{{"./providers/postgres", "TestAHandlerThatWaitsForALockIsNotToBlame"}},
	},
	{
		Name:  "silent_migrator",
		What:  "a migrator that waits for another one does not say so",
		Edits: []Edit{{File: "providers/postgres/migrate.go", Old: "sayWhoBlocks(ctx, pid, said)()", New: "sayWhoBlocks(ctx, 0*pid, said)()"}},
		Tests: []Test{{"./providers/postgres", "TestMigrateSaysWhoHasTheLock"}},
	},
}
