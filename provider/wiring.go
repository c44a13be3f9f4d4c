package provider

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
)

// RelayWiring says what a relay reads, and where it publishes. kinora.Start compares it with RunnerWiring.
type RelayWiring struct {
	Store     Outbox
	Publisher any
	Topics    []string // nil means all
	Logger    *slog.Logger
}

// RunnerWiring says what a runner reads and takes.
type RunnerWiring struct {
	Log        Log      // of the events; nil: there is none
	FromLog    bool     // it reads only the log
	Subscriber any      // nil: one for each projector, a router, or none
	Topics     []string // nil: a router passes any, or FromLog
	Takes      []string // the stored names of the event types that have handlers, sorted
	Emits      bool     // a handler has output, of any topic
	Decodes    bool     // it has a decoder for messages of other software
	Logger     *slog.Logger
}

// Routes are the categories that the repositories of this process append to in a store, and the
// topics of their events. Stores embed it. It is safe for concurrent use.
type Routes struct {
	route func(stream string, d eventstore.Draft) []string

	mu         sync.Mutex
	categories map[string][]string // the stored names of the event types
}

// NewRoutes returns the Routes of a store with this route, which may be nil.
func NewRoutes(route func(stream string, d eventstore.Draft) []string) *Routes {
	return &Routes{route: route, categories: map[string][]string{}}
}

// RoutesOf returns the Routes of a store, or nil if it has none.
func RoutesOf(store any) *Routes {
	if s, ok := store.(interface{ Routed() *Routes }); ok {
		return s.Routed()
	}
	return nil
}

// Routed returns r. So a store that embeds Routes has it.
func (r *Routes) Routed() *Routes { return r }

// AppendsTo records the types that a repository appends to a category. eventstore.NewRepository calls it.
func (r *Routes) AppendsTo(category string, types []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := append(slices.Clone(r.categories[category]), types...)
	slices.Sort(all)
	r.categories[category] = slices.Compact(all)
}

// HasRoute reports whether the store has a route.
func (r *Routes) HasRoute() bool { return r.route != nil }

// Categories returns the recorded categories with their event types.
func (r *Routes) Categories() map[string][]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.categories)
}

// TopicsOf returns the topics of the events of a recorded category: it calls the route with an
// event of each type, with the data {}. It returns false if the route panics.
func (r *Routes) TopicsOf(category string) (topics []string, ok bool) {
	defer func() {
		if recover() != nil {
			topics, ok = nil, false
		}
	}()
	var drafts []eventstore.Draft
	for _, name := range r.Categories()[category] {
		drafts = append(drafts, eventstore.Draft{ID: uuid.NewString(), Type: name, Schema: 1, Data: []byte("{}")})
	}
	byDraft, err := Topics(r.route, eventstore.StreamName(category, "1"), drafts)
	if err != nil {
		return nil, false
	}
	topics = slices.Concat(byDraft...)
	slices.Sort(topics)
	return slices.Compact(topics), true
}

// ReadyChecker is a capability of a provider. Relays and runners call it once, when they start.
type ReadyChecker interface {
	// ReadyFor returns an error for a problem that no retry can solve, such as a schema that is not migrated, or a role
	// without the rights of the service. If the database is only unreachable, it returns nil.
	ReadyFor(ctx context.Context, s Service) error
}

// Service is a kind of service that uses a database. Each needs other rights.
type Service int

// The services.
const (
	AnyService    Service = iota // any: the rights of one of them are enough
	RelayService                 // outbox.Relay
	RunnerService                // projector.Runner
	WorkerService                // task.Worker
)

// NewerError is returned by Migrate and ReadyFor: a newer program has migrated the database. Nothing was changed.
type NewerError struct {
	Database int64 // the version of the database's schema
	Program  int64 // the newest version that this program knows
}

func (e *NewerError) Error() string {
	return fmt.Sprintf("the database's schema has version %d, and this program knows versions up to %d: "+
		"deploy the program that migrated the database, or a later one", e.Database, e.Program)
}
