package mutant

// redis lists the mutants of read models in Redis with markers of their own.
var redis = []Mutant{
	{
		Name:  "redis_no_marker",
		What:  "a script applies a message although it has markers",
		Edits: []Edit{{File: "providers/redis/scripts/unit.lua", Old: "  elseif markers > 0 then\n", New: "  elseif false then\n"}},
		Tests: []Test{{"./providers/redis", "TestWithOwnMarkersAMessageTakesEffectOnce"}},
		Cells: []string{"redis"},
	},
	{
		Name:  "redis_server_ignored",
		What:  "a script does not compare the server with the one on which the checkpoint was stored",
		Edits: []Edit{{File: "providers/redis/scripts/server.lua", Old: "is[4] ~= server() then", New: "false then"}},
		Tests: []Test{{"./providers/redis", "TestTheLogBringsBackWhatRedisHasLost/old_snapshot,_broker"}},
		Cells: []string{"redis"},
	},
	{
		Name:  "redis_from_ignored",
		What:  "a script does not compare the position of the checkpoint with the one that the reader knows",
		Edits: []Edit{{File: "providers/redis/scripts/server.lua", Old: "tonumber(from) ~= position then", New: "false then"}},
		Tests: []Test{{"./providers/redis", "TestALostReplyOfAScriptDoublesNothing/log,_the_connection_ends"}},
	},
	{
		Name:  "redis_covered_applied",
		What:  "a delivery at or before the checkpoint is applied if it has no marker",
		Edits: []Edit{{File: "providers/redis/scripts/unit.lua", Old: "  if covered and (kind", New: "  if false and (kind"}},
		Tests: []Test{{"./providers/redis", "TestWithOwnMarkersPoisonHoldsItsKey/broker"}},
	},
	{
		Name: "redis_recorded_first",
		What: "a message is recorded as parked before it is parked in the second store",
		Edits: []Edit{{
			File: "providers/redis/combined.go",
			Old:  "return m.record, nil",
			New:  "return nil, m.record(ctx)",
		}},
		Tests: []Test{{"./providers/redis", "TestAKillAtAnyStepLosesAndDoublesNothing/broker,_before_the_commit_of_what_is_parked"}},
	},
	{
		Name:  "redis_parked_not_restored",
		What:  "messages that were parked at the time of an old snapshot, and applied since, are not applied again",
		Edits: []Edit{{File: "projector/internal/follow/restore.go", Old: "\t\t_, err := r.Complete(ctx, hard, g, events)\n\t\treturn err\n", New: "\t\treturn nil\n"}},
		Tests: []Test{{"./providers/redis", "TestWhatWasParkedComesBackAfterALoss"}},
		Cells: []string{"redis"},
	},
	{
		Name:  "redis_earlier_held",
		What:  "events that are read again wait behind parked ones of their stream that come later",
		Edits: []Edit{{File: "projector/internal/follow/restore.go", Old: "\tif r.at.Restoring {\n\t\tif err := r.drop", New: "\tif false {\n\t\tif err := r.drop"}},
		Tests: []Test{{"./providers/redis", "TestAStuckMessageKeepsItsPlaceAfterALoss"}},
	},
	{
		Name:  "redis_lost_behind_parked",
		What:  "events that were lost wait behind parked ones of their stream that come later",
		Edits: []Edit{{File: "provider/combine_records.go", Old: "lost[row.Lane] && at > 0 ||", New: ""}},
		Tests: []Test{{"./providers/redis", "TestWhatIsLostComesBeforeWhatIsParked"}},
	},
	{
		Name:  "redis_busy_lane_kept",
		What:  "a parked message that comes again in its place is not deleted if another unit tries it",
		Edits: []Edit{{File: "provider/combine_records.go", Old: "!slices.Contains(live, false)", New: "len(live) >= 0"}},
		Tests: []Test{{"./providers/redis", "TestWhatIsParkedIsDroppedWhileAnotherUnitTriesIt"}},
		Cells: []string{"redis"},
	},
	{
		Name:  "redis_loss_overwritten",
		What:  "a reader that has not noticed a loss stores its checkpoint",
		Edits: []Edit{{File: "providers/redis/scripts/set_checkpoint.lua", Old: " or other ~= (ARGV[4] == '1')", New: ""}},
		Tests: []Test{{"./providers/redis", "TestWhatIsLostComesBeforeWhatIsParked"}},
	},
	{
		Name:  "redis_partly_forgotten",
		What:  "a message that was applied in part is tried again",
		Edits: []Edit{{File: "providers/redis/scripts/unit.lua", Old: "      call('HSET', KEYS[2], member, 'partly ' .. text)\n", New: "      for _, set in ipairs(sets) do redis.call('ZREM', KEYS[set], member) end\n"}},
		Tests: []Test{{"./providers/redis", "TestAMessageThatWasPartlyAppliedIsStuck/log"}},
	},
	{
		Name:  "redis_output_after",
		What:  "output is committed after its effect",
		Edits: []Edit{{File: "provider/combine.go", Old: "len(c.Output) > 0 && !o.emitted {", New: "false {"}, {File: "provider/combine.go", Old: "		c.Output = nil\n", New: ""}},
		Tests: []Test{{"./providers/redis", "TestOutputIsCommittedOnce"}},
	},
}
