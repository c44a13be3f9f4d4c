package commands

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/provider"
)

type markersCmd struct {
	Ls    markersLsCmd    `cmd:"" help:"List the handlers that have markers."`
	Prune markersPruneCmd `cmd:"" help:"Delete old markers. Runners do this by themselves: use it for projectors that have none."`
	Drop  markersDropCmd  `cmd:"" help:"Delete all markers of a handler that was removed."`
}

type markersLsCmd struct{}

// markedHandler is a handler with markers as JSON.
type markedHandler struct {
	Handler string `json:"handler"`
	Runners int    `json:"runners"` // that are alive and have its projector
}

func (c *markersLsCmd) Run(ctx context.Context, app *App) error {
	cells := func(h markedHandler) []string { return []string{h.Handler, fmt.Sprint(h.Runners)} }
	return list(ctx, app, "handler | runners of its projector", cells, func(_ *Session, ops *admin.Admin) ([]markedHandler, error) {
		handlers, err := ops.MarkedHandlers(ctx)
		if err != nil {
			return nil, err
		}
		f, err := ops.Facts(ctx)
		if err != nil {
			return nil, err
		}
		runners := map[string]int{}
		for _, s := range f.Services {
			if s.ExpiresAt.After(f.At) {
				for _, c := range s.Can {
					runners[c.Projector]++
				}
			}
		}
		return each(handlers, func(h string) markedHandler {
			projector, _, _ := strings.Cut(h, "/")
			return markedHandler{h, runners[projector]}
		}), nil
	})
}

type markersPruneCmd struct {
	Projector string        `help:"Markers of the handlers of this projector, and its replayed and skipped messages."`
	Handler   []string      `help:"Markers of these handlers: projector/handler, or the name given to the middleware."`
	Window    time.Duration `required:"" help:"Only those that are older than this: at least the window of the services (RunnerConfig.Markers), which is 192h if it is not set."`
	Horizon   time.Duration `default:"168h" help:"How long a broker may deliver a message again. The window must be a day longer."`
	decision  `embed:""`
}

func (c *markersPruneCmd) Validate() error {
	if (c.Projector == "") == (len(c.Handler) == 0) {
		return errors.New("select markers with --projector or --handler")
	}
	r := marker.Retention{Horizon: c.Horizon, Window: c.Window}
	if _, err := r.WithDefaults(); err != nil || c.Window == 0 {
		return errors.New("--window must be a day longer than --horizon: a message that is delivered again after its marker was deleted takes effect again")
	}
	return nil
}

func (c *markersPruneCmd) Run(ctx context.Context, app *App) error {
	warning := fmt.Sprintf("The selected markers that are older than %s are deleted: a message that is delivered again after that takes effect again", c.Window)
	return app.changeNoted(ctx, c.decision, warning, deleted, func(ops *admin.Admin, d provider.Decision) (int, error) {
		return ops.PruneMarkers(ctx, c.Projector, c.Handler, marker.Retention{Horizon: c.Horizon, Window: c.Window}, d)
	})
}

type markersDropCmd struct {
	Handler  string `arg:"" help:"The handler: projector/handler, or the name given to the middleware."`
	decision `embed:""`
}

func (c *markersDropCmd) Run(ctx context.Context, app *App) error {
	warning := "All markers of " + c.Handler + " are deleted: if a service still has this handler, messages that are delivered again take effect again"
	return app.changeNoted(ctx, c.decision, warning, deleted, func(ops *admin.Admin, d provider.Decision) (int, error) {
		return ops.DropMarkers(ctx, c.Handler, d)
	})
}
