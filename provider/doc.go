// Package provider has the interfaces that a store implements for relays, projectors and workers.
//
// Applications need not import this package: packages projector and outbox have aliases of the types
// that they use. The fields and methods of these types are documented here.
//
// A store may stop at a tier (docs/providers.md). A store of events implements Log, Outbox,
// EntryMaintainer and Inspector. One for projectors also implements seven small interfaces:
//
//   - Units: one transaction over messages of a projector, with their markers and parked
//     messages.
//   - Parking: the queues of messages that could not be applied.
//   - Liveness: which runners are alive, and which messages they have in flight.
//   - Records: what happened to messages, and deleting old rows.
//   - Progress: how far each projector has applied the log.
//   - Builds: which generations of read models exist, and which one is live.
//   - provider.Leases: which process reads the log for a projector, and which one deletes old rows.
//
// Then come tasks (TaskProvider, TaskInspector) and Operations. A store that has only Units, such as
// Redis, is combined with another one: see Combine. Package providertest has a conformance suite for
// each interface and each tier.
package provider
