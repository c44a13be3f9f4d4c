// Package marker maintains markers, the rows by which each message takes effect once: it deletes
// old ones, and those of handlers that are gone.
//
// A marker records that a handler has applied a message. It is unique on (handler, generation,
// message id), and commits in the same transaction as the handler's writes. If the message is
// delivered again, at the same moment or after a crash, the marker is found and the message is
// skipped. Projectors write markers. The generation identifies a build of the read model; the
// store adds it.
package marker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// margin covers the time between an effect and a later publication of its message, and clocks
// that differ.
const margin = 24 * time.Hour

// ErrUnsafe: a broker may still redeliver messages when their markers are deleted.
var ErrUnsafe = errors.New("unsafe marker retention")

// Retention is how long markers are kept. A message that is redelivered after its marker was
// deleted takes effect again.
type Retention struct {
	// Horizon is how long after its first publication a broker may redeliver a message. Zero
	// means 7 days.
	Horizon time.Duration
	// Window is how long markers are kept. Zero means Horizon and a day.
	Window time.Duration
}

// WithDefaults returns r with its zero fields filled in. A negative Horizon, and a Window shorter
// than Horizon and a day, are ErrUnsafe.
func (r Retention) WithDefaults() (Retention, error) {
	r.Horizon = cmp.Or(r.Horizon, 7*24*time.Hour) // brokers usually keep messages that long
	if r.Horizon < 0 {
		return r, fmt.Errorf("%w: horizon %s: must not be negative", ErrUnsafe, r.Horizon)
	}
	if r.Window == 0 {
		r.Window = r.Horizon + margin
	}
	// The sum of Horizon and margin may be too long for a Duration.
	if r.Window < margin || r.Window-margin < r.Horizon {
		return r, fmt.Errorf("%w: window %s: set it to at least the horizon (%s) and a day",
			ErrUnsafe, r.Window, r.Horizon)
	}
	return r, nil
}

// Prune deletes the markers of a projector's handlers (projector.Projector.Handlers), and its
// replayed and skipped messages, once they are older than r.Window. It deletes at most 1,000 of
// each per transaction, and returns their number, also with an error. A projector.Runner does
// this by itself.
func Prune(
	ctx context.Context, p provider.Records, r Retention, projector string, handlers ...string,
) (pruned int, err error) {
	if r, err = r.WithDefaults(); err != nil {
		return 0, err
	}
	pruned, err = untilNone(func() (int, error) { return p.Prune(ctx, projector, handlers, r.Window, pageSize) })
	if err != nil {
		err = fmt.Errorf("prune markers of %s: %w", projector, err)
	}
	return pruned, err
}

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
