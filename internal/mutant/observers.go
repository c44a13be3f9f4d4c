package mutant

// observers lists the mutants of telemetry and health.
var observers = []Mutant{
	{
		Name: "claims_uncounted",
		What: "claims that find nothing, or take over what another one has left, are not counted",
		Edits: []Edit{
			{File: "telemetry/otel/observers.go", Old: "len(entries) == 0 && err == nil", New: "false"},
			{File: "telemetry/otel/observers.go", Old: "if e.Suspect {", New: "if false {"},
			{File: "telemetry/otel/observers.go", Old: "len(tasks) == 0 && err == nil", New: "false"},
			{File: "telemetry/otel/observers.go", Old: "tasks[i].Vanished > 0", New: "false"},
		},
		Tests: []Test{{"./telemetry/otel", "TestClaimsAreCounted"}},
	},
	{
		Name:  "held_log_unmeasured",
		What:  "the wait of the readers of the log is not measured",
		Edits: []Edit{{File: "telemetry/otel/watch.go", Old: `wait.What == "append"`, New: `wait.What == ""`}},
		Tests: []Test{{"./telemetry/otel", "TestWatchShowsForHowLongTheLogIsHeld"}},
	},
	{
		Name:  "publish_unwatched",
		What:  "a Publish call that does not return is not late",
		Edits: []Edit{{File: "outbox/publish.go", Old: "b.pulse.Within(clock(), 0)", New: "b.pulse.Rest()"}},
		Tests: []Test{{".", "TestHealthyWhileARelayPublishes"}},
	},
	{
		Name:  "stuck_unwatched",
		What:  "a handler that the runner or worker has given up is not late",
		Edits: []Edit{{File: "internal/pulse/pulse.go", Old: "	l.put(call, name)\n", New: ""}},
		Tests: []Test{{".", "TestHealthyWhileHandlersRun"}, {".", "TestHealthyWhileTasksRun"}},
	},
	{
		Name:  "handler_limit",
		What:  "a handler counts from its beginning as late, not from its deadline",
		Edits: []Edit{{File: "projector/internal/unit/handle.go", Old: "a.Loop.Within(began, Sum(Sum(each, each), grace))", New: "a.Loop.Within(began, -each)"}},
		Tests: []Test{{".", "TestHealthyWhileHandlersRun"}},
	},
	{
		Name:  "ended_unwatched",
		What:  "a service that has ended with an error is not late",
		Edits: []Edit{{File: "internal/pulse/pulse.go", Old: "l.Add(name).Within(now, 0)", New: "_ = name"}},
		Tests: []Test{{".", "TestHealthyAfterAServiceHasEnded"}},
	},
	{
		Name:  "probes_apart",
		What:  "each readiness probe starts a check of its own",
		Edits: []Edit{{File: "probes.go", Old: "if h.running == nil {", New: "if h.running == nil || len(h.running) == 0 {"}},
		Tests: []Test{{".", "TestReadyIsBounded"}},
	},
	{
		Name:  "ready_held_log",
		What:  "an append that holds back the log does not count",
		Edits: []Edit{{File: "probes.go", Old: "held > h.cfg.Open", New: "held < 0"}},
		Tests: []Test{{".", "TestReadyOnPostgreSQL"}},
	},
	{
		Name:  "ready_schema",
		What:  "a service is ready although its schema is not migrated",
		Edits: []Edit{{File: "probes.go", Old: "fault != nil {", New: "fault != nil && ctx == nil {"}},
		Tests: []Test{{".", "TestReadyOnSQLite"}},
	},
	{
		Name:  "unit_context",
		What:  "handlers do not see the context of the observer of their unit",
		Edits: []Edit{{File: "projector/internal/unit/handle.go", Old: "ctx = handlerContext{ctx, a.values}", New: "_ = a.values"}},
		Tests: []Test{{"./projector", "TestObserverSurroundsUnits"}},
	},
	{
		Name:  "update_trace",
		What:  "events do not get the trace context of their update",
		Edits: []Edit{{File: "telemetry/otel/otel.go", Old: "meta.Traceparent = header", New: "_ = header"}},
		Tests: []Test{{"./telemetry/otel", "TestTheTraceOfACommandCrossesProcessesAndABroker"}},
	},
	{
		Name:  "output_trace",
		What:  "output does not get the trace context of its span",
		Edits: []Edit{{File: "telemetry/otel/observers.go", Old: "m.Headers[header] = traceparent", New: "_ = traceparent"}},
		Tests: []Test{{"./telemetry/otel", "TestTheTraceOfACommandCrossesProcessesAndABroker"}},
	},
	{
		Name:  "error_texts",
		What:  "spans and metrics have the texts of errors",
		Edits: []Edit{{File: "telemetry/otel/instruments.go", Old: `return fmt.Sprintf("%T", errclass.Innermost(err))`, New: `return fmt.Sprint(errclass.Innermost(err))`}},
		Tests: []Test{{"./telemetry/otel", "TestTelemetryShowsNoSecrets"}},
	},
	{
		Name:  "keys_logged",
		What:  "relays log the keys of entries that are not published",
		Edits: []Edit{{File: "outbox/publish.go", Old: `"topic", e.Topic, "message_id", e.ID`, New: `"topic", e.Topic, "key", e.Key, "message_id", e.ID`}},
		Tests: []Test{{"./telemetry/otel", "TestTelemetryShowsNoSecrets"}},
	},
	{
		Name:  "gauges_kept",
		What:  "a gauge keeps its value after its query has failed",
		Edits: []Edit{{File: "telemetry/otel/watch.go", Old: "	w.values = nil\n", New: ""}},
		Tests: []Test{{"./telemetry/otel", "TestWatchQueriesSeldomAndShowsNoOldValues"}},
	},
	{
		Name:  "lack_unsaid",
		What:  "a program that starts does not warn of what its read model has seen and it lacks",
		Edits: []Edit{{File: "projector/runner.go", Old: "} else if len(lacks) > 0 {\n\t\t\tr.cfg.Logger.Warn(\"the read model has what", New: "} else if len(lacks) < 0 {\n\t\t\tr.cfg.Logger.Warn(\"the read model has what"}},
		Tests: []Test{{"./projector", "TestRunnerWarnsOfWhatItLacks"}},
	},
	{
		Name:  "worker_lack_unsaid",
		What:  "a worker that starts does not warn of kinds of open tasks that no worker defines",
		Edits: []Edit{{File: "task/maintain.go", Old: "if len(kinds) > 0 {", New: "if len(kinds) < 0 {"}},
		Tests: []Test{{"./task", "TestAWorkerWarnsAtItsStartOfWhatItLacks"}},
	},
	{
		Name:  "request_lack_unsaid",
		What:  "the doctor does not see that no runner has what a verification needs",
		Edits: []Edit{{File: "admin/requests.go", Old: "case a.Verb == provider.VerbVerify:\n\t\t\treturn p.lackedBy(c), true", New: "case a.Verb == provider.VerbVerify:\n\t\t\treturn nil, true"}},
		Tests: []Test{{"./admin", "TestDoctorSaysWhatRequestsWaitFor"}},
	},
}
