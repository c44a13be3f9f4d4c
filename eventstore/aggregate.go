package eventstore

// Aggregate is state that is computed from the events of a stream. Apply gets the data of each event, as a value of a
// registered type. It cannot fail, and must use nothing but its receiver and its argument: no clock, no I/O.
type Aggregate interface{ Apply(event any) }
