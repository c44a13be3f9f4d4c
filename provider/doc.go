// Package provider is what a store implements so that projectors can run on it.
//
// Applications do not need this package: package projector has aliases of the types that they use. Authors of a
// provider implement four small interfaces:
//
//   - Units: one transaction over the messages of a projector, with their markers and what is parked.
//   - Parking: the queues of messages that could not be applied.
//   - Liveness: which runners are alive, and which messages a careful runner has in hand.
//   - Records: what became of messages, and deleting what is old enough.
//
// Package providertest has a conformance suite for each of them. A store that has units only, such as Redis, is
// combined with one that has the other three: see Combine.
package provider
