package follow

import (
	"context"
	"slices"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// Handlers compares the handlers of this program with those that are recorded in a checkpoint.
type Handlers struct {
	byType  map[string][]provider.Handler
	named   map[taken][]string // the handlers that have or had a name; there may be thousands
	removed []string           // names of handlers that this program no longer has
}

// taken is a type of events, and the name of a handler that takes it.
type taken struct{ eventType, handler string }

// HandlersOf returns the handlers of a projector.
func HandlersOf(p *model.Projector) *Handlers {
	o := &Handlers{p.ByType, map[taken][]string{}, p.Rules.Removed}
	for eventType, handlers := range o.byType {
		for _, h := range handlers {
			for _, name := range h.Names() {
				o.named[taken{eventType, name}] = append(o.named[taken{eventType, name}], h.Name)
			}
		}
	}
	return o
}

// From returns the handlers and types of this program, and those that are recorded and that it lacks. What is recorded
// keeps the position at which it began, and the others begin at a position.
func (o *Handlers) From(recorded []provider.Began, position int64) (all []provider.Began) {
	began := o.recorded(recorded)
	for eventType, handlers := range o.byType {
		for _, h := range handlers {
			b := provider.Began{Handler: h.Name, Type: eventType, Position: position}
			if at, ok := began[taken{eventType, h.Name}]; ok {
				b.Position = at
			}
			all = append(all, b)
		}
	}
	for _, lacking := range o.Lacking(recorded) {
		all = append(all, lacking...)
	}
	slices.SortFunc(all, provider.Began.Compare)
	return all
}

// recorded returns the positions at which recorded handlers of this program began.
func (o *Handlers) recorded(all []provider.Began) map[taken]int64 {
	began := map[taken]int64{}
	for _, was := range all {
		for _, handler := range o.named[taken{was.Type, was.Handler}] {
			began[taken{was.Type, handler}] = was.Position
		}
	}
	return began
}

// Lacking returns the recorded handlers that this program does not have, and that were not removed: it may be an older
// one.
func (o *Handlers) Lacking(recorded []provider.Began) model.Lacking {
	lacking := model.Lacking{}
	for _, was := range recorded {
		if len(o.named[taken{was.Type, was.Handler}]) == 0 && !slices.Contains(o.removed, was.Handler) {
			lacking[was.Type] = append(lacking[was.Type], was)
		}
	}
	return lacking
}

// Match reports whether this program has, or lacks, the recorded handlers, and has no other ones.
func (o *Handlers) Match(recorded []provider.Began) bool {
	own := o.From(recorded, 0)
	return slices.EqualFunc(own, recorded, func(a, b provider.Began) bool {
		return a.Type == b.Type && (a.Handler == b.Handler || slices.Contains(o.named[taken{b.Type, b.Handler}], a.Handler))
	})
}

// reportAdded logs how many earlier events the handlers that begin now do not get. It counts up to
// 10,000 of each type.
func (r *Reader) reportAdded(ctx context.Context, recorded []provider.Began) {
	if len(recorded) == 0 {
		return
	}
	const most = 10_000
	had, counted := r.Handlers.recorded(recorded), map[string]int{}
	for _, b := range r.at.Handlers {
		if _, has := had[taken{b.Type, b.Handler}]; has || b.Position != r.at.Place.Position {
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
