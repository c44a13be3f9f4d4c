package mutant

// rebuilds lists the mutants of rebuilds, rollbacks and verifications.
var rebuilds = []Mutant{
	{
		Name: "forget_without_tombstone",
		What: "the name of a forgotten projector can be used at once, also by a program that is rolled back",
		Edits: []Edit{{
			File: "projector/forget.go", Old: "\t\t\tdone, err = one.clear(ctx, d, &found.Deleted)\n",
			New: "\t\t\tif done, err = one.clear(ctx, d, &found.Deleted); done {\n\t\t\t\terr = Release(ctx, s, projector, d)\n\t\t\t}\n",
		}},
		Tests: []Test{{"./projector", "TestAForgottenProjectorLeavesNothing/log"}},
	},
	{
		Name: "forgets_in_use",
		What: "a projector is forgotten although a runner of it is alive, or it is being verified or rebuilt",
		Edits: []Edit{
			{File: "projector/forget.go", Old: "if g := generation.Find(o.all, isRebuilt); g != nil {", New: "if g := generation.Find(o.all, isRebuilt); g == nil && o.all == nil {"},
			{File: "projector/forget.go", Old: "if s.Serves(o.name) {", New: "if s.Serves(o.name) && s.ID == \"\" {"},
			{File: "projector/forget.go", Old: "case rest != \"\" && rest[0] != '@' && rest[0] != '/':", New: "case rest != \"\\x00\":"},
		},
		Tests: []Test{
			{"./projector", "TestForgetIsRefused/a_runner"}, {"./projector", "TestForgetIsRefused/a_reader"},
			{"./projector", "TestForgetIsRefused/verified"}, {"./projector", "TestForgetIsRefused/rebuilt"},
		},
	},
	{
		Name:  "forgotten_unnoticed",
		What:  "a runner goes on after its projector was forgotten",
		Edits: []Edit{{File: "projector/internal/feed/all.go", Old: "if errors.Is(err, generation.ErrForgotten) {", New: "if errors.Is(err, generation.ErrForgotten) && ctx == nil {"}},
		Tests: []Test{{"./projector", "TestARunnerOfAForgottenProjectorEnds/log"}},
	},
	{
		Name:  "released_before_its_end",
		What:  "the name of a projector can be used again before all of its rows are deleted",
		Edits: []Edit{{File: "projector/forget.go", Old: "return !g.Cleared }); g != nil {", New: "return !g.Cleared }); g != nil && g.Build.Generation == 0 {"}},
		Tests: []Test{{"./projector", "TestForgetIsContinued"}},
	},
	{
		Name:  "released_without_tables",
		What:  "the first program after a release does not create its tables",
		Edits: []Edit{{File: "projector/internal/generation/generation.go", Old: "return g.Revision == 0 || g.Released", New: "return g.Revision == 0"}},
		Tests: []Test{{"./projector/internal/plan", "TestPlans/it_creates_tables"}},
	},
	{
		Name: "forgets_kept_tables",
		What: "the tables of a forgotten projector that were kept are dropped by the next runner of that name",
		Edits: []Edit{{
			File: "projector/forget.go", Old: "if to.Tables = nil; !g.Cleared {", New: "if g.Cleared {",
		}, {
			File: "projector/forget.go", Old: "\t\t\tif g.Cleared = true; o.drop {\n", New: "\t\t\tif o.drop {\n",
		}, {
			File: "projector/forget.go", Old: "func(g *generation.Row) bool { return !g.Cleared })", New: "func(g *generation.Row) bool { return false })",
		}},
		Tests: []Test{{"./projector", "TestAForgottenProjectorLeavesNothing/log"}},
	},
	{
		Name:  "generations_set_without_the_fence",
		What:  "several generations are retired while a unit of one of them is open",
		Edits: []Edit{{File: "providers/postgres/progress.go", Old: "\t\t\tb.Queue(exclusiveSQL, lockClassFence, db.fence(all[0].Projector))\n", New: ""}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/States/several_generations_in_one_call"}},
	},
	{
		Name:  "switch_at_head",
		What:  "a switch does not apply the last events: the new generation goes on at the head of the log",
		Edits: []Edit{{File: "projector/internal/rebuild/switch.go", Old: "\talso := change.Last\n", New: "\tif change.Compare == nil {\n\t\tif head, err := s.Reader.Host.Log.LogPosition(hard, eventstore.From{Now: true}); err == nil && head > s.Reader.At().Place.Position {\n\t\t\tat := s.Reader.At()\n\t\t\tu.Intent.Advance = &provider.Advance{From: at.Place.Position, To: provider.LogPlace{Position: head}, Mode: at.Mode, Token: at.Token}\n\t\t}\n\t\tchange.Last = func(context.Context, provider.Live) ([]provider.Message, error) { return nil, nil }\n\t\treturn s.Reader.Applier.Worker.Transact(hard, u)\n\t}\n\talso := change.Last\n"}},
		Tests: []Test{{"./projector", "TestRebuildBlueGreenUnderLoad/broker"}},
	},
	{
		Name:  "rebuild_deletes_markers",
		What:  "a rebuild in place is no new generation: it deletes the markers, and the reader begins at the first event",
		Edits: []Edit{{File: "projector/internal/rebuild/maker.go", Old: "\tto.State, to.Suffix, to.Tables = provider.GenerationLive, live.Suffix, live.Tables\n", New: "\tif del, ok := any(m.Host.Store).(provider.MarkerMaintainer); ok {\n\t\tctx := hard\n\t\tfor _, name := range m.Projector.Marked {\n\t\t\tif _, err := del.DropMarkers(ctx, name, 1<<30); err != nil {\n\t\t\t\treturn err\n\t\t\t}\n\t\t}\n\t\tif err := m.alone(hard, live, \"\", provider.Switch{Reset: m.Projector.TablesOf(live.Suffix)}); err != nil {\n\t\t\treturn err\n\t\t}\n\t\tat, err := m.Host.Store.Checkpoint(ctx, live.Build)\n\t\tif err != nil {\n\t\t\treturn err\n\t\t}\n\t\tfirst := at\n\t\tfirst.Place = provider.LogPlace{}\n\t\tif _, err = m.Host.Store.SetCheckpoint(ctx, live.Build, at, first); err != nil {\n\t\t\treturn err\n\t\t}\n\t\tdone := *to\n\t\tdone.State, done.Failed = provider.GenerationRetired, \"done\"\n\t\t_, err = m.Host.Store.SetGeneration(ctx, done.Stored())\n\t\treturn err\n\t}\n\tto.State, to.Suffix, to.Tables = provider.GenerationLive, live.Suffix, live.Tables\n"}},
		Tests: []Test{{"./projector", "TestRebuildInPlaceUnderLoad/broker"}},
	},
	{
		Name:  "reset_outside_fence",
		What:  "a rebuild in place empties the tables in a transaction before that of the switch",
		Edits: []Edit{{File: "projector/internal/rebuild/maker.go", Old: "\ts.Reset = m.Projector.TablesOf(live.Suffix)\n", New: "\tif err := m.alone(hard, live, \"\", provider.Switch{Reset: m.Projector.TablesOf(live.Suffix)}); err != nil {\n\t\treturn err\n\t}\n\tmodel.Wait(hard, time.Second)\n"}},
		Tests: []Test{{"./projector", "TestRebuildInPlaceUnderLoad/log"}},
	},
	{
		Name:  "ahead_of_live",
		What:  "the reader of a generation that is not live applies events that the live one has not applied",
		Edits: []Edit{{File: "projector/internal/follow/page.go", Old: "\tif err == nil && r.Pace != nil {\n\t\terr = r.Pace.Cut(", New: "\tif err == nil && r.Build.Generation == 0 {\n\t\terr = r.Pace.Cut("}},
		Tests: []Test{{"./projector", "TestVerifyComparesAtTheLivePosition"}},
		Cells: []string{"rebuild-verify"},
	},
	{
		Name:  "pages_of_a_moving_generation",
		What:  "events that the live generation applies are looked at page by page, without a look at the order of streams",
		Edits: []Edit{{File: "projector/internal/rebuild/switch.go", Old: "\t}}, true)\n", New: "\t}}, false)\n"}},
		Tests: []Test{{"./projector", "TestARebuildKeepsTheOrderOfStreamsNextToTheLiveGeneration"}},
	},
	{
		Name:  "stands_down_unnoticed",
		What:  "a reader begins although its generation has stood down, and the program has not noticed it",
		Edits: []Edit{{File: "projector/internal/follow/post.go", Old: "\tr.reportAdded(ctx, c.Handlers)\n\treturn r, r.checkServing(ctx, g)\n", New: "\tr.reportAdded(ctx, c.Handlers)\n\treturn r, nil\n"}},
		Tests: []Test{{"./projector", "TestAProgramThatMissedASwitchStaysBehindTheLiveGeneration"}},
	},
	{
		Name:  "parked_compared",
		What:  "a verification compares read models although a message is parked in the live one only",
		Edits: []Edit{{File: "projector/internal/rebuild/compare.go", Old: "_, has := ours[id]; !has {", New: "_, has := ours[id]; !has && id == \"\" {"}},
		Tests: []Test{{"./projector", "TestVerifyWaitsForParkedMessages"}},
	},
	{
		Name:  "switch_waits_for_readers",
		What:  "a switch waits longer for the locks of tables than PostgreSQL waits until it looks for a deadlock",
		Edits: []Edit{{File: "providers/postgres/switch.go", Old: "tableTimeout = \"300ms\"", New: "tableTimeout = \"5s\""}},
		Tests: []Test{{"./providers/postgres", "TestASwitchGivesWayToReadersOfSeveralViews"}},
	},
}
