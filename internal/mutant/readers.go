package mutant

// readers lists the mutants of the readers of the log, and of deliveries that they complete.
var readers = []Mutant{
	{
		Name:  "each_reader_asks",
		What:  "each reader without work asks the log for itself",
		Edits: []Edit{{File: "projector/internal/model/host.go", Old: "if now := h.Clock(); o.read.IsZero() || now.Sub(o.read) >= headAge {", New: "if now := h.Clock(); true {"}},
		Tests: []Test{{"./projector", "TestIdleProjectorsShareAQuestion"}},
	},
	{
		Name:  "checkpoint_at_the_head",
		What:  "the checkpoint of a live projector moves to the head of the log, not to the end of the events that are old enough",
		Edits: []Edit{{File: "projector/internal/follow/complete.go", Old: "\tif len(page.Events) > 0 || page.End.Position-r.at.Place", New: "\tif head, err := r.Host.Log.LogPosition(ctx, eventstore.From{Now: true}); err == nil && len(page.Events) > 0 {\n\t\tpage.End = provider.LogPlace{Position: head}\n\t}\n\tif len(page.Events) > 0 || page.End.Position-r.at.Place"}},
		Tests: []Test{{"./projector", "TestTheCheckpointStaysBehindTheGrace"}},
	},
	{
		Name:  "settled_after_the_read",
		What:  "when a projector goes live, the checkpoint moves to what is settled after the last events were read",
		Edits: []Edit{{File: "projector/internal/follow/complete.go", Old: "\tif err := r.setMode(ctx, provider.ModeLive); err != nil {\n", New: "\tlater, err := r.Host.Page(ctx, provider.LogQuery{After: r.cursor.read, Filter: r.Projector.Rules.Filter, Limit: closeLimit, NoData: true})\n\tif err == nil {\n\t\terr = r.advance(hard, later.End)\n\t}\n\tif err != nil {\n\t\treturn err\n\t}\n\tr.cursor.read = later.End.Position\n\tif err := r.setMode(ctx, provider.ModeLive); err != nil {\n"}},
		Tests: []Test{{"./projector", "TestGoingLiveLosesDoublesAndMisordersNothing"}},
	},
	{
		Name:  "last_step_without_markers",
		What:  "the units in which a projector goes live write no markers",
		Edits: []Edit{{File: "projector/internal/follow/reader.go", Old: "slices.Chunk(r.taken(events), r.Applier.Batch) {\n", New: "slices.Chunk(r.taken(events), r.Applier.Batch) {\n\t\tfor _, m := range msgs {\n\t\t\tm.Mark = m.Mark && r.at.Mode != provider.ModeClosing\n\t\t}\n"}},
		Tests: []Test{{"./projector", "TestGoingLiveLosesDoublesAndMisordersNothing"}},
	},
	{
		Name: "read_before_closing",
		What: "the last events before a projector goes live are read before its deliveries wait",
		Edits: []Edit{
			{File: "projector/internal/follow/complete.go", Old: "\tif page.Full {\n", New: "\tif page = c.early; page.Full {\n"},
			{File: "projector/internal/follow/complete.go", Old: "\treturn true, r.setMode(ctx, provider.ModeClosing)", New: "\tif c.early, err = r.Host.Page(ctx, provider.LogQuery{\n\t\tAfter: r.cursor.read, Filter: r.Projector.Rules.Filter, Limit: closeLimit, Unsettled: true, NoData: true,\n\t}); err != nil {\n\t\treturn false, err\n\t}\n\treturn true, r.setMode(ctx, provider.ModeClosing)"},
			{File: "projector/internal/follow/complete.go", Old: "\tasked  int64 // unsettled events up to it were completed\n", New: "\tasked  int64 // unsettled events up to it were completed\n\tearly  provider.LogPage\n"},
		},
		Tests: []Test{{"./projector", "TestGoingLiveLosesDoublesAndMisordersNothing"}},
	},
	{
		Name:  "deliveries_not_left",
		What:  "deliveries of a new projector are applied while its reader applies the events before them",
		Edits: []Edit{{File: "provider/unit.go", Old: "case isDelivery && c.Mode == ModeCatchUp && !c.Covers(m):", New: "case isDelivery && c.Mode == 0:"}},
		Tests: []Test{{"./projector", "TestNewProjectorGetsThePastInOrder"}},
	},
	{
		Name:  "deliveries_do_not_wait",
		What:  "deliveries do not wait while a projector goes live",
		Edits: []Edit{{File: "provider/unit.go", Old: "case isDelivery && c.Mode == ModeClosing:", New: "case isDelivery && c.Mode == 0:"}},
		Tests: []Test{{"./projector", "TestGoingLiveLosesDoublesAndMisordersNothing"}},
	},
	{
		Name:  "earlier_not_brought",
		What:  "with Ordered, a delivery does not bring the earlier events of its stream",
		Edits: []Edit{{File: "projector/internal/deliver/pool.go", Old: "if err == nil && p.Rules.Ordered {", New: "if err == nil && p.Rules.Ordered && !p.Logged {"}},
		Tests: []Test{{"./projector", "TestOrderedBringsWhatWasLost"}},
		Cells: []string{"broker-loses"},
	},
	{
		Name:  "checkpoint_not_asked",
		What:  "a delivery at or before the checkpoint is applied again if its marker was deleted",
		Edits: []Edit{{File: "provider/unit.go", Old: "m.Position <= c.Place.Position", New: "m.Position < 0"}},
		Tests: []Test{{"./projector", "TestEventsThatAreNotDeliveredAreReadFromTheLog"}},
	},
	{
		Name:  "large_units_after_a_crash",
		What:  "events that were in flight when a reader crashed run in units of the usual size",
		Edits: []Edit{{File: "projector/internal/follow/page.go", Old: "\tif r.suspects > 0 {\n", New: "\tif r.suspects < 0 {\n"}},
		Tests: []Test{{"./projector", "TestEventsOfACrashedReaderRunInSmallUnits"}},
	},
	{
		Name: "advance_not_fenced",
		What: "a unit moves the checkpoint from wherever it is, although another reader has taken over",
		Edits: []Edit{
			{
				File: "provider/unit.go",
				Old:  "(c.Mode == 0 || a.From != c.Place.Position || a.Mode != c.Mode || a.Token != c.Token)",
				New:  "c.Mode == 0",
			},
			{
				File: "providers/postgres/progress.go",
				Old:  "kinora.advance($1::text, $2::int, $3::bigint, $4::text, $5::uuid,",
				New: "kinora.advance($1::text, $2::int, (select position from kinora.checkpoint($1::text, $2::int, '')) + 0 * $3::bigint, " +
					"$4::text, (select token from kinora.checkpoint($1::text, $2::int, '') where $5::uuid is not null),",
			},
		},
		Tests: []Test{{"./providers/postgres", "TestConformance/Progress/Advance/a_fenced_move"}},
		Cells: []string{"readers"},
	},
	{
		Name:  "from_rounds_down",
		What:  "the log from a time on begins at an event that was recorded up to a microsecond before",
		Edits: []Edit{{File: "providers/postgres/log_settled.go", Old: "planned, after, roundUp(t))", New: "planned, after, t)"}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Log/a_place_by_time"}},
	},
	{
		Name:  "any_year",
		What:  "a time that a database does not have is sent to it",
		Edits: []Edit{{File: "provider/log.go", Old: `return checkTime("from.time", from.Time)`, New: "return nil"}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Log/queries_that_no_store_can_answer"}},
	},
	{
		Name:  "page_again",
		What:  "a reader that has applied a part of a page, and then failed, reads the page again",
		Edits: []Edit{{File: "projector/internal/follow/page.go", Old: "if err != nil && r.at.Place.Position > from {", New: "if err != nil && from < 0 {"}},
		Tests: []Test{{"./projector", "TestATurnThatIsLostWithinAPage"}},
	},
	{
		Name:  "brake_within_pages",
		What:  "a reader waits only between the failing events of one page",
		Edits: []Edit{{File: "projector/internal/follow/page.go", Old: "\tr.Applier.BackOff(ctx) // the messages", New: "\t_ = 0 // the messages"}},
		Tests: []Test{{"./projector", "TestAReaderOfTheLogWaits"}},
	},
	{
		Name:  "readers_never_yield",
		What:  "a reader does not leave its post to a program that can do more",
		Edits: []Edit{{File: "projector/internal/follow/yield.go", Old: "if y.asked = now; h.Able(", New: "if y.asked = now; false && h.Able("}},
		Tests: []Test{{"./projector", "TestTheProgramThatCanTakesOver/1_segments"}},
	},
	{
		Name:  "segments_kept",
		What:  "the readers of segments that leave take segments again at once",
		Edits: []Edit{{File: "projector/internal/feed/segments.go", Old: "if s.yield.Left(now, h.Lease) &&", New: "if s.yield.Left(now, 0) &&"}},
		Tests: []Test{{"./projector", "TestTheProgramThatCanTakesOver/4_segments"}},
	},
	{
		Name:  "yields_to_one_that_lacks",
		What:  "a reader leaves its post to a program that lacks something that its own program has",
		Edits: []Edit{{File: "projector/internal/model/host.go", Old: `strings.Join(append([]string{needs}, p.Has...), "\n")`, New: "strings.Clone(needs)"}},
		Tests: []Test{{"./projector/internal/model", "TestAble/one_that_lacks_what_this_one_has"}},
	},
	{
		Name:  "yields_again_and_again",
		What:  "readers leave their posts more often than once per lease",
		Edits: []Edit{{File: "projector/internal/follow/yield.go", Old: "now.Sub(y.at) < h.Lease {", New: "now.Before(y.at) {"}},
		Tests: []Test{{"./projector/internal/follow", "TestReadersLeaveOncePerLease"}},
	},
	{
		Name:  "wanted_looks_late",
		What:  "a program that messages wait for asks for the lease no more often than others",
		Edits: []Edit{{File: "projector/internal/feed/crew.go", Old: "if !g.IsLive() || h.Clock().Sub(time.Unix(0, c.wanted.Load())) < h.Lease {", New: "if !g.IsLive() {"}},
		Tests: []Test{{"./projector", "TestAProgramThatIsWantedLooksAtTheLease"}},
	},
}
