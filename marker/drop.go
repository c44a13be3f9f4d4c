package marker

import (
	"context"
	"fmt"
	"slices"

	"github.com/kinora-go/kinora/provider"
)

// Orphans returns the handlers that have markers and are not among known. Pass the handlers of
// all projectors of all services that share the database (projector.Projector.Handlers, which
// includes earlier names), and the names given to projector.Middleware.
func Orphans(ctx context.Context, k provider.MarkerMaintainer, known ...string) ([]string, error) {
	handlers, err := k.MarkedHandlers(ctx)
	if err != nil {
		return nil, fmt.Errorf("orphaned markers: %w", err)
	}
	return slices.DeleteFunc(handlers, func(h string) bool { return slices.Contains(known, h) }), nil
}

// Drop deletes all markers of a handler, 1,000 per transaction, and returns their number, also
// with an error. Call it only for a handler that was removed: without its markers, a redelivered
// message takes effect again.
func Drop(ctx context.Context, k provider.MarkerMaintainer, handler string) (dropped int, err error) {
	dropped, err = untilNone(func() (int, error) { return k.DropMarkers(ctx, handler, pageSize) })
	if err != nil {
		err = fmt.Errorf("drop markers: %w", err)
	}
	return dropped, err
}

const pageSize = 1000 // rows per transaction

// untilNone calls f until f deletes nothing, and returns the number of deleted rows, also with an
// error. If f deletes fewer rows than its limit, more may be left: other processes may be
// deleting rows too.
func untilNone(f func() (int, error)) (all int, err error) {
	for n := 1; n != 0 && err == nil; all += n {
		n, err = f()
	}
	return all, err
}
