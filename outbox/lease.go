package outbox

import (
	"context"
	"sync"
	"time"

	"github.com/kinora-go/kinora/internal/errclass"
)

// lease is how long a claim protects its entries, as the relay measures it. It begins before the
// claim or the renewal is sent, so it ends before the lease in the store does.
type lease struct {
	context.Context // ends with the lease: another relay may take over, so no more calls begin
	cancel          context.CancelFunc
	timer           *time.Timer
	length          time.Duration
}

func newLease(ctx context.Context, length time.Duration) *lease {
	l := &lease{length: length}
	l.Context, l.cancel = context.WithCancel(ctx)
	l.timer = time.AfterFunc(length, l.cancel)
	return l
}

func (l *lease) end() {
	l.timer.Stop()
	l.cancel()
}

// renew calls ask. If ask returns true, the lease lasts for its full length from the moment
// before the call. A lease that has ended is not renewed.
func (l *lease) renew(ask func() bool) {
	next := time.AfterFunc(l.length, l.cancel)
	if ask() && l.timer.Stop() {
		l.timer = next
		return
	}
	next.Stop()
}

// heartbeat renews the claims of entries that are not marked yet, three times per lease, until
// stop is called.
func (b *batch) heartbeat() (stop func()) {
	ctx, cancel := context.WithCancel(b.lease)
	var renewing sync.WaitGroup
	renewing.Go(func() {
		tick := time.NewTicker(b.cfg.Lease / 3)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				b.lease.renew(b.renewClaims)
			case <-ctx.Done():
				return
			}
		}
	})
	return func() {
		cancel()
		renewing.Wait()
	}
}

// renewClaims renews the claims in the store. It drops entries that another relay has taken over,
// and releases the ones behind them: the other relay may still be publishing, and they would
// overtake its messages.
func (b *batch) renewClaims() bool {
	b.mu.Lock()
	var marks []Mark
	for _, it := range b.items {
		if it.state != done {
			marks = append(marks, Mark{Seq: it.Seq, Token: it.Token, To: Claimed, After: b.cfg.Lease})
		}
	}
	b.mu.Unlock()
	if len(marks) == 0 {
		return true
	}
	late, err := b.markOnce(marks)
	if err != nil {
		b.log.Warn("claims not renewed", "entries", len(marks), "class", errclass.Of(err))
		return false
	}
	if behind := b.drop(late); len(behind) > 0 {
		// If this fails, other relays take over when the lease ends.
		if _, err := b.markOnce(releases(behind)); err != nil {
			b.log.Warn("entries not released", "entries", len(behind), "class", errclass.Of(err))
		}
	}
	return true
}

// drop removes entries that another relay has taken over. It returns the items behind the removed
// ones that this relay had not started.
func (b *batch) drop(taken []int64) (behind []*item) {
	b.mu.Lock()
	defer b.mu.Unlock()
	from := map[*run]int64{}
	for _, seq := range taken {
		it := b.find(seq)
		if it == nil {
			continue
		}
		if it.state == waiting {
			if first, ok := from[it.run]; !ok || seq < first {
				from[it.run] = seq
			}
		}
		it.state = done
	}
	for i := range b.items {
		it := &b.items[i]
		if first, ok := from[it.run]; ok && it.state == waiting && it.Seq > first {
			behind = append(behind, it)
			it.state = done
		}
	}
	return behind
}
