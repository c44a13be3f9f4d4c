package marker

import (
	"context"
	"fmt"
	"slices"
)

// Keeper is a capability of a provider: finding markers whose handlers are gone, and deleting them.
type Keeper interface {
	// MarkedHandlers lists the handlers that have markers, of any generation, in order.
	MarkedHandlers(ctx context.Context) ([]string, error)
	// DropMarkers deletes at most limit markers of handler, of any generation, and returns how many; zero means that
	// none is left, except those that others delete at this moment.
	DropMarkers(ctx context.Context, handler string, limit int) (int, error)
}

// Orphans lists the handlers that have markers and are not among known: the names, also the earlier ones, of the
// handlers of all the service's projectors (projector.Projector.Handlers). If services share a database, give the
// handlers of all of them.
func Orphans(ctx context.Context, k Keeper, known ...string) ([]string, error) {
	handlers, err := k.MarkedHandlers(ctx)
	if err != nil {
		return nil, fmt.Errorf("orphaned markers: %w", err)
	}
	return slices.DeleteFunc(handlers, func(h string) bool { return slices.Contains(known, h) }), nil
}

// Drop deletes all markers of a handler, a thousand in a transaction, and returns how many, also with an error. Call
// it only for a handler that is gone for good: without its markers, every redelivered message takes effect again.
func Drop(ctx context.Context, k Keeper, handler string) (dropped int, err error) {
	dropped, err = untilNone(func() (int, error) { return k.DropMarkers(ctx, handler, atOnce) })
	if err != nil {
		err = fmt.Errorf("drop markers: %w", err)
	}
	return dropped, err
}

const atOnce = 1000 // rows in a transaction

// untilNone calls f until it deletes nothing, and returns how many it deleted, also with an error. That it deletes fewer than
// it may says nothing: others may have deleted some of them.
func untilNone(f func() (int, error)) (all int, err error) {
	for n := 1; n != 0 && err == nil; all += n {
		n, err = f()
	}
	return all, err
}
