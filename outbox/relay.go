package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/purpose"
	"github.com/kinora-go/kinora/provider"
)

// ErrDrain: a service did not finish within its Drain. Others take over its entries when its lease ends.
var ErrDrain = errors.New("not drained in time")

// Relay publishes entries: it claims them, publishes outside of any transaction, and marks them. Any number of
// relays may run.
type Relay struct {
	store    provider.Outbox
	pub      message.Publisher
	cfg      RelayConfig
	query    provider.EntryQuery
	log      *slog.Logger
	once     sync.Once
	running  chan struct{}
	breakers map[string]*breaker // by topic; of the one goroutine that publishes
	holdSoon chan struct{}       // requests that entries be held soon
}

// NewRelay returns a relay from s to p. It checks cfg and does nothing else.
func NewRelay(s provider.Outbox, p message.Publisher, cfg *RelayConfig) (*Relay, error) {
	if s == nil || p == nil {
		return nil, errors.New("relay: a store and a publisher are required")
	}
	r := &Relay{store: s, pub: p, running: make(chan struct{}), breakers: map[string]*breaker{}, holdSoon: make(chan struct{}, 1)}
	if cfg != nil {
		r.cfg = *cfg
	}
	if err := r.cfg.validate(); err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	r.log = r.cfg.Logger.With("relay", r.cfg.Holder)
	r.query = provider.EntryQuery{Topics: r.cfg.Topics, Attempts: r.cfg.Backoff.Attempts, Unordered: r.cfg.Unordered, Bytes: r.cfg.Bytes}
	return r, nil
}

// Running returns a channel that is closed once Run works.
func (r *Relay) Running() <-chan struct{} { return r.running }

// Run relays until ctx ends. Then it claims no more, finishes the Publish call in flight, releases what it did not
// start, and returns nil, or ErrDrain if that takes longer than Drain. A second call returns an error.
//
// A message that fails counts an attempt and waits for its backoff, and the later messages of its key wait with it.
// If every message of a topic fails, this is an outage and not the fault of the messages. The topic pauses (1s
// doubling to 1m) and attempts are given back, so that an outage abandons nothing. The same holds for a message
// that fails alone, until other messages of its topic have passed since its first failure.
func (r *Relay) Run(ctx context.Context) error {
	started := false
	r.once.Do(func() { started = true })
	if !started {
		return errors.New("relay: Run called twice")
	}
	if c, ok := r.store.(provider.ReadyChecker); ok {
		if err := c.Ready(purpose.With(ctx, purpose.Relay)); err != nil {
			return fmt.Errorf("relay: %w", err)
		}
	}
	// Claims and marks must not break off half-way when ctx ends. hard ends only after the drain.
	hard, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		var maintenance sync.WaitGroup
		maintenance.Go(func() { r.keep(ctx) })
		r.loop(ctx, hard)
		maintenance.Wait()
	}()
	close(r.running)
	select {
	case <-done:
		return nil
	case <-ctx.Done():
	}
	drain := time.NewTimer(r.cfg.Drain)
	defer drain.Stop()
	select {
	case <-done:
		return nil
	case <-drain.C:
		return fmt.Errorf("relay: %w: %s", ErrDrain, r.cfg.Drain)
	}
}

const (
	troubleMin = 50 * time.Millisecond // the first pause after a store error; it doubles to troubleMax
	troubleMax = 5 * time.Second
	batchMax   = 1_000_000        // every store can count a claim of this size, doubled deepest times
	storeLimit = 30 * time.Second // for one statement of the store
)

// loop claims and publishes until ctx ends. The scanner decides where and when.
func (r *Relay) loop(ctx, hard context.Context) {
	scans := newScanner(r.cfg.Clock(), r.cfg.Poll)
	trouble := troubleMin
	var hint <-chan struct{} // requested before the first scan that found nothing, so that no entry is missed
	for ctx.Err() == nil {
		if w, ok := r.store.(provider.Waker); ok && hint == nil {
			hint = w.Enqueued()
		}
		now := r.cfg.Clock()
		at, pause := scans.next(now)
		if at == noScan {
			if sleep(ctx, pause, hint) {
				scans.wake()
				hint = nil
			}
			continue
		}
		found, err := r.scan(ctx, hard, scans, at, now)
		if err != nil {
			r.log.Warn("claim", "class", errorClass(err), "again_in", trouble)
			sleep(ctx, trouble, nil)
			trouble = min(2*trouble, troubleMax)
			continue
		}
		trouble = troubleMin
		if found {
			hint = nil
		}
	}
}

