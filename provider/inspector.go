package provider

import "context"

// Inspector lists entries, and carries out what a person decides about them.
type Inspector interface {
	// Entries lists the entries that f selects in order of Seq.
	Entries(ctx context.Context, f EntryFilter) ([]Entry, error)
	// StatusCounts counts entries of the given statuses, or of all if none is given. Each status is in the result, also
	// with a count of zero. The cost grows with the number of open entries, and with that of resolved ones only if
	// these are counted.
	StatusCounts(ctx context.Context, of ...EntryStatus) (map[EntryStatus]int64, error)
	// Requeue makes the abandoned and failed entries that f selects pending at once, with no attempts counted and no longer
	// suspect. It returns how many. Entries in another status are unchanged. Held entries behind them become pending in
	// the same transaction, in their places: the first of them, and at least the next one.
	//   - If one of them was last attempted longer ago than the provider's RequeueWindow, and f.Force is not set, the result
	//     is ErrStale and nothing is changed: that attempt may have published the message, and consumers may have
	//     deleted the markers by which they would recognise it.
	//   - A Malformed entry whose LastAttemptedAt cannot be read is unchanged without f.Force.
	Requeue(ctx context.Context, f EntryFilter) (int, error)
	// Skip gives up for good the pending, failed, held and abandoned entries that f selects, and returns how many. Their
	// keys continue without them; held entries behind them become pending as with Requeue. Entries in another status
	// are unchanged, except a Malformed one with a lease that never ends.
	Skip(ctx context.Context, f EntryFilter) (int, error)
}
