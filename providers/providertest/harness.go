// Package providertest is the conformance suite of Kinora's providers.
//
// A provider runs All in its tests with the Tier that it declares. Each case has the rule that it checks, in the words of the
// contract, and prints the rule if it fails. Cases do not sleep, and cases with separate
// databases run in parallel. With KINORA_LONG=1 the races of tasks run 1,000 times each, and the
// model of tasks plays longer sequences. A provider that differs declares it (Difference). The
// suite then checks what that Difference promises: no case is skipped.
//
//	func TestConformance(t *testing.T) { providertest.All(t, providertest.TierEvents, open) }
//
// The function open makes a Fixture. A provider needs five things for it:
//
//   - A fresh, migrated database with a table of totals: one number a key. If a database takes
//     long to create, clone a template.
//   - Add, which adds to a total through the transaction that Units.Do passes to handlers, and
//     Total, which reads a committed total in any other way. With these two the suites see
//     effects from outside.
//   - InTx and Owned, a transaction as a user of the provider begins it.
//   - Advance, which makes all stored data older. If the provider has an injected clock, move it
//     forward. If it uses the database's clock, subtract from every stored time. A time that
//     stands for "never" must stay so.
//   - Reopen, a second handle on the same data, unless the provider is Volatile.
//
// The function open in the tests of providers/memory shows a complete fixture.
package providertest

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// TxView is the event store and the outbox inside a transaction that the caller owns.
type TxView interface {
	eventstore.TxStore
	eventstore.SnapshotStore
	provider.EventFinder
	// Enqueue adds messages to the outbox. They are added if the transaction commits, and only
	// then.
	//   - A message whose id is in the outbox for that topic already is ignored.
	//   - If a message is invalid, Enqueue adds none and returns an *eventstore.InvalidError, and
	//     the transaction stays usable.
	Enqueue(ctx context.Context, ms ...outbox.Message) error
}

// Options configure the provider that a case opens.
type Options struct {
	Route      outbox.Route // nil: no entries
	MaxPayload int          // bytes; zero means the provider's default

	RequeueWindow time.Duration // zero means the provider's default

	// Conns is the most connections of the provider; zero means the fixture's default. A provider
	// without connections ignores it.
	Conns int
}

// Open opens a provider for one case, or for several that run one after another: fresh, migrated,
// and closed by t.Cleanup. It is called concurrently. Cleanup may check the invariants of the
// database.
type Open[Tx any] func(t testing.TB, o Options) Fixture[Tx]

// Add adds n to the total of key.
type Add func(ctx context.Context, key string, n int) error

// Fixture is a provider and the functions with which the suites test it. The read model is a
// table of totals, one for each key.
type Fixture[Tx any] struct {
	// Provider implements the interfaces of its Tier.
	Provider Events

	// InTx begins a transaction as a user of the provider would, and runs fn with its view and
	// with writes to the read model.
	//   - It commits if fn returns nil, and returns commit's error. Otherwise it rolls back and
	//     returns fn's error, also if fn ends its goroutine, as a failing case does.
	//   - It begins as a writer, if the provider distinguishes readers and writers.
	//   - Cases read through Provider and Total while it is open, which takes a second
	//     connection.
	InTx func(ctx context.Context, fn func(view TxView, add Add) error) error

	// Transact is InTx by a method of the provider that commits for its user and may run fn
	// several times. Nil if the provider has none.
	Transact func(ctx context.Context, fn func(view TxView, add Add) error) error

	// Owned begins a transaction as InTx does, and passes it to fn. It commits if fn returns nil.
	// Otherwise it rolls back and returns fn's error. Nil if Tx is no transaction that users begin.
	Owned func(ctx context.Context, fn func(tx Tx) error) error

	// Advance makes all stored data older by d: with an injected clock, or by moving each stored
	// time back.
	Advance func(d time.Duration)

	// Add adds n to the total of key, through the transaction that Units.Do passes to its
	// function.
	Add func(ctx context.Context, tx Tx, key string, n int) error

	// Break runs or queues a statement through tx that the database refuses. Nil if the type has
	// no statements.
	Break func(ctx context.Context, tx Tx) error

	// End tries to commit or roll back the transaction that Units.Do passes to its function, by
	// every means of the type. Nil if the type has none.
	End func(ctx context.Context, tx Tx)

	// Tables are tables that the suites create. Nil if the provider's Keeps has no Tables.
	Tables *Tables[Tx]

	// Insert writes entries with the payload "x" into the outbox as other software could: all of
	// them or none. It returns an error if the store refuses one. Nil if the store has no other
	// writers.
	Insert func(entries ...Foreign) error

	// Total reads the committed total of key; 0 if it has none.
	Total func(key string) int

	// Reopen opens the same data through a new handle, as a new process would. Nil if the
	// provider is Volatile.
	Reopen func() Fixture[Tx]
}

