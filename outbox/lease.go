package outbox

import (
	"context"
	"time"
)

// lease is the time that a claim protects its entries, seen from this side: it begins before the claim or the
// renewal is asked for, so it is over no later than the store's own.
type lease struct {
	context.Context // ends with it: another relay may take over, so no call begins any more
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

// renew runs ask, and where that returns true the lease lives for its whole length from the moment before. One
// that is over stays so.
func (l *lease) renew(ask func() bool) {
	next := time.AfterFunc(l.length, l.cancel)
	if ask() && l.timer.Stop() {
		l.timer = next
		return
	}
	next.Stop()
}

// heartbeat renews the claim of everything that is not marked yet, three times in a lease, until stop is called.
func (b *batch) heartbeat() (stop func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(b.cfg.Lease / 3)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				b.lease.renew(b.renewClaims)
			case <-done:
				return
			case <-b.lease.Done():
				return
			}
		}
	}()
	return func() {
		close(done)
		<-ended
	}
}

// renewClaims renews them in the store. What another relay has taken over meanwhile is not published any more, and
// nothing behind it either: the other one may be at it still, and would be overtaken. That goes back.
func (b *batch) renewClaims() bool {
	b.mu.Lock()
	marks := make([]Mark, 0, len(b.claimed))
	for seq, token := range b.claimed {
		marks = append(marks, Mark{Seq: seq, Token: token, To: Claimed, After: b.cfg.Lease})
	}
	b.mu.Unlock()
	if len(marks) == 0 {
		return true
	}
	late, err := b.markOnce(marks)
	if err != nil {
		b.log.Warn("renew", "entries", len(marks), "class", errorClass(err))
		return false
	}
	if behind := b.leave(late); len(behind) > 0 {
		if _, err := b.markOnce(releases(behind)); err != nil { // then they go on when their lease ends
			b.log.Warn("release", "entries", len(behind), "class", errorClass(err))
		}
	}
	return true
}

// leave forgets entries that are another relay's by now, and returns what waits behind those of them that nobody
// here has begun to publish.
func (b *batch) leave(taken []int64) (behind []Entry) {
	b.mu.Lock()
	defer b.mu.Unlock()
	from := map[lane]int64{}
	for _, seq := range taken {
		if e, ok := b.waiting[seq]; ok {
			if first, ok := from[b.lane(e)]; !ok || seq < first {
				from[b.lane(e)] = seq
			}
		}
		delete(b.waiting, seq)
		delete(b.claimed, seq)
	}
	for seq, e := range b.waiting {
		if first, ok := from[b.lane(e)]; ok && seq > first {
			behind = append(behind, e)
			delete(b.waiting, seq)
			delete(b.claimed, seq)
		}
	}
	return behind
}
