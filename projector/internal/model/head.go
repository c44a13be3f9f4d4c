package model

import (
	"context"
	"sync"
	"time"

	"github.com/kinora-go/kinora/eventstore"
)

// headAge is how old the head of the log may be that readers without work compare with.
const headAge = 100 * time.Millisecond

// Head is the position of the last visible event, for all readers of a runner that have no work: then a
// hundred projectors ask no more than one.
type Head struct {
	mu       sync.Mutex
	position int64
	read     time.Time
}

// Position returns the position. It is at most headAge old.
func (o *Head) Position(ctx context.Context, h *Host) (int64, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if now := h.Clock(); o.read.IsZero() || now.Sub(o.read) >= headAge {
		limited, cancel := h.Limited(ctx)
		defer cancel()
		position, err := h.Log.LogPosition(limited, eventstore.From{Now: true})
		if err != nil {
			return 0, err
		}
		o.position, o.read = position, now
	}
	return o.position, nil
}
