package provider

// Provider is all that a runner needs of a store.
type Provider[Tx any] interface {
	Units[Tx]
	Parking
	Liveness
	Records
}
