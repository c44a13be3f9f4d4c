package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/errclass"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/internal/presence"
	"github.com/kinora-go/kinora/internal/pulse"
	"github.com/kinora-go/kinora/provider"
)

// ErrDrain: a relay or a runner did not finish within its Drain. Other relays take over its
// entries when its lease ends; a broker redelivers the messages of a runner.
var ErrDrain = errors.New("not drained in time")

// Relay publishes entries: it claims them, publishes them outside of any transaction, and marks
// them. Any number of relays may run on one store. Create it with NewRelay.
type Relay struct {
	store    provider.Outbox
	pub      message.Publisher
	cfg      RelayConfig
	query    provider.EntryQuery
	log      *slog.Logger
	started  atomic.Bool
	running  chan struct{}
	breakers map[string]*breaker // by topic; used only by the goroutine that publishes
	holdSoon pauses.Signal       // requests that entries be held soon
	presence *presence.Presence
	outages  atomic.Pointer[[]provider.Outage] // of the breakers, for reports
	loops    pulse.Loops
	pulse    *pulse.Loop // of the goroutine that publishes
}

// NewRelay returns a relay that publishes the entries of s through p. A nil cfg means the
// default. It checks its arguments, and starts nothing.
func NewRelay(s provider.Outbox, p message.Publisher, cfg *RelayConfig) (*Relay, error) {
	if s == nil || p == nil {
		return nil, errors.New("relay: the store or the publisher is nil: give both")
	}
	r := &Relay{
		store: s, pub: p, running: make(chan struct{}), breakers: map[string]*breaker{},
		holdSoon: pauses.NewSignal(),
	}
	r.pulse = r.loops.Add("relay")
	if cfg != nil {
		r.cfg = *cfg
	}
	if err := r.cfg.validate(); err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	r.log = r.cfg.Logger.With("relay", r.cfg.Holder)
	r.query = provider.EntryQuery{
		Topics: r.cfg.Topics, Attempts: r.cfg.Backoff.Attempts, Unordered: r.cfg.Unordered, Bytes: r.cfg.Bytes,
	}
	r.presence = presence.New(s, clock, func(err error) { r.log.Warn("relay not reported", "class", errclass.Of(err)) }, r.report)
	return r, nil
}

// Wiring says what r reads, and where it publishes. kinora.Start calls it.
func (r *Relay) Wiring() provider.RelayWiring {
	return provider.RelayWiring{Store: r.store, Publisher: r.pub, Topics: r.cfg.Topics, Logger: r.log}
}

func (r *Relay) report() provider.ServiceReport {
	report := provider.ServiceReport{Kind: "relay", Holder: r.cfg.Holder}
	if outages := r.outages.Load(); outages != nil {
		report.Outages = *outages
	}
	return report
}

// Running returns a channel that is closed once Run has checked the store and started.
func (r *Relay) Running() <-chan struct{} { return r.running }

// Late returns the relay's loop, by its name, and for how long it has not moved although it should
// have: zero if it moves. A Publish call counts from its beginning. A Run that has returned an error
// counts from its end. See kinora.Healthy.
func (r *Relay) Late() map[string]time.Duration { return r.loops.Late(clock()) }

// Run publishes entries until ctx ends. Then it claims no more, finishes the Publish call in
// flight, releases the entries that it has not started, and returns nil.
//   - ErrDrain: that took longer than RelayConfig.Drain.
//   - It returns an error at once if the store is not ready, for example not migrated, and on a
//     second call.
//
// When a message fails, an attempt is counted. The message waits for its backoff, and the later
// messages of its key wait with it. If every message of a topic fails, that is an outage and not
// the fault of the messages: the topic pauses (1s doubling to 1m) and attempts are restored, so
// an outage abandons nothing. The same holds for a message that fails alone, until other messages
// of its topic have passed after its first failure.
func (r *Relay) Run(ctx context.Context) (err error) {
	if r.started.Swap(true) {
		return errors.New("relay: Run called twice: create a new relay")
	}
	if c, ok := r.store.(provider.ReadyChecker); ok {
		err := c.ReadyFor(ctx, provider.RelayService)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("relay: %w", err)
		}
	}
	// The end of ctx must not interrupt claims and marks. hard ends only after the drain.
	hard, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	defer func() { r.loops.End(clock(), "relay", err) }()
	done := make(chan struct{})
	go func() {
		defer close(done)
		var maintenance sync.WaitGroup
		r.presence.Follow(ctx)
		maintenance.Go(func() { r.maintain(ctx) })
		maintenance.Go(func() { r.presence.Run(ctx) })
		r.loop(ctx, hard)
		maintenance.Wait()
	}()
	close(r.running)
	if !pauses.Returns(ctx, done, r.cfg.Drain) {
		return fmt.Errorf("relay: %w: Drain is %s: raise it, or find the call that does not return", ErrDrain, r.cfg.Drain)
	}
	return nil
}

