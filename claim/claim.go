// Package claim has the parts that every claim of rows shares: terms, tokens, backoff, and a
// portable claim.
//
// A claim finds rows and takes them atomically: no row is taken twice while its lease lives.
//
//   - The lease is how long the claim protects its rows, on the store's clock.
//   - The token fences a worker that finishes late: a change with an old token changes nothing.
//   - Taking a row counts as an attempt, whether or not it fails. So a row that kills its worker
//     each time still reaches its limit of attempts.
//
// The package builds no queries: each provider writes the claim statements for its tables. A
// provider that cannot claim several rows in one transaction uses Portable.
//
//	entries of the outbox     Terms, Token, Backoff, Portable
//	tasks                     Terms, Token, Backoff, Portable
//	readers of the log        provider.Leases: "reader/<projector>"
//	deletion of old entries   provider.Leases: "prune-entries"
//	deletion of old markers   provider.Leases: "prune-markers/<projector>"
//	deletion of old tasks     provider.Leases: "prune-tasks"
//	parked messages           Backoff
package claim
