package eventstore

// Expected is the version that a stream must be at; any value ≥ 0 is exact.
type Expected int64

const (
	Any      Expected = -1 // whatever version the stream is at
	NoStream Expected = 0  // the stream must have no events
)

// Appended is a stream's place after an append. projector.Projector.Wait takes it to wait for the read model.
type Appended struct {
	Stream   string
	Version  int64 // of the last of the events
	Position int64 // of the last of the events
	Count    int   // number of events, versions Version-Count+1 to Version; 0 if Update had nothing to append
	Replayed bool  // the same event ids were stored before; nothing was written
}
