package mutant

// decoders lists the mutants of messages of other software, and of rows that other software writes.
var decoders = []Mutant{
	{
		Name:  "foreign_position",
		What:  "the headers of a position make a message of other software an event of the log",
		Edits: []Edit{{File: "projector/internal/model/receiver.go", Old: "case m.Malformed != nil, m.IsForeign, m.IsUnknown:", New: "case m.Malformed != nil, m.IsUnknown:"}},
		Tests: []Test{{"./projector", "TestMessageOfOtherSoftwareIsNotInTheLog"}},
	},
	{
		Name:  "foreign_uuid",
		What:  "markers have the UUID of the delivery instead of the id that the decoder returned",
		Edits: []Edit{{File: "projector/internal/model/receiver.go", Old: "\t\td.ID = raw.ID\n", New: "\t\traw.ID = d.ID\n"}},
		Tests: []Test{{"./projector", "TestMessagesOfOtherSoftwareAreAppliedOnce"}},
	},
	{
		Name:  "decoder_shares_message",
		What:  "a decoder gets the delivery itself, and may change or ack it",
		Edits: []Edit{{File: "projector/internal/model/receiver.go", Old: "one := m.CopyWithContext()", New: "one := m"}},
		Tests: []Test{{"./projector", "TestMessageThatTheDecoderRefusesIsParked"}},
	},
	{
		Name:  "foreign_clock",
		What:  "the clock of other software decides whether a message may have crashed a process",
		Edits: []Edit{{File: "projector/internal/unit/crashes.go", Old: "return m.IsForeign || at.IsZero()", New: "return at.IsZero()"}},
		Tests: []Test{{"./projector", "TestClockOfOtherSoftwareDoesNotHideACrash"}},
	},
	{
		Name:  "no_decoder_malformed",
		What:  "a runner without the decoder makes parked messages of other software stuck",
		Edits: []Edit{{File: "projector/internal/model/message.go", Old: "case m.Malformed != nil && p.LacksDecoder(m.Parked):", New: "case m.Malformed == ErrNoDecoder:"}},
		Tests: []Test{{"./projector", "TestReplayWithoutTheDecoder"}},
	},
	{
		Name:  "mark_without_id",
		What:  "a message without an id is parked with markers, which SQLite refuses",
		Edits: []Edit{{File: "projector/internal/model/message.go", Old: "m.Mark = m.Mark && provider.CheckText", New: "_ = m.Mark && provider.CheckText"}},
		Tests: []Test{{"./decode", "TestAnyMessageIsParkedAndReplayed/sqlite"}},
	},
	{
		Name: "metadata_must_parse",
		What: "an event with metadata of another form cannot be read, nor the events behind it",
		Edits: []Edit{{
			File: "providers/postgres/log.go",
			Old:  "	raw.Metadata = metadataOf(metadata)\n	return raw, len(raw.Data) + len(metadata), nil",
			New:  "	if len(metadata) > 2 {\n		err = json.Unmarshal(metadata, &raw.Metadata)\n	}\n	return raw, len(raw.Data) + len(metadata), err",
		}},
		Tests: []Test{{"./docs", "TestWrongRowsOnPostgreSQL"}},
	},
	{
		Name: "time_unchecked",
		What: "the database accepts an event whose time cannot be read",
		Edits: []Edit{{
			File: "providers/postgres/migrations/00001_kinora.sql",
			Old:  " check (value between '0001-01-02 00:00Z' and '9999-12-30 00:00Z')", New: "",
		}},
		Tests: []Test{{"./docs", "TestWrongRowsOnPostgreSQL"}},
	},
	{
		Name:  "null_is_zero",
		What:  "a message without data is applied as an event of zeros",
		Edits: []Edit{{File: "eventstore/types.go", Old: "if !d.OwnCodec && check.IsNull(r.Data)", New: "if false && check.IsNull(r.Data)"}},
		Tests: []Test{{"./decode", "TestOddMessagesAreReadOrParked"}, {"./eventstore", "TestNullIsNoEventOfFields"}},
	},
	{
		Name:  "mark_is_no_json",
		What:  "JSON with a byte order mark is parked",
		Edits: []Edit{{File: "internal/check/json.go", Old: `return bytes.TrimPrefix(text, []byte("\ufeff"))`, New: "return text"}},
		Tests: []Test{{"./decode", "TestOddMessagesAreReadOrParked"}},
	},
	{
		Name:  "times_of_go",
		What:  "times in lower case and leap seconds are parked",
		Edits: []Edit{{File: "internal/check/check.go", Old: "text, leap := strings.ToUpper(text), time.Duration(0)\n	if len(text) > second", New: "leap := time.Duration(0)\n	if false && len(text) > second"}},
		Tests: []Test{{"./decode", "TestOddMessagesAreReadOrParked"}},
	},
}