const (
	retryMin   = 50 * time.Millisecond // the first pause after a store error; it doubles
	retryMax   = 5 * time.Second
	batchMax   = 1_000_000        // stores can count claims of this size, doubled depthMax times
	storeLimit = 30 * time.Second // for one statement of the store
)

// loop claims and publishes until ctx ends. The scanner decides which entries to scan, and when.
func (r *Relay) loop(ctx, hard context.Context) {
	scans := newScanner(clock(), r.cfg.Poll)
	retry := pauses.Doubling{First: retryMin, Longest: retryMax}
	// The hint is requested before the first scan that finds nothing, so that no entry is missed.
	var hint <-chan struct{}
	for ctx.Err() == nil {
		if w, ok := r.store.(provider.Waker); ok && hint == nil {
			hint = w.Enqueued()
		}
		now := clock()
		r.pulse.Within(now, r.cfg.Poll+storeLimit)
		at, pause := scans.next(now)
		if at == noScan {
			if pauses.Wait(ctx, pause, hint) {
				scans.wake()
				hint = nil
			}
			continue
		}
		found, err := r.scan(ctx, hard, scans, at, now)
		if err != nil {
			pause := retry.Next()
			r.log.Warn("entries not claimed", "class", errclass.Of(err), "again_in", pause)
			pauses.Wait(ctx, pause, nil)
			continue
		}
		retry.Reset()
		if found {
			hint = nil
		}
	}
}

// scan runs one scan, and publishes the entries that it claims. Meanwhile it may claim the next
// batch.
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
	scans.scanned(begin, clock(), n, limit)
	for b != nil {
		scans.claimed(b.last())
		var ahead func() (*batch, error)
		if now := clock(); scans.mayClaimAhead(now) {
			ahead = r.fetchAhead(ctx, hard, b, now)
		}
		b.publish()
		b, err = nil, nil
		if ahead != nil {
			b, err = ahead()
		}
	}
	if err == nil {
		scans.handled(clock(), n > 0, suspect)
	}
	return n > 0, err
}

// nextQuery returns the query and the limit of the next claim, which depend on the breakers.
func (r *Relay) nextQuery(now time.Time) (q provider.EntryQuery, limit int) {
	q, depth := r.query, 0
	q.Except = r.presence.Paused(provider.PauseTopic)
	var outages []provider.Outage
	for topic, k := range r.breakers {
		depth = max(depth, k.depth(now))
		if k.paused(now) {
			q.Except = append(q.Except, topic)
		}
		if k.down() {
			outages = append(outages, provider.Outage{Topic: topic, Class: k.class, Until: k.pausedUntil})
		}
	}
	r.outages.Store(&outages)
	slices.Sort(q.Except)
	return q, r.cfg.Batch << depth
}

// fetch claims a batch. It returns nil if there is nothing to claim.
func (r *Relay) fetch(ctx, hard context.Context, q provider.EntryQuery, limit int) (*batch, error) {
	lease := newLease(hard, r.cfg.Lease) // begins before the claim, so it ends before that in the store
	entries, err := r.claim(ctx, hard, q, limit)
	if err != nil || len(entries) == 0 {
		lease.end()
		return nil, err
	}
	return r.newBatch(ctx, hard, lease, entries), nil
}

// fetchAhead starts claiming the next batch, in a near scan, while b is published. It returns a
// function that waits for the claim. It returns nil, and claims nothing, unless b is full and has
// so many keys that not all of the next entries are behind those of b.
func (r *Relay) fetchAhead(ctx, hard context.Context, b *batch, now time.Time) func() (*batch, error) {
	q, limit := r.nextQuery(now)
	q.Near, q.After = true, nearAfter(b.last())
	full, manyKeys := len(b.items) >= limit, 2*len(b.lanes) >= len(b.items)
	if ctx.Err() != nil || len(q.Except) > 0 || limit > r.cfg.Batch || !full || !manyKeys {
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

// claim claims entries. A claim in flight at the end of ctx may finish, because its entries would
// be unknown otherwise. It is canceled after half of the drain, since it may be waiting for a
// lock.
func (r *Relay) claim(ctx, hard context.Context, q provider.EntryQuery, limit int) ([]Entry, error) {
	limited, cancel := context.WithTimeout(hard, storeLimit)
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(r.cfg.Drain/2, cancel) })()
	report := r.cfg.Observer.Claimed
	begin := clock()
	terms := claim.Terms{Holder: r.cfg.Holder, Lease: r.cfg.Lease, Limit: limit}
	entries, err := provider.ClaimEntries(limited, r.store, q, terms)
	if report != nil {
		report(entries, clock().Sub(begin), err)
	}
	return entries, err
}

// clock schedules scans and measures durations, as this process sees them.
func clock() time.Time { return time.Now() } //nolint:forbidigo // not compared with the store's times
