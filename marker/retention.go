package marker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// defaultHorizon is the default of Retention.Horizon: brokers usually keep messages that long.
const defaultHorizon = 7 * 24 * time.Hour

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
	r.Horizon = cmp.Or(r.Horizon, defaultHorizon)
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