// Tables are functions for tables of a key, a number "n" and a text "note". The key is the primary
// key. The functions with a transaction use the one that Units.Do passes to its function.
type Tables[Tx any] struct {
	Create func(ctx context.Context, tx Tx, table string) error
	// Put inserts or replaces a row.
	Put    func(ctx context.Context, tx Tx, table string, row Row) error
	Delete func(ctx context.Context, tx Tx, table, key string) error
	// Rows returns the committed rows of a table or a view, in order of their keys, by one
	// statement. A table that does not exist has none.
	Rows func(ctx context.Context, table string) ([]Row, error)
}

// Row is a row of a table. As JSON it is an object of its columns, or has them as fields of a column
// "value".
type Row struct {
	Key  string `json:"-"`
	N    int    `json:"n"`
	Note string `json:"note"`
}

// Difference is a promise that a provider does not make. The list is fixed.
type Difference string

// Volatile: no data outlives the process. A new handle is an empty store. Markers and marks count
// only during the life of the process.
const Volatile Difference = "volatile"

// Deferred: Units.Do sends statements after its function has returned. Until then the unit has no
// locks, so other units do not wait for it, and the function may be called again with the result
// of the opening.
const Deferred Difference = "deferred"

// All runs the suites of a tier and of those before it. It fails at once if the provider lacks a
// method of the tier, or has all of a higher one.
func All[Tx any](t *testing.T, tier Tier, open Open[Tx], differences ...Difference) {
	checkTier[Tx](t, tier, open(t, Options{}).Provider)
	for _, suite := range []struct {
		tier Tier
		name string
		run  func(*testing.T, Open[Tx], ...Difference)
	}{
		{TierEvents, "EventStore", EventStore[Tx]},
		{TierEvents, "Log", Log[Tx]},
		{TierEvents, "Outbox", Outbox[Tx]},
		{TierProjectors, "Units", Units[Tx]},
		{TierProjectors, "Parking", Parking[Tx]},
		{TierProjectors, "Liveness", Liveness[Tx]},
		{TierProjectors, "Records", Records[Tx]},
		{TierProjectors, "Progress", Progress[Tx]},
		{TierProjectors, "Generations", Generations[Tx]},
		{TierTasks, "Tasks", Tasks[Tx]},
		{TierOperations, "Operations", Operations[Tx]},
	} {
		if suite.tier <= tier {
			t.Run(suite.name, func(t *testing.T) { suite.run(t, open, differences...) })
		}
	}
}

// EventStore checks eventstore.Store, eventstore.TxStore, eventstore.SnapshotStore, provider.EventFinder, and Transact if the fixture has it.
func EventStore[Tx any](t *testing.T, open Open[Tx], differences ...Difference) {
	run(t, open, differences, slices.Concat(appendCases, againCases, readCases, inputCases, txCases, transactCases, snapshotCases, commandCases, streamEndCases, archiveCases))
}

// Log checks provider.LogReader, provider.Log, provider.LogWaker and provider.LogCounter.
func Log[Tx any](t *testing.T, open Open[Tx], differences ...Difference) {
	run(t, open, differences, slices.Concat(logPageCases, readLogCases))
}

// Outbox checks provider.Outbox, provider.EntryMaintainer, outbox.Inspector, provider.Waker and
// Enqueue.
func Outbox[Tx any](t *testing.T, open Open[Tx], differences ...Difference) {
	t.Run("Entries", func(t *testing.T) {
		run(t, open, differences, slices.Concat(entryCases, pathCases, retentionCases, foreignCases, entryFilterCases))
	})
	t.Run("Claim", func(t *testing.T) {
		run(t, open, differences, slices.Concat(claimCases, markCases, guardCases, crashCases, heldCases, inspectCases, crowdCases, foreignClaimCases))
	})
}

// Units checks provider.Units, including the parking of messages.
func Units[Tx any](t *testing.T, open Open[Tx], differences ...Difference) {
	runGroups(t, open, differences, []group{
		{name: "Transaction", cases: transactionCases}, {name: "Markers", cases: markerCases},
		{name: "Concurrent", cases: concurrentCases}, {name: "ContextEnds", cases: contextEndsCases},
		{name: "Parks", cases: parksCases}, {name: "Runs", cases: parkedUnitCases},
		{name: "Holds", cases: holdCases}, {name: "Careful", cases: carefulCases},
		{name: "DryRun", cases: dryRunCases, needs: func(k provider.Keeps) bool { return k.DryRun }},
		{name: "Crowd", cases: parkCrowdCases},
	})
}

