package postgres

import (
	"context"
	"sync"
	"time"
)

const (
	// shortest time from the end of one notification to the next one
	notifyEvery = 10 * time.Millisecond
	// for sending one, including the wait for a connection
	notifyLimit = 5 * time.Second
	notifyLast  = time.Second // for the last one, for which Close waits
)

// A notification has a separate transaction, because PostgreSQL commits notifying transactions
// one after another.
const notifySQL = `select pg_notify($1::text, $2::text)`

// channel returns the channel of this schema's notifications. Channels belong to a database. A
// schema's name has at most 41 bytes, a channel's 63.
func (db *Provider) channel() string { return "kinora_outbox_" + db.cfg.Schema }

// added tells relays that entries can be claimed: those of this process and, with Config.Notify,
// those of others.
func (db *Provider) added() {
	db.wake.signal()
	if db.cfg.Notify {
		db.notifier.request()
	}
}

// appended tells readers of the log that there are events, and relays if there are entries.
func (db *Provider) appended(entries bool) {
	db.appends.signal()
	if entries {
		db.wake.signal()
	}
	if db.cfg.Notify {
		db.notifier.request()
	}
}

// notify sends one notification. Without a payload it means that there are entries or events.
// Callers may ignore its error, because relays and readers of the log poll.
func (db *Provider) notify(ctx context.Context, channel, payload string) error {
	_, err := db.pool.Exec(ctx, notifySQL, channel, payload)
	return err
}

// notifier sends the requested notifications one at a time, with pauses of notifyEvery. Requests
// during a pause share one notification. During a pause a timer runs, and no goroutine.
type notifier struct {
	send func(ctx context.Context)
	mu   sync.Mutex
	// one is being sent, or was sent less than notifyEvery ago
	busy bool
	// requested since the current one began, which may be too early for it
	wanted  bool
	closed  bool
	cancel  context.CancelFunc // cancels the one being sent
	pause   *time.Timer
	flights sync.WaitGroup
}

func (n *notifier) request() {
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

// begin sends one. n.mu must be locked.
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

// close sends a requested notification, so that a process that appends and ends has notified. It
// waits at most notifyLast.
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
	// requested before the close; no further requests are accepted
	if n.wanted {
		n.send(ctx)
	}
}
