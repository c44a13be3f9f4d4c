package outbox

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/crash"
)

// lane is what keeps its order.
type lane struct{ topic, key string }

// lane is what e keeps its order in: its key, or nothing but itself.
func (b *batch) lane(e Entry) lane {
	if b.cfg.Unordered {
		return lane{e.Topic, e.ID}
	}
	return lane{e.Topic, e.Key}
}

// batch is one claim on its way out.
type batch struct {
	*Relay
	entries []Entry
	ctx     context.Context // ends when the relay is told to stop: no call begins any more
	hard    context.Context // ends when the drain is over
	lease   *lease
	stopped map[lane]bool // keys whose run has met a failure
	trials  map[string]*trial

	mu      sync.Mutex
	waiting map[int64]Entry       // claimed, and not begun
	claimed map[int64]claim.Token // not marked yet

	rest     func()        // ends the renewal
	unhook   func() bool   // from the end of ctx
	released chan struct{} // closed when what was waiting at the end of ctx is released
}

// newBatch renews what was claimed until it is published. When the relay is told to stop it releases at once what
// is waiting, since the call in flight may take long.
func (r *Relay) newBatch(ctx, hard context.Context, l *lease, entries []Entry) *batch {
	b := &batch{
		Relay: r, entries: entries, ctx: ctx, hard: hard, lease: l, stopped: map[lane]bool{}, trials: map[string]*trial{},
		waiting: make(map[int64]Entry, len(entries)), claimed: make(map[int64]claim.Token, len(entries)), released: make(chan struct{}),
	}
	for _, e := range entries {
		b.waiting[e.Seq], b.claimed[e.Seq] = e, e.Token
	}
	b.rest = b.heartbeat()
	b.unhook = context.AfterFunc(ctx, func() {
		defer close(b.released)
		b.release(b.take(entries))
	})
	return b
}

// lanes is how many keys the batch has entries of.
func (b *batch) lanes() int {
	all := make(map[lane]bool, len(b.entries))
	for _, e := range b.entries {
		all[b.lane(e)] = true
	}
	return len(all)
}

// publish sends what was claimed, each key's run in order, and stops a key at its first failure. What it does
// not come to is released, with its attempt given back.
func (b *batch) publish() {
	defer b.lease.end()
	defer b.rest()
	entries := b.leaveOutPaused()
	for len(entries) > 0 && b.goesOn() {
		var calls [][]Entry
		var unsent []Entry
		calls, entries, unsent = b.next(entries)
		b.release(b.take(unsent))
		for _, call := range calls {
			if call = b.take(call); len(call) > 0 && b.goesOn() {
				b.mark(b.send(call))
			} else {
				b.release(call)
			}
		}
	}
	b.release(b.take(entries))
	b.mark(b.judge())
	if !b.unhook() {
		<-b.released
	}
}

// leaveOutPaused releases entries of topics that have begun to pause since the claim.
func (b *batch) leaveOutPaused() (entries []Entry) {
	paused := b.pausing()
	if len(paused) == 0 {
		return b.entries
	}
	var not []Entry
	for _, e := range b.entries {
		if slices.Contains(paused, e.Topic) {
			not = append(not, e)
		} else {
			entries = append(entries, e)
		}
	}
	b.release(b.take(not))
	return entries
}

// take takes those of entries that nobody has begun or released yet.
func (b *batch) take(entries []Entry) []Entry {
	b.mu.Lock()
	defer b.mu.Unlock()
	var mine []Entry
	for _, e := range entries {
		if _, ok := b.waiting[e.Seq]; ok {
			delete(b.waiting, e.Seq)
			mine = append(mine, e)
		}
	}
	return mine
}

// goesOn tells whether another call may begin.
func (b *batch) goesOn() bool { return b.ctx.Err() == nil && b.lease.Err() == nil }

// next takes from entries what can be published now: one Publish call a topic, and in a call at most one
// entry a key, unless the publisher keeps order. Entries of stopped keys are unsent.
func (b *batch) next(entries []Entry) (calls [][]Entry, later, unsent []Entry) {
	busy := map[lane]bool{}
	call := map[string]int{}
	full := func(topic string) bool {
		i, ok := call[topic]
		return ok && len(calls[i]) >= b.cfg.Batch
	}
	for _, e := range entries {
		switch l := b.lane(e); {
		case b.stopped[l] || b.trial(e.Topic).hopeless():
			unsent = append(unsent, e)
		case busy[l] && !b.cfg.OrderedPublisher, full(e.Topic) && b.trial(e.Topic).pauses == 0:
			later = append(later, e)
		default:
			busy[l] = true
			i, ok := call[e.Topic]
			if !ok {
				i = len(calls)
				call[e.Topic] = i
				calls = append(calls, nil)
			}
			calls[i] = append(calls[i], e)
		}
	}
	return calls, later, unsent
}

