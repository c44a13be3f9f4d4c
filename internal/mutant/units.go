package mutant

// units lists the mutants of the rules by which a projector's messages are applied and parked.
var units = []Mutant{
	{
		Name:  "ack_early",
		What:  "deliveries are acknowledged before their unit runs",
		Edits: []Edit{{File: "projector/internal/deliver/pool.go", Old: "\t\t\tw.deliver(ctx, hard, w.leave(ctx, w.locate(ctx, w.collect(m))))\n", New: "\t\t\tmsgs := w.collect(m)\n\t\t\tfor _, m := range msgs {\n\t\t\t\tm.Done()\n\t\t\t}\n\t\t\tw.deliver(ctx, hard, w.leave(ctx, w.locate(ctx, msgs)))\n"}},
		Tests: []Test{{"./projector", "TestNoMessageIsAckedBeforeItsCommit"}},
		Cells: []string{"kill"},
	},
	{
		Name:  "sql_tx_ended",
		What:  "a unit does not notice that a handler ended its *sql.Tx",
		Edits: []Edit{{File: "providers/postgres/sql.go", Old: "if h.driver.ended.Load() && (", New: "if false && ("}},
		Tests: []Test{{"./providers/postgres", "TestASQLHandlerCannotEndItsTransaction"}},
	},
	{
		Name:  "sql_any_driver",
		What:  "a *sql.Tx of another driver is not refused",
		Edits: []Edit{{File: "providers/postgres/sql.go", Old: "case !b.borrowed:\n\t\t\treturn unborrowed(ctx, err)", New: "case !b.borrowed:\n\t\t\treturn nil"}},
		Tests: []Test{{"./providers/postgres", "TestASQLTransactionOfAnotherDriverIsRefused"}},
	},
	{
		Name:  "no_group_commit",
		What:  "messages that arrive while a unit runs do not share the next unit: each has its own",
		Edits: []Edit{{File: "projector/internal/deliver/pool.go", Old: "if len(msgs) == most {", New: "if len(msgs) >= 1 {"}},
		Tests: []Test{{"./projector", "TestMessagesThatArriveDuringAUnitShareTheNextOne/all_of_them"}},
	},
	{
		Name:  "twice_in_unit",
		What:  "a unit may contain a message twice",
		Edits: []Edit{{File: "projector/internal/deliver/pool.go", Old: "twice && m.ID != \"\" {", New: "twice && i < 0 {"}},
		Tests: []Test{{"./projector", "TestDuplicateIDInAUnitRunsOnce/markers_true"}},
	},
	{
		Name:  "some_handlers",
		What:  "a message is applied if its first handler succeeds, although another handler fails",
		Edits: []Edit{{File: "projector/internal/unit/handle.go", Old: "\t\tsome, took, err := a.call(ctx, call, &m.Handlers[j], m.Replayed, m, nil)\n\t\tif err != nil {\n", New: "\t\tsome, took, err := a.call(ctx, call, &m.Handlers[j], m.Replayed, m, nil)\n\t\tif err != nil && j == 0 {\n"}},
		Tests: []Test{{"./projector", "TestMessageIsAppliedByAllItsHandlersOrNone"}},
	},
	{
		Name:  "same_transaction",
		What:  "a unit continues in the same transaction after a message has failed",
		Edits: []Edit{{File: "projector/internal/unit/handle.go", Old: "\t\tout, err := a.run(ctx, call, i, m, found.Fresh[i])\n\t\tif err != nil {\n\t\t\treturn c, err\n\t\t}\n", New: "\t\tout, err := a.run(ctx, call, i, m, found.Fresh[i])\n\t\tif err != nil && len(msgs) == 1 {\n\t\t\treturn c, err\n\t\t}\n\t\tif err != nil {\n\t\t\tm.Aside = &model.Aside{Cause: err, Attempts: 1}\n\t\t\tc.Park = append(c.Park, *a.pass(i, m, Failed, found.Fresh[i], false))\n\t\t\tdecided.stop(m.Lane)\n\t\t}\n"}},
		Tests: []Test{{"./projector", "TestFailingUnitIsSplitAtTheFailingMessage/the_third"}},
	},
	{
		Name:  "counted_in_company",
		What:  "a message that fails among others is parked, although it may not fail alone",
		Edits: []Edit{{File: "projector/internal/apply/apply.go", Old: "case f.size == 1, f.at >= 0 && (", New: "case f.size == 1, f.at >= 0 || ("}},
		Tests: []Test{{"./projector", "TestOnlyFailuresAloneCount"}},
	},
	{
		Name:  "not_set_aside",
		What:  "a worker retries a message that failed alone, with pauses, before it parks the message",
		Edits: []Edit{{File: "projector/internal/apply/apply.go", Old: "\t\tif v == end {\n", New: "\t\tif v == setAside && len(u.Messages) == 1 && run.tries < 4 {\n\t\t\tv = again\n\t\t}\n\t\tif v == end {\n"}},
		Tests: []Test{{"./projector", "TestFailedMessageIsParkedAtOnceAndHoldsItsKey/until_it_is_applied"}},
	},
	{
		Name:  "no_serial_units",
		What:  "units still run in parallel after a deadlock",
		Edits: []Edit{{File: "projector/internal/unit/unit.go", Old: "u.Intent.Serial = until > 0 &&", New: "u.Intent.Serial = until < 0 &&"}},
		Tests: []Test{{"./projector", "TestDeadlockMakesUnitsSerialForAMinute"}},
	},
	{
		Name:  "transient_counted",
		What:  "a message is parked when the database is busy or away",
		Edits: []Edit{{File: "projector/internal/apply/apply.go", Old: "case class == provider.ClassTransient, class", New: "case class"}},
		Tests: []Test{{"./projector", "TestTransientErrorHalvesTheUnitAndIsNeverCounted"}},
	},
	{
		Name:  "parked_without_marker",
		What:  "a unit that parks a message leaves no marker for it",
		Edits: []Edit{{File: "projector/internal/model/message.go", Old: "Mark: m.Mark, Position", New: "Mark: m.Mark && m.Aside == nil, Position"}},
		Tests: []Test{{"./projector", "TestMessageIsAppliedByAllItsHandlersOrNone"}},
	},
	{
		Name:  "no_hold",
		What:  "a delivery passes a parked message of its key",
		Edits: []Edit{{File: "projector/internal/unit/handle.go", Old: "case m.Parked == nil && f.found.Held[i], f.stopped[m.Lane]:", New: "case f.stopped[m.Lane]:"}},
		Tests: []Test{{"./projector", "TestFailedMessageIsParkedAtOnceAndHoldsItsKey/until_it_is_applied"}},
	},
	{
		Name: "hold_before_unit",
		What: "a unit asks which lanes are held before its transaction begins",
		Edits: []Edit{
			{File: "providers/postgres/open.go", Old: "	b := &pgx.Batch{}\n	if w.Switch == nil {\n", New: `	if ask := (&pgx.Batch{}); !w.IsReplay() && len(w.Messages) > 0 {
		w.queueHeld(ask)
		if err := conn.SendBatch(ctx, ask).Close(); err != nil {
			return nil, err
		}
	}
	b := &pgx.Batch{}
	if w.Switch == nil {
`},
			{File: "providers/postgres/open.go", Old: "	if !w.IsReplay() && len(w.Messages) > 0 {\n		w.queueHeld(b)\n	}\n", New: ""},
		},
		Tests: []Test{{"./providers/postgres", "TestHoldsAreReadAfterTheWaitForMarkers/tx"}},
	},
	{
		Name: "hold_first",
		What: "a unit asks which lanes are held before it waits for markers",
		Edits: []Edit{
			{File: "providers/postgres/open.go", Old: "	if !w.IsReplay() && len(w.Messages) > 0 {\n		w.queueHeld(b)\n	}\n", New: ""},
			{File: "providers/postgres/open.go", Old: "	w.queueMarkers(b, sql)\n", New: `	if !w.IsReplay() && len(w.Messages) > 0 {
		w.queueHeld(b)
	}
	w.queueMarkers(b, sql)
`},
		},
		Tests: []Test{{"./providers/postgres", "TestHoldsAreReadAfterTheWaitForMarkers/tx"}},
	},
	{
		Name:  "many_lanes_not_held",
		What:  "a unit of many lanes does not look up which ones are held",
		Edits: []Edit{{File: "providers/postgres/open.go", Old: "	if err == nil && w.mayHold {\n", New: "	if err == nil && w.mayHold && false {\n"}},
		Tests: []Test{{"./providers/postgres", "TestHoldsAreReadAfterTheWaitForMarkers/tx_of_many_lanes"}},
	},
	{
		Name: "hold_not_locked",
		What: "a unit that finds a lane held does not lock the hold: it may park behind a message that has left",
		Edits: []Edit{{
			File: "providers/postgres/open.go",
			Old:  "select kinora.held($1::text, $2::int, $3::bytea[])",
			New:  "select lane from kinora.holds where projector = $1::text and generation = $2::int and lane = any($3::bytea[])",
		}},
		Tests: []Test{{"./providers/postgres", "TestADeliveryAndAParkedMessageOfOneLaneFollowOneAnother"}},
	},
	{
		Name:  "parked_not_first",
		What:  "a parked message runs although an earlier message of its lane is parked",
		Edits: []Edit{{File: "provider/unit.go", Old: "asked && locked && i >= next[is.Lane] &&", New: "asked && locked &&"}},
		Tests: []Test{{"./providers/memory", "TestConformance/Units/Runs/a_lane_is_emptied_in_order"}},
	},
	{
		Name: "unable_is_due",
		What: "a message that the program cannot apply is due as others are, so each program tries it again and again",
		Edits: []Edit{
			{File: "provider/parking.go", Old: "if after < 0 || p.IsUnable() {", New: "if after < 0 {"},
			{File: "providers/sqlite/do.go", Old: "case !is.IsUnable() || u.db.older.Load():", New: "default:"},
			{File: "providers/postgres/parked.go", Old: "return a.Parked.IsUnable() })", New: "return false })"},
		},
		Tests: []Test{
			{"./providers/memory", "TestConformance/Parking/Needs/a_message_that_needs_something"},
			{"./providers/sqlite", "TestConformance/Parking/Needs/a_message_that_needs_something"},
			{"./providers/postgres", "TestConformance/Parking/Needs/a_message_that_needs_something"},
		},
	},
	{
		Name: "unable_replayed",
		What: "an operator's replay makes a message due that the program cannot apply",
		Edits: []Edit{
			{File: "providers/sqlite/do.go", Old: "and (class <> 'unable' or needs = '') ", New: ""},
			{File: "providers/postgres/parked.go", Old: "when l.class = 'unable' and l.needs <> '' then", New: "when false then"},
		},
		Tests: []Test{
			{"./providers/sqlite", "TestConformance/Parking/Needs/a_person's_decision"},
			{"./providers/postgres", "TestConformance/Parking/Needs/a_person's_decision"},
		},
	},
	{
		Name: "need_of_any_build",
		What: "a need of one generation or projector counts for all",
		Edits: []Edit{
			{File: "provider/parking.go", Old: "return n.Projector == p.Projector && n.Number() == p.Generation && n.Needs == p.Needs", New: "return n.Needs == p.Needs"},
			{File: "providers/sqlite/parked.go", Old: "if n.Projector == b.Projector && n.Number() == b.Number() {", New: "{"},
			{File: "providers/postgres/parked.go", Old: "where has.projector = n.projector and has.generation = n.generation", New: "where true"},
			{File: "providers/postgres/parked.go", Old: "(p.projector, p.generation, p.needs) in (select projector, generation, needs from has)", New: "p.needs in (select needs from has)"},
		},
		Tests: []Test{
			{"./providers/memory", "TestConformance/Parking/Needs/a_need_of_one_build"},
			{"./providers/sqlite", "TestConformance/Parking/Needs/a_need_of_one_build"},
			{"./providers/postgres", "TestConformance/Parking/Needs/a_need_of_one_build"},
		},
	},
	{
		Name: "unable_of_any_class",
		What: "a message that an earlier program gave another class, and left its needs, waits for a program and is never due",
		Edits: []Edit{
			{File: "provider/parking.go", Old: `return p.Class == ClassUnable && p.Needs != ""`, New: `return p.Needs != ""`},
			{File: "providers/sqlite/do.go", Old: "(class <> 'unable' or needs = '')", New: "needs = ''"},
			{File: "providers/postgres/parked.go", Old: "when l.class = 'unable' and l.needs <> '' then", New: "when l.needs <> '' then"},
		},
		Tests: []Test{
			{"./providers/memory", "TestConformance/Parking/Needs/the_class_decides"},
			{"./providers/sqlite", "TestConformance/Parking/Needs/the_class_decides"},
			{"./providers/postgres", "TestConformance/Parking/Needs/the_class_decides"},
		},
	},
	{
		Name: "unable_behind_others",
		What: "messages behind others take the places of the search for those whose needs the program has",
		Edits: []Edit{
			{File: "providers/postgres/parked.go", Old: "and p.class = 'unable' and case when p.id = (", New: "and p.class = 'unable' and case when p.id >= ("},
		},
		Tests: []Test{{"./providers/postgres", "TestConformance/Parking/Needs/a_need_behind_another_message"}},
	},
	{
		Name:  "unable_counted",
		What:  "a message that the program cannot apply has an attempt counted",
		Edits: []Edit{{File: "projector/internal/model/message.go", Old: "m.Aside = &Aside{Cause: cause, Needs: needs}", New: "m.Aside = &Aside{Cause: cause, Needs: needs, Attempts: 1}"}},
		Tests: []Test{{"./projector/internal/model", "TestNeeds/an_unknown_type"}},
	},
	{
		Name:  "attempts_begin_again",
		What:  "the attempts at a message that has waited for a program begin again",
		Edits: []Edit{{File: "projector/internal/apply/apply.go", Old: "attempts += m.Parked.Attempts", New: "attempts = max(attempts, 1)"}},
		Tests: []Test{{"./projector", "TestAttemptsGoOnAfterAnOlderProgram"}},
	},
	{
		Name:  "need_of_a_part",
		What:  "a message that was parked for handlers needs these only, and not the schema version of its event",
		Edits: []Edit{{File: "projector/internal/model/message.go", Old: "	} else {\n		all = append(all, provider.NeedEvent(", New: "	} else if len(names) == 0 {\n		all = append(all, provider.NeedEvent("}},
		Tests: []Test{{"./projector/internal/model", "TestNeeds/with_a_newer_schema_version"}},
	},
	{
		Name:  "needs_met_by_none",
		What:  "a program does not take the messages whose needs it has",
		Edits: []Edit{{File: "projector/internal/feed/needs.go", Old: "		n.met = append(n.met, one)\n", New: ""}},
		Tests: []Test{{"./projector", "TestUnknownTypesWaitForAProgramThatKnowsThem/that_starts"}},
	},
	{
		Name:  "suspect_tried_by_the_unable",
		What:  "a program tries a message that may have crashed a process although it cannot apply it, and others no longer run it alone",
		Edits: []Edit{{File: "projector/internal/parked/parked.go", Old: "m.Parked.Code == model.CodeCrashed &&", New: "m.Parked.Code == \"\" &&"}},
		Tests: []Test{{"./projector", "TestASuspectIsLeftToAProgramThatIsAble"}},
	},
	{
		Name: "halt_passes_the_unable",
		What: "a message that the program cannot apply does not halt its runner",
		Edits: []Edit{
			{File: "projector/internal/apply/apply.go", Old: "(row.After < 0 || p.Class == provider.ClassUnable) &&", New: "row.After < 0 &&"},
			{File: "projector/runner.go", Old: "lacks := f.Projector.Lacks(n.Needs); lacks != nil {", New: "lacks := f.Projector.Lacks(n.Needs); lacks == nil {"},
		},
		Tests: []Test{{"./projector", "TestHaltEndsWhenTheMessageIsSkipped/unregistered"}},
	},
	{
		Name: "first_before_lock",
		What: "a unit of a counted message reads which message is the first of the lane without waiting for the lane's lock",
		Edits: []Edit{ // either lock alone would hide the loss of the other
			{File: "providers/postgres/open.go", Old: "lanes + ` for update) h`", New: "lanes + `) h`"},
			{File: "providers/postgres/open.go", Old: "order by id limit l.n for no key update) p", New: "order by id limit l.n) p"},
		},
		Tests: []Test{{"./providers/postgres", "TestADeliveryAndAParkedMessageOfOneLaneFollowOneAnother"}},
	},
	{
		Name: "no_count",
		What: "an attempt at a parked message is counted after it has failed instead of before it runs",
		Edits: []Edit{
			{File: "projector/internal/parked/parked.go", Old: "begun, err := p.Host.Store.Try(inner, *row, p.Host.Retry.Attempts, again)", New: "begun, err := again > 0, inner.Err()"},
			{File: "projector/internal/parked/parked.go", Old: "\trow.Attempts++\n", New: ""},
			{File: "projector/internal/parked/parked.go", Old: "apply.SetAside(m, d, err, row.Attempts)", New: "apply.SetAside(m, d, err, row.Attempts+1)"},
			{File: "projector/internal/parked/parked.go", Old: "apply.SetAside(m, d, err, row.Attempts-1)", New: "apply.SetAside(m, d, err, row.Attempts)"},
		},
		Tests: []Test{{"./projector", "TestAttemptIsCountedBeforeItRuns"}},
	},
	{
		Name: "replay_not_due",
		What: "a replay leaves the lane of a stuck message without a due time, so no runner replays the message",
		Edits: []Edit{{
			File: "providers/memory/parking.go",
			Old:  "p.Attempts = 0\n				s.keep(p, 0, now)\n",
			New:  "p.State, p.Attempts = to, 0\n				s.parked = s.parked.put(p.Seq, p)\n",
		}},
		Tests: []Test{{"./projector", "TestFailedMessageIsParkedAtOnceAndHoldsItsKey/until_it_is_replayed"}},
	},
	{
		Name:  "no_backoff",
		What:  "a worker does not back off when every message fails, and parks the whole backlog",
		Edits: []Edit{{File: "projector/internal/apply/brake.go", Old: "if n < 0 || b.since != applied {", New: "if true {"}},
		Tests: []Test{{"./projector", "TestWorkerBacksOffWhenEveryMessageFails/units_of_one"}},
	},
	{
		Name:  "brake_for_bad_messages",
		What:  "a worker waits after messages that can never be applied",
		Edits: []Edit{{File: "projector/internal/apply/brake.go", Old: "if provider.ClassOf(a.Cause) != provider.ClassUnknown {", New: "if false {"}},
		Tests: []Test{{"./projector", "TestARunOfBadMessagesDelaysNoOther/log/permanent"}, {"./projector", "TestARunOfBadMessagesDelaysNoOther/broker/unregistered_type"}},
	},
	{
		Name:  "undecodable_by_its_handler",
		What:  "an event that cannot be decoded fails in its handler, and undoes its unit",
		Edits: []Edit{{File: "projector/internal/unit/handle.go", Old: "if first < 0 || m.IsDecoded() {", New: "if true {"}},
		Tests: []Test{{"./projector", "TestAnUndecodableEventUndoesNothing"}},
	},
	{
		Name:  "brake_of_one_worker",
		What:  "a worker waits on after another one of its projector has applied a message",
		Edits: []Edit{{File: "projector/internal/apply/brake.go", Old: "a.Worker.Group.Applied.Load() == b.since && ctx.Err()", New: "ctx.Err()"}},
		Tests: []Test{{"./projector", "TestAWaitEndsWhenAnotherWorkerAppliesAMessage"}},
	},
	{
		Name:  "brake_without_cause",
		What:  "failures of different causes add up",
		Edits: []Edit{{File: "projector/internal/apply/brake.go", Old: "c := cause{a.Handler, provider.CodeOf(a.Cause)}", New: "c := cause{}"}},
		Tests: []Test{{"./projector", "TestABrakeIsOfOneCause"}},
	},
	{
		Name:  "brake_unreported",
		What:  "no runner reports that it waits",
		Edits: []Edit{{File: "projector/runner.go", Old: ", Outages: r.brakes.List()}", New: "}"}},
		Tests: []Test{{"./projector", "TestABrakeIsOfOneCause"}, {"./admin", "TestDoctorNamesWhatIsPaused"}},
	},
	{
		Name:  "no_in_flight",
		What:  "no runner records messages as in flight, or asks for the records of others",
		Edits: []Edit{{File: "projector/internal/unit/unit.go", Old: "if u.Intent.DryRun == nil && w.Crashes.suspects(u) {", New: "if false {"}},
		Tests: []Test{{"./projector", "TestSuspectIsParkedAndRetriedFromItsRow"}},
	},
	{
		Name:  "not_careful_at_start",
		What:  "a runner records nothing as in flight in its first lease, when an earlier process may have ended unnoticed",
		Edits: []Edit{{File: "projector/internal/unit/crashes.go", Old: "if w.now.Sub(w.began) < c.Host.Lease &&", New: "if false &&"}},
		Tests: []Test{{"./projector", "TestOnlyMessagesLeftByACrashAreRecordedInFlight"}},
	},
	{
		Name:  "in_flight_stays",
		What:  "the commit of a unit does not delete its worker's in-flight records",
		Edits: []Edit{{File: "providers/memory/unit.go", Old: "		s.inFlight = s.inFlight.drop(workerKey(*w))\n", New: ""}},
		Tests: []Test{{"./providers/memory", "TestConformance/Units/Careful/names_are_deleted_with_the_commit"}},
	},
	{
		Name:  "careful_in_one_trip",
		What:  "a careful unit runs its handlers before it knows which messages are suspects",
		Edits: []Edit{{File: "providers/postgres/batch.go", Old: "u.Switch == nil && u.Careful == nil &&", New: "u.Switch == nil &&"}},
		Tests: []Test{{"./providers/postgres", "TestBatchedConformance/Careful/a_careful_unit_asks_first"}},
	},
	{
		Name:  "suspect_no_barrier",
		What:  "messages of a suspect's key do not wait for it in its own unit",
		Edits: []Edit{{File: "projector/internal/unit/handle.go", Old: "f.found.Held[i], f.stopped[m.Lane]:", New: "f.found.Held[i]:"}},
		Tests: []Test{{"./projector", "TestSuspectIsParkedAndRetriedFromItsRow"}},
	},
	{
		Name: "count_before_process",
		What: "an attempt at a suspect is counted before it waits for the units that run in its process",
		Edits: []Edit{
			{File: "projector/internal/parked/parked.go", Old: "\t\tw.Crashes.Process.Lock() // before it is counted: waiting is no attempt\n\t\tdefer w.Crashes.Process.Unlock()\n", New: ""},
			{File: "projector/internal/parked/parked.go", Old: "\trow.Attempts++\n", New: "\trow.Attempts++\n\tif alone {\n\t\tw.Crashes.Process.Lock()\n\t\tdefer w.Crashes.Process.Unlock()\n\t}\n"},
		},
		Tests: []Test{{"./projector", "TestSuspectWaitsForItsProcessBeforeItIsCounted/then_it_runs"}},
	},
	{
		Name:  "names_forgotten",
		What:  "Projector.Handlers returns no earlier names of handlers",
		Edits: []Edit{{File: "projector/projector.go", Old: "append(names, full.Names()...)", New: "append(names, full.Name)"}},
		Tests: []Test{{"./projector", "TestHandlersReturnsEarlierNames"}},
	},
	{
		Name:  "always_marked",
		What:  "a projector writes markers also without Options.Markers",
		Edits: []Edit{{File: "projector/erase.go", Old: "Marks: p.opts.Markers && keeps.Markers,", New: "Marks: keeps.Markers,"}},
		Tests: []Test{{"./projector", "TestRedeliveryTakesEffectOnce/control_without_markers"}, {"./providers/postgres", "TestUnitsOfARunnerWithoutMarkersDoNotTouchTheirTable"}},
	},
}
