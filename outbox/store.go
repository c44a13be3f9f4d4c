package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
)

// Status is where an entry stands in its life.
//
//	pending ─claim─▶ claimed ─▶ published
//	 │ ▲ ▲             │ ├────▶ failed ─(backoff over)─▶ claimed …
//	 │ │ └──release────┘ └────▶ abandoned ─requeue─▶ pending, or ─skip─▶ skipped
//	 ▼ │
//	held (behind one of its topic and key that waits for long, out of the way of claims; back in its turn)
//
// Published and skipped are terminal. An abandoned entry changes only by Requeue or Skip, and until then the
// later entries of its topic and key wait.
type Status string

const (
	Pending   Status = "pending"   // waits to be claimed
	Claimed   Status = "claimed"   // a relay has it; once its lease is over, another may take it
	Published Status = "published" // the publisher took it, and said so
	Failed    Status = "failed"    // publishing failed; claimable again when its backoff is over
	Held      Status = "held"      // waits behind an entry of its topic and key that is abandoned, or failed with a long backoff
	Abandoned Status = "abandoned" // its attempts are spent
	Skipped   Status = "skipped"   // given up on by a person
)

// Statuses lists every status.
func Statuses() []Status {
	return []Status{Pending, Claimed, Published, Failed, Held, Abandoned, Skipped}
}

// Open tells whether an entry in this status stands before the later ones of its topic and key: all but
// published and skipped ones do.
func (s Status) Open() bool { return s != Published && s != Skipped }

// ZeroCounts is a count of no entry, of the statuses given, or of all where none is.
func ZeroCounts(of []Status) map[Status]int64 {
	if len(of) == 0 {
		of = Statuses()
	}
	counts := make(map[Status]int64, len(of))
	for _, s := range of {
		counts[s] = 0
	}
	return counts
}

// Entry is a stored message with its life so far. Times are on the store's clock, UTC.
type Entry struct {
	Message
	Seq             int64 // the order of entries
	Status          Status
	Attempts        int         // claims so far in this budget, the live one included
	Suspect         bool        // a claim of it vanished (its lease ended without a mark): it is claimed alone from then on
	Token           claim.Token // of the last claim
	ClaimedBy       string      // the holder of the last claim
	LastError       string      // class only, never the error's text
	NextAttemptAt   time.Time   // claimed: when the lease ends; skipped: when that was; else: not claimable before
	CreatedAt       time.Time
	LastAttemptedAt time.Time // zero: never
	PublishedAt     time.Time // zero: not yet
	// Malformed: somebody else wrote the row, and its headers are not a JSON object of strings (Headers is nil), or
	// a time is infinite or outside of the years 1 to 9999 (that time is zero). A claim sets NextAttemptAt and
	// LastAttemptedAt, so after it only Headers and CreatedAt count. Relays abandon such an entry, with LastError
	// MalformedClass, and never publish it.
	Malformed bool
}

// MalformedClass is the LastError of an entry that a relay abandoned because it is Malformed.
const MalformedClass = "malformed"

// StoredTime returns t in UTC, or the zero time and false if t is outside of the years 1 to 9999. RFC 3339 has no form
// for such a time.
func StoredTime(t time.Time) (time.Time, bool) {
	if t = t.UTC(); t.Year() < 1 || t.Year() > 9999 {
		return time.Time{}, false
	}
	return t, true
}

// Query picks entries to claim.
type Query struct {
	Topics    []string // only these; empty: all
	Except    []string // not these
	Attempts  int      // the limit of attempts: an entry whose claim vanished at it is abandoned; ≤ 0: no limit
	Unordered bool     // no entry waits for another of its key: what is eligible is claimed, whatever stands before it
	After     int64    // only entries with a greater Seq
	Near      bool     // look only at the first eligible entries, as many as may be claimed: cheap, whatever waits for others, and no proof that there is nothing
	Bytes     int      // no more payload than this, but for one entry; ≤ 0: no limit
}

// Mark is one fenced change of a claimed entry.
type Mark struct {
	Seq   int64
	Token claim.Token
	To    Status        // Published, Failed, Abandoned; Claimed renews the lease; Pending releases and gives the attempt back
	After time.Duration // Failed: the backoff; Claimed: the new lease; Pending: not claimable before
	Error string        // Failed, Abandoned, and where it is not empty Pending: class only
	Drop  bool          // Published: delete the entry instead
}

// Retention is how long entries are kept that are done with. Abandoned ones are kept until a person decides.
type Retention struct {
	Published time.Duration // zero: not at all, relays delete them instead of marking them, and leave alone what others keep
	Skipped   time.Duration // zero means 30 days
}

