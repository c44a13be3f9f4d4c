package mutant

// settings are mutants of what protects from settings of sessions, and from rows that sessions cannot see, or that others write.
var settings = []Mutant{
	{
		Name:  "encoding_unchecked",
		What:  "sessions with another encoding are used",
		Edits: []Edit{{File: "providers/postgres/postgres.go", Old: `if encoding := is("client_encoding"); encoding != "" && encoding != encodingUTF8 {`, New: `if encoding := is("client_encoding"); encoding == "none" {`}},
		Tests: []Test{{"./providers/postgres", "TestSettingsThatChangeTheMeaningAreRefused/another_encoding"}},
	},
	{
		Name:  "dates_unchecked",
		What:  "dates in text are read as ISO, whatever DateStyle says",
		Edits: []Edit{{File: "providers/postgres/postgres.go", Old: `!strings.HasPrefix(style, "ISO") {`, New: `strings.HasPrefix(style, "none") {`}},
		Tests: []Test{{"./providers/postgres", "TestSettingsThatChangeTheMeaningAreRefused/dates_as_text"}},
	},
	{
		Name:  "encoding_of_the_database",
		What:  "Open leaves the encoding to the role and the database",
		Edits: []Edit{{File: "providers/postgres/postgres.go", Old: `config.ConnConfig.RuntimeParams["client_encoding"] == "" {`, New: "false {"}},
		Tests: []Test{{"./providers/postgres", "TestSettingsOfTheDatabaseChangeNothing"}},
	},
	{
		Name:  "share_with_a_backslash",
		What:  "the share of a stream in SQL depends on standard_conforming_strings",
		Edits: []Edit{{File: "providers/postgres/log.go", Old: `sha256(decode('6b657900', 'hex') ||`, New: `sha256('\x6b657900'::bytea ||`}},
		Tests: []Test{{"./providers/postgres", "TestSettingsOfTheDatabaseChangeNothing"}},
	},
	{
		Name:  "hidden_rows",
		What:  "readers pass events that row level security hides",
		Edits: []Edit{{File: "providers/postgres/log.go", Old: "set_config('row_security', 'off', true)", New: "''"}, {File: "providers/postgres/log_settled.go", Old: "if !active {", New: "if true {"}},
		Tests: []Test{{"./providers/postgres", "TestHiddenRowsAreAnError"}},
	},
	{
		Name:  "trigger_of_origin",
		What:  "the lock of the log is not taken in sessions with session_replication_role = replica",
		Edits: []Edit{{File: "providers/postgres/migrations/00002_trigger_always.sql", Old: "enable always trigger", New: "enable trigger"}, {File: "providers/postgres/log_settled.go", Old: "tgenabled = 'A'", New: "tgenabled in ('O', 'A')"}},
		Tests: []Test{{"./providers/postgres", "TestAnAppendOfAReplicaSessionIsWaitedFor"}},
	},
	{
		Name:  "checkpoint_in_memory",
		What:  "a reader compares the log with the checkpoint in its memory, although the read model may have gone back with the log",
		Edits: []Edit{{File: "projector/internal/follow/post.go", Old: "\tif !errors.Is(err, model.ErrLogChanged) {", New: "\tif true || !errors.Is(err, model.ErrLogChanged) {"}},
		Tests: []Test{{"./providers/postgres", "TestALogAndAReadModelThatGoBackTogether"}},
	},
	{
		Name:  "json_of_any_length",
		What:  "SQL can store JSON that no statement can return",
		Edits: []Edit{{File: "providers/postgres/migrations/00003_foreign_rows.sql", Old: "check (octet_length(value::text) <= 67108864)", New: "check (true)"}},
		Tests: []Test{{"./providers/postgres", "TestForeignRowsHarmThemselvesOnly/events"}},
	},
	{
		Name:  "times_of_any_age",
		What:  "SQL can store times that no program can read",
		Edits: []Edit{{File: "providers/postgres/migrations/00003_foreign_rows.sql", Old: "check (value between '0001-01-01 00:00Z' and '9999-12-30 00:00Z')", New: "check (true)"}},
		Tests: []Test{{"./providers/postgres", "TestForeignRowsHarmThemselvesOnly/parked"}},
	},
	{
		Name:  "attempts_overflow",
		What:  "an entry with the highest number of attempts stops all claims",
		Edits: []Edit{{File: "providers/postgres/claim.go", Old: "attempts = least(o.attempts, 999999999) + 1,", New: "attempts = o.attempts + 1,"}},
		Tests: []Test{{"./providers/postgres", "TestForeignRowsHarmThemselvesOnly/outbox"}},
	},
	{
		Name:  "positions_are_chosen",
		What:  "an appender may choose the position of an event",
		Edits: []Edit{{File: "providers/postgres/grants.sql", Old: "insert (stream, version, id, type, schema_version, data, metadata, recorded_at) on kinora.events", New: "insert on kinora.events"}},
		Tests: []Test{{"./providers/postgres", "TestNoRoleChoosesAPosition"}},
	},
	{
		Name:  "lists_of_own_rows",
		What:  "a checkpoint that another program wrote hides what is stored from operators",
		Edits: []Edit{{File: "providers/postgres/survey.go", Old: "errors.As(err, &malformed) {", New: "errors.As(err, &malformed) && false {"}},
		Tests: []Test{{"./providers/postgres", "TestForeignRowsHarmThemselvesOnly/checkpoints"}},
	},
	{
		Name:  "foreign_ids_refused",
		What:  "a task with an id that no API accepts takes the leases of the others of its batch with it",
		Edits: []Edit{{File: "providers/postgres/tasks.go", Old: `provider.CheckStored("task id", ids...)`, New: `provider.CheckStorable("task id", ids...)`}},
		Tests: []Test{{"./providers/postgres", "TestATaskWithAForeignIDHoldsNoOtherUp"}},
	},
}
