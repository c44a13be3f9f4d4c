package provider

import (
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
)

// RelayWiring says what a relay reads, and where it publishes. kinora.Start compares it with the
// subscriptions of runners.
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

// AppendsTo records that a repository appends events of these types to streams of category.
// eventstore.NewRepository calls it.
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