// scan runs one scan, and publishes what it claims. While that is published it may claim the next batch ahead.
func (r *Relay) scan(ctx, hard context.Context, scans *scanner, at scan, begin time.Time) (found bool, err error) {
	q, limit := r.nextQuery(begin)
	q.Near = at.near()
	if !at.fromFront() {
		q.After = scans.after
	}
	b, err := r.fetch(ctx, hard, q, limit)
	n, suspect := 0, false
	if b != nil {
		n, suspect = len(b.items), b.items[0].Suspect
	}
	scans.scanned(begin, r.cfg.Clock(), n, limit)
	for b != nil {
		scans.claimed(b.last())
		var ahead func() (*batch, error)
		if now := r.cfg.Clock(); scans.mayClaimAhead(now) {
			ahead = r.fetchAhead(ctx, hard, b, now)
		}
		b.publish()
		b, err = nil, nil
		if ahead != nil {
			b, err = ahead()
		}
	}
	if err == nil {
		scans.handled(r.cfg.Clock(), n > 0, suspect)
	}
	return n > 0, err
}

// nextQuery returns the next claim's query and limit, as the breakers demand them.
func (r *Relay) nextQuery(now time.Time) (q provider.EntryQuery, limit int) {
	q, depth := r.query, 0
	for topic, k := range r.breakers {
		depth = max(depth, k.depth(now))
		if k.paused(now) {
			q.Except = append(q.Except, topic)
		}
	}
	slices.Sort(q.Except)
	return q, r.cfg.Batch << depth
}

// fetch claims a batch. It returns nil if there is nothing to claim. With an error it may return a batch of what
// was taken before the error.
func (r *Relay) fetch(ctx, hard context.Context, q provider.EntryQuery, limit int) (*batch, error) {
	lease := newLease(hard, r.cfg.Lease) // begins before the claim, so that it ends before the store's does
	entries, err := r.claim(ctx, hard, q, limit)
	if len(entries) == 0 {
		lease.end()
		return nil, err
	}
	return r.newBatch(ctx, hard, lease, entries), err
}

// fetchAhead claims the next batch in a near scan while b is published. It does so only if b is full, and has so many
// keys that the next entries are not all behind it. Otherwise it returns nil. The returned function waits for the claim.
func (r *Relay) fetchAhead(ctx, hard context.Context, b *batch, now time.Time) func() (*batch, error) {
	q, limit := r.nextQuery(now)
	q.Near, q.After = true, nearAfter(b.last())
	if ctx.Err() != nil || len(q.Except) > 0 || limit > r.cfg.Batch || len(b.items) < limit || 2*len(b.lanes) < len(b.items) {
		return nil
	}
	var next *batch
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		next, err = r.fetch(ctx, hard, q, limit)
	}()
	return func() (*batch, error) {
		<-done
		return next, err
	}
}

// claim claims entries. A claim in flight when ctx ends may finish, since otherwise its entries are unknown. One
// that takes longer than half of the drain, perhaps because it waits for a lock, is canceled.
func (r *Relay) claim(ctx, hard context.Context, q provider.EntryQuery, limit int) ([]Entry, error) {
	limited, cancel := context.WithTimeout(hard, storeLimit)
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(r.cfg.Drain/2, cancel) })()
	report := r.cfg.Observer.Claimed
	begin := r.begin(report != nil)
	entries, err := provider.ClaimEntries(limited, r.store, q, claim.Terms{Holder: r.cfg.Holder, Lease: r.cfg.Lease, Limit: limit})
	if report != nil {
		report(entries, r.since(begin), err)
	}
	return entries, err
}

// sleep waits for d, for wake, or for the end of ctx. It reports whether wake ended it.
func sleep(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-wake:
		return true
	case <-t.C:
	case <-ctx.Done():
	}
	return false
}

// errorClass names an error by its innermost type, and by its database code if it has one. It never uses the text,
// which may hold a secret. The last of several joined errors is the cause.
func errorClass(err error) string {
	if errors.Is(err, context.DeadlineExceeded) {
		return "deadline exceeded"
	}
	if state, ok := errors.AsType[interface {
		error
		SQLState() string
	}](err); ok {
		return fmt.Sprintf("%T %s", state, state.SQLState())
	}
	for {
		var next error
		switch e := err.(type) { //nolint:errorlint // this walks the tree itself
		case interface{ Unwrap() error }:
			next = e.Unwrap()
		case interface{ Unwrap() []error }:
			if all := e.Unwrap(); len(all) > 0 {
				next = all[len(all)-1]
			}
		}
		if next == nil {
			break
		}
		err = next
	}
	if coded, ok := err.(interface{ Code() int }); ok {
		return fmt.Sprintf("%T %d", err, coded.Code())
	}
	return fmt.Sprintf("%T", err)
}

// since returns the time since begin on the relay's clock.
func (r *Relay) since(begin time.Time) time.Duration { return r.cfg.Clock().Sub(begin) }

// begin returns the time on the relay's clock if the call is observed.
func (r *Relay) begin(observed bool) (begin time.Time) {
	if observed {
		begin = r.cfg.Clock()
	}
	return begin
}
