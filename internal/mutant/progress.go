package mutant

// progress lists the mutants of checkpoints, their modes, and the readers of the log.
var progress = []Mutant{
	{
		Name: "no_look_at_the_checkpoint",
		What: "a unit does not compare its events with the checkpoint, only with markers",
		Edits: []Edit{
			{File: "providers/postgres/open.go", Old: "w.found.SetProgress(&w.Unit, w.checkpoint)", New: "nil"},
			{File: "providers/postgres/batch.go", Old: "w.lanes(), lowest)", New: "w.lanes(), (*int64)(nil))"},
		},
		Tests: []Test{
			{"./providers/postgres", "TestTheCheckpointIsReadAfterTheMarkers/tx"},
			{"./providers/postgres", "TestTheCheckpointIsReadAfterTheMarkers/batch"},
		},
	},
	{
		Name: "checkpoint_before_markers",
		What: "markers are pruned, but a unit does not read the checkpoint again after its wait for markers",
		Edits: []Edit{
			{File: "providers/postgres/open.go", Old: `		w.queueMarkers(b, sql)
		if w.Projector != "" {
			w.db.queueCheckpoint(b, w.Build(), locked, &w.checkpoint)
		}
`, New: `		if w.Projector != "" {
			w.db.queueCheckpoint(b, w.Build(), locked, &w.checkpoint)
		}
		w.queueMarkers(b, sql)
`},
		},
		Tests: []Test{{"./providers/postgres", "TestTheCheckpointIsReadAfterTheMarkers/tx"}},
	},
	{
		Name: "checkpoint_in_the_insert",
		What: "in one round trip the insert of the markers selects the events behind the checkpoint, which is no error for the others",
		Edits: []Edit{
			{File: "providers/postgres/open.go", Old: "	mustMarkSQL = insertMarkers + ` order by 1, 3`\n", New: "	mustMarkSQL = insertMarkers + ` left join kinora.checkpoint($5::text, $1::int, '') c on true where $6::boolean is not null and (c.position is null or n.position > c.position) order by 1, 3`\n"},
			{File: "providers/postgres/open.go", Old: "if sql == markBehindSQL {", New: "if sql != markSQL {"},
			{File: "providers/postgres/batch.go", Old: "w.lanes(), lowest)", New: "w.lanes(), (*int64)(nil))"},
		},
		Tests: []Test{{"./providers/postgres", "TestBatchedProgressConformance/Applied/a_redelivery_after_PruneApplied"}},
	},
	{
		Name: "fence_after_markers",
		What: "a unit takes the fence after its markers, so it does not see the mode that the fence has waited for",
		Edits: []Edit{
			{File: "providers/postgres/open.go", Old: "ReadCommitted})\n		w.queueFence(b)\n", New: "ReadCommitted})\n"},
			{File: "providers/postgres/open.go", Old: "	if !w.IsReplay() && len(w.Messages) > 0 {\n		w.queueHeld(b)\n", New: "	if w.Switch == nil {\n		w.queueFence(b)\n	}\n	if !w.IsReplay() && len(w.Messages) > 0 {\n		w.queueHeld(b)\n"},
		},
		Tests: []Test{{"./providers/postgres", "TestUnitsThatWaitForAChangeOfTheModeSeeIt/tx"}},
	},
	{
		Name: "mode_remembered",
		What: "a process remembers the mode of a projector",
		Edits: []Edit{
			{File: "providers/postgres/open.go", Old: "w.found.SetProgress(&w.Unit, w.checkpoint)", New: "w.found.SetProgress(&w.Unit, w.db.remembered(w.checkpoint))"},
			{File: "providers/postgres/open.go", Old: "// fence returns the key", New: `func (db *Provider) remembered(c provider.Checkpoint) provider.Checkpoint {
	first, _ := db.cached.LoadOrStore(0, c.Mode)
	c.Mode = first.(provider.Mode)
	return c
}

// fence returns the key`},
		},
		Tests: []Test{{"./providers/postgres", "TestUnitsThatWaitForAChangeOfTheModeSeeIt/tx"}},
	},
	{
		Name:  "mode_not_asked",
		What:  "a unit in one round trip does not ask for the mode",
		Edits: []Edit{{File: "providers/postgres/migrations/00001_kinora.sql", Old: "(c.position >= lowest or c.mode <> 'live')", New: "(c.position >= lowest)"}},
		Tests: []Test{{"./providers/postgres", "TestUnitsThatWaitForAChangeOfTheModeSeeIt/batch"}},
	},
	{
		Name: "batches_do_not_skip",
		What: "a batch that moves the checkpoint applies events that have markers",
		Edits: []Edit{
			{File: "providers/postgres/open.go", Old: "func() { delete(w.marked, m) }", New: "func() {}"},
			{File: "providers/postgres/batch.go", Old: "if args, all := w.lookup(); len(all) > 0 {", New: "if args, all := w.lookup(); len(all) < 0 {"},
		},
		Tests: []Test{
			{"./providers/postgres", "TestABatchSkipsWhatHasAMarker/tx"},
			{"./providers/postgres", "TestABatchSkipsWhatHasAMarker/batch"},
		},
	},
	{
		Name:  "unfenced_change_of_the_mode",
		What:  "a change of the checkpoint does not wait for open units",
		Edits: []Edit{{File: "providers/postgres/progress.go", Old: "	b.Queue(exclusiveSQL, lockClassFence, db.fence(projector))\n", New: ""}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Progress/Checkpoint/SetCheckpoint_waits_for_an_open_unit"}},
	},
	{
		Name:  "aged_markers_of_events",
		What:  "pruning by age deletes markers of events that are behind the checkpoint",
		Edits: []Edit{{File: "providers/postgres/parked.go", Old: "and generation <> all((select generations from c)::int[])", New: "and (select generations from c) is not null"}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Progress/Applied/markers_of_a_projector_with_a_checkpoint"}},
	},
	{
		Name:  "lacking_passed",
		What:  "a program passes the events of a handler that it does not have, and that no program has removed",
		Edits: []Edit{{File: "projector/internal/follow/post.go", Old: "lateOf(&r.at), p.handlers().Lacking(to.Handlers)", New: "lateOf(&r.at), nil"}},
		Tests: []Test{{"./projector", "TestAddedHandlerBeginsAtTheCheckpoint"}},
	},
	{
		Name:  "coming_not_seen",
		What:  "a reader of the log does not see that a program with new handlers has started",
		Edits: []Edit{{File: "projector/internal/follow/reader.go", Old: "case r.shouldRecord(g):", New: "case false:"}},
		Tests: []Test{{"./projector", "TestANewTypeBesideAnOldReader"}},
	},
	{
		Name:  "coming_not_answered",
		What:  "a reader of the log that has removed a handler does not tell a program that has it",
		Edits: []Edit{{File: "projector/internal/follow/reader.go", Old: "DeleteFunc(slices.Clone(now.Coming), func(b provider.Began) bool { return Has(g.Coming, b) })", New: "DeleteFunc(slices.Clone(now.Coming), func(b provider.Began) bool { return Has(r.at.Handlers, b) })"}},
		Tests: []Test{{"./projector", "TestARemovedHandlerIsNotTakenUpAgain"}},
	},
	{
		Name:  "ready_before_announced",
		What:  "Ready says yes before the runner of the process has announced its new handlers",
		Edits: []Edit{{File: "projector/wait.go", Old: "|| p.logged.Load() && !p.announced.Load() {", New: "{"}},
		Tests: []Test{{"./projector", "TestANewTypeBesideAnOldReader"}},
	},
	{
		Name:  "coming_in_segments",
		What:  "a handler of another program is recorded while segments are ahead of the checkpoint",
		Edits: []Edit{{File: "projector/internal/follow/post.go", Old: "len(p.handlers().merge(c.Handlers, g.Coming, 0)) > len(c.Handlers) ||", New: ""}},
		Tests: []Test{{"./projector", "TestAHandlerIsAddedToASplitProjector"}},
	},
	{
		Name:  "ordered_without_lacking",
		What:  "with Ordered, a delivery does not wait for an earlier event of a handler that the program lacks",
		Edits: []Edit{{File: "projector/internal/deliver/pool.go", Old: "lacking := follow.HandlersOf(w.pool.Projector).Lacking(c.Handlers)\n\ttakers", New: "lacking := follow.HandlersOf(w.pool.Projector).Lacking(nil)\n\ttakers"}},
		Tests: []Test{{"./projector", "TestOrderedWaitsForWhatAnotherProgramIsAbleToApply"}},
	},
	{
		Name:  "in_flight_though_aside",
		What:  "a message whose handlers do not run is recorded as one that may crash the process",
		Edits: []Edit{{File: "projector/internal/unit/crashes.go", Old: " && m.Aside == nil {", New: " {"}},
		Tests: []Test{{"./projector", "TestOnlyMessagesLeftByACrashAreRecordedInFlight"}},
	},
	{
		Name:  "not_delivered_though_applied",
		What:  "an event that an old program has applied without the new handler counts as one that was not delivered",
		Edits: []Edit{{File: "projector/internal/follow/reader.go", Old: "r.Missed.Report(d.First)", New: "r.Missed.Report(d.Applied)"}},
		Tests: []Test{{"./projector", "TestEventsThatAnOldProgramGotWereDelivered"}},
	},
	{
		Name:  "verified_without_all",
		What:  "a program answers a verification though it lacks what the live read model has",
		Edits: []Edit{{File: "projector/requests.go", Old: "if errors.Is(err, ErrGeneration) {\n\t\t\treturn false, nil", New: "if errors.Is(err, ErrGeneration) {\n\t\t\treturn true, nil"}},
		Tests: []Test{{"./projector", "TestVerificationsAndRebuildsAreLeftToAProgramThatHasAll"}},
	},
	{
		Name:  "rebuilt_without_all",
		What:  "a program takes up a rebuild though it lacks what the live read model has",
		Edits: []Edit{{File: "projector/internal/feed/feeder.go", Old: "p.Row.Revision > 0 && live.Takes(f.Me.Version)", New: "false"}},
		Tests: []Test{{"./projector", "TestVerificationsAndRebuildsAreLeftToAProgramThatHasAll"}},
	},
	{
		Name:  "apply_parked_never_ends",
		What:  "a tool waits for a message that it leaves to another program",
		Edits: []Edit{{File: "projector/internal/feed/all.go", Old: "if parked.Leaves(m) {", New: "if parked.Leaves(m) && m.Aside == nil {"}},
		Tests: []Test{{"./projector", "TestASuspectIsLeftToAProgramThatIsAble"}},
	},
	{
		Name:  "forget_takes_others",
		What:  "forgetting a projector deletes markers under an earlier name of a handler that is one of another projector",
		Edits: []Edit{{File: "projector/internal/follow/handlers.go", Old: "!strings.HasPrefix(name, projector+\"/\")", New: "!strings.HasPrefix(name, projector[:0])"}},
		Tests: []Test{{"./projector", "TestForgetLeavesTheMarkersOfOthers"}},
	},
	{
		Name:  "forget_without_rights",
		What:  "forgetting a projector begins without the rights to end it",
		Edits: []Edit{{File: "projector/forget.go", Old: "ok && !o.Preview {", New: "ok && o.Preview && !o.Preview {"}},
		Tests: []Test{{"./projector", "TestForgetRequiresTheRightsOfARunner"}},
	},
	{
		Name:  "view_of_another_dropped",
		What:  "PostgreSQL drops a view with a table that it does not show",
		Edits: []Edit{{File: "providers/postgres/progress.go", Old: "= array[to_regclass(p.tbl)::oid]`", New: "is not null`"}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/Tables/tables_of_a_retired_generation"}},
	},
	{
		Name:  "needs_not_granted",
		What:  "a role that may park may not say what a message needs after the migration",
		Edits: []Edit{{File: "providers/postgres/migrations/00006_needs.sql", Old: "execute 'grant insert (needs)", New: "perform 'grant insert (needs)"}},
		Tests: []Test{{"./providers/postgres", "TestAProgramRunsOnNeighbouringVersions"}},
	},
	{
		Name:  "migration_keeps_its_place",
		What:  "a migration waits for a lock without an end, and all others behind it",
		Edits: []Edit{{File: "providers/postgres/migrate.go", Old: "set local lock_timeout = '1s'", New: "set local lock_timeout = 0"}},
		Tests: []Test{{"./providers/postgres", "TestAMigrationThatWaitsLetsOthersPass"}},
	},
	{
		Name:  "ready_before_new_handlers",
		What:  "Ready says yes while new handlers do not take events",
		Edits: []Edit{{File: "probes.go", Old: "if len(lag.NotBegun) > 0 {", New: "if false {"}},
		Tests: []Test{{".", "TestReadyWaitsForNewHandlers"}},
	},
	{
		Name:  "removed_ignored",
		What:  "a handler that a program has removed is taken for one that it lacks",
		Edits: []Edit{{File: "projector/erase.go", Old: "Removed: p.removed(),", New: "Removed: p.removed()[:0],"}},
		Tests: []Test{{"./projector", "TestAddedHandlerBeginsAtTheCheckpoint"}},
	},
	{
		Name:  "earlier_names_ignored",
		What:  "a handler is not known by the earlier names in the checkpoint",
		Edits: []Edit{{File: "provider/progress.go", Old: " || slices.Contains(b.Was, h.Name)", New: ""}},
		Tests: []Test{{"./projector", "TestAnOlderProgramKnowsARenamedHandler"}},
	},
	{
		Name:  "repair_undoes_handlers",
		What:  "a verification repairs what a program with a handler that it lacks has applied meanwhile",
		Edits: []Edit{{File: "projector/internal/rebuild/compare.go", Old: "g.How == generation.Scratch && len(lacking) > 0", New: "len(lacking) < 0"}},
		Tests: []Test{{"./projector", "TestAVerificationBesideANewProgramRepairsNothing/a_handler"}},
	},
	{
		Name:  "repair_undoes_schemas",
		What:  "a verification repairs what a program has applied of a schema version that it cannot read",
		Edits: []Edit{{File: "projector/internal/rebuild/compare.go", Old: "class == provider.ClassUnable && !has", New: "class == provider.ClassUnable && has"}},
		Tests: []Test{{"./projector", "TestAVerificationBesideANewProgramRepairsNothing/a_schema_version"}},
	},
	{
		Name:  "unread_applied_at_once",
		What:  "a delivery of an unknown type is applied before what the reader of the log has still to read of its stream",
		Edits: []Edit{{File: "projector/internal/parked/parked.go", Old: "place > 0 && !p.takes(m, place, &c)", New: "place < 0 && !p.takes(m, place, &c)"}},
		Tests: []Test{{"./projector", "TestAnUnknownTypeDeliveredBeforeItsStreamIsRead/the_new_handler_reads_it"}},
	},
	{
		Name:  "unread_lost",
		What:  "Redis takes a delivery that was parked without handlers for one that its reader has applied",
		Edits: []Edit{{File: "providers/redis/scripts/record.lua", Old: "if taken and (kind", New: "if (kind"}},
		Tests: []Test{{"./providers/redis", "TestWhatTheReaderDoesNotReadIsAppliedLater"}},
	},
	{
		Name:  "marker_without_place_refuses",
		What:  "a rebuild is refused after an event whose type was unknown",
		Edits: []Edit{{File: "projector/internal/rebuild/maker.go", Old: "for _, id := range ids {\n\t\t\t\tif places[id].Position == 0 {", New: "for _, id := range ids {\n\t\t\t\tif places[id].Position >= 0 {"}},
		Tests: []Test{{"./projector", "TestARebuildAfterATypeThatWasUnknown"}},
	},
	{
		Name:  "parked_under_the_new_name",
		What:  "after a rollback across a rename, parked messages wait for the new program",
		Edits: []Edit{{File: "projector/internal/model/message.go", Old: "parkedName(b.Projector, h))", New: "h.Name)"}},
		Tests: []Test{{"./projector", "TestWhatIsParkedUnderANewNameIsAppliedAfterARollback"}},
	},
	{
		Name:  "standby_begins_later",
		What:  "a new handler begins in the live generation before the one that is kept for a rollback",
		Edits: []Edit{{File: "projector/internal/feed/feeder.go", Old: "len(follow.HandlersOf(f.Projector).Added(c.Handlers)) > 0", New: "len(follow.HandlersOf(f.Projector).Added(c.Handlers)) < 0"}},
		Tests: []Test{{"./projector", "TestANewHandlerBeginsInTheStandbyGenerationFirst"}},
	},
	{
		Name:  "left_hide_others",
		What:  "messages that are left to another program hide those that this one can apply",
		Edits: []Edit{{File: "projector/internal/feed/all.go", Old: "Keys: 4*batch + a.left,", New: "Keys: 4 * batch,"}},
		Tests: []Test{{"./projector", "TestASuspectIsLeftToAProgramThatIsAble"}},
	},
	{
		Name:  "handlers_written_back",
		What:  "a checkpoint gets back an older list of handlers",
		Edits: []Edit{{File: "provider/progress.go", Old: "return from.Mode != 0 && slices", New: "return from.Mode < 0 && slices"}},
		Tests: []Test{
			{"./providers/memory", "TestConformance/Progress/Checkpoint/handlers_that_the_caller_has_not_changed"},
			{"./providers/sqlite", "TestConformance/Progress/Checkpoint/handlers_that_the_caller_has_not_changed"},
			{"./providers/postgres", "TestConformance/Progress/Checkpoint/handlers_that_the_caller_has_not_changed"},
		},
	},
}