// Parking checks provider.Parking.
func Parking[Tx any](t *testing.T, open Open[Tx], differences ...Difference) {
	runGroups(t, open, differences, []group{
		{name: "Due", cases: dueCases}, {name: "Needs", cases: needsCases}, {name: "Try", cases: tryCases}, {name: "List", cases: listCases}, {name: "Decide", cases: decideCases},
		{name: "Filters", cases: parkedFilterCases},
	})
}

// Liveness checks provider.Liveness.
func Liveness[Tx any](t *testing.T, open Open[Tx], differences ...Difference) {
	runGroups(t, open, differences, []group{{name: "Runners", cases: livenessCases}})
}

// Records checks provider.Records, and provider.MarkerMaintainer.
func Records[Tx any](t *testing.T, open Open[Tx], differences ...Difference) {
	runGroups(t, open, differences, []group{{name: "Outcomes", cases: outcomeCases}, {name: "Prune", cases: pruneCases}, {name: "Filters", cases: recordFilterCases}})
}

// Progress checks provider.Progress, provider.Leases, and what a checkpoint means for units and
// records.
func Progress[Tx any](t *testing.T, open Open[Tx], differences ...Difference) {
	runGroups(t, open, differences, []group{
		{name: "Checkpoint", cases: checkpointCases}, {name: "Modes", cases: modeCases}, {name: "Advance", cases: advanceCases},
		{name: "Segments", cases: segmentCases},
		{name: "Applied", cases: appliedCases}, {name: "Archive", cases: archiveAheadCases}, {name: "Concurrent", cases: progressCrowdCases}, {name: "Leases", cases: leaseCases},
		{name: "DryRun", cases: dryAdvanceCases, needs: func(k provider.Keeps) bool { return k.DryRun }},
	})
}

// Generations checks provider.Builds, units with Switch, and that generations are independent.
func Generations[Tx any](t *testing.T, open Open[Tx], differences ...Difference) {
	runGroups(t, open, differences, []group{
		{name: "Independent", cases: independentCases}, {name: "States", cases: generationCases}, {name: "Ended", cases: endedCases},
		{name: "Switch", cases: switchCases}, {name: "Concurrent", cases: switchCrowdCases}, {name: "Clear", cases: clearCases},
		{name: "Tables", cases: tableCases, needs: func(k provider.Keeps) bool { return k.Tables }},
	})
}

// Tasks checks provider.Tasks, provider.TaskTx, provider.TaskInspector and provider.TaskWaker.
// Fixture.Owned is required.
func Tasks[Tx any](t *testing.T, open Open[Tx], differences ...Difference) {
	t.Run("Claim", func(t *testing.T) {
		runTasks(t, open, differences, []group{
			{name: "States", cases: taskStateCases}, {name: "Claims", cases: taskClaimCases}, {name: "Vanished", cases: taskVanishedCases},
			{name: "Model", cases: taskModelCases}, {name: "Claimers", cases: taskClaimerCases},
		})
	})
	runTasks(t, open, differences, []group{
		{name: "Inspector", cases: taskInspectCases}, {name: "Decisions", cases: taskDecideCases}, {name: "Retention", cases: taskRetentionCases},
		{name: "Races", cases: taskRaceCases}, {name: "Crowds", cases: taskGroupRaces}, {name: "Wakes", cases: taskWakeCases},
	})
	TaskTx(t, open, differences...)
}

// TaskTx checks provider.TaskTx. It is the part of Tasks that a provider with several types of transactions runs for each
// of them.
func TaskTx[Tx any](t *testing.T, open Open[Tx], differences ...Difference) {
	runTasks(t, open, differences, []group{
		{name: "Enqueue", cases: taskEnqueueCases}, {name: "Changes", cases: taskChangeCases}, {name: "Answers", cases: taskAnswerCases},
		{name: "Units", cases: taskUnitCases}, {name: "Groups", cases: taskGroupCases},
		{name: "OneConnection", cases: taskGroupRaces, options: Options{Conns: 1}},
	})
}

// Operations checks provider.Operations.
func Operations[Tx any](t *testing.T, open Open[Tx], differences ...Difference) {
	runGroups(t, open, differences, []group{{name: "Registry", cases: registryCases}, {name: "Acts", cases: actCases}, {name: "Streams", cases: streamCases}, {name: "Leases", cases: oldLeaseCases}})
	run(t, open, differences, surveyCases)
}

func knows(differences []Difference, d Difference) bool { return slices.Contains(differences, d) }
