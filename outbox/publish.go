package outbox

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/internal/errclass"
	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/provider"
)

// lane identifies entries that keep their order.
type lane struct{ topic, key string }

type batch struct {
	*Relay
	items []item
	lanes []run
	ctx   context.Context // ends when the relay stops: no more calls begin
	hard  context.Context // ends after the drain
	lease *lease
	round int // of calls

	mu sync.Mutex // protects the states of items

	endRenewal func()
	unhook     func() bool   // cancels the release at the end of ctx
	released   chan struct{} // closed after the entries that wait at the end of ctx are released
}

type item struct {
	*Entry
	run   *run
	state state
}

type state byte

const (
	waiting state = iota // claimed
	started              // about to be published, or to be released
	done                 // marked, or taken over by another relay
)

// run has the entries of one lane in one batch.
type run struct {
	lane    lane
	breaker *breaker // of its topic
	stopped bool     // a message failed: the rest is released
	round   int      // the last round with a message of this run
	rank    float64  // see freshFirst
}

// newBatch returns a batch of entries, and renews their claims until they are published. When the
// relay stops, the batch releases waiting entries at once, since the call in flight may take
// long.
func (r *Relay) newBatch(ctx, hard context.Context, l *lease, entries []Entry) *batch {
	b := &batch{
		Relay: r, items: make([]item, len(entries)), lanes: make([]run, 0, len(entries)),
		ctx: ctx, hard: hard, lease: l, released: make(chan struct{}),
	}
	runs := make(map[lane]*run, len(entries))
	for i := range entries {
		e := &entries[i]
		at := lane{e.Topic, e.Key}
		if b.cfg.Unordered {
			at.key = e.ID
		}
		if runs[at] == nil {
			b.lanes = append(b.lanes, run{lane: at})
			runs[at] = &b.lanes[len(b.lanes)-1]
		}
		b.items[i] = item{Entry: e, run: runs[at]}
	}
	b.endRenewal = b.heartbeat()
	b.unhook = context.AfterFunc(ctx, func() {
		defer close(b.released)
		b.release(b.take(b.all()))
	})
	return b
}

func (b *batch) all() []*item {
	all := make([]*item, len(b.items))
	for i := range b.items {
		all[i] = &b.items[i]
	}
	return all
}

func (b *batch) find(seq int64) *item {
	i, ok := slices.BinarySearchFunc(b.items, seq, func(it item, seq int64) int { return cmp.Compare(it.Seq, seq) })
	if !ok {
		return nil
	}
	return &b.items[i]
}

// last returns the greatest Seq of the batch.
func (b *batch) last() int64 { return b.items[len(b.items)-1].Seq }

// publish publishes the batch, each lane in order, and stops a lane at its first failure. It
// releases the entries that it does not try, and restores their attempts.
func (b *batch) publish() {
	defer b.lease.end()
	defer b.endRenewal()
	for i := range b.lanes {
		run := &b.lanes[i]
		if run.breaker = b.breakers[run.lane.topic]; run.breaker == nil {
			run.breaker = newBreaker()
			b.breakers[run.lane.topic] = run.breaker
		}
	}
	items := b.abandonMalformed(b.releasePaused(b.all()))
	for len(items) > 0 && b.mayCall() {
		calls, later, unsent := b.next(items)
		b.release(b.take(unsent))
		for _, call := range calls {
			if call = b.take(call); len(call) > 0 && b.mayCall() {
				b.mark(b.send(call))
			} else {
				b.release(call)
			}
		}
		items = later
	}
	b.release(b.take(items))
	b.mark(b.failureMarks())
	if !b.unhook() {
		<-b.released
	}
}

// releasePaused releases the items of topics that were paused after the claim, and returns the
// others.
func (b *batch) releasePaused(items []*item) []*item {
	now := clock()
	paused := func(it *item) bool { return it.run.breaker.paused(now) }
	b.release(b.take(slices.DeleteFunc(slices.Clone(items), func(it *item) bool { return !paused(it) })))
	return slices.DeleteFunc(items, paused)
}

