// Package claim holds the mechanics that every find-and-take shares: terms, tokens, backoff, the portable claim.
//
// A claim finds rows and takes them, atomically: no row is taken twice while its lease lives. The lease says
// how long the claim protects its rows, on the store's clock. The token fences late finishers: a change that
// carries a stale token changes nothing. The claim is the attempt: taking a row counts, not failing at it, so
// that a row that kills its worker every time still reaches its limit.
//
// The package is no query builder: each provider writes its claim verbs for its tables.
package claim
