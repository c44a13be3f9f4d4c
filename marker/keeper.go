package marker

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// Keeper is a capability of a provider: looking after markers that are old, or whose handlers are gone.
type Keeper interface {
	// PruneMarkers deletes at most limit markers of handler, of whatever generation, that are older than window on the store's clock,
	// the oldest first, and returns how many; zero means that there are no more, but for those that somebody else deletes at this
	// moment. In the same transaction it raises the handler's floor: the time at which, and before which, its markers may be
	// missing. It does not look at younger ones.
	PruneMarkers(ctx context.Context, handler string, window time.Duration, limit int) (int, error)
	// Floor is the floor of a handler; the zero time where none of its markers were pruned.
	Floor(ctx context.Context, handler string) (time.Time, error)
	// MarkedHandlers lists the handlers that have markers, of whatever generation, in order.
	MarkedHandlers(ctx context.Context) ([]string, error)
	// DropMarkers deletes at most limit markers of handler, of whatever generation, and returns how many; zero as of PruneMarkers.
	DropMarkers(ctx context.Context, handler string, limit int) (int, error)
}

// Orphans lists the handlers that have markers and are none of known, which is what all projectors of the service
// call their handlers, and called them before (projector.Projector.Handlers). Somebody else's handlers in the same
// database are orphans to who does not know them.
func Orphans(ctx context.Context, k Keeper, known ...string) ([]string, error) {
	handlers, err := k.MarkedHandlers(ctx)
	if err != nil {
		return nil, fmt.Errorf("orphaned markers: %w", err)
	}
	return slices.DeleteFunc(handlers, func(h string) bool { return slices.Contains(known, h) }), nil
}

const dropAtOnce = 1000

// Drop deletes all markers of a handler, a thousand in a transaction, and returns how many, also with an error. Where
// the handler is not gone for good, every message that comes again takes effect again.
func Drop(ctx context.Context, k Keeper, handler string) (dropped int, err error) {
	for {
		n, err := k.DropMarkers(ctx, handler, dropAtOnce)
		dropped += n
		if err != nil {
			return dropped, fmt.Errorf("drop markers: %w", err)
		}
		if n == 0 {
			return dropped, nil
		}
	}
}
