package mutant

// rebuilds lists the mutants of rebuilds, rollbacks and verifications.
var rebuilds = []Mutant{
	{
		Name: "switch_at_head",
		What: "a switch does not apply the last events: the new generation goes on at the head of the log",
		Edits: []Edit{{File: "projector/promote.go", Old: "	u.intent.Switch.Last = r.lastStep(u, promoteMost)\n", New: `	if head, err := r.log.LogPosition(ctx, eventstore.From{Now: true}); err == nil && head > r.at.Place.Position {
		u.intent.Advance = r.advanceTo(provider.LogPlace{Position: head})
	}
`}},
		Tests: []Test{{"./projector", "TestRebuildBlueGreenUnderLoad/broker"}},
	},
	{
		Name: "rebuild_deletes_markers",
		What: "a rebuild in place is no new generation: it deletes the markers, and the reader begins at the first event",
		Edits: []Edit{{File: "projector/promote.go", Old: "	to.state, to.Suffix, to.Tables = provider.GenerationLive, is.Suffix, is.Tables\n", New: `	if m, ok := any(p.runner.store).(provider.MarkerMaintainer); ok {
		for _, name := range p.marked {
			if _, err := m.DropMarkers(ctx, name, 1<<30); err != nil {
				return err
			}
		}
		if err := p.alone(hard, is, "", provider.Switch{Reset: p.tables(is.Suffix)}); err != nil {
			return err
		}
		at, err := p.runner.store.Checkpoint(ctx, is.Build)
		if err != nil {
			return err
		}
		first := at
		first.Place = provider.LogPlace{}
		if _, err = p.runner.store.SetCheckpoint(ctx, is.Build, at, first); err != nil {
			return err
		}
		done := *to
		done.state, done.Failed = provider.GenerationRetired, "done"
		_, err = p.runner.store.SetGeneration(ctx, done.stored())
		return err
	}
	to.state, to.Suffix, to.Tables = provider.GenerationLive, is.Suffix, is.Tables
`}},
		Tests: []Test{{"./projector", "TestRebuildInPlaceUnderLoad/broker"}},
	},
	{
		Name: "reset_outside_fence",
		What: "a rebuild in place empties the tables in a transaction before that of the switch",
		Edits: []Edit{{File: "projector/promote.go", Old: "		s.Reset = p.tables(is.Suffix)\n", New: `		if err := p.alone(hard, is, "", provider.Switch{Reset: p.tables(is.Suffix)}); err != nil {
			return err
		}
		wait(ctx, readMax)
`}},
		Tests: []Test{{"./projector", "TestRebuildInPlaceUnderLoad/log"}},
	},
	{
		Name:  "ahead_of_live",
		What:  "the reader of a generation that is not live applies events that the live one has not applied",
		Edits: []Edit{{File: "projector/reader.go", Old: "err == nil && !r.serving.isLive() {\n		err = r.trail(", New: "err == nil && r.serving.Generation == 0 {\n		err = r.trail("}},
		Tests: []Test{{"./projector", "TestVerifyComparesAtTheLivePosition"}},
		Cells: []string{"rebuild-verify"},
	},
	{
		Name:  "pages_of_a_moving_generation",
		What:  "events that the live generation applies are looked at page by page, without a look at the order of streams",
		Edits: []Edit{{File: "projector/promote.go", Old: "	}}, true)\n", New: "	}}, false)\n"}},
		Tests: []Test{{"./projector", "TestARebuildKeepsTheOrderOfStreamsNextToTheLiveGeneration"}},
		Cells: []string{"rebuild-verify"},
	},
	{
		Name:  "stands_down_unnoticed",
		What:  "a reader begins although its generation has stood down, and the program has not noticed it",
		Edits: []Edit{{File: "projector/checkpoint.go", Old: "	return r.checkServing(ctx)\n", New: "	return nil\n"}},
		Tests: []Test{{"./projector", "TestAProgramThatMissedASwitchStaysBehindTheLiveGeneration"}},
		Cells: []string{"rebuild"},
	},
	{
		Name:  "parked_compared",
		What:  "a verification compares read models although a message is parked in the live one only",
		Edits: []Edit{{File: "projector/verify.go", Old: "		if !ours[id] {\n", New: "		if !ours[id] && id == \"\" {\n"}},
		Tests: []Test{{"./projector", "TestVerifyWaitsForParkedMessages"}},
	},
	{
		Name:  "switch_waits_for_readers",
		What:  "a switch waits longer for the locks of tables than PostgreSQL waits until it looks for a deadlock",
		Edits: []Edit{{File: "providers/postgres/switch.go", Old: "tableTimeout = \"300ms\"", New: "tableTimeout = \"5s\""}},
		Tests: []Test{{"./providers/postgres", "TestASwitchGivesWayToReadersOfSeveralViews"}},
	},
}
