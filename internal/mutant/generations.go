package mutant

// generations lists the mutants of generations, of units with Switch, and of their tables.
var generations = []Mutant{
	{
		Name: "markers_of_all_generations",
		What: "a marker of one generation prevents a handler from running in another",
		Edits: []Edit{
			{File: "providers/memory/records.go", Old: "pair(strconv.Itoa(b.Number()), m.MessageID)", New: "pair(\"1\", m.MessageID)"},
			{File: "providers/postgres/open.go", Old: "args := []any{w.Generation, handlers,", New: "args := []any{1, handlers,"},
		},
		Tests: []Test{
			{"./providers/memory", "TestConformance/Units/Markers/generations"},
			{"./providers/postgres", "TestConformance/Units/Markers/generations"},
		},
	},
	{
		Name: "lanes_of_all_generations",
		What: "a message that is parked in one generation holds its lane in another",
		Edits: []Edit{
			{File: "providers/memory/parking.go", Old: "pair(buildKey(b), string(lane[:]))", New: "pair(b.Projector, string(lane[:]))"},
			{File: "providers/postgres/open.go", Old: "w.db.q(heldSQL), w.Projector, w.Generation,", New: "w.db.q(heldSQL), w.Projector, 1,"},
		},
		Tests: []Test{
			{"./providers/memory", "TestConformance/Generations/Independent/messages_and_held_lanes"},
			{"./providers/postgres", "TestConformance/Generations/Independent/messages_and_held_lanes"},
		},
	},
	{
		Name: "suspects_of_all_generations",
		What: "a message that is in flight in one generation is a suspect in another",
		Edits: []Edit{{
			File: "providers/postgres/open.go", Old: "w.db.q(suspectSQL), w.Build().String(),", New: "w.db.q(suspectSQL), w.Projector,",
		}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/Independent/messages_in_flight"}},
	},
	{
		Name: "zero_is_the_first",
		What: "no generation means the first one, and not the live one",
		Edits: []Edit{{
			File: "providers/postgres/progress.go", Old: "coalesce(nullif($2::int, 0), ` + liveGeneration + `, 1)`", New: "coalesce(nullif($2::int, 0), 0 * ` + liveGeneration + ` + 1, 1)`",
		}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/Independent/no_generation_means_the_live_one"}},
	},
	{
		Name:  "revision_not_compared",
		What:  "a generation is stored although another program has changed its row",
		Edits: []Edit{{File: "providers/postgres/progress.go", Old: "	where g.revision = $3::bigint and (g.state", New: "	where (g.state"}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/States/revisions"}},
	},
	{
		Name:  "two_live",
		What:  "two generations of a projector may be live",
		Edits: []Edit{{File: "providers/postgres/migrations/00001_kinora.sql", Old: "create unique index generations_live_key", New: "create index generations_live_key"}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/States/several_SetGeneration_at_once"}},
	},
	{
		Name:  "standby_keeps_its_token",
		What:  "the reader of a generation that was live keeps its lease on the checkpoint",
		Edits: []Edit{{File: "providers/postgres/progress.go", Old: "set mode = 'catch-up', token = '00000000-0000-0000-0000-000000000000'", New: "set mode = 'catch-up'"}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/Switch/a_switch_and_a_rollback"}},
	},
	{
		Name:  "retired_without_checkpoint",
		What:  "a generation that is retired before it has a checkpoint takes units",
		Edits: []Edit{{File: "providers/postgres/progress.go", Old: "where isnew and $4::text = 'retired'", New: "where isnew and $4::text = 'retired' and exists (select from kinora.checkpoint($1::text, $2::int, ''))"}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/Ended/units_of_a_retired_generation_without_a_checkpoint"}},
	},
	{
		Name:  "ended_not_asked_by_replays",
		What:  "parked messages of a retired generation run",
		Edits: []Edit{{File: "provider/unit.go", Old: "if c.Mode == ModeEnded {", New: "if c.Mode == ModeEnded && !u.IsReplay() {"}},
		Tests: []Test{
			{"./providers/memory", "TestConformance/Generations/Ended/units_of_a_retired_generation"},
			{"./providers/postgres", "TestConformance/Generations/Ended/units_of_a_retired_generation"},
		},
	},
	{
		Name: "ended_asked_of_events_only",
		What: "units without events do not ask whether their generation is retired",
		Edits: []Edit{{
			File: "providers/postgres/open.go", Old: "		if w.Projector != \"\" {\n", New: "		if w.Projector != \"\" && w.lowest() != nil {\n",
		}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/Ended/units_of_a_retired_generation"}},
	},
	{
		Name:  "ended_not_asked_in_one_trip",
		What:  "a unit in one round trip does not ask whether its generation is retired",
		Edits: []Edit{{File: "providers/postgres/migrations/00001_kinora.sql", Old: "c.mode = 'ended' or lowest is not null", New: "lowest is not null"}},
		Tests: []Test{{"./providers/postgres", "TestBatchedGenerationsConformance/Ended/units_of_a_retired_generation"}},
	},
	{
		Name:  "switch_shares_the_fence",
		What:  "a unit with Switch does not wait for open units",
		Edits: []Edit{{File: "providers/postgres/switch.go", Old: "tx.Exec(ctx, exclusiveSQL, lockClassFence,", New: "tx.Exec(ctx, `select pg_advisory_xact_lock_shared($1::int, $2::int)`, lockClassFence,"}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Units/Concurrent/a_unit_with_Switch_waits_for_open_units"}},
	},
	{
		Name:  "switch_is_never_busy",
		What:  "a unit with Switch waits for open units without a limit, and all later ones wait for it",
		Edits: []Edit{{File: "providers/postgres/switch.go", Old: `fenceTimeout   = "1s"`, New: `fenceTimeout   = "0"`}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/Switch/a_busy_projector"}},
	},
	{
		Name:  "set_not_compared",
		What:  "a switch begins although other generations are stored than it was planned for",
		Edits: []Edit{{File: "provider/generation.go", Old: "	if !CanSet(stored, u.Switch.Set...) {", New: "	if !CanSet(stored) {"}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/Switch/generations_that_have_changed"}},
	},
	{
		Name:  "last_of_its_own_generation",
		What:  "the last messages of a switch are those that the generation of the unit has applied",
		Edits: []Edit{{File: "provider/generation.go", Old: "Generation: LiveGeneration(stored)}", New: "Generation: u.Generation}"}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/Switch/the_last_messages"}},
	},
	{
		Name:  "last_before_the_wait",
		What:  "a switch reads what the live generation has applied before the open units end",
		Edits: []Edit{{File: "providers/postgres/switch.go", Old: "tx.Exec(ctx, exclusiveSQL, lockClassFence, w.db.fence(w.Projector))", New: "tx.Exec(ctx, `select $1::int, $2::int`, lockClassFence, w.db.fence(w.Projector))"}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/Switch/Last_after_open_units"}},
	},
	{
		Name:  "a_snapshot_for_each_statement",
		What:  "the statements of a comparison see different moments",
		Edits: []Edit{{File: "providers/postgres/switch.go", Old: "level, sql = pgx.RepeatableRead, generationsSQL", New: "level, sql = pgx.ReadCommitted, generationsSQL"}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/Tables/a_comparison_of_one_moment"}},
	},
	{
		Name: "renamed_apart",
		What: "a table is renamed in a transaction of its own, so that its readers find no table",
		Edits: []Edit{{
			File: "providers/postgres/switch.go",
			Old:  "	return w.exec(ctx, tx, `alter table `+quoted(p.Table)+` rename to `+to[len(to)-1:].Sanitize())\n",
			New: "	err = w.exec(ctx, tx, `alter table `+quoted(p.Table)+` rename to `+to[len(to)-1:].Sanitize())\n" +
				"	return errors.Join(err, w.exec(ctx, tx, `commit`), w.exec(ctx, tx, `begin`))\n",
		}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/Tables/readers_of_a_view_that_is_replaced"}},
	},
	{
		Name:  "every_row_repaired",
		What:  "a repair changes all rows that differ, not only those that a person has seen",
		Edits: []Edit{{File: "providers/postgres/compare.go", Old: "	if c.Only != nil {\n", New: "	if c.Only != nil && !c.Repair {\n"}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/Tables/repaired_rows"}},
	},
	{
		Name:  "cleared_while_it_is_used",
		What:  "the rows of a generation are deleted although it is not retired",
		Edits: []Edit{{File: "providers/postgres/progress.go", Old: "and generation = $2::int and state = 'retired' for share", New: "and generation = $2::int for share"}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/Clear/a_generation_that_is_not_retired"}},
	},
	{
		Name:  "markers_cleared_of_all_generations",
		What:  "the markers of all generations are deleted with those of a retired one",
		Edits: []Edit{{File: "providers/postgres/progress.go", Old: "where handler = h.name and generation = $2::int\n", New: "where handler = h.name and (generation = $2::int or true)\n"}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/Clear/the_rows_of_a_retired_generation"}},
	},
	{
		Name:  "tables_dropped_first",
		What:  "the tables of a retired generation are dropped before its rows are deleted",
		Edits: []Edit{{File: "providers/postgres/progress.go", Old: "err == nil && n == 0 && len(tables) > 0", New: "err == nil && len(tables) > 0"}},
		Tests: []Test{{"./providers/postgres", "TestConformance/Generations/Tables/tables_of_a_retired_generation"}},
	},
}
