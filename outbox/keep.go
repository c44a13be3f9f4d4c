package outbox

import (
	"context"
	"time"

	"github.com/kinora-go/kinora/provider"
)

const (
	holdLong   = 5 * time.Second // a backoff that has this much to go is long
	holdLimit  = 10_000          // entries held in one statement
	holdEvery  = 5 * time.Second
	pruneEvery = time.Minute
)

// keep holds entries that wait for long, and deletes entries at the end of their retention, until ctx ends.
func (r *Relay) keep(ctx context.Context) {
	k, ok := r.store.(provider.EntryMaintainer)
	if !ok {
		return
	}
	hold, prune := time.NewTicker(holdEvery), time.NewTicker(pruneEvery)
	defer hold.Stop()
	defer prune.Stop()
	for {
		var what string
		var err error
		select {
		case <-ctx.Done():
			return
		case <-r.holdSoon:
			what, err = "hold", r.hold(ctx, k)
		case <-hold.C:
			what, err = "hold", r.hold(ctx, k)
		case <-prune.C:
			what = "delete"
			var n int
			if n, err = Prune(ctx, k, r.cfg.Keep); n > 0 && r.cfg.Observer.Deleted != nil {
				r.cfg.Observer.Deleted(n)
			}
		}
		if err != nil && ctx.Err() == nil {
			r.log.Warn(what, "class", errorClass(err))
		}
	}
}

func (r *Relay) hold(ctx context.Context, k provider.EntryMaintainer) error {
	if r.cfg.Unordered {
		return nil
	}
	for {
		limited, cancel := context.WithTimeout(ctx, storeLimit)
		n, err := k.HoldEntries(limited, holdLong, holdLimit)
		cancel()
		if n > 0 && r.cfg.Observer.Held != nil {
			r.cfg.Observer.Held(n)
		}
		if err != nil || n == 0 { // a call looks at so many keys only
			return err
		}
	}
}

// Prune deletes the entries that have been published or skipped for longer than keep says, some thousand at a
// time, and returns how many. Relays do so every minute; this is for whoever wants it now, and with another
// Retention. Abandoned entries are never deleted: Skip them first.
func Prune(ctx context.Context, k provider.EntryMaintainer, keep EntryRetention) (int, error) {
	keep, err := keep.WithDefaults()
	if err != nil {
		return 0, err
	}
	total := 0
	for after := int64(0); ; {
		n, next, err := k.DeleteEntries(ctx, keep, after)
		total += n
		if err != nil || next == 0 {
			return total, err
		}
		after = next
	}
}
