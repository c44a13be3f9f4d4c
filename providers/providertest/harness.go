// Package providertest holds the conformance suites: what every provider of Kinora promises, as cases.
//
// A provider runs All in its own tests. Every case names the rule that it checks, in the words of the
// contract, and prints the rule where it fails. Each case opens a provider of its own, runs in parallel with
// the others, and never sleeps. Where a provider differs it says so (Difference), and the suite then checks
// what it promises instead: no case is skipped.
//
//	func TestConformance(t *testing.T) { providertest.All(t, open, providertest.Volatile) }
//
// The tests of providers/memory show a whole fixture, as their function open makes it.
package providertest

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

// Provider is everything that the suites ask of a provider. Capabilities (outbox.BatchClaimer, outbox.Waker)
// are found by assertion.
type Provider[Tx any] interface {
	eventstore.Store
	outbox.Store
	outbox.Inspector
	outbox.Keeper
	marker.Keeper
	projector.UnitOfWork[Tx]
	projector.ParkedInspector
	projector.Journal
	projector.State
}

// TxView is the event store and the outbox inside a transaction that the caller owns.
type TxView interface {
	eventstore.TxStore
	// Enqueue adds messages to the outbox: they are there when the transaction commits, and never otherwise.
	//   - A message whose id is in the outbox for that topic already is ignored.
	//   - An invalid message is an *eventstore.InvalidError, nothing of the call is added, and the transaction
	//     stays usable.
	Enqueue(ctx context.Context, ms ...outbox.Message) error
}

// Options are what a case asks of the provider that it opens.
type Options struct {
	Route      outbox.Route // nil: no entries
	MaxPayload int          // bytes; zero means the provider's default

	RequeueWindow time.Duration // zero means the provider's default
}

// Open opens a provider for one case: fresh, migrated, and closed by t.Cleanup. It is called from many
// goroutines. Cleanup may check what must hold of any database at rest.
type Open[Tx any] func(t testing.TB, o Options) Fixture[Tx]

// Add adds n to the total of key.
type Add func(ctx context.Context, key string, n int) error

// Fixture is a provider, and the suite's hands on it. The read model is a table of totals, one a key.
type Fixture[Tx any] struct {
	Provider Provider[Tx]

	// InTx begins a transaction as a user of the provider would, and runs fn in it: with the view of it, and
	// with writes to the read model through it. It commits where fn returns nil and returns commit's error;
	// otherwise it rolls back and returns fn's error; also where fn ends its goroutine, as a failing case does.
	// It begins as a writer, where the provider tells readers and writers apart. Cases read through Provider and
	// Total while it is open, so that takes a second connection.
	InTx func(ctx context.Context, fn func(view TxView, add Add) error) error

	// Advance moves the store's clock forward: by an injected clock, or by shifting back every stored time.
	Advance func(d time.Duration)

	// Add adds n to the total of key, through the transaction that a unit of work hands to apply.
	Add func(ctx context.Context, tx Tx, key string, n int) error

	// End tries to commit or to roll back the transaction that a unit of work hands to apply, by every means
	// that the type gives, so that the unit must notice. Nil where the type gives none.
	End func(ctx context.Context, tx Tx)

	// Total reads the committed total of key; 0 where there is none.
	Total func(key string) int

	// Reopen gives the same data through a new handle, as a new process would see it. Nil where nothing
	// outlives the process (Volatile).
	Reopen func() Fixture[Tx]
}

// Difference is a promise that a provider does not make. The list is fixed: a provider cannot invent one.
type Difference string

// Volatile: nothing outlives the process. A new handle is an empty store, so what marks and markers prove
// holds for the life of the process only.
const Volatile Difference = "volatile"

// Deferred: a unit of work sends what apply asked for after apply has returned. Until then it holds nothing, so
// nobody waits for it; which marks are new shows only then, and apply may run again for those that are.
const Deferred Difference = "deferred"

// All runs every suite.
func All[Tx any](t *testing.T, open Open[Tx], differences ...Difference) {
	t.Run("EventStore", func(t *testing.T) { EventStore(t, open, differences...) })
	t.Run("Outbox", func(t *testing.T) { Outbox(t, open, differences...) })
	t.Run("UnitOfWork", func(t *testing.T) { UnitOfWork(t, open, differences...) })
}

// EventStore checks eventstore.Store and eventstore.TxStore.
func EventStore[Tx any](t *testing.T, open Open[Tx], differences ...Difference) {
	run(t, open, differences, nil, slices.Concat(appendCases, againCases, readCases, inputCases, txCases))
}

// Outbox checks outbox.Store, outbox.Keeper, outbox.Inspector, outbox.Waker and Enqueue: once through outbox.Claim and once
// through outbox.ClaimPortably.
func Outbox[Tx any](t *testing.T, open Open[Tx], differences ...Difference) {
	claiming := slices.Concat(claimCases, markCases, guardCases, vanishCases, heldCases, inspectCases, crowdCases)
	t.Run("Entries", func(t *testing.T) { run(t, open, differences, outbox.Claim, slices.Concat(entryCases, keepCases)) })
	t.Run("Claim", func(t *testing.T) { run(t, open, differences, outbox.Claim, claiming) })
	t.Run("ClaimPortably", func(t *testing.T) { run(t, open, differences, outbox.ClaimPortably, claiming) })
}

// UnitOfWork checks projector.UnitOfWork, projector.ParkedInspector, projector.Journal, projector.State and what prunes markers.
func UnitOfWork[Tx any](t *testing.T, open Open[Tx], differences ...Difference) {
	units := slices.Concat(unitCases, markerCases, outputCases, parkCases, parkingCases, dueCases, replayCases, rehearseCases, pruneCases, stuckCases, parkCrowdCases)
	t.Run("Journal", func(t *testing.T) { run(t, open, differences, nil, slices.Concat(journalCases, attemptCases)) })
	run(t, open, differences, outbox.Claim, units)
}

func knows(differences []Difference, d Difference) bool { return slices.Contains(differences, d) }
