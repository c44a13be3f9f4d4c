package outbox

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var newYear = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func pass(k *breaker, seq int64) { k.pass([]*item{{Entry: &Entry{Seq: seq}}}) }

// failAll records a failure of each entry. Each entry has its own key.
func failAll(k *breaker, seqs ...int64) {
	for _, seq := range seqs {
		k.fail(Entry{Seq: seq}, lane{"t", fmt.Sprint(seq)}, errors.New("down"))
	}
}

func TestBreakerCountsFailuresWhileOthersPass(t *testing.T) {
	t.Parallel()
	for name, batches := range map[string]func(k *breaker){
		"passes in the same batch":          func(k *breaker) { pass(k, 1); failAll(k, 2) },
		"passes after it in the same batch": func(k *breaker) { failAll(k, 2); pass(k, 1) },
		"passed in the batch before":        func(k *breaker) { pass(k, 1); k.end(newYear); failAll(k, 2) },
		"passed since its first failure": func(k *breaker) {
			failAll(k, 2)
			k.end(newYear)
			pass(k, 1)
			k.end(newYear)
			failAll(k, 3) // the topic's last try fails
			k.end(newYear)
			failAll(k, 2)
		},
	} {
		k := newBreaker()
		batches(k)
		v := k.end(newYear)
		require.Zero(t, v.outage, name)
		require.False(t, v.paused, name)
		require.Len(t, v.failed, 1, name)
		require.EqualValues(t, 2, v.failed[0].Seq, name)
		require.False(t, k.down(), name)
	}
}

func TestBreakerDoesNotCountASingleFailingKey(t *testing.T) {
	t.Parallel()
	k := newBreaker()
	failAll(k, 1)
	v := k.end(newYear)
	require.Equal(t, time.Second, v.outage)
	require.False(t, v.paused, "one failing key is not an outage of the topic")
	require.True(t, k.down())
	require.False(t, k.paused(newYear))

	pass(k, 2)
	k.end(newYear)
	failAll(k, 3)
	require.Zero(t, k.end(newYear).outage, "the topic was up")
	failAll(k, 4)
	require.Equal(t, time.Second, k.end(newYear).outage, "nothing passed since its first failure")
}

func TestBreakerPausesLongerEachTime(t *testing.T) {
	t.Parallel()
	k, now := newBreaker(), newYear
	for _, want := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60} {
		failAll(k, 1, 2, 3)
		require.True(t, k.hopeless())
		v := k.end(now)
		require.Equal(t, want*time.Second, v.outage)
		require.True(t, v.paused)
		require.True(t, k.paused(now.Add(v.outage-1)))
		now = now.Add(v.outage)
		require.False(t, k.paused(now))
	}
	pass(k, 9)
	require.False(t, k.down())
	k.end(now)
	failAll(k, 1)
	k.end(now)
	failAll(k, 1, 2, 3)
	require.Equal(t, time.Second, k.end(now).outage, "a message that passes resets the pauses")
}

func TestBreakerDoesNotCountFailuresOfAnOutage(t *testing.T) {
	t.Parallel()
	k := newBreaker()
	failAll(k, 1)
	k.end(newYear)
	pass(k, 2)
	failAll(k, 3)
	k.end(newYear)
	failAll(k, 4)
	require.Equal(t, time.Second, k.end(newYear).outage)
	failAll(k, 1)
	require.Equal(t, 2*time.Second, k.end(newYear).outage, "others passed after its first failure, and then the topic went down")
}

func TestBreakerCountsKeysSinceTheLastPass(t *testing.T) {
	t.Parallel()
	k := newBreaker()
	failAll(k, 1, 2)
	k.end(newYear)
	pass(k, 3)
	failAll(k, 4)
	k.end(newYear)
	failAll(k, 5)
	v := k.end(newYear)
	require.Positive(t, v.outage)
	require.False(t, v.paused, "two keys failed since a message passed")
}

// Suspects are claimed one at a time: three batches with one failure each count like one batch with
// three.
func TestBreakerPausesAfterSeveralBatchesOfOne(t *testing.T) {
	t.Parallel()
	k := newBreaker()
	for seq := range int64(3) {
		failAll(k, seq)
		require.Equal(t, seq == 2, k.end(newYear).paused, "after %d", seq)
	}
	k = newBreaker()
	for range 5 {
		failAll(k, 1)
		require.False(t, k.end(newYear).paused, "the same key each time")
	}
}

func TestBreakerGivesUpLaterIfTheTopicWasUp(t *testing.T) {
	t.Parallel()
	k := newBreaker()
	pass(k, 1)
	for seq := range int64(hopelessLate) {
		require.False(t, k.hopeless(), "after %d", seq)
		failAll(k, 2+seq)
	}
	require.True(t, k.hopeless())
	require.Zero(t, k.end(newYear).outage, "another message passed in this batch")
	require.False(t, k.hopeless(), "the next batch tries again")
	failAll(k, 100, 101, 102)
	require.True(t, k.hopeless(), "the topic is no longer up")
	v := k.end(newYear)
	require.True(t, v.paused)
	require.Len(t, v.failed, 3)
}

func TestBreakerDepth(t *testing.T) {
	t.Parallel()
	k, now := newBreaker(), newYear
	require.Zero(t, k.depth(now))
	for _, want := range []int{1, 2, 3, 4, 5, 5} {
		failAll(k, 1)
		v := k.end(now)
		require.Equal(t, want, k.depth(now))
		require.Equal(t, want, k.depth(now.Add(4*v.outage-1)))
		require.Zero(t, k.depth(now.Add(4*v.outage)), "the depth is reset")
	}
	pass(k, 1)
	require.Zero(t, k.depth(now))
}

func TestBreakerRemembersALimitedNumberOfEntries(t *testing.T) {
	t.Parallel()
	k := newBreaker()
	for seq := range int64(3 * refusedMax) {
		failAll(k, seq)
		k.end(newYear)
		require.LessOrEqual(t, len(k.refused), refusedMax)
		require.LessOrEqual(t, len(k.keys), hopelessSoon)
	}
	pass(k, 3*refusedMax-1)
	require.NotContains(t, k.refused, int64(3*refusedMax-1))
}

func TestBreakerEndsABatchWithoutFailures(t *testing.T) {
	t.Parallel()
	k := newBreaker()
	require.Empty(t, k.end(newYear))
	pass(k, 1)
	require.Empty(t, k.end(newYear))
	require.Empty(t, k.end(newYear))
	failAll(k, 2)
	require.Zero(t, k.end(newYear).outage, "batches without a try of this topic change nothing")
}