// WithDefaults fills in what is zero, and refuses a negative time with claim.ErrTerms.
func (r Retention) WithDefaults() (Retention, error) {
	if r.Skipped == 0 {
		r.Skipped = 30 * 24 * time.Hour
	}
	if r.Published < 0 || r.Skipped < 0 {
		return r, fmt.Errorf("%w: published entries kept for %s, skipped ones for %s: want no negative duration", claim.ErrTerms, r.Published, r.Skipped)
	}
	return r, nil
}

// Store is what a relay needs of a provider.
//
// An entry is open until it is published or skipped (Status.Open). It is eligible while it is pending, failed or
// claimed and its NextAttemptAt is not in the future on the store's clock, which is read once per statement.
// Query.Unordered takes the conditions on earlier entries away.
type Store interface {
	// EntryCandidates reads at most limit eligible entries in order of Seq, without taking them: only those
	// that have no earlier open entry of the same topic and key that is not eligible. With q.Near it looks at no
	// more than limit eligible ones; with q.Bytes it stops before the one that would be too much, unless it is the first.
	EntryCandidates(ctx context.Context, q Query, limit int) ([]Entry, error)

	// TakeEntry takes e if it is still as it was read (status, attempts, token), still eligible, and every earlier open entry of its
	// topic and key is held by t.Token: all of it checked in one atomic step.
	//   - Taking counts an attempt, sets the token and holder of t, and leases the entry for t.Lease.
	//   - If e was claimed and that claim vanished, it becomes suspect; at q.Attempts it is abandoned
	//     instead (LastError "vanished") and not taken.
	//   - Not taken is (e, false, nil). Terms are complete (claim.Terms.WithDefaults).
	TakeEntry(ctx context.Context, e Entry, q Query, t claim.Terms) (Entry, bool, error)

	// MarkEntries changes claimed entries, all marks in one transaction, each fenced by its token.
	//   - It returns the Seqs whose token is no longer the entry's claim, in any order: those are unchanged.
	//     Of two marks of one entry the first counts, and the second is late.
	//   - Where an entry is published, held ones of its topic and key are pending again in the same transaction:
	//     the first of them, and at least the next one.
	//   - What CheckMarks refuses is an *eventstore.InvalidError, nothing changed.
	MarkEntries(ctx context.Context, marks []Mark) (late []int64, err error)
}

// Alone tells whether e, as it was read, must be claimed with no other: a claim of it vanished.
func (e Entry) Alone() bool { return e.Suspect || e.Status == Claimed }

// CheckMarks refuses a mark to a status that no claim ends in, and a negative time. Providers call it before
// they change anything.
func CheckMarks(marks []Mark) error {
	for i, m := range marks {
		switch m.To {
		case Published, Failed, Abandoned, Claimed, Pending:
		default:
			return &eventstore.InvalidError{Field: fmt.Sprintf("marks[%d].to", i), Reason: "want published, failed, abandoned, claimed or pending"}
		}
		if m.Drop && m.To != Published {
			return &eventstore.InvalidError{Field: fmt.Sprintf("marks[%d].drop", i), Reason: "only a published entry is deleted"}
		}
		if m.After < 0 {
			return &eventstore.InvalidError{Field: fmt.Sprintf("marks[%d].after", i), Reason: "negative"}
		}
	}
	return nil
}

// Enqueuer is the outbox inside a transaction that its caller owns, such as sqlite.DB.InTx returns.
type Enqueuer interface {
	// Enqueue adds messages to the outbox. They are there when the transaction commits, and never otherwise.
	//   - A message whose id is in the outbox for that topic already is ignored.
	//   - What Message.Normalize refuses is an *eventstore.InvalidError, nothing added, the transaction usable.
	Enqueue(ctx context.Context, ms ...Message) error
}

// BatchClaimer is a capability of a Store: Claim in one transaction.
type BatchClaimer interface {
	// ClaimEntries does what Claim does. Terms are complete (claim.Terms.WithDefaults).
	ClaimEntries(ctx context.Context, q Query, t claim.Terms) ([]Entry, error)
}

// Keeper is a capability of a Store: what relays do for the outbox itself, now and then.
type Keeper interface {
	// HoldEntries holds at most limit pending entries that wait for long: those behind one of their topic and key
	// that is abandoned, or failed with at least long of its backoff to go.
	//   - A held entry keeps its place: no later one of its key is claimed before it. It is pending again, its
	//     attempts as they were, once what it waits for is published, requeued or skipped.
	//   - Held entries that nothing precedes any more, as where somebody deleted that by hand, are pending again too.
	//   - It returns how many it held. Claims meanwhile may pass over entries of the keys that it looks at.
	HoldEntries(ctx context.Context, long time.Duration, limit int) (int, error)

	// DeleteEntries looks at entries after Seq after, at most some thousand of them in order, and deletes those
	// that have been published or skipped for longer than keep says; no published ones where it says zero. keep is
	// complete (Retention.WithDefaults). It returns how many it deleted, and the Seq to go on after; 0 at the end.
	DeleteEntries(ctx context.Context, keep Retention, after int64) (n int, next int64, err error)
}

