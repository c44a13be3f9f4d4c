package outbox

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const ms = time.Millisecond

// steps is a scanner with a clock that only run and sleep move.
type steps struct {
	*testing.T
	*scanner
	now time.Time
}

func newSteps(t *testing.T, poll time.Duration) *steps {
	t.Helper()
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	return &steps{t, newScanner(now, poll), now}
}

// run checks that the next scan is want, and runs it. The scan takes the given time and finds that
// many of 50 entries.
func (s *steps) run(want scan, took time.Duration, found int) {
	s.Helper()
	s.begin(want, took, found)
	s.handled(s.now, found > 0, false)
}

func (s *steps) begin(want scan, took time.Duration, found int) {
	s.Helper()
	at, pause := s.next(s.now)
	require.Equal(s, want, at)
	require.Zero(s, pause)
	begin := s.now
	s.now = s.now.Add(took)
	s.scanned(begin, s.now, found, 50)
	if found > 0 {
		s.claimed(5000)
	}
}

// suspect runs a front scan that finds a suspect, whose publication takes the given time.
func (s *steps) suspect(took time.Duration) {
	s.Helper()
	s.begin(frontScan, 0, 1)
	s.now = s.now.Add(took)
	s.handled(s.now, true, true)
}

// sleep checks that the next pause has this length, and waits for its end.
func (s *steps) sleep(want time.Duration) {
	s.Helper()
	at, pause := s.next(s.now)
	require.Equal(s, noScan, at)
	require.Equal(s, want, pause)
	s.now = s.now.Add(pause)
}

func TestScannerWidensAndThenPauses(t *testing.T) {
	t.Parallel()
	s := newSteps(t, time.Second)
	s.run(frontScan, 0, 1)
	s.run(nearScan, 0, 0)
	s.run(frontScan, 0, 0)
	s.run(behindScan, 0, 0)
	s.run(fullScan, 0, 0)
	for _, pause := range []time.Duration{5, 10, 20, 40, 80, 160, 320, 640, 1000, 1000} {
		s.sleep(pause * ms)
		s.run(fullScan, 0, 0)
	}
	s.sleep(time.Second)
	s.run(fullScan, 0, 1)
	s.run(nearScan, 0, 0)
	s.run(frontScan, 0, 0)
	s.run(behindScan, 0, 0)
	s.run(fullScan, 0, 0)
	s.sleep(5 * ms) // the scan that found an entry shortened the pauses
}

func TestScannerBeginsAtTheFrontUntilItHasClaimed(t *testing.T) {
	t.Parallel()
	s := newSteps(t, time.Second)
	s.run(frontScan, 0, 0)
	s.run(fullScan, 0, 0) // no scan behind the last claim, because nothing was claimed
	s.sleep(5 * ms)
	s.wake()
	s.run(frontScan, 0, 0)
}

func TestScannerNearScanRepeatsSomeSeqs(t *testing.T) {
	t.Parallel()
	s := newSteps(t, time.Second)
	for _, c := range []struct{ last, after int64 }{{10, 1}, {5000, 4000}, {3000, 4000}} {
		s.claimed(c.last)
		require.Equal(t, c.after, s.after, "after a claim that ended with %d", c.last)
	}
}

func TestScannerVisitsTheFrontAndAllUnderLoad(t *testing.T) {
	t.Parallel()
	s := newSteps(t, time.Second)
	var got []scan
	for begin := s.now; s.now.Sub(begin) < 2*time.Second; {
		at, _ := s.next(s.now)
		got = append(got, at)
		s.run(at, 25*ms, 50)
	}
	count := map[scan]int{}
	for _, at := range got {
		count[at]++
	}
	require.Equal(t, []scan{frontScan, nearScan, nearScan, nearScan, nearScan, frontScan}, got[:6])
	require.Equal(t, 1, count[fullScan], "the next one is due after a second and a backoff of 250 ms")
	require.InDelta(t, 2000/125, count[frontScan], 1)
}

func TestScannerWakeInterruptsAPause(t *testing.T) {
	t.Parallel()
	s := newSteps(t, time.Second)
	s.run(frontScan, 0, 1)
	s.run(nearScan, 0, 0)
	s.run(frontScan, 0, 0)
	s.run(behindScan, 0, 0)
	s.run(fullScan, 0, 0)
	s.sleep(5 * ms)
	s.wake()
	s.run(nearScan, 0, 1)
}

