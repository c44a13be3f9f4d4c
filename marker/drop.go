package marker

import (
	"context"
	"fmt"
	"slices"

	"github.com/kinora-go/kinora/provider"
)

// Orphans lists the handlers that have markers and are not among known. Give it the handlers of all projectors of all
// services that share the database, earlier names included (projector.Projector.Handlers).
func Orphans(ctx context.Context, k provider.MarkerMaintainer, known ...string) ([]string, error) {
	handlers, err := k.MarkedHandlers(ctx)
	if err != nil {
		return nil, fmt.Errorf("orphaned markers: %w", err)
	}
	return slices.DeleteFunc(handlers, func(h string) bool { return slices.Contains(known, h) }), nil
}

// Drop deletes all markers of a handler, a thousand in a transaction, and returns how many, also with an error. Call
// it only for a handler that is gone for good: without its markers, a redelivered message takes effect again.
func Drop(ctx context.Context, k provider.MarkerMaintainer, handler string) (dropped int, err error) {
	dropped, err = untilNone(func() (int, error) { return k.DropMarkers(ctx, handler, atOnce) })
	if err != nil {
		err = fmt.Errorf("drop markers: %w", err)
	}
	return dropped, err
}

const atOnce = 1000 // rows in a transaction

// untilNone calls f until it deletes nothing, and returns how many it deleted, also with an error. A call that deletes
// fewer than its limit is not the last: other processes may have deleted some of the rows.
func untilNone(f func() (int, error)) (all int, err error) {
	for n := 1; n != 0 && err == nil; all += n {
		n, err = f()
	}
	return all, err
}
