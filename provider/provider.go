package provider

// Provider is a store for runners. Tx is the transaction type of its handlers.
type Provider[Tx any] interface {
	Units[Tx]
	Parking
	Liveness
	Records
	Progress
	Builds
	Leases
}
