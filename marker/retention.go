package marker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// DefaultHorizon is how long after its publication a message may be delivered again, unless configured otherwise: as long as
// brokers usually keep messages.
const DefaultHorizon = 7 * 24 * time.Hour

// margin is for the time between an effect and its message's publication, and for clocks that differ.
const margin = 24 * time.Hour

// ErrUnsafe: markers would be deleted while their messages may still come again.
var ErrUnsafe = errors.New("unsafe marker retention")

// Retention says how long markers are kept. A message that comes again after its marker is deleted takes effect again.
type Retention struct {
	Horizon time.Duration // how long after it was published first a broker may deliver a message again; zero means 7 days
	Window  time.Duration // how long markers are kept; zero means Horizon and a day
}

// WithDefaults fills in what is zero, and refuses a window shorter than the horizon and a day with ErrUnsafe.
func (r Retention) WithDefaults() (Retention, error) {
	if r.Horizon == 0 {
		r.Horizon = DefaultHorizon
	}
	if r.Window == 0 {
		r.Window = r.Horizon + margin
	}
	if r.Horizon < 0 || r.Window < margin || r.Window-margin < r.Horizon { // not added: it may be too long for a Duration
		return r, fmt.Errorf("%w: window %s: want at least the redelivery horizon, %s, and a day", ErrUnsafe, r.Window, r.Horizon)
	}
	return r, nil
}

// Prune deletes the markers of a projector's handlers (projector.Projector.Handlers), and its replayed and skipped
// messages, that are older than r's window, at most a thousand of each in a transaction, and returns how many, also
// with an error. A Runner does that by itself.
func Prune(ctx context.Context, p provider.Records, r Retention, projector string, handlers ...string) (pruned int, err error) {
	if r, err = r.WithDefaults(); err != nil {
		return 0, err
	}
	pruned, err = untilNone(func() (int, error) { return p.Prune(ctx, projector, handlers, r.Window, atOnce) })
	if err != nil {
		err = fmt.Errorf("prune markers of %s: %w", projector, err)
	}
	return pruned, err
}
