package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
)

// RelayConfig tells how a Relay works; the zero value is the default.
type RelayConfig struct {
	Topics           []string         // only these; nil: all; an empty list is refused
	Batch            int              // entries in one claim, at most 1,000,000; zero means 50
	Bytes            int              // of payload in one claim, unless one entry has more; zero means 8 MiB
	Lease            time.Duration    // how long a claim protects its entries, and how late those of a relay that died go on; renewed while a batch takes longer; zero means 5m
	Backoff          claim.Backoff    // after a failed publication; zero means 30s doubling to 1h, 8 attempts
	OrderedPublisher bool             // one Publish call keeps the order of its messages; else at most one message per key a call
	Unordered        bool             // no message waits for another: for consumers that need no order; not beside a relay that keeps it
	Keep             Retention        // how long entries are kept that are done with
	Poll             time.Duration    // the longest pause between two looks while idle, and between two everywhere, unless these take long; zero means 1s
	Drain            time.Duration    // how long Run may go on after its ctx ends; zero means 10s
	Holder           string           // who claims, for people to read; empty: host and process
	Logger           *slog.Logger     // nil: slog.Default()
	LogErrors        bool             // also log the texts of publish errors, which may hold what users wrote
	Observer         Observer         // is told what the relay does
	Clock            func() time.Time // paces the looks, and measures how long calls take; nil: time.Now
}

// ErrDrain: a service did not finish in its Drain. What it held goes on with others when its lease ends.
var ErrDrain = errors.New("not drained in time")

// Relay publishes entries: it claims, publishes outside of any transaction, marks. Run any number of them.
type Relay struct {
	store   Store
	pub     message.Publisher
	cfg     RelayConfig
	query   Query
	log     *slog.Logger
	once    sync.Once
	running chan struct{}
	topics  map[string]*topic // of the one goroutine that publishes
	upkeep  chan struct{}     // asks for a look at what should be held
}

// NewRelay makes a relay from s to p. It checks cfg and does nothing else yet.
func NewRelay(s Store, p message.Publisher, cfg *RelayConfig) (*Relay, error) {
	if s == nil || p == nil {
		return nil, errors.New("relay: wants a store and a publisher")
	}
	r := &Relay{store: s, pub: p, running: make(chan struct{}), topics: map[string]*topic{}, upkeep: make(chan struct{}, 1)}
	if cfg != nil {
		r.cfg = *cfg
	}
	if err := r.cfg.validate(); err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	r.log = r.cfg.Logger.With("relay", r.cfg.Holder)
	r.query = Query{Topics: r.cfg.Topics, Attempts: r.cfg.Backoff.Attempts, Unordered: r.cfg.Unordered, Bytes: r.cfg.Bytes}
	return r, nil
}