// send publishes entries of one topic, and returns the marks of what passed and of what it did not try. A failed
// call of several may have published any prefix: they go again with the same ids, one by one, to find the one
// that fails. So they go from the start where the topic was down.
func (b *batch) send(call []Entry) (marks []Mark) {
	t := b.trial(call[0].Topic)
	if len(call) > 1 && t.pauses == 0 && b.publishCall(call) == nil {
		t.pass(call)
		return published(call, b.cfg.Keep)
	}
	call = b.freshFirst(call, t.pauses > 0)
	for i, e := range call {
		one := call[i : i+1]
		if b.stopped[b.lane(e)] || !b.goesOn() || t.hopeless() {
			marks = append(marks, releases(one)...)
			continue
		}
		if err := b.publishCall(one); err != nil {
			b.stopped[b.lane(e)] = true
			t.fail(e, b.lane(e), err)
			continue
		}
		t.pass(one)
		marks = append(marks, published(one, b.cfg.Keep)...)
	}
	return marks
}

// freshFirst puts the keys of which a message has failed before behind the others, and where nothing passes mixes
// these: so each try is of something new, and much poison does not hide what is good behind it. A key keeps its
// order.
func (b *batch) freshFirst(call []Entry, mixed bool) []Entry {
	rank := map[lane]float64{}
	for _, e := range call {
		l := b.lane(e)
		if _, ok := rank[l]; !ok && mixed {
			rank[l] = rand.Float64()
		}
		if e.LastError != "" && rank[l] < 1 {
			rank[l]++
		}
	}
	call = slices.Clone(call)
	slices.SortStableFunc(call, func(x, y Entry) int { return cmp.Compare(rank[b.lane(x)], rank[b.lane(y)]) })
	return call
}

func published(call []Entry, keep Retention) []Mark {
	marks := make([]Mark, len(call))
	for i, e := range call {
		marks[i] = Mark{Seq: e.Seq, Token: e.Token, To: Published, Drop: keep.Published == 0}
	}
	return marks
}

func (b *batch) publishCall(call []Entry) error {
	messages := make([]*message.Message, len(call))
	for i := range call {
		messages[i] = call[i].Watermill()
	}
	told := b.cfg.Observer.Published
	begin := b.begin(told != nil)
	crash.Point("publish: before")
	err := b.pub.Publish(call[0].Topic, messages...)
	crash.Point("publish: after")
	if told != nil {
		told(call[0].Topic, len(call), b.since(begin), err)
	}
	return err
}

// failure says what becomes of an entry whose publication failed by its own fault: a later attempt, or the end
// of them.
func (b *batch) failure(f failure) Mark {
	m := Mark{Seq: f.Seq, Token: f.Token, To: Failed, Error: errorClass(f.err)}
	if b.cfg.Backoff.Spent(f.Attempts) {
		m.To = Abandoned
	} else {
		m.After, _ = b.cfg.Backoff.Delay(f.Attempts) // never fails: the claim counted an attempt, NewRelay checked the schedule
	}
	if m.To == Abandoned || m.After >= holdLong {
		select {
		case b.upkeep <- struct{}{}:
		default: // somebody has asked already
		}
	}
	attrs := []any{"to", string(m.To), "topic", f.Topic, "key", f.Key, "message_id", f.ID, "attempt", f.Attempts, "class", m.Error}
	if m.To == Failed {
		attrs = append(attrs, "again_in", m.After)
	}
	if b.cfg.LogErrors {
		attrs = append(attrs, "err", f.err)
	}
	b.log.Warn("publish", attrs...)
	return m
}

func releases(entries []Entry) []Mark {
	marks := make([]Mark, len(entries))
	for i, e := range entries {
		marks[i] = Mark{Seq: e.Seq, Token: e.Token, To: Pending}
	}
	return marks
}

func (b *batch) release(entries []Entry) { b.mark(releases(entries)) }

// mark records what happened. While the store has trouble it tries again, for as long as the lease lives. A
// mark after that still counts where nobody has taken over.
func (b *batch) mark(marks []Mark) {
	if len(marks) == 0 {
		return
	}
	for pause := troubleMin; ; pause = min(2*pause, troubleMax) {
		late, err := b.markOnce(marks)
		if err == nil {
			b.forget(marks)
			if len(late) > 0 {
				b.log.Warn("marked too late: the claim was taken over", "entries", len(late))
			}
			return
		}
		b.log.Warn("mark", "entries", len(marks), "class", errorClass(err), "again_in", pause)
		if sleep(b.lease, pause, nil); b.lease.Err() != nil {
			return
		}
	}
}

// forget ends the renewal of what is marked.
func (b *batch) forget(marks []Mark) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, m := range marks {
		delete(b.claimed, m.Seq)
	}
}

func (b *batch) markOnce(marks []Mark) ([]int64, error) {
	ctx, cancel := context.WithTimeout(b.hard, storeLimit)
	defer cancel()
	told := b.cfg.Observer.Marked
	begin := b.begin(told != nil)
	late, err := b.store.MarkEntries(ctx, marks)
	if told != nil {
		told(marks, len(late), b.since(begin), err)
	}
	if err != nil {
		return nil, fmt.Errorf("mark: %w", err)
	}
	return late, nil
}
