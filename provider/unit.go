package provider

// Unit describes one transaction of a projector. Its messages are either all deliveries or all parked ones.
type Unit struct {
	Projector string
	Messages  []Message // in order; no id twice
	// Careful, if not nil, is the worker that runs the unit: Found.Suspect reports the messages that workers of
	// other runners have named (Liveness.InFlight), and this worker's own names are deleted with the commit.
	Careful *Worker
	// Serial: the unit waits until no other serial unit of the projector is open. Runners set it after deadlocks.
	Serial bool
	// Once: run is called once, after the opening, because what it does cannot be undone.
	Once bool
	// DryRun, if not nil, makes the unit a dry run: it is rolled back instead of committed. Then DryRun gets the
	// rows that the handlers changed, without those of the provider's own tables, ordered by table and key.
	// It is not called if Do returns an error. In a dry run a parked message may be stuck.
	DryRun func([]Change)
}

// Message is one message of a unit.
type Message struct {
	ID       string    // empty if it has none
	Lane     Lane      // what a hold of it holds
	Handlers []Handler // that are to run it, in order; none if no handler takes it
	Mark     bool      // insert a marker for each of Handlers
	Parked   *Parked   // the parked message that it is, as it was listed; nil for a delivery
}

// Handler names a handler.
type Handler struct {
	Name string   // in full: "product-ratings/posted"
	Was  []string // its earlier names, in full: a marker under one of them counts, and a new one is left under each
}
