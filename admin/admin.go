package admin

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// Store is what a store of events and an outbox has for operators. *postgres.DB, *sqlite.DB and *memory.DB
// have it, and the other parts. With read models in Redis, it is the second store of provider.Combine.
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
	provider.LeaseLister
}

// Admin reads facts and carries out acts. Create it with New. Its methods are safe for concurrent use. The error of one
// that requires a part that the store does not have is errors.ErrUnsupported and says which.
type Admin struct {
	store Store
	mu    sync.Mutex
	seen  map[string]time.Time // see sightings
}

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

// Survey is that of the store, or as far as the other parts show it.
func (a *Admin) Survey(ctx context.Context, limit int) (provider.Survey, error) {
	if o, err := a.Operations(); err == nil {
		return o.Survey(ctx, limit)
	}
	s := provider.Survey{Now: time.Now().UTC()} //nolint:forbidigo // the store does not say what its clock is
	if err := a.surveyEvents(ctx, &s); err != nil {
		return s, err
	}
	p, err := a.Projectors()
	if err != nil {
		return s, nil //nolint:nilerr // there are none
	}
	return s, surveyProjectors(ctx, p, &s, limit)
}

// surveyEvents adds the head of the log and the open entries.
func (a *Admin) surveyEvents(ctx context.Context, s *provider.Survey) error {
	head, err := a.store.LogPosition(ctx, eventstore.From{Now: true})
	if err != nil {
		return err
	}
	page, err := a.store.LogPage(ctx, provider.LogQuery{After: max(head-1, 0), Limit: 1, Unsettled: true, NoData: true})
	if err != nil {
		return err
	}
	s.Waiting = page.Waiting
	if len(page.Events) > 0 {
		e := page.Events[0]
		s.Head = provider.LogPlace{Position: e.Position, ID: e.ID, RecordedAt: e.RecordedAt}
	}
	if len(page.Waiting) == 0 {
		s.Settled = s.Head.Position
	}
	statuses := slices.DeleteFunc(provider.EntryStatuses(), func(of outbox.Status) bool { return !of.Open() })
	counts, err := a.store.StatusCounts(ctx, statuses...)
	if err != nil {
		return err
	}
	for _, status := range statuses {
		if counts[status] == 0 {
			continue
		}
		first, err := a.store.Entries(ctx, outbox.Filter{Status: []outbox.Status{status}, Limit: 1})
		if err != nil {
			return err
		}
		c := provider.EntryCount{Status: status, Count: provider.Count{N: counts[status]}}
		for _, e := range first {
			if c.Oldest = e.CreatedAt; status == outbox.Claimed {
				c.Until = e.NextAttemptAt
			}
		}
		s.Entries = append(s.Entries, c)
	}
	return nil
}

// surveyProjectors adds the builds that have a row, a marker, a reader or a parked message.
func surveyProjectors(ctx context.Context, p Projectors, s *provider.Survey, limit int) error {
	rows, err := p.Generations(ctx, "")
	if err != nil {
		return err
	}
	builds := map[provider.Build]*provider.SurveyedBuild{}
	add := func(b provider.Build) *provider.SurveyedBuild {
		if b.Generation = b.Number(); builds[b] == nil {
			builds[b] = &provider.SurveyedBuild{Build: b}
		}
		return builds[b]
	}
	for _, g := range rows {
		if g.State != provider.GenerationRetired {
			add(g.Build)
		}
	}
	handlers, err := p.MarkedHandlers(ctx)
	if err != nil {
		return err
	}
	for _, h := range handlers {
		name, _, _ := strings.Cut(h, "/")
		own := slices.DeleteFunc(slices.Clone(rows), func(g provider.Generation) bool { return g.Projector != name })
		add(provider.Build{Projector: name, Generation: provider.LiveGeneration(own)})
	}
	readers, err := p.LeaseNames(ctx, readerLease)
	if err != nil {
		return err
	}
	for _, lease := range readers {
		name, number, _ := strings.Cut(strings.TrimPrefix(lease, readerLease), "@")
		generation, _ := strconv.Atoi(number) // none is the first
		add(provider.Build{Projector: name, Generation: generation})
	}
	parked, err := p.Parked(ctx, projector.ParkedFilter{Limit: limit})
	if err != nil {
		return err
	}
	surveyParked(s, parked, len(parked) == limit, add)
	for _, b := range builds {
		if b.Checkpoint, err = p.Checkpoint(ctx, b.Build); err != nil {
			return err
		}
		s.Builds = append(s.Builds, *b)
	}
	slices.SortFunc(s.Builds, func(a, b provider.SurveyedBuild) int {
		return cmp.Or(cmp.Compare(a.Projector, b.Projector), cmp.Compare(a.Generation, b.Generation))
	})
	return nil
}

// readerLease is the beginning of the names of leases of readers of the log.
const readerLease = "reader/"

// surveyParked counts the open messages of each build, and finds the first stuck ones.
func surveyParked(s *provider.Survey, parked []provider.Parked, more bool, add func(provider.Build) *provider.SurveyedBuild) {
	type queue struct {
		provider.Build
		provider.Lane
	}
	seen, stuck := map[queue]bool{}, map[queue]int{} // stuck: the place in s.Stuck
	for _, m := range parked {
		b := add(provider.Build{Projector: m.Projector, Generation: m.Generation})
		b.Parked.N, b.Parked.AtLeast = b.Parked.N+1, more
		if b.Oldest.IsZero() {
			b.Oldest = m.At
		}
		q := queue{b.Build, m.Lane}
		if i, ok := stuck[q]; ok {
			s.Stuck[i].Behind.N++
		}
		if seen[q] {
			continue
		}
		seen[q] = true
		b.Lanes.N, b.Lanes.AtLeast = b.Lanes.N+1, more
		if m.State != provider.StateStuck {
			continue
		}
		b.StuckLanes.N, b.StuckLanes.AtLeast = b.StuckLanes.N+1, more
		if b.StuckLanes.N <= 10 {
			m.Payload, m.Headers = nil, nil
			stuck[q], s.Stuck = len(s.Stuck), append(s.Stuck, provider.StuckLane{First: m})
		}
	}
}
