package outbox

import (
	"time"

	"github.com/kinora-go/kinora/internal/pauses"
)

const (
	pauseMin      = 5 * time.Millisecond   // the first pause of an idle relay; it doubles up to Poll
	frontEvery    = 100 * time.Millisecond // front scans while near scans find entries
	suspectsMax   = time.Second            // how long suspects may be claimed in a row
	backoffFactor = 10                     // backoff after a wide scan, as a multiple of its duration
	backoffMax    = 10 * time.Second       // the longest such backoff
	nearOverlap   = 1000                   // Seqs that a near scan repeats, for commits out of order
)

// scan is the set of entries that a claim considers, in order of cost.
type scan int

const (
	nearScan   scan = iota // the first eligible entries after the last claim
	frontScan              // the first eligible entries of all
	behindScan             // all entries after the last claim, also behind those that wait
	fullScan               // all entries, also behind those that wait
	noScan                 // a pause
)

// near reports whether s considers only the first eligible entries.
func (s scan) near() bool { return s <= frontScan }

// fromFront reports whether s begins at the first entry.
func (s scan) fromFront() bool { return s == frontScan || s == fullScan }

// scanner chooses the scans of a relay and the pauses between them. It reads
// no clock and does no I/O.
//
//   - A near scan comes first. While it finds nothing, wider scans follow, and
//     then a pause.
//   - While near scans find entries, a front scan is due every frontEvery, and a
//     full scan every poll.
//   - A scan behind waiting entries can take long. If it finds little, a backoff in
//     proportion to its duration follows.
//   - Suspects are claimed one at a time. Suspects at the front get as much time as
//     other entries had since the last front scan, at most suspectsMax.
type scanner struct {
	poll          time.Duration // the longest pause, and the interval between full scans
	pause         pauses.Doubling
	at            scan                  // the current scan
	after         int64                 // near scans begin after this Seq; zero: no claim yet
	front         time.Time             // when a front scan is due
	full          time.Time             // when a full scan is due
	suspectsUntil time.Time             // suspects at the front may be claimed until then
	backoff       [noScan + 1]time.Time // when each scan may run again
}

func newScanner(now time.Time, poll time.Duration) *scanner {
	return &scanner{poll: poll, pause: pauses.Doubling{First: pauseMin, Longest: poll}, at: frontScan, front: now, full: now.Add(poll), suspectsUntil: now}
}

// next returns the scan to run now, or noScan and the pause before the next call.
func (s *scanner) next(now time.Time) (scan, time.Duration) {
	switch {
	case s.fullDue(now):
		s.at = fullScan
	case s.at == nearScan && (s.after == 0 || !now.Before(s.front)):
		s.at, s.suspectsUntil = frontScan, now.Add(min(now.Sub(s.front)+frontEvery, suspectsMax))
	case s.at == behindScan && s.after == 0:
		s.at = fullScan
	}
	left := s.backoff[s.at].Sub(now)
	if s.at != noScan && left <= 0 {
		return s.at, 0
	}
	return noScan, s.wait(left)
}

// wait returns the length of a pause, doubles the next one, and chooses the scan
// that follows. left is the rest of the backoff of the current scan.
func (s *scanner) wait(left time.Duration) time.Duration {
	d := s.pause.Next()
	switch {
	case s.at == noScan:
		s.at = fullScan
	case left <= d:
		return left
	default:
		s.at = nearScan
	}
	return d
}

// wake makes a near scan the next one, because entries were added.
func (s *scanner) wake() { s.at = nearScan }

// scanned records that the current scan ran from begin to end, and found this
// number of entries, at most limit.
func (s *scanner) scanned(begin, end time.Time, found, limit int) {
	if s.at.fromFront() {
		s.front = end.Add(frontEvery)
	}
	cost := min(backoffFactor*end.Sub(begin), backoffMax)
	switch s.at {
	case behindScan: // the more it finds, the sooner it continues
		s.backoff[s.at] = end.Add(cost * time.Duration(max(0, limit-found)) / time.Duration(limit))
	case fullScan: // near scans continue behind the entries that it finds
		s.backoff[s.at] = end.Add(cost)
		s.full = end.Add(s.poll)
	}
}

func (s *scanner) claimed(last int64) { s.after = max(s.after, nearAfter(last)) }

// nearAfter is where a near scan begins after a claim that ended with last.
func nearAfter(last int64) int64 { return max(1, last-nearOverlap) }

// mayClaimAhead reports whether no other scan is due before the next near scan.
func (s *scanner) mayClaimAhead(now time.Time) bool { return now.Before(s.front) && !s.fullDue(now) }

func (s *scanner) fullDue(now time.Time) bool {
	return !now.Before(s.full) && !now.Before(s.backoff[fullScan])
}

// handled records that all entries of the current scan were published. found is
// whether there were any, and suspect whether the first one was suspect.
func (s *scanner) handled(now time.Time, found, suspect bool) {
	if !found {
		s.at++
		return
	}
	s.pause.Reset()
	if suspect && s.at == frontScan {
		if now.Before(s.suspectsUntil) {
			return // the next suspect
		}
		s.front = now.Add(frontEvery)
	}
	s.at = nearScan
}
