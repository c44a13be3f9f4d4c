package outbox

import (
	"context"
	"time"

	"github.com/kinora-go/kinora/internal/errclass"
	"github.com/kinora-go/kinora/internal/sweep"
	"github.com/kinora-go/kinora/provider"
)

const (
	holdLong   = 5 * time.Second // a backoff with at least this much left is long
	holdLimit  = 10_000          // entries per statement
	holdEvery  = 5 * time.Second
	pruneEvery = time.Minute
)

// maintain holds entries behind those that wait for long, and deletes entries at the end of their
// retention, until ctx ends.
func (r *Relay) maintain(ctx context.Context) {
	m, ok := r.store.(provider.EntryMaintainer)
	if !ok {
		return
	}
	leases, _ := r.store.(provider.Leases)
	turn := sweep.Turn{Leases: leases, Name: "prune-entries", Holder: r.cfg.Holder, Clock: clock}
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
			what, err = "entries not held", r.hold(ctx, m)
		case <-hold.C:
			what, err = "entries not held", r.hold(ctx, m)
		case <-prune.C:
			what = "old entries not deleted"
			var n int
			if n, err = deleteEntries(ctx, m, r.cfg.Keep, turn); n > 0 && r.cfg.Observer.Deleted != nil {
				r.cfg.Observer.Deleted(n)
			}
		}
		if err != nil && ctx.Err() == nil {
			r.log.Warn(what, "class", errclass.Of(err))
		}
	}
}

// hold needs no lease: a relay must hold entries soon after a failure, calls at the same time are
// safe, and a call that finds no entry writes nothing.
func (r *Relay) hold(ctx context.Context, m provider.EntryMaintainer) error {
	if r.cfg.Unordered {
		return nil
	}
	for {
		limited, cancel := context.WithTimeout(ctx, storeLimit)
		n, err := m.HoldEntries(limited, holdLong, holdLimit)
		cancel()
		if n > 0 && r.cfg.Observer.Held != nil {
			r.cfg.Observer.Held(n)
		}
		if err != nil || n == 0 { // a call reads a limited number of keys, so more may be left
			return err
		}
	}
}

// Prune deletes entries that were published or skipped longer ago than keep says, some thousand
// at a time, and returns their number, also with an error. Relays do this every minute with
// RelayConfig.Keep, one relay at a time: call Prune to delete entries now, or with another
// retention. Abandoned entries are never deleted: Skip them first. A negative duration is
// claim.ErrTerms.
func Prune(ctx context.Context, m provider.EntryMaintainer, keep EntryRetention) (int, error) {
	return deleteEntries(ctx, m, keep, sweep.Turn{})
}

func deleteEntries(ctx context.Context, m provider.EntryMaintainer, keep EntryRetention, t sweep.Turn) (total int, err error) {
	if keep, err = keep.WithDefaults(); err != nil {
		return 0, err
	}
	after := int64(0)
	err = sweep.Run(ctx, t, func(ctx context.Context) (more bool, err error) {
		n := 0
		n, after, err = m.DeleteEntries(ctx, keep, after)
		total += n
		return after != 0, err
	})
	return total, err
}
