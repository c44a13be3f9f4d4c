package mutant

// operations lists the mutants of pauses, requests and surveys.
var operations = []Mutant{
	{
		Name:  "pause_reader",
		What:  "the reader of the log applies events to a paused projector",
		Edits: []Edit{{File: "projector/internal/follow/reader.go", Old: " || r.Host.Paused(r.Projector.Name)", New: ""}},
		Tests: []Test{{"./admin", "TestAPausedProjectorAppliesNothing/log"}},
	},
	{
		Name:  "pause_worker",
		What:  "deliveries are applied to a paused projector",
		Edits: []Edit{{File: "projector/internal/deliver/pool.go", Old: "\t\t\tw.awaitResume(ctx)\n", New: ""}},
		Tests: []Test{{"./admin", "TestAPausedProjectorAppliesNothing/broker"}},
	},
	{
		Name:  "pause_parked",
		What:  "parked messages are applied to a paused projector",
		Edits: []Edit{{File: "projector/internal/feed/all.go", Old: "if !a.Host.Paused(c.feeder.Projector.Name) {", New: "if c.feeder.Projector.Name != \"\" {"}},
		Tests: []Test{{"./admin", "TestAPausedProjectorAppliesNothing/parked"}},
	},
	{
		Name:  "pause_topic",
		What:  "relays claim the entries of a paused topic",
		Edits: []Edit{{File: "outbox/relay.go", Old: `q.Except = r.presence.Paused(provider.PauseTopic)`, New: `_ = provider.PauseTopic`}},
		Tests: []Test{{"./admin", "TestAPausedTopicIsNotPublished"}},
	},
	{
		Name:  "request_not_stopped",
		What:  "a runner goes on with a request that was canceled",
		Edits: []Edit{{File: "projector/requests.go", Old: "\t\t}, cancel)\n", New: "\t\t}, func() {})\n"}},
		Tests: []Test{{"./admin", "TestACanceledRequestStops"}},
	},
	{
		Name:  "request_kept",
		What:  "a request whose runner was killed never ends",
		Edits: []Edit{{File: "providers/postgres/operations.go", Old: ` or state = 'running' and expires_at < clock_timestamp()`, New: ``}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Operations/Acts/taken_once"}},
	},
	{
		Name:  "request_again",
		What:  "a request whose runner was killed is begun again by another one",
		Edits: []Edit{{File: "projector/requests.go", Old: `case a.State == provider.ActRunning:`, New: `case a.State == provider.ActCanceled:`}},
		Tests: []Test{{"./admin", "TestARequestOfAKilledRunnerFails"}},
	},
	{
		Name:  "request_any_holder",
		What:  "a runner that has lost a request stores its outcome",
		Edits: []Edit{{File: "providers/postgres/operations.go", Old: ` and state = 'running' and holder = $2::text`, New: ` and state = 'running' and $2::text <> ''`}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Operations/Acts/changed_by_its_holder"}},
	},
	{
		Name:  "prune_neighbours",
		What:  "the markers of projectors whose names begin alike are pruned too",
		Edits: []Edit{{File: "admin/acts.go", Old: `of == projector {`, New: `strings.HasPrefix(of, projector) {`}},
		Tests: []Test{{"./cmd/kinora/commands", "TestOldEntriesAndMarkersArePruned"}},
	},
	{
		Name: "survey_reads_all",
		What: "a survey counts all parked messages",
		Edits: []Edit{{File: "providers/postgres/survey.go", Old: `order by o.generation, o.id limit $1::int) p) p`,
			New: `order by o.generation, o.id) p) p`}},
		Tests: []Test{{"./providers/postgres", "TestTheCostOfASurveyIsFlat"}},
	},
	{
		Name:  "forms_widen",
		What:  "a form whose filter cannot be read back exactly acts on more rows than were listed",
		Edits: []Edit{{File: "admin/adminpage/filter.go", Old: "if len(given) > 0 && !slices.Equal(given, read[name]) {", New: "if false && !slices.Equal(given, read[name]) {"}},
		Tests: []Test{{"./admin/adminpage", "TestFormsSelectWhatThePageListed"}},
	},
	{
		Name:  "request_of_any_runner",
		What:  "a runner takes a request that it can only fail: of another version of the read model, or about messages that it cannot apply",
		Edits: []Edit{{File: "projector/requests.go", Old: "taken, err = by.can(limited, a)", New: "taken = true"}},
		Tests: []Test{{"./projector", "TestARequestWaitsForAProgramOfTheLiveVersion"}, {"./projector", "TestADryRunWaitsForAProgramThatCan"}},
	},
}