// abandonMalformed abandons malformed items, releases the items behind them, and returns the
// others.
func (b *batch) abandonMalformed(items []*item) []*item {
	if !slices.ContainsFunc(items, func(it *item) bool { return it.Malformed }) {
		return items
	}
	var others, behind, malformed []*item
	stopped := map[*run]bool{}
	for _, it := range items {
		switch {
		case stopped[it.run]:
			behind = append(behind, it)
		case it.Malformed:
			stopped[it.run] = true
			malformed = append(malformed, it)
		default:
			others = append(others, it)
		}
	}
	var marks []Mark
	for _, it := range b.take(malformed) {
		m := Mark{Seq: it.Seq, Token: it.Token, To: Abandoned, Error: provider.LastErrorMalformed}
		b.logFailure(*it.Entry, m, ErrMalformed)
		marks = append(marks, m)
	}
	b.mark(marks)
	b.release(b.take(behind))
	return others
}

// take starts the waiting ones of items, and returns them. It reuses the slice.
func (b *batch) take(items []*item) []*item {
	b.mu.Lock()
	defer b.mu.Unlock()
	mine := items[:0]
	for _, it := range items {
		if it.state == waiting {
			it.state = started
			mine = append(mine, it)
		}
	}
	return mine
}

func (b *batch) mayCall() bool { return b.ctx.Err() == nil && b.lease.Err() == nil }

// next splits items. calls can be published now, one Publish call per topic. Unless the publisher
// keeps the order, a call has at most one entry per key. later items follow in another round.
// unsent items are behind a failure.
func (b *batch) next(items []*item) (calls [][]*item, later, unsent []*item) {
	b.round++
	callOf := map[*breaker]int{}
	for _, it := range items {
		k := it.run.breaker
		i, ok := callOf[k]
		switch {
		case it.run.stopped || k.givesUp():
			unsent = append(unsent, it)
		case it.run.round == b.round && !b.cfg.OrderedPublisher, ok && len(calls[i]) >= b.cfg.Batch && !k.down():
			later = append(later, it)
		default:
			if !ok {
				i = len(calls)
				callOf[k] = i
				calls = append(calls, nil)
			}
			it.run.round = b.round
			calls[i] = append(calls[i], it)
		}
	}
	return calls, later, unsent
}

// send publishes items of one topic. It returns the marks of the items that passed, and of those
// that it did not try. A failed call may have published some of its entries. So they are
// published again one by one, with the same ids, to find the one that fails. If the topic was
// down, they are published one by one from the beginning.
func (b *batch) send(call []*item) (marks []Mark) {
	k := call[0].run.breaker
	if len(call) > 1 && !k.down() && b.publishCall(call) == nil {
		k.pass(call)
		return marked(call, Published, b.cfg.Keep.Published == 0)
	}
	freshFirst(call, k.down())
	for i, it := range call {
		one := call[i : i+1]
		if it.run.stopped || !b.mayCall() || k.givesUp() {
			marks = append(marks, releases(one)...)
			continue
		}
		if err := b.publishCall(one); err != nil {
			it.run.stopped = true
			k.fail(*it.Entry, it.run.lane, err)
			continue
		}
		k.pass(one)
		marks = append(marks, marked(one, Published, b.cfg.Keep.Published == 0)...)
	}
	return marks
}

// freshFirst moves keys with a message that has failed before behind the others. If mixed is set,
// it shuffles the keys in both groups: then each try is of another key, and many failing messages
// do not hide good ones. The order in a key stays the same.
func freshFirst(call []*item, mixed bool) {
	for _, it := range call {
		it.run.rank = 0
		if mixed {
			it.run.rank = rand.Float64()
		}
	}
	for _, it := range call {
		if it.LastError != "" && it.run.rank < 1 {
			it.run.rank++
		}
	}
	slices.SortStableFunc(call, func(x, y *item) int { return cmp.Compare(x.run.rank, y.run.rank) })
}

// marked returns marks of items.
func marked(items []*item, to Status, drop bool) []Mark {
	marks := make([]Mark, len(items))
	for i, it := range items {
		marks[i] = Mark{Seq: it.Seq, Token: it.Token, To: to, Drop: drop}
	}
	return marks
}

func (b *batch) publishCall(call []*item) error {
	messages := make([]*message.Message, len(call))
	for i, it := range call {
		messages[i] = ToWatermill(*it.Entry)
	}
	report, ended := b.cfg.Observer.Published, func(error) {}
	begin := clock()
	if b.cfg.Observer.Publishing != nil {
		if end := b.cfg.Observer.Publishing(call[0].Topic, messages); end != nil {
			ended = end
		}
	}
	b.pulse.Within(clock(), 0)
	crash.Point("publish: before")
	err := b.pub.Publish(call[0].Topic, messages...)
	crash.Point("publish: after")
	b.pulse.Within(clock(), storeLimit)
	ended(err)
	if report != nil {
		report(call[0].Topic, len(call), clock().Sub(begin), err)
	}
	return err
}

