package eventstore

// Expected is the version that a stream must have for an append. A value of 0 or more is exact.
type Expected int64

const (
	Any      Expected = -1 // any version
	NoStream Expected = 0  // the stream must have no events
)

// Appended is the result of an append. Pass it to projector.Projector.Wait to wait for a read
// model.
type Appended struct {
	Stream   string
	Version  int64  // of the last event
	Position int64  // of the last event, in the log
	Count    int    // number of events: versions Version-Count+1 to Version; 0: none
	Log      string // identifies the log of the store; a copy of the database has the same
	Replayed bool   // the same event ids were stored before, and nothing was written
}
