package providertest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

var crowdCases = []testCase{
	{
		// Promise: G2.1
		name: "a crowd of relays", play: crowd,
		rule: "With any number of relays no entry has two live claims, the first publications of each key are in order, through failures and releases, and at the end all entries are published",
	},
	{
		// Promise: G3.5
		name: "a crowd of relays and keepers", play: crowdHeld,
		rule: "A held entry keeps its place: no later one of its key is claimed before it. It becomes pending again once the entry that it waits for is published, requeued or skipped. At the end all entries are published or skipped",
	},
}

const (
	crowdRelays = 8
	crowdKeys   = 50
)

var crowdEntries = longtest.Or(250, 600)

// crowded records what the relays did, as seen from outside the store.
type crowded struct {
	mu sync.Mutex
	// relay by Seq: from the return of its claim until just before its mark
	held   map[int64]int
	last   map[string]int // last published entry of the key, from 1
	faults []string       // violations of the rule
	out    int            // entries marked published, not late
	done   chan struct{}  // closed when all are published or skipped

	poison                      bool // some entries are abandoned, some dropped
	abandoned, dropped, skipped int
}

func (c *crowded) fault(format string, args ...any) {
	if len(c.faults) < 10 {
		c.faults = append(c.faults, fmt.Sprintf(format, args...))
	}
}

func crowd(s *stage) {
	c := &crowded{}
	s.crowd(c, 0)
	same(s, "entries published", c.out, crowdEntries)
	s.counted(map[outbox.Status]int64{outbox.Published: int64(crowdEntries)})
	for key, n := range c.last {
		same(s, "entries of "+key+" published", n, crowdEntries/crowdKeys)
	}
}

// crowdHeld is the crowd with some abandoned entries, and with keepers that hold the entries
// behind them and decide.
func crowdHeld(s *stage) {
	c := &crowded{poison: true}
	s.crowd(c, 3)
	same(s, "entries published or skipped", c.out+c.skipped, crowdEntries)
	s.counted(map[outbox.Status]int64{outbox.Published: int64(c.out - c.dropped), outbox.Skipped: int64(c.skipped)})
	s.require(c.abandoned > 0 && c.dropped > 0 && c.skipped > 0, "%d are abandoned, %d dropped, %d skipped", c.abandoned, c.dropped, c.skipped)
}

// crowd runs the relays and this number of keepers until all entries are published or skipped.
func (s *stage) crowd(c *crowded, keepers int) {
	s.Helper()
	ms := make([]outbox.Message, crowdEntries)
	for i := range ms {
		ms[i] = outbox.Message{ID: newID(), Topic: "mail", Key: fmt.Sprintf("key %d", i%crowdKeys), Payload: fmt.Append(nil, i/crowdKeys+1)}
	}
	s.ok(s.inTx(s.ctx, func(view TxView, _ Add) error { return view.Enqueue(s.ctx, ms...) }), "enqueue")
	ctx, stop := context.WithCancel(s.ctx)
	defer stop()
	c.held, c.last, c.done = map[int64]int{}, map[string]int{}, make(chan struct{})
	seed := rand.Uint64()
	together(crowdRelays+keepers, func(i int) {
		work := s.relayInCrowd
		if i >= crowdRelays {
			work = s.keepInCrowd
		}
		work(ctx, c, i, rand.New(rand.NewPCG(seed, uint64(i))))
		if c.broken() {
			stop() // stop the others too
		}
	})
	for _, fault := range c.faults {
		s.Errorf("seed %d: %s", seed, fault)
	}
}

func (c *crowded) broken() (yes bool) {
	c.note(func() { yes = len(c.faults) > 0 })
	return yes
}

func (s *stage) relayInCrowd(ctx context.Context, c *crowded, me int, random *rand.Rand) {
	for ctx.Err() == nil && !c.broken() {
		taken, err := provider.ClaimEntries(ctx, s.db, provider.EntryQuery{Near: random.IntN(2) == 0, After: max(0, random.Int64N(int64(crowdEntries))-int64(crowdEntries)/2)}, claim.Terms{Holder: fmt.Sprint(me), Lease: lease, Limit: 1 + random.IntN(60)})
		if err != nil {
			c.note(func() { c.fault("relay %d: claim: %v", me, err) })
			return
		}
		c.note(func() { c.claimed(taken, me) })
		marks := c.publish(taken, random)
		// in portions, as a relay marks after each Publish call
		for len(marks) > 0 {
			n := 1 + random.IntN(len(marks))
			c.note(func() { c.marked(marks[:n]) })
			late, err := s.db.MarkEntries(ctx, marks[:n])
			if err != nil || len(late) > 0 {
				c.note(func() { c.fault("relay %d: mark: late %v, error %v", me, late, err) })
				return
			}
			c.note(func() { c.count(marks[:n]) })
			marks = marks[n:]
		}
		if len(taken) == 0 && pause(ctx, c.done) {
			return
		}
	}
}