// A full scan of 300 ms is followed by a backoff of 3 s, during which near and front scans
// continue.
func TestScannerBacksOffFromLongScans(t *testing.T) {
	t.Parallel()
	s := newSteps(t, time.Second)
	s.run(frontScan, 0, 1)
	s.run(nearScan, 0, 0)
	s.run(frontScan, 0, 0)
	s.run(behindScan, 0, 0)
	s.run(fullScan, 300*ms, 0)
	end := s.now
	s.sleep(5 * ms)
	full, near := 0, 0
	for s.now.Sub(end) < 2990*ms {
		at, pause := s.next(s.now)
		switch at {
		case noScan:
			s.now = s.now.Add(pause)
			continue
		case fullScan:
			full++
		case nearScan:
			near++
		}
		s.run(at, 0, 0)
	}
	require.Zero(t, full)
	require.GreaterOrEqual(t, near, 3)
	require.Equal(t, end.Add(3*time.Second), s.backoff[fullScan])
}

func TestScannerBacksOffNoLongerThanTenSeconds(t *testing.T) {
	t.Parallel()
	s := newSteps(t, time.Second)
	s.run(frontScan, 0, 0)
	s.run(fullScan, time.Minute, 0)
	require.Equal(t, s.now.Add(10*time.Second), s.backoff[fullScan])
}

// The backoff of a scan behind the last claim is proportional to the share of 50 entries that it
// did not find.
func TestScannerBacksOffLessBehindALargeBacklog(t *testing.T) {
	t.Parallel()
	for found, want := range map[int]time.Duration{0: time.Second, 10: 800 * ms, 50: 0, 60: 0} {
		s := newSteps(t, time.Hour)
		s.run(frontScan, 0, 1)
		s.run(nearScan, 0, 0)
		s.run(frontScan, 0, 0)
		s.run(behindScan, 100*ms, found)
		require.Equal(t, s.now.Add(want), s.backoff[behindScan], "%d of 50", found)
	}
}

// Suspects come one at a time. Together they get as much time as other entries had since the last
// front scan.
func TestScannerGivesSuspectsTheirTurn(t *testing.T) {
	t.Parallel()
	s := newSteps(t, time.Hour)
	s.run(frontScan, 0, 1)
	s.run(nearScan, 400*ms, 50)
	for range 4 { // the front scan was due 300 ms ago, so the run lasts 400 ms
		s.suspect(100 * ms)
	}
	s.run(nearScan, 0, 50)
	s.run(nearScan, 5*time.Second, 50)
	for range 10 { // at most 1 s
		s.suspect(100 * ms)
	}
	s.run(nearScan, 0, 50)
}

func TestScannerClaimsAheadUnlessAnotherScanIsDue(t *testing.T) {
	t.Parallel()
	s := newSteps(t, time.Second)
	s.begin(frontScan, 0, 50)
	require.True(t, s.mayClaimAhead(s.now))
	require.True(t, s.mayClaimAhead(s.now.Add(99*ms)))
	require.False(t, s.mayClaimAhead(s.now.Add(100*ms)), "a front scan is due")
	s.front = s.now.Add(time.Hour)
	require.False(t, s.mayClaimAhead(s.now.Add(time.Second)), "a full scan is due")
	s.backoff[fullScan] = s.now.Add(time.Hour)
	require.True(t, s.mayClaimAhead(s.now.Add(time.Second)), "the full scan backs off")
}

func TestScannerPausesAreNotLongerThanPoll(t *testing.T) {
	t.Parallel()
	for poll, want := range map[time.Duration][]time.Duration{
		time.Millisecond: {ms, ms, ms},
		12 * ms:          {5 * ms, 10 * ms, 12 * ms, 12 * ms},
	} {
		s := newSteps(t, poll)
		s.run(frontScan, 0, 0)
		for _, pause := range want {
			s.run(fullScan, 0, 0)
			s.sleep(pause)
		}
	}
	s := newSteps(t, math.MaxInt64)
	s.run(frontScan, 0, 0)
	last := time.Duration(0)
	for range 100 {
		at, pause := s.next(s.now)
		if at == noScan {
			require.GreaterOrEqual(t, pause, last)
			last = pause
			continue
		}
		s.run(at, 0, 0)
	}
	require.Greater(t, last, 10*time.Hour)
}
