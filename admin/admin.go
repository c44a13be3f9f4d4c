package admin

import (
	"context"
	"errors"
	"iter"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// Store is what a store of events and an outbox has for operators. *postgres.DB, *sqlite.DB and *memory.DB
// implement it, and the other parts. If the read models are in Redis, it is the second store of
// provider.Combine.
type Store interface {
	provider.Inspector
	provider.Log
	provider.EntryMaintainer
	// ReadStream is that of eventstore.Store.
	ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error]
}

// Projectors is what a store has for operators of projectors.
type Projectors interface {
	provider.Parking
	provider.Progress
	provider.Builds
	provider.MarkerMaintainer
	provider.Records
	// LeaseNames is that of claim.Leases.
	LeaseNames(ctx context.Context, prefix string) ([]string, error)
}

// Admin reads facts and carries out acts. Create it with New. Its methods are safe for concurrent use. The error of one
// that requires a part that the store does not have is errors.ErrUnsupported and says which.
type Admin struct{ store Store }

// New returns an Admin of a store. It sends no statement.
func New(store Store) (*Admin, error) {
	if store == nil {
		return nil, errors.New("admin: the store is nil: give one")
	}
	return &Admin{store: store}, nil
}

// Projectors returns the part of the store for projectors.
func (a *Admin) Projectors() (Projectors, error) { return part[Projectors](a.store, "projectors") }

// Tasks returns the part of the store for tasks.
func (a *Admin) Tasks() (provider.TaskInspector, error) {
	return part[provider.TaskInspector](a.store, "tasks")
}

// Operations returns the part of the store for operations: reports of services, pauses, acts and the survey.
func (a *Admin) Operations() (provider.Operations, error) {
	return part[provider.Operations](a.store, "operations")
}

// Missing returns what the store does not keep: "projectors", "tasks", "operations".
func (a *Admin) Missing() (missing []string) {
	_, projectors := a.Projectors()
	_, tasks := a.Tasks()
	_, operations := a.Operations()
	for _, err := range []error{projectors, tasks, operations} {
		if m, ok := errors.AsType[missingError](err); ok {
			missing = append(missing, string(m))
		}
	}
	return missing
}

func part[T any](store Store, name string) (T, error) {
	p, ok := store.(T)
	if !ok {
		return p, missingError(name)
	}
	return p, nil
}

// with calls do with a part of the store.
func with[P, R any](part func() (P, error), do func(P) (R, error)) (none R, err error) {
	p, err := part()
	if err != nil {
		return none, err
	}
	return do(p)
}

// missingError says that the store does not have a part.
type missingError string

func (m missingError) Error() string { return "the store keeps no " + string(m) }

// Is makes it errors.ErrUnsupported.
func (m missingError) Is(err error) bool { return err == errors.ErrUnsupported }
