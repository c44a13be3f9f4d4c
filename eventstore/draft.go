package eventstore

// Draft is an event that has no place in a stream yet. Types.Encode makes drafts.
type Draft struct {
	ID       string // a UUID in lower-case canonical form; Encode draws a version 7
	Type     string // stored name, 1 to 255 bytes
	Schema   int    // 1 to 32767
	Data     []byte // JSON, at most the provider's MaxPayload with its numbers in full: see CheckJSON
	Metadata Metadata
}
