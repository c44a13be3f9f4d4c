package follow

import (
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// Handlers compares the handlers of this program with those that are recorded in a checkpoint.
type Handlers struct {
	ByType  map[string][]provider.Handler
	Removed []string // names of handlers that this program no longer has
}

// HandlersOf returns the handlers of this program's projector.
func HandlersOf(p *model.Projector) Handlers { return Handlers{p.ByType, p.Rules.Removed} }

// From returns the handlers and types of this program, and those that are recorded and that it lacks. What is recorded
// keeps the position at which it began, and the others begin at a position.
func (o Handlers) From(recorded []provider.Began, position int64) (all []provider.Began) {
	was, lacking := o.compare(recorded)
	for eventType, handlers := range o.ByType {
		for i, h := range handlers {
			b := provider.Began{Handler: h.Name, Was: h.Was, Type: eventType, Position: position}
			if at := was[eventType][i]; at != nil {
				b.Position = at.Position
				if slices.Contains(at.Was, h.Name) { // a newer program has renamed it
					b = *at
				}
			}
			all = append(all, b)
		}
	}
	all = append(all, lacking...)
	slices.SortFunc(all, provider.Began.Compare)
	return all
}

// compare returns what is recorded of each handler of this program, nil if nothing is, and what is recorded of others that
// were not removed.
func (o Handlers) compare(recorded []provider.Began) (own map[string][]*provider.Began, lacking []provider.Began) {
	own = map[string][]*provider.Began{}
	for eventType, handlers := range o.ByType {
		own[eventType] = make([]*provider.Began, len(handlers))
	}
	for k := range recorded {
		b := &recorded[k]
		i := slices.IndexFunc(o.ByType[b.Type], b.Is)
		switch {
		case i >= 0:
			own[b.Type][i] = b
		case !slices.Contains(o.Removed, b.Handler):
			lacking = append(lacking, *b)
		}
	}
	return own, lacking
}

// Lacking returns the recorded handlers that this program does not have, and that were not removed: it may be an older
// one.
func (o Handlers) Lacking(recorded []provider.Began) model.Lacking {
	byType := model.Lacking{}
	_, lacking := o.compare(recorded)
	for _, b := range lacking {
		byType[b.Type] = append(byType[b.Type], b)
	}
	return byType
}

// Takers returns the handlers by the type of their events, also those that this program lacks.
func (o Handlers) Takers(lacking model.Lacking) map[string][]provider.Handler {
	if len(lacking) == 0 {
		return o.ByType
	}
	all := maps.Clone(o.ByType)
	for eventType, began := range lacking {
		all[eventType] = slices.Clone(all[eventType])
		for _, b := range began {
			all[eventType] = append(all[eventType], b.Taker())
		}
	}
	return all
}

// Added returns the handlers of this program that are not recorded.
func (o Handlers) Added(recorded []provider.Began) (added []provider.Began) {
	was, _ := o.compare(recorded)
	for eventType, handlers := range o.ByType {
		for i, h := range handlers {
			if was[eventType][i] == nil {
				added = append(added, provider.Began{Handler: h.Name, Was: h.Was, Type: eventType})
			}
		}
	}
	slices.SortFunc(added, provider.Began.Compare)
	return added
}

// merge returns what is recorded, and the handlers of programs that have started, unless this program has removed them. They
// begin at a position.
func (o Handlers) merge(recorded, coming []provider.Began, position int64) []provider.Began {
	all := slices.Clone(recorded)
	for _, b := range coming {
		if !Has(all, b) && !slices.Contains(o.Removed, b.Handler) {
			b.Position = position
			all = append(all, b)
		}
	}
	return all
}

// Has reports whether a handler is in a list.
func Has(all []provider.Began, b provider.Began) bool {
	return slices.ContainsFunc(all, func(a provider.Began) bool { return isSame(a, b) })
}

// Names returns the names of handlers, each once.
func Names(of []provider.Began) (names []string) {
	for _, b := range of {
		if !slices.Contains(names, b.Handler) {
			names = append(names, b.Handler)
		}
	}
	return names
}

// OwnHandlers returns the names in lists that are those of a projector's handlers, each once. Earlier names of them may be of
// handlers of other projectors.
func OwnHandlers(projector string, lists ...[]string) []string {
	all := slices.DeleteFunc(slices.Concat(lists...), func(name string) bool { return !strings.HasPrefix(name, projector+"/") })
	slices.Sort(all)
	return slices.Compact(all)
}

func isSame(a, b provider.Began) bool {
	return a.Type == b.Type && a.Is(b.Taker())
}

// Match reports whether this program has, or lacks, the recorded handlers, and has no other ones.
func (o Handlers) Match(recorded []provider.Began) bool {
	return slices.EqualFunc(o.From(recorded, 0), recorded, isSame)
}

// reportAdded logs how many earlier events the handlers that begin now do not get. It counts up to
// 10,000 of each type.
func (r *Reader) reportAdded(ctx context.Context, recorded []provider.Began) {
	if len(recorded) == 0 {
		return
	}
	const most = 10_000
	counted := map[string]int{}
	for _, b := range r.at.Handlers {
		if b.Position != r.at.Place.Position || Has(recorded, b) {
			continue
		}
		missed, ok := counted[b.Type]
		if !ok {
			var err error
			if missed, err = r.countUpTo(ctx, b, most); err != nil {
				return
			}
			counted[b.Type] = missed
		}
		if missed > 0 {
			r.Host.Logger.Warn("a new handler does not get earlier events: rebuild the projector to apply them",
				"projector", r.Projector.Name, "handler", b.Handler, "type", b.Type, "events", missed, "or_more", missed >= most)
		}
	}
}

// countUpTo counts the events of a type up to where a handler began to take them, until there are most.
func (r *Reader) countUpTo(ctx context.Context, b provider.Began, most int) (n int, err error) {
	for q := (provider.LogQuery{Filter: eventstore.LogFilter{Types: []string{b.Type}}, Limit: most, NoData: true}); n < most; {
		page, err := r.Host.Page(ctx, q)
		if err != nil {
			return n, err
		}
		for _, e := range page.Events {
			if e.Position <= b.Position {
				n++
			}
		}
		if page.End.Position <= q.After || page.End.Position >= b.Position {
			break
		}
		q.After = page.End.Position
	}
	return n, nil
}
