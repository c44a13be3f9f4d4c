package provider

import "context"

// Inspector lists entries, and requeues or skips them for operators.
type Inspector interface {
	// Entries lists the entries that f selects in order of Seq.
	Entries(ctx context.Context, f EntryFilter) ([]Entry, error)
	// StatusCounts counts entries by status: the given statuses, or all if none is given. Each of
	// them is in the result, also with a count of zero. The cost grows with the number of open
	// entries, and with that of resolved ones only if they are counted.
	StatusCounts(ctx context.Context, of ...EntryStatus) (map[EntryStatus]int64, error)
	// Requeue makes the abandoned and failed entries that f selects pending at once, resets their
	// attempts and Suspect, and returns their number. Entries in another status are unchanged.
	// Held entries behind them become pending in the same transaction, in their places: the first
	// of them, and at least the next one.
	//   - ErrStale: one of the entries was last attempted longer ago than the provider's
	//     RequeueWindow, and f.Force is not set. Nothing is changed. That attempt may have
	//     published the message, and consumers may have deleted the markers by which they would
	//     recognize it.
	//   - A Malformed entry whose LastAttemptedAt cannot be read is unchanged without f.Force.
	Requeue(ctx context.Context, f EntryFilter) (int, error)
	// Skip gives up the pending, failed, held and abandoned entries that f selects, and returns
	// their number. This cannot be undone. Their keys continue without them; held entries behind
	// them become pending as with Requeue. Entries in another status are unchanged, except a
	// Malformed one whose lease never ends.
	Skip(ctx context.Context, f EntryFilter) (int, error)
}
