package outbox

import (
	"time"

	"github.com/kinora-go/kinora/internal/errclass"
	"github.com/kinora-go/kinora/internal/pauses"
)

const (
	failuresDown = 3      // keys that fail in a row until a batch gives up a topic that was down
	failuresUp   = 10     // the same for a topic that was up
	depthMax     = 5      // the most doublings of a claim's size
	refusedMax   = 10_000 // entries that a breaker remembers
)

// breaker is the outage breaker of one topic, in this process. It distinguishes an
// outage from messages that can never be published:
//
//   - If other messages of the topic pass, a message that fails is at fault. Its attempt counts.
//   - If no message passes, there may be an outage. No attempt counts, and the failed
//     messages wait. If several keys failed, the topic is not claimed meanwhile.
type breaker struct {
	// up: the last batch that tried a message ended with a pass, or this batch has one.
	up     bool
	passes int // messages that passed
	// refused has the entries that failed and have not passed since, by Seq, with the number of
	// passes before their first failure.
	refused map[int64]int

	// Since the last pass.
	keys        map[lane]bool // keys that failed, at most failuresDown
	pauses      int           // batches that ended as an outage
	pausedUntil time.Time     // the topic is not claimed before
	class       string        // of the last error
	deepUntil   time.Time     // claims take more entries until then

	// In the current batch.
	inRow  int // failures since the last pass, each of another key
	failed []failure
}

type failure struct {
	Entry
	err error
}

// verdict is the decision about the failures of one batch.
type verdict struct {
	failed []failure
	// outage is the length of the pause, for which attempts are restored. Zero: the attempts count.
	outage time.Duration
	paused bool // the topic is not claimed during the pause
}

func newBreaker() *breaker { return &breaker{refused: map[int64]int{}, keys: map[lane]bool{}} }

func (k *breaker) pass(items []*item) {
	k.up, k.inRow, k.pauses = true, 0, 0
	k.passes += len(items)
	clear(k.keys)
	if len(k.refused) == 0 {
		return
	}
	for _, it := range items {
		delete(k.refused, it.Seq)
	}
}

func (k *breaker) fail(e Entry, l lane, err error) {
	k.failed = append(k.failed, failure{e, err})
	k.class = errclass.Of(err)
	k.inRow++
	if len(k.keys) < failuresDown {
		k.keys[l] = true
	}
	if _, again := k.refused[e.Seq]; !again {
		if len(k.refused) >= refusedMax { // other relays may have published them
			clear(k.refused)
		}
		k.refused[e.Seq] = k.passes
	}
}

// down reports whether no message has passed since a batch ended as an outage.
func (k *breaker) down() bool { return k.pauses > 0 }

// givesUp reports whether this batch must not try the rest of the topic.
func (k *breaker) givesUp() bool {
	if k.up {
		return k.inRow >= failuresUp
	}
	return k.inRow >= failuresDown
}

// counts reports whether the messages are at fault, because others passed in this
// batch or just before it. A single failed message is also at fault if others have
// passed since its first failure.
func (k *breaker) counts() bool {
	return k.up || !k.down() && len(k.failed) == 1 && k.passes > k.refused[k.failed[0].Seq]
}

func (k *breaker) end(now time.Time) verdict {
	v := verdict{failed: k.failed}
	if len(k.failed) > 0 && !k.counts() {
		k.pauses++
		v.outage = pauses.Doubled(time.Second, k.pauses-1, time.Minute)
		// The failed messages wait for 2 pauses. After 4, another relay has claimed them.
		k.deepUntil = now.Add(4 * v.outage)
		if v.paused = len(k.keys) >= failuresDown; v.paused {
			k.pausedUntil = now.Add(v.outage)
		}
	}
	k.up = k.up && k.inRow == 0
	k.inRow, k.failed = 0, nil
	return v
}

func (k *breaker) paused(now time.Time) bool { return now.Before(k.pausedUntil) }

// depth is how often the size of a claim is doubled, 0 to depthMax. In an outage
// claims take more entries, so that failed messages do not hide later ones that
// may pass.
func (k *breaker) depth(now time.Time) int {
	if !now.Before(k.deepUntil) {
		return 0
	}
	return min(k.pauses, depthMax)
}
