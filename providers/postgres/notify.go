package postgres

import (
	"context"
	"sync"
	"time"
)

const (
	notifyEvery = 10 * time.Millisecond // the shortest time from the end of one notification to the next one
	notifyLimit = 5 * time.Second       // for one to be sent, the wait for a connection included
	notifyLast  = time.Second           // for the last one, which Close waits for
)

// A notification travels in a transaction of its own: PostgreSQL commits those that notify one after the other.
const notifySQL = `select pg_notify($1::text, $2::text)`

// channel is where this schema's notifications arrive. Channels belong to a database; a schema's name has 41 bytes
// at most, and a channel's 63.
func (db *Provider) channel() string { return "kinora_outbox_" + db.cfg.Schema }

// added tells relays that there is something to claim: those of this process, and with Config.Notify all others.
func (db *Provider) added() {
	db.wake.signal()
	if db.cfg.Notify {
		db.notes.ask()
	}
}

// notify sends one notification. Without a payload it says that there is something to claim. An error is
// nobody's: relays look by themselves.
func (db *Provider) notify(ctx context.Context, channel, payload string) error {
	_, err := db.pool.Exec(ctx, notifySQL, channel, payload)
	return err
}

// notifier sends what is asked for: one at a time, notifyEvery apart, so that one answers for all that were asked
// for meanwhile. Between two there is a timer and no goroutine.
type notifier struct {
	send    func(ctx context.Context)
	mu      sync.Mutex
	busy    bool // one is being sent, or was sent less than notifyEvery ago
	wanted  bool // since it began: it may have been too early for this
	closed  bool
	cancel  context.CancelFunc // of the one that is being sent
	pause   *time.Timer
	flights sync.WaitGroup
}

func (n *notifier) ask() {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.closed:
	case n.busy:
		n.wanted = true
	default:
		n.begin()
	}
}

// begin sends one; n.mu is locked.
func (n *notifier) begin() {
	ctx, cancel := context.WithTimeout(context.Background(), notifyLimit)
	n.busy, n.wanted, n.cancel = true, false, cancel
	n.flights.Go(func() {
		n.send(ctx)
		cancel()
		n.mu.Lock()
		defer n.mu.Unlock()
		if !n.closed {
			n.pause = time.AfterFunc(notifyEvery, n.next)
		}
	})
}

func (n *notifier) next() {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.closed:
	case n.wanted:
		n.begin()
	default:
		n.busy = false
	}
}

// close sends what is still wanted, so that a process which appends and ends has notified, and waits for it; for
// no longer than notifyLast.
func (n *notifier) close() {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return
	}
	n.closed = true
	if n.pause != nil {
		n.pause.Stop()
	}
	ctx, cancel := context.WithTimeout(context.Background(), notifyLast)
	defer cancel()
	if n.cancel != nil {
		defer context.AfterFunc(ctx, n.cancel)()
	}
	n.mu.Unlock()
	n.flights.Wait()
	if n.wanted { // asked for before it was closed, and nobody asks any more
		n.send(ctx)
	}
}
