package outbox

import (
	"context"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
)

// An outage is told from poison by what gets through. A message that fails while others of its topic pass is
// poison, or nearly so. Where nothing passes there is no telling: then no attempt is counted, and what failed
// waits, or the whole topic where that were several keys.
const (
	hopelessSoon = 3  // keys that fail in a row, of a topic of which nothing has passed lately: no further tries in this batch
	hopelessLate = 10 // the same where something has
	refusedMax   = 10_000
)

var pauses = claim.Backoff{Base: time.Second, Max: time.Minute, Attempts: -1}

// topic is what a relay knows of a topic's fortunes, in this process.
type topic struct {
	alive   bool            // the last try passed
	passes  int             // messages that got through
	dry     map[lane]bool   // keys that have failed since
	pauses  int             // in a row; 0: it is up, as far as we know
	forget  time.Time       // when these tell nothing more of how deep to look
	refused map[int64]int   // by Seq, of what failed and has not passed: how many had got through when it failed first
	paused  context.Context // until its end nothing of the topic is claimed; nil: never yet
	resume  context.CancelFunc
}

const deepest = 5 // doublings of a claim while nothing of a topic passes

// depth is how many entries a claim may take. Where nothing passes it takes more, to find what may: messages that
// are refused would hide what is good behind them. No call of the publisher is larger for it.
func (r *Relay) depth() int {
	deep, now := 0, r.cfg.Clock()
	for _, t := range r.topics {
		if now.Before(t.forget) {
			deep = max(deep, min(t.pauses, deepest))
		}
	}
	return r.cfg.Batch << deep
}

// pausing lists the topics that pause.
func (r *Relay) pausing() []string {
	var names []string
	for name, t := range r.topics {
		if t.paused != nil && t.paused.Err() == nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// trial is a topic in one batch.
type trial struct {
	*topic
	passed bool // something got through in this batch
	inRow  int  // keys that failed since
	failed []failure
}

// failure is one try that failed. What becomes of it is judged when the batch is over.
type failure struct {
	Entry
	err error
}

func (b *batch) trial(name string) *trial {
	t := b.trials[name]
	if t == nil {
		if b.topics[name] == nil {
			b.topics[name] = &topic{refused: map[int64]int{}, dry: map[lane]bool{}}
		}
		t = &trial{topic: b.topics[name]}
		b.trials[name] = t
	}
	return t
}

func (t *trial) pass(call []Entry) {
	t.passed, t.alive, t.inRow, t.pauses = true, true, 0, 0
	t.passes += len(call)
	clear(t.dry)
	for _, e := range call {
		delete(t.refused, e.Seq)
	}
}

func (t *trial) fail(e Entry, l lane, err error) {
	t.failed = append(t.failed, failure{e, err})
	t.inRow++
	if len(t.dry) < hopelessSoon {
		t.dry[l] = true
	}
	if _, again := t.refused[e.Seq]; !again {
		if len(t.refused) >= refusedMax { // other relays may have published them
			clear(t.refused)
		}
		t.refused[e.Seq] = t.passes
	}
}

// hopeless tells whether to leave the rest of the topic alone.
func (t *trial) hopeless() bool {
	if t.alive {
		return t.inRow >= hopelessLate
	}
	return t.inRow >= hopelessSoon
}

// counts tells whether what failed is the messages' own fault: others passed, or did so just before; or it is one
// alone, and others have passed since it failed first.
func (t *trial) counts() bool {
	return t.passed || t.alive || t.pauses == 0 && len(t.failed) == 1 && t.passes > t.refused[t.failed[0].Seq]
}

// judge says what becomes of everything that failed in this batch.
func (b *batch) judge() []Mark {
	var marks []Mark
	for name, t := range b.trials {
		switch {
		case len(t.failed) == 0:
		case t.counts():
			for _, f := range t.failed {
				marks = append(marks, b.failure(f))
			}
		default:
			marks = append(marks, b.pause(name, t)...)
		}
		t.alive = t.inRow == 0 && t.alive
	}
	return marks
}

// pause gives the attempts back, and lets nothing of the topic be claimed for a while. What was tried waits twice
// as long, so that the next try is of other keys. Where that was little it waits alone: the next message of
// another key may get through, and then there is telling.
func (b *batch) pause(name string, t *trial) []Mark {
	t.pauses++
	delay, _ := pauses.Delay(t.pauses)              // never fails: it is a schedule, and pauses ≥ 1
	t.forget = b.cfg.Clock().Add(4 * delay)         // what was tried is tried again before, unless others have done that
	if t.hopeless() || len(t.dry) >= hopelessSoon { // entries whose claim vanished come one by one
		if t.resume != nil {
			t.resume()
		}
		t.paused, t.resume = context.WithTimeout(b.hard, delay)
		if b.cfg.Observer.Paused != nil {
			b.cfg.Observer.Paused(name, delay)
		}
	}
	last := t.failed[len(t.failed)-1]
	attrs := []any{"topic", name, "tried", len(t.failed), "class", errorClass(last.err), "for", delay}
	if b.cfg.LogErrors {
		attrs = append(attrs, "err", last.err)
	}
	b.log.Warn("nothing of a topic can be published: it is tried less often", attrs...)
	marks := make([]Mark, len(t.failed))
	for i, f := range t.failed {
		marks[i] = Mark{Seq: f.Seq, Token: f.Token, To: Pending, After: 2 * delay, Error: errorClass(f.err)}
	}
	return marks
}
