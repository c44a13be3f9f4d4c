package mutant

// readers lists the mutants of the rules by which projectors read the log.
var readers = []Mutant{
	{
		Name: "advance_not_fenced",
		What: "a unit moves the checkpoint from wherever it is, although another reader has taken over",
		Edits: []Edit{
			{
				File: "provider/opening.go",
				Old:  "(c.Mode == 0 || a.From != c.Place.Position || a.Mode != c.Mode || a.Token != c.Token)",
				New:  "c.Mode == 0",
			},
			{
				File: "providers/postgres/progress.go",
				Old:  "kinora.advance($1::text, $2::bigint, $3::text, $4::uuid,",
				New: "kinora.advance($1::text, (select position from kinora.checkpoint($1::text, false)) + 0 * $2::bigint, " +
					"$3::text, (select token from kinora.checkpoint($1::text, false) where $4::uuid is not null),",
			},
		},
		Tests: []Test{{"./providers/postgres", "TestConformance/Progress/Advance/a_fenced_move"}},
		Cells: []string{"readers"},
	},
}