// ReadyChecker is a capability of a provider: services ask it once, when they start.
type ReadyChecker interface {
	// Ready returns an error for what no retry can help, such as a schema that is not migrated; a database that
	// is merely away is no such thing, and gives nil.
	Ready(ctx context.Context) error
}

// Waker is a capability of a Store: a hint that there is something to claim.
type Waker interface {
	// Enqueued returns a channel that is closed when entries are next added through this value, in this
	// process. Entries that others add, or that a caller's own transaction adds, may give no hint.
	Enqueued() <-chan struct{}
}

// Inspector is a capability of a Store: looking at entries, and a person's decisions about them.
type Inspector interface {
	// Entries lists what f picks, in order of Seq.
	Entries(ctx context.Context, f Filter) ([]Entry, error)
	// StatusCounts counts entries by status: those of the statuses given, or of all; each of them is there, also
	// with none. What it costs grows with the open entries, and only where others are asked for with those.
	StatusCounts(ctx context.Context, of ...Status) (map[Status]int64, error)
	// Requeue makes the abandoned and failed entries that f picks pending, at once, with a fresh budget of
	// attempts, no longer suspect. It returns how many; entries in another status stay as they are. Held entries
	// behind them are pending again in the same transaction, in their places: the first of them, at least the next.
	//   - Where one of those was last attempted longer ago than the provider's RequeueWindow, and not f.Force, it is ErrStale, and nothing is changed:
	//     that attempt may have published it, and the markers that would tell consumers so may be gone.
	//   - A Malformed entry whose LastAttemptedAt cannot be read stays as it is without f.Force.
	Requeue(ctx context.Context, f Filter) (int, error)
	// Skip gives up for good on the pending, failed, held and abandoned entries that f picks; their keys go on
	// without them, held entries behind them as with Requeue. It returns how many it skipped; entries in another
	// status stay as they are, except a Malformed one that is claimed for ever.
	Skip(ctx context.Context, f Filter) (int, error)
}

// Filter picks entries. The zero Filter picks all, up to the default limit. A text over 255 bytes,
// with a NUL, or that is not UTF-8 is an *eventstore.InvalidError in every method that takes a
// Filter. The same holds for the topics of a Query.
type Filter struct {
	Status []Status
	Topic  string
	Key    string
	Stream string        // of the event
	Seqs   []int64       // these; nil: any; empty: none
	Older  time.Duration // created longer than this ago, on the store's clock
	After  int64         // only greater Seqs: the last one of the page before
	Limit  int           // zero means 100 for Entries, and no limit for Requeue and Skip
	Force  bool          // Requeue: also what was last attempted too long ago
}

// RequeueWindow is how long consumers keep markers, unless they are configured otherwise (marker.Retention). Where they are, the
// provider's Config has to say so.
const RequeueWindow = 8 * 24 * time.Hour

// ErrStale: an entry was last attempted so long ago that its message, if it was published then, would take effect again.
var ErrStale = errors.New("last attempted before the marker window: its message may take effect a second time")

// OnlyOpen tells whether f picks open entries alone, which providers find without looking at what is done with.
func (f Filter) OnlyOpen() bool {
	for _, s := range f.Status {
		if !s.Open() {
			return false
		}
	}
	return len(f.Status) > 0
}

// Claim claims what is eligible, in order of Seq: by the store's own ClaimEntries, or else portably.
//   - No two live claims on one entry; a live lease is never stolen, an expired one is taken over.
//   - Claimed together are only entries such that every earlier open one of the same topic and key is
//     claimed with them: so no key runs past an entry that waits, fails, or is with another relay.
//   - An entry whose claim vanished is claimed alone, so that it takes no bystander with it.
//   - Entries are in post-claim state. With an error, those that were taken before it.
func Claim(ctx context.Context, s Store, q Query, t claim.Terms) ([]Entry, error) {
	t, err := t.WithDefaults()
	if err != nil {
		return nil, err
	}
	if b, ok := s.(BatchClaimer); ok {
		return b.ClaimEntries(ctx, q, t)
	}
	return ClaimPortably(ctx, s, q, t)
}

// ClaimPortably is Claim by one read and one guarded change an entry, whatever s can do besides.
func ClaimPortably(ctx context.Context, s Store, q Query, t claim.Terms) ([]Entry, error) {
	t, err := t.WithDefaults()
	if err != nil {
		return nil, err
	}
	return claim.Portable(ctx, t,
		func(ctx context.Context, limit int) ([]Entry, error) { return s.EntryCandidates(ctx, q, limit) },
		func(ctx context.Context, e Entry, t claim.Terms) (Entry, bool, error) {
			return s.TakeEntry(ctx, e, q, t)
		},
		Entry.Alone)
}