func (c *RelayConfig) validate() error {
	terms, err := claim.Terms{Lease: c.Lease, Limit: c.Batch}.WithDefaults()
	if err != nil {
		return err
	}
	c.Lease, c.Batch = terms.Lease, terms.Limit
	if c.Batch > batchMax {
		return fmt.Errorf("%w: a batch of %d: want at most %d", claim.ErrTerms, c.Batch, batchMax)
	}
	if c.Topics != nil && len(c.Topics) == 0 {
		return errors.New("an empty list of topics: want nil for all, or some")
	}
	for i, topic := range c.Topics {
		if err := eventstore.CheckText(fmt.Sprintf("topics[%d]", i), topic, eventstore.MaxIDBytes); err != nil {
			return err
		}
	}
	if c.Backoff, err = c.Backoff.WithDefaults(); err != nil {
		return err
	}
	if c.Keep, err = c.Keep.WithDefaults(); err != nil {
		return err
	}
	if c.Bytes == 0 {
		c.Bytes = 8 << 20
	}
	if c.Poll == 0 {
		c.Poll = time.Second
	}
	if c.Drain == 0 {
		c.Drain = 10 * time.Second
	}
	if c.Poll < 0 || c.Drain < 0 || c.Bytes < 0 {
		return fmt.Errorf("poll %s, drain %s, %d bytes: want nothing negative", c.Poll, c.Drain, c.Bytes)
	}
	if c.Holder == "" {
		host, _ := os.Hostname()
		c.Holder = fmt.Sprintf("%s/%d", host, os.Getpid())
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Clock == nil {
		c.Clock = time.Now //nolint:forbidigo // durations of calls, as this process sees them
	}
	return nil
}

// Running is closed once Run works.
func (r *Relay) Running() <-chan struct{} { return r.running }

// Run relays until ctx ends; then it claims no more, finishes the Publish call in flight, releases what it did
// not start, and returns nil; or ErrDrain if that takes longer than Drain. It runs once.
//
// A message that fails counts an attempt and waits for its backoff, and its key with it. Where all that is tried
// of a topic fails, and nothing of it has got through since, that is no fault of the messages: the topic pauses
// (1s doubling to 1m), and attempts are given back, so that an outage abandons nothing. So it is with a message that
// is alone, until others of its topic have got through since it failed.
func (r *Relay) Run(ctx context.Context) error {
	started := false
	r.once.Do(func() { started = true })
	if !started {
		return errors.New("relay: it runs once")
	}
	if c, ok := r.store.(ReadyChecker); ok {
		if err := c.Ready(ctx); err != nil {
			return fmt.Errorf("relay: %w", err)
		}
	}
	// Claims and marks must not break off half-way when ctx ends: hard ends only when the drain is over.
	hard, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		var upkeep sync.WaitGroup
		upkeep.Go(func() { r.keep(ctx) })
		r.loop(ctx, hard)
		upkeep.Wait()
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
	pauseMin   = 5 * time.Millisecond  // the first pause of an idle relay; it doubles up to Poll
	troubleMin = 50 * time.Millisecond // the first pause after a store error; it doubles to troubleMax
	troubleMax = 5 * time.Second

	lookEvery    = 100 * time.Millisecond // looks at the front while there is something nearby
	turnMax      = time.Second            // of suspects in a row
	restTimes    = 10                     // the rest after a look past what waits, in times of what it took, where it found nothing
	restMax      = 10 * time.Second
	nearbyBefore = 1000             // Seqs
	batchMax     = 1_000_000        // so that one that is deepest is a number for every store
	storeLimit   = 30 * time.Second // for one statement of the store
)

// look is where a relay looks for something to claim, from what costs least.
type look int

const (
	lookNearby look = iota // behind what it claimed last, at the first eligible entries
	lookFront              // at the first eligible entries of all
	lookBehind             // behind what it claimed last, past whatever waits
	lookAll                // everywhere, past whatever waits
	lookNowhere
)

// loop looks for what it can claim: nearby; where there is nothing, further; and now and then everywhere anyway. A look
// past what waits can be long, where that is much, or dead and not vacuumed. One that finds little only keeps others from
// their work: the longer it took, the longer there is none. Entries whose claim vanished come one by one: those at the
// front have about as much time in a row as others had before them, and these then have theirs.
func (r *Relay) loop(ctx, hard context.Context) {
	pause, trouble := pauseMin, troubleMin
	var after int64                     // where nearby begins; 0: not known yet
	var rest [lookNowhere + 1]time.Time // no such look before
	now := r.cfg.Clock()
	front, all := now, now.Add(r.cfg.Poll) // when to look there by all means
	at, turn := lookFront, now             // until when suspects come in a row
	var wake <-chan struct{}               // since before the first look that found nothing, so that nothing falls between
	for ctx.Err() == nil {
		if w, ok := r.store.(Waker); ok && wake == nil {
			wake = w.Enqueued()
		}
		now = r.cfg.Clock()
		switch {
		case !now.Before(all) && !now.Before(rest[lookAll]):
			at = lookAll
		case at < lookFront && (after == 0 || !now.Before(front)):
			at, turn = lookFront, now.Add(min(now.Sub(front)+lookEvery, turnMax))
		case at == lookBehind && after == 0:
			at = lookAll
		}
		if resting := now.Before(rest[at]); at == lookNowhere || resting {
			next, d := lookAll, min(pause, r.cfg.Poll)
			switch left := rest[at].Sub(now); {
			case resting && left <= d:
				next, d = at, left
			case resting:
				next = lookNearby
			}
			if pause > r.cfg.Poll/2 { // not doubled first: it may be as long as a Duration can be
				pause = r.cfg.Poll
			} else {
				pause *= 2
			}
			if sleep(ctx, d, wake) {
				next, wake = lookNearby, nil
			}
			at = next
			continue
		}
		q, limit := r.next()
		q.Near = at <= lookFront
		if at == lookNearby || at == lookBehind {
			q.After = after
		}
		b, err := r.fetch(ctx, hard, q, limit)
		found, alone, end := 0, false, r.cfg.Clock()
		if b != nil {
			found, alone = len(b.entries), b.entries[0].Suspect
		}
		switch pay := min(restTimes*end.Sub(now), restMax); at {
		case lookBehind: // where there is much it goes on
			rest[at] = end.Add(pay * time.Duration(max(0, limit-found)) / time.Duration(limit))
		case lookAll: // what it finds is nearby from then on
			rest[at] = end.Add(pay)
		}
		if q.After == 0 {
			front = end.Add(lookEvery)
		}
		if at == lookAll {
			all = end.Add(r.cfg.Poll)
		}
		for b != nil {
			after = max(after, b.behind())
			ahead := func() (*batch, error) { return nil, nil }
			if now = r.cfg.Clock(); now.Before(front) && (now.Before(all) || now.Before(rest[lookAll])) {
				ahead = r.fetchAhead(ctx, hard, b)
			}
			b.publish()
			b, err = ahead()
		}
		switch {
		case err != nil:
			r.log.Warn("claim", "class", errorClass(err), "again_in", trouble)
			sleep(ctx, trouble, nil)
			trouble = min(2*trouble, troubleMax)
			continue
		case found > 0:
			pause, wake = pauseMin, nil
			if now = r.cfg.Clock(); alone && at == lookFront {
				if now.Before(turn) {
					break
				}
				front = now.Add(lookEvery)
			}
			at = lookNearby
		default:
			at++
		}
		trouble = troubleMin
	}
}

// behind is where to look nearby after b. It is a little before its end, as what was added before may be committed
// after it.
func (b *batch) behind() int64 { return max(1, b.entries[len(b.entries)-1].Seq-nearbyBefore) }

// next is what to claim next.
func (r *Relay) next() (q Query, limit int) {
	q = r.query
	q.Except = r.pausing()
	return q, r.depth()
}

// fetch claims a batch, nil where there is nothing to claim. With an error there may be a batch: of what was taken
// before it.
func (r *Relay) fetch(ctx, hard context.Context, q Query, limit int) (*batch, error) {
	lease := newLease(hard, r.cfg.Lease) // before the claim, so that it ends before the store's does
	entries, err := r.claim(ctx, hard, q, limit)
	if len(entries) == 0 {
		lease.end()
		return nil, err
	}
	return r.newBatch(ctx, hard, lease, entries), err
}

// fetchAhead claims the next batch nearby while b is published, where there is likely one: b is as large as may be,
// and of so many keys that the next entries are not all behind it. The function that it returns waits for that.
func (r *Relay) fetchAhead(ctx, hard context.Context, b *batch) func() (*batch, error) {
	q, limit := r.next()
	q.Near, q.After = true, b.behind()
	if ctx.Err() != nil || len(q.Except) > 0 || limit > r.cfg.Batch || len(b.entries) < limit || 2*b.lanes() < len(b.entries) {
		return func() (*batch, error) { return nil, nil }
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

// claim claims. A claim that is on its way when ctx ends may finish, since nobody would know what it took; one
// that takes longer than half of the drain, waiting for a lock perhaps, is broken off.
func (r *Relay) claim(ctx, hard context.Context, q Query, most int) ([]Entry, error) {
	limit, cancel := context.WithTimeout(hard, storeLimit)
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(r.cfg.Drain/2, cancel) })()
	told := r.cfg.Observer.Claimed
	begin := r.begin(told != nil)
	entries, err := Claim(limit, r.store, q, claim.Terms{Holder: r.cfg.Holder, Lease: r.cfg.Lease, Limit: most})
	if told != nil {
		told(entries, r.since(begin), err)
	}
	return entries, err
}

// sleep waits for d, for wake, or for the end of ctx. It tells whether it was woken.
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

// errorClass names an error by its innermost type, and a database's code where it has one; never by its text,
// which may hold a secret. Of several errors joined, the last one is the cause.
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
		switch e := err.(type) { //nolint:errorlint // it is what walks the tree
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
