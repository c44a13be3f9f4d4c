package eventstore

// Aggregate is state that is computed from the events of a stream. Apply is called with the data
// of each event, in order, as a value of a registered type. It cannot fail, and must depend only
// on its receiver and its argument: no clock, no I/O.
type Aggregate interface{ Apply(event any) }