func (b *batch) failureMarks() []Mark {
	var marks []Mark
	for topic, k := range b.breakers {
		v := k.end(clock())
		if v.outage > 0 {
			marks = append(marks, b.outageMarks(topic, v)...)
			continue
		}
		for _, f := range v.failed {
			marks = append(marks, b.failureMark(f))
		}
	}
	return marks
}

// outageMarks returns the marks of entries that failed in an outage: their attempts are restored.
// They wait for two pauses, so that the next try is of other keys.
func (b *batch) outageMarks(topic string, v verdict) []Mark {
	if v.paused && b.cfg.Observer.Paused != nil {
		b.cfg.Observer.Paused(topic, v.outage)
	}
	last := v.failed[len(v.failed)-1]
	attrs := []any{"topic", topic, "tried", len(v.failed), "class", errclass.Of(last.err), "for", v.outage}
	if b.cfg.LogErrors {
		attrs = append(attrs, "err", last.err)
	}
	b.log.Warn("topic paused: every publish fails", attrs...)
	marks := make([]Mark, len(v.failed))
	for i, f := range v.failed {
		marks[i] = Mark{Seq: f.Seq, Token: f.Token, To: Pending, After: 2 * v.outage, Error: errclass.Of(f.err)}
	}
	return marks
}

// failureMark returns the mark of an entry that is itself at fault: Failed, or Abandoned after
// the last attempt.
func (b *batch) failureMark(f failure) Mark {
	m := Mark{Seq: f.Seq, Token: f.Token, To: Failed, Error: errclass.Of(f.err)}
	if b.cfg.Backoff.Exhausted(f.Attempts) {
		m.To = Abandoned
	} else {
		// It cannot fail: the claim counted an attempt, and NewRelay checked the schedule.
		m.After, _ = b.cfg.Backoff.Delay(f.Attempts)
	}
	b.logFailure(f.Entry, m, f.err)
	return m
}

func (b *batch) logFailure(e Entry, m Mark, err error) {
	attrs := []any{
		"to", string(m.To), "topic", e.Topic, "message_id", e.ID, "attempt", e.Attempts, "class", m.Error,
	}
	if m.To == Failed {
		attrs = append(attrs, "again_in", m.After)
	}
	if b.cfg.LogErrors {
		attrs = append(attrs, "err", err)
	}
	b.log.Warn("entry not published", attrs...)
}

func releases(items []*item) []Mark { return marked(items, Pending, false) }

func (b *batch) release(items []*item) { b.mark(releases(items)) }

// mark stores marks. After store errors it tries again until the lease ends. A mark that is
// stored after the lease still counts, unless another relay has taken the entry over.
func (b *batch) mark(marks []Mark) {
	if len(marks) == 0 {
		return
	}
	for retry := (pauses.Doubling{First: retryMin, Longest: retryMax}); ; {
		b.pulse.Within(clock(), storeLimit)
		late, err := b.markOnce(marks)
		if err == nil {
			b.forget(marks)
			blocks := func(m Mark) bool { return m.To == Abandoned || m.To == Failed && m.After >= holdLong }
			if slices.ContainsFunc(marks, blocks) { // not before the marks are stored: there is nothing to hold
				b.holdSoon.Send()
			}
			if len(late) > 0 {
				b.log.Warn("marked too late: another relay has taken over", "entries", len(late))
			}
			return
		}
		pause := retry.Next()
		b.log.Warn("marks not stored", "entries", len(marks), "class", errclass.Of(err), "again_in", pause)
		if pauses.Wait(b.lease, pause, nil); b.lease.Err() != nil {
			return
		}
	}
}

// forget stops renewing the claims of marked entries.
func (b *batch) forget(marks []Mark) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, m := range marks {
		if it := b.find(m.Seq); it != nil {
			it.state = done
		}
	}
}

func (b *batch) markOnce(marks []Mark) ([]int64, error) {
	ctx, cancel := context.WithTimeout(b.hard, storeLimit)
	defer cancel()
	report := b.cfg.Observer.Marked
	begin := clock()
	late, err := b.store.MarkEntries(ctx, marks)
	if report != nil {
		report(marks, len(late), clock().Sub(begin), err)
	}
	return late, err
}
