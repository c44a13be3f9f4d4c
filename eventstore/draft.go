package eventstore

// Draft is an event that is not in a stream yet. Types.Encode returns drafts.
type Draft struct {
	ID       string // a UUID in canonical lower case; Encode creates a version 7
	Type     string // the stored name, 1 to 255 bytes
	Schema   int    // the schema version of Data, 1 to 32767
	Data     []byte // JSON of at most the provider's MaxPayload bytes; see provider.CheckJSON
	Metadata Metadata
}