// keepInCrowd holds waiting entries, and requeues and skips abandoned ones.
func (s *stage) keepInCrowd(ctx context.Context, c *crowded, me int, random *rand.Rand) {
	abandoned := outbox.Filter{Status: []outbox.Status{outbox.Abandoned}, Limit: 1 + random.IntN(3)}
	for done := false; !done && ctx.Err() == nil && !c.broken(); done = pause(ctx, c.done) {
		var skipped int
		first := false // the first decision skips, so that each crowd skips something
		c.note(func() { first = c.skipped == 0 })
		_, err := s.db.HoldEntries(ctx, time.Millisecond, 1+random.IntN(300))
		if dice := random.IntN(4); err == nil && (dice == 0 || first) {
			skipped, err = s.db.Skip(ctx, abandoned)
		} else if err == nil && dice <= 2 {
			_, err = s.db.Requeue(ctx, abandoned)
		}
		c.note(func() {
			c.skipped += skipped
			c.resolved(skipped)
			if err != nil {
				c.fault("keeper %d: %v", me, err)
			}
		})
	}
}

// pause waits for a moment. It returns true if the case is done or ctx has ended.
func pause(ctx context.Context, done <-chan struct{}) bool {
	t := time.NewTimer(time.Millisecond)
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-ctx.Done():
		return true
	case <-t.C:
		return false
	}
}

func (c *crowded) note(what func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	what()
}

func (c *crowded) claimed(taken []outbox.Entry, me int) {
	for _, e := range taken {
		if other, held := c.held[e.Seq]; held {
			c.fault("entry %d is claimed by relay %d and by relay %d", e.Seq, other, me)
		}
		c.held[e.Seq] = me
	}
}

func (c *crowded) marked(marks []outbox.Mark) {
	for _, m := range marks {
		delete(c.held, m.Seq)
	}
}

func (c *crowded) count(marks []outbox.Mark) {
	for _, m := range marks {
		switch m.To {
		case outbox.Published:
			c.out++
			if m.Drop {
				c.dropped++
			}
			c.resolved(1)
		case outbox.Abandoned:
			c.abandoned++
		}
	}
}

// resolved counts n more entries as published or skipped.
func (c *crowded) resolved(n int) {
	if n == 0 {
		return
	}
	if c.out+c.skipped == crowdEntries {
		close(c.done)
	}
}

// publish is a publisher that sometimes fails. A key's run ends at its first failure, and its
// other entries are released. Some runs are released completely.
func (c *crowded) publish(taken []outbox.Entry, random *rand.Rand) []outbox.Mark {
	stopped := map[string]bool{}
	marks := make([]outbox.Mark, len(taken))
	for i, e := range taken {
		m := outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Published}
		switch dice := random.IntN(20); {
		case stopped[e.Key]:
			m.To = outbox.Pending
		case dice == 0:
			m.To, stopped[e.Key] = outbox.Pending, true
		case dice == 1 && c.poison:
			m.To, stopped[e.Key] = outbox.Abandoned, true
		case dice <= 2:
			m.To, m.After, stopped[e.Key] = outbox.Failed, time.Duration(random.IntN(3))*time.Millisecond, true
		default:
			c.note(func() { c.published(e) })
			m.Drop = c.poison && dice < 8
		}
		marks[i] = m
	}
	return marks
}

// published checks the order of a key's first publications. No entry is published twice, because
// no claim crashes here. If some are skipped, there are gaps.
func (c *crowded) published(e outbox.Entry) {
	n, _ := strconv.Atoi(string(e.Payload))
	if n != c.last[e.Key]+1 && !c.poison || n <= c.last[e.Key] {
		c.fault("%s: entry %d is published after entry %d", e.Key, n, c.last[e.Key])
	}
	c.last[e.Key] = n
}
