package admin

import (
	"context"
	"fmt"
	"strings"

	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// PruneEntries is outbox.Prune, recorded as an act: it deletes entries that were published or skipped longer
// ago than keep says. Abandoned and held entries stay.
func (a *Admin) PruneEntries(ctx context.Context, keep outbox.EntryRetention, d Decision) (int, error) {
	keep, err := keep.WithDefaults()
	if err != nil {
		return 0, err
	}
	detail := map[string]string{"published": keep.Published.String(), "skipped": keep.Skipped.String()}
	return a.decide(ctx, provider.Act{Verb: "prune", Kind: "outbox", Decision: d}, detail,
		func() (int, error) { return outbox.Prune(ctx, a.store, keep) })
}

// MarkedHandlers returns the handlers that have markers, sorted.
func (a *Admin) MarkedHandlers(ctx context.Context) ([]string, error) {
	return with(a.Projectors, func(p Projectors) ([]string, error) { return p.MarkedHandlers(ctx) })
}

// PruneMarkers is marker.Prune, recorded as an act: it deletes markers that are older than r.Window. They are
// those of handlers, or, if there are none, of all handlers of the projector that have markers; then it deletes
// the projector's replayed and skipped messages of that age too.
//   - marker.ErrUnsafe: r.Window is too short for r.Horizon. A longer window that a service is configured with
//     is not known here.
//   - provider.ErrInput: projector and handlers are both given, or neither is.
func (a *Admin) PruneMarkers(ctx context.Context, projector string, handlers []string, r marker.Retention, d Decision) (int, error) {
	if (projector == "") == (len(handlers) == 0) {
		return 0, fmt.Errorf("%w: name the projector, or its handlers", provider.ErrInput)
	}
	p, err := a.Projectors()
	if err != nil {
		return 0, err
	}
	if r, err = r.WithDefaults(); err != nil {
		return 0, err
	}
	name := projector
	if projector == "" {
		name = strings.Join(handlers, ", ")
	}
	return a.decide(ctx, provider.Act{Verb: "prune", Kind: "markers", Name: name, Decision: d}, map[string]string{"window": r.Window.String()},
		func() (int, error) {
			if projector != "" {
				marked, err := p.MarkedHandlers(ctx)
				if err != nil {
					return 0, err
				}
				for _, h := range marked {
					if of, _, _ := strings.Cut(h, "/"); of == projector {
						handlers = append(handlers, h)
					}
				}
			}
			return marker.Prune(ctx, p, r, projector, handlers...)
		})
}

// DropMarkers is marker.Drop, recorded as an act: it deletes all markers of a handler that was removed. Without
// them, a message that is delivered again takes effect again.
func (a *Admin) DropMarkers(ctx context.Context, handler string, d Decision) (int, error) {
	if handler == "" {
		return 0, fmt.Errorf("%w: the handler is missing: name it", provider.ErrInput)
	}
	p, err := a.Projectors()
	if err != nil {
		return 0, err
	}
	return a.decide(ctx, provider.Act{Verb: "drop", Kind: "markers", Name: handler, Decision: d}, struct{}{},
		func() (int, error) { return marker.Drop(ctx, p, handler) })
}
