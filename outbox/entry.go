package outbox

import "github.com/kinora-go/kinora/provider"

// Entry is a message in the outbox with its Seq, Status, Attempts, LastError and times.
type Entry = provider.Entry

// Status is where an entry stands in its life.
type Status = provider.EntryStatus

// The statuses of an entry. Published and Skipped entries never change again.
const (
	Pending   = provider.EntryPending   // waits to be claimed
	Claimed   = provider.EntryClaimed   // a relay has it; another relay may take it once the lease is over
	Published = provider.EntryPublished // the publisher confirmed it
	Failed    = provider.EntryFailed    // publishing failed; claimable again after its backoff
	Held      = provider.EntryHeld      // waits behind an entry of its topic and key that is abandoned, or failed with a long backoff
	Abandoned = provider.EntryAbandoned // its attempts are exhausted; its key waits until a person requeues or skips it
	Skipped   = provider.EntrySkipped   // given up by a person
)

// Filter selects entries by Status, Topic, Key, Stream, Seqs and age. The zero Filter selects all.
type Filter = provider.EntryFilter

// Inspector lists and counts entries, and requeues or skips what a person decides about. Every provider with an outbox is
// one.
type Inspector = provider.Inspector

// EntryRetention is how long published and skipped entries are kept. The zero value deletes published entries at once, and
// skipped ones after 30 days.
type EntryRetention = provider.EntryRetention

// Mark is a change of an entry that a relay stores after a publication: RelayObserver.Marked reports it.
type Mark = provider.EntryMark

var (
	// ErrStale: the entry was last attempted so long ago that its message, if that attempt published it, would take
	// effect again.
	ErrStale = provider.ErrStale
	// ErrMalformed: a message is not in the wire form. No retry can help.
	ErrMalformed = provider.ErrMalformed
)
