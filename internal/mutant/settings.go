package mutant

// settings are mutants of what protects from settings of sessions, and from rows that sessions cannot see.
var settings = []Mutant{
	{
		Name:  "encoding_unchecked",
		What:  "sessions with another encoding are used",
		Edits: []Edit{{File: "providers/postgres/settings.go", Old: `if encoding := is("client_encoding"); encoding != "" && encoding != encodingUTF8 {`, New: `if encoding := is("client_encoding"); encoding == "none" {`}},
		Tests: []Test{{"./providers/postgres", "TestSettingsThatChangeTheMeaningAreRefused/another_encoding"}},
	},
	{
		Name:  "dates_unchecked",
		What:  "dates in text are read as ISO, whatever DateStyle says",
		Edits: []Edit{{File: "providers/postgres/settings.go", Old: `!strings.HasPrefix(style, "ISO") {`, New: `strings.HasPrefix(style, "none") {`}},
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
}
