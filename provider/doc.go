// Package provider has the interfaces that a store implements for relays, projectors and workers.
//
// Applications need not import this package: packages projector and outbox have aliases of the types
// that they use. The fields and methods of these types are documented here.
//
// A store may stop at a tier (docs/providers.md). A store of events implements Log, Outbox,
// EntryMaintainer and Inspector. One for projectors also implements the seven small interfaces of Provider. Then
// come tasks (TaskProvider, TaskInspector) and Operations. A store that has only Units, such as Redis, is
// combined with another one: see Combine. Package providertest has a conformance suite for each interface.
package provider
