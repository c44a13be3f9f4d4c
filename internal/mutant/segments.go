package mutant

// segments lists the mutants of projectors that are split.
var segments = []Mutant{
	{
		Name:  "segment_no_token",
		What:  "a unit moves a segment whatever its token is",
		Edits: []Edit{{File: "providers/postgres/migrations/00001_kinora.sql", Old: `and s.position = was and s.token = of_token`, New: `and s.position = was`}},
		Tests: []Test{{"./providers/postgres", "TestBatchedProgressConformance/Segments"}},
	},
	{
		Name: "segment_no_fence",
		What: "a unit moves a segment that is not in the current split, under any token",
		Edits: []Edit{
			{File: "provider/progress.go", Old: `!has || !split.Has(number)`, New: `!has || split.First < 0`},
		},
		Tests: []Test{{"./providers/memory", "TestConformance/Progress/Segments/a_fenced_unit_of_a_segment"}},
	},
	{
		Name:  "segment_split_does_not_wait",
		What:  "the number of segments changes while their units are open",
		Edits: []Edit{{File: "providers/postgres/progress.go", Old: ` || from.Split() != to.Split()`, New: ``}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Progress/Segments/a_new_split_waits_for_an_open_unit"}},
	},
	{
		Name:  "segment_resplit_forgets",
		What:  "a new number of segments forgets what the segments before have applied",
		Edits: []Edit{{File: "projector/internal/follow/split.go", Old: "Count: count}}, c.Splits...)", New: "Count: count}}, c.Splits[:0]...)"}},
		Tests: []Test{{"./projector", "TestTheNumberOfSegmentsCanChange"}, {"./providers/postgres", "TestSegmentsFromTheLogOfPostgreSQL"}},
		Cells: []string{"segments"},
	},
	{
		Name:  "segment_by_event",
		What:  "the segment of an event is that of its id instead of its stream",
		Edits: []Edit{{File: "projector/internal/follow/page.go", Old: "o.split.Of(e.Stream) != o.segment", New: "o.split.Of(e.ID) != o.segment"}},
		Tests: []Test{{"./projector", "TestSegmentsApplyEachStreamInOrderAndAreSharedFairly"}},
	},
	{
		Name:  "segment_highest",
		What:  "the checkpoint is the highest position of the segments instead of the lowest",
		Edits: []Edit{{File: "projector/internal/follow/split.go", Old: "one.Place.Position < lowest.Position", New: "one.Place.Position > lowest.Position"}},
		Tests: []Test{{"./projector", "TestWaitAsksTheSegmentOfTheStream"}},
		Cells: []string{"segments"},
	},
	{
		Name:  "segment_handler_begins_early",
		What:  "a handler that is added to a split projector begins at the checkpoint, although segments are ahead of it",
		Edits: []Edit{{File: "projector/internal/follow/post.go", Old: "position := furthest(&c)", New: "position := c.Place.Position"}},
		Tests: []Test{{"./projector", "TestAHandlerIsAddedToASplitProjector"}},
	},
	{
		Name:  "segment_no_quota",
		What:  "a runner keeps more segments than its share",
		Edits: []Edit{{File: "projector/internal/plan/plan.go", Old: "if s.Split.Has(number) && len(share.Keep) < share.Quota {", New: "if s.Split.Has(number) {"}},
		Tests: []Test{{"./projector", "TestSegmentsApplyEachStreamInOrderAndAreSharedFairly"}},
	},
	{
		Name:  "segment_output_again",
		What:  "a rebuild sends the output again of events that only the segments of the generation before had passed",
		Edits: []Edit{{File: "projector/internal/sent/sent.go", Old: "p.Applied(m.Raw.Stream, m.Raw.Position)", New: "m.Raw.Position <= p.Place.Position"}, {File: "projector/internal/sent/sent.go", Old: "len(c.Segments) > 0 && c.Applied(m.Raw.Stream, m.Raw.Position)", New: "len(c.Segments) > 1<<30"}},
		Tests: []Test{{"./projector", "TestARebuildIsSplitAndSendsNothingTwice/in-place"}},
	},
	{
		Name:  "segment_redis_forgets",
		What:  "after Redis has gone back, one reader applies everything behind the checkpoint, also what the segments have applied",
		Edits: []Edit{{File: "projector/internal/follow/split.go", Old: "r.cursor.before = &provider.Checkpoint{Splits: r.at.Splits[1:], Segments: c.Segments}", New: "r.cursor.before = &provider.Checkpoint{Splits: r.at.Splits[1:], Segments: c.Segments[:0]}"}},
		Tests: []Test{{"./providers/redis", "TestSegmentsGoBackWithTheReadModel"}},
	},
}
