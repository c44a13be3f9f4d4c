package providertest

import (
	"reflect"
	"strings"
	"testing"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Tier is how much a provider implements. Each tier has what those before it have.
type Tier int

// The tiers.
const (
	TierEvents     Tier = iota + 1 // Events: repositories and relays
	TierProjectors                 // Projectors: runners
	TierTasks                      // provider.TaskProvider and provider.TaskInspector: workers
	TierOperations                 // provider.Operations: pauses, reports, and the command kinora in full
)

func (t Tier) String() string {
	return [...]string{"none", "TierEvents", "TierProjectors", "TierTasks", "TierOperations"}[t]
}

// Events is a provider of TierEvents. The suites also check the capabilities Archive,
// provider.EntryTaker, provider.Waker, provider.LogWaker and provider.LogCounter if it has them.
type Events interface {
	eventstore.Store
	eventstore.SnapshotStore
	provider.EventFinder
	provider.LogReader
	provider.Log
	provider.Outbox
	provider.EntryMaintainer
	outbox.Inspector
}

// Projectors is a provider of TierProjectors. The suites also check ParkedCount, as memory.DB has it, if the
// provider has it.
type Projectors[Tx any] interface {
	Events
	provider.Provider[Tx]
	provider.MarkerMaintainer
}

// required are the interfaces of a tier, without those of the tiers before.
func required[Tx any](tier Tier) []reflect.Type {
	switch tier {
	case TierEvents:
		return []reflect.Type{reflect.TypeFor[Events]()}
	case TierProjectors:
		return []reflect.Type{reflect.TypeFor[Projectors[Tx]]()}
	case TierTasks:
		return []reflect.Type{reflect.TypeFor[provider.TaskProvider[Tx]](), reflect.TypeFor[provider.TaskInspector]()}
	}
	return []reflect.Type{reflect.TypeFor[provider.Operations]()}
}

// checkTier fails the test if store lacks a method of its tier, or has all of a higher one, which no
// suite would check.
func checkTier[Tx any](t testing.TB, tier Tier, store any) {
	t.Helper()
	if tier < TierEvents || tier > TierOperations {
		t.Fatalf("tier %d is not in the list", int(tier))
	}
	for of := TierEvents; of <= TierOperations; of++ {
		lacks := missing(store, required[Tx](of))
		if of <= tier && len(lacks) > 0 {
			t.Errorf("a provider of %s has all methods of %s: %T lacks %s", tier, of, store, strings.Join(lacks, ", "))
		}
		if of > tier && len(lacks) == 0 {
			t.Errorf("%T has all methods of %s: declare this tier instead of %s", store, of, tier)
		}
	}
	if t.Failed() {
		t.FailNow()
	}
}

// missing returns the methods of the interfaces that store does not have.
func missing(store any, interfaces []reflect.Type) (methods []string) {
	has := reflect.TypeOf(store)
	for _, want := range interfaces {
		if has.Implements(want) {
			continue
		}
		for i := range want.NumMethod() {
			m := want.Method(i)
			switch got, ok := has.MethodByName(m.Name); {
			case !ok:
				methods = append(methods, m.Name)
			case !sameSignature(got.Type, m.Type):
				methods = append(methods, m.Name+strings.TrimPrefix(m.Type.String(), "func")+" (it has other parameters or results)")
			}
		}
	}
	return methods
}

// sameSignature reports whether a method with a receiver has the signature of an interface's method.
func sameSignature(method, want reflect.Type) bool {
	if method.NumIn() != want.NumIn()+1 || method.NumOut() != want.NumOut() || method.IsVariadic() != want.IsVariadic() {
		return false
	}
	for i := range want.NumIn() {
		if method.In(i+1) != want.In(i) {
			return false
		}
	}
	for i := range want.NumOut() {
		if method.Out(i) != want.Out(i) {
			return false
		}
	}
	return true
}
