package outbox

import "github.com/kinora-go/kinora/provider"

// Entry is a message in the outbox. Besides the fields of Message it has Seq (the order of
// entries), Status, Attempts, LastError (the Go type of the error, never its text), and the times
// CreatedAt, LastAttemptedAt, NextAttemptAt and PublishedAt, in UTC on the store's clock.
type Entry = provider.Entry

// Status is the status of an entry. It is a string, such as "pending".
type Status = provider.EntryStatus

// The statuses of an entry. Published and Skipped entries never change again.
const (
	Pending   = provider.EntryPending   // can be claimed
	Claimed   = provider.EntryClaimed   // a relay has it until its lease ends
	Published = provider.EntryPublished // the publisher confirmed it
	Failed    = provider.EntryFailed    // publishing failed; can be claimed again after its backoff
	Held      = provider.EntryHeld      // waits for an abandoned or failed entry of its key
	Abandoned = provider.EntryAbandoned // attempts exhausted; its key waits for Requeue or Skip
	Skipped   = provider.EntrySkipped   // an operator gave it up
)

// Filter selects entries by Status, Topic, Key, Stream, Seqs and Older (an age). The zero Filter
// selects all. Limit is the page size of Inspector.Entries (zero means 100), and the most entries
// of Requeue and Skip (zero means no limit). After is the last Seq of the page before. With Force,
// Requeue takes entries that would be ErrStale.
type Filter = provider.EntryFilter

// Inspector has the methods for operators: Entries lists entries, StatusCounts counts them by
// status (of all statuses if none is given), Requeue makes failed and abandoned entries pending at
// once, and Skip gives up all open entries that it selects, pending ones too: set Seqs. Every
// provider with an outbox implements it. The methods: go doc provider.Inspector.
type Inspector = provider.Inspector

// EntryRetention is how long entries are kept after they were Published (zero means that they are
// deleted at once) or Skipped (zero means 30 days).
type EntryRetention = provider.EntryRetention

// Mark is a change of a claimed entry, as RelayObserver.Marked reports it: the entry's Seq, its
// new status To, the backoff or lease After, and the class of the Error.
type Mark = provider.EntryMark

var (
	// ErrStale: Requeue refused an entry whose last attempt is older than the provider's
	// RequeueWindow. If that attempt published the message, consumers may have deleted its
	// markers, and it would take effect again.
	ErrStale = provider.ErrStale
	// ErrMalformed: a message does not have the headers of a published event. No retry can help.
	ErrMalformed = provider.ErrMalformed
)
