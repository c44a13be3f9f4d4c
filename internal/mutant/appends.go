package mutant

// appends lists the mutants of snapshots, commands that are sent again, appends that share a transaction,
// and handlers of many events.
var appends = []Mutant{
	{
		Name:  "snapshot_any_event",
		What:  "a snapshot is used although its version of the stream is another event",
		Edits: []Edit{{File: "eventstore/snapshot.go", Old: ` || raw.ID != stored.EventID`, New: ``}},
		Tests: []Test{{"./eventstore", "TestASnapshotOfARestoredDatabase"}},
	},
	{
		Name:  "snapshot_no_checksum",
		What:  "the checksum of a snapshot is not compared",
		Edits: []Edit{{File: "eventstore/snapshot.go", Old: `!bytes.Equal(seal(stream, stored), sealed)`, New: `len(seal(stream, stored)) < 0`}},
		Tests: []Test{{"./eventstore", "TestSnapshotsAreNotTrustedOverTheStream"}},
	},
	{
		Name: "append_after_end",
		What: "an append to a stream that has ended is not refused",
		Edits: []Edit{
			{File: "providers/memory/events.go", Old: `} else if s.ended(stream) {`, New: `} else if s.ended(stream) && stream == "" {`},
			{File: "providers/sqlite/append.go", Old: `where not ended and (`, New: `where (`},
			{File: "providers/postgres/append.go", Old: ` where not s.ended`, New: ``},
		},
		Tests: []Test{
			{"./providers/memory", "TestConformance/EventStore/nothing_after_the_end"},
			{"./providers/sqlite", "TestConformance/EventStore/nothing_after_the_end"},
			{"./providers/postgres", "TestConformance/EventStore/nothing_after_the_end"},
		},
	},
	{
		Name:  "archive_ahead",
		What:  "events are archived that a projector has not applied",
		Edits: []Edit{{File: "provider/log.go", Old: `if len(behind) == 0 {`, New: `if len(behind) < 1<<20 {`}},
		Tests: []Test{
			{"./providers/memory", "TestConformance/Progress/Archive/archive_ahead_of_a_reader"},
			{"./providers/sqlite", "TestConformance/Progress/Archive/archive_ahead_of_a_reader"},
			{"./providers/postgres", "TestConformance/Progress/Archive/archive_ahead_of_a_reader"},
		},
	},
	{
		Name: "archive_keeps_snapshots",
		What: "the snapshots of an archived stream stay",
		Edits: []Edit{
			{File: "providers/memory/events.go", Old: `s.snapshots = s.snapshots.drop(stream)`, New: ``},
			{File: "providers/sqlite/stream.go", Old: "snapshots where stream = ?1`", New: "snapshots where stream = ?1 and false`"},
			{File: "providers/postgres/streams.go", Old: `delete from kinora.snapshots where stream = $1::text`, New: `delete from kinora.snapshots where stream = $1::text and false`},
		},
		Tests: []Test{
			{"./providers/memory", "TestConformance/EventStore/archive_a_stream"},
			{"./providers/sqlite", "TestConformance/EventStore/archive_a_stream"},
			{"./providers/postgres", "TestConformance/EventStore/archive_a_stream"},
		},
	},
	{
		Name: "command_decided_again",
		What: "a command that has appended events is decided again",
		Edits: []Edit{{File: "eventstore/repository.go", Old: `		if at.Count > 0 {
			return at, false, nil`, New: `		if at.Count > 1<<40 {
			return at, false, nil`}},
		Tests: []Test{{"./providers/memory", "TestConformance/EventStore/commands_that_are_sent_again"}},
	},
	{
		Name:  "shared_failure_for_all",
		What:  "a statement that fails fails all appends of its transaction",
		Edits: []Edit{{File: "providers/postgres/append_shared.go", Old: `case conn == nil || unsent || !maybeExecuted(err):`, New: `case conn == nil || unsent:`}},
		Tests: []Test{{"./providers/postgres", "TestAppendsThatShareACommit"}},
	},
	{
		Name:  "shared_no_lock_limit",
		What:  "appends that share a transaction wait without limit for a lock of one of them",
		Edits: []Edit{{File: "providers/postgres/append_shared.go", Old: `b.Queue(db.q(lockTimeoutSQL), shareLock.String())`, New: `b.Queue(db.q(lockTimeoutSQL), "0")`}},
		Tests: []Test{{"./providers/postgres", "TestALockedStreamDelaysNoOtherAppendForLong"}},
	},
	{
		Name:  "shared_alone_keeps_place",
		What:  "an append that runs alone and waits for a lock keeps others from running",
		Edits: []Edit{{File: "providers/postgres/append_shared.go", Old: `time.AfterFunc(shareLock, end)`, New: `time.AfterFunc(time.Hour, end)`}},
		Tests: []Test{{"./providers/postgres", "TestLockedStreamsStopNoOtherAppend"}},
	},
	{
		Name:  "gap_lock_not_taken",
		What:  "the trigger of the log takes no lock",
		Edits: []Edit{{File: "providers/postgres/migrations/00001_kinora.sql", Old: `when (pg_advisory_xact_lock_shared(1802661487, 'kinora.events'::regclass::oid::int) is null)`, New: `when (false)`}},
		Tests: []Test{{"./providers/postgres", "TestNoWriterCanForgetTheGapLock"}, {"./providers/postgres", "TestNoEventIsSkippedWhateverTheOrderOfCommits"}},
	},
	{
		Name:  "gap_lock_late",
		What:  "the lock of the log is taken after positions are drawn",
		Edits: []Edit{{File: "providers/postgres/migrations/00001_kinora.sql", Old: `create trigger hold_gap before insert`, New: `create trigger hold_gap after insert`}},
		Tests: []Test{{"./providers/postgres", "TestNoWriterCanForgetTheGapLock"}},
	},
	{
		Name:  "batch_overtaken",
		What:  "a handler gets an event although another handler has not got an earlier one of its stream",
		Edits: []Edit{{File: "projector/internal/unit/handle.go", Old: "if b.keys[m.OrderedBy()] && (b.handler.Name != h.Name ||", New: "if b.keys[m.OrderedBy()] && (b.handler.Name == \"\" ||"}},
		Tests: []Test{{"./projector", "TestOnBatchKeepsTheOrderOfEachStream"}},
	},
}
