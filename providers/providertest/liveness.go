package providertest

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
)

var livenessCases = []testCase{
	{
		name: "leases", play: leases,
		rule: "Beat records that runner is alive until lease from now. Health.Crashed is the end of the last lease that did not end well; zero if there is none",
	},
	{
		name: "a runner that ends", play: runnerEnds,
		rule: "Beat with a lease of zero: the runner ended well. Its record and its messages in flight are deleted",
	},
	{
		name: "runners are forgotten", play: runnersExpire,
		rule: "Other runners are deleted, with their messages in flight, when their lease ended longer than record ago",
	},
	{
		name: "names are replaced", play: inFlightReplaced,
		rule: "InFlight records the messages that w is about to run, in place of its earlier ones",
	},
	{
		name: "the store's clock", play: storesClock,
		rule: "Health.Now and Health.Crashed are on the store's clock",
	},
	{
		name: "beats and names at once", play: beatsAtOnce,
		rule: "Runners and workers may call Beat and InFlight concurrently",
	},
	{
		name: "leases and names outlive the process", unless: Volatile, play: livenessOutlives,
		rule: "Leases and messages in flight are never lost in a crash of a runner",
	},
}

// beat renews a lease, and fails the case unless Health reports a crash or none, as expected.
func (s *stage) beat(runner string, lease, record time.Duration, crashed bool) provider.Health {
	s.Helper()
	h, err := s.db.Beat(s.ctx, runner, lease, record)
	s.ok(err, "beat")
	same(s, "a runner has crashed", !h.Crashed.IsZero(), crashed)
	return h
}

// expireRunners ends the leases of earlier cases.
func (s *stage) expireRunners() {
	s.Helper()
	s.advance(1000 * day)
	s.beat("expires others", time.Hour, time.Millisecond, false)
	s.beat("expires others", 0, day, false)
}

const day = 24 * time.Hour

func leases(s *stage) {
	s.expireRunners()
	s.beat("one", time.Hour, day, false)
	s.beat("two", 3*time.Hour, day, false)
	s.advance(50 * time.Minute)
	s.beat("one", time.Hour, day, false) // from now
	s.advance(50 * time.Minute)
	s.beat("two", 3*time.Hour, day, false)
	s.advance(time.Hour) // the lease of one ended 50 minutes ago
	h := s.beat("two", 3*time.Hour, day, true)
	ago := h.Now.Sub(h.Crashed)
	s.require(ago > 40*time.Minute && ago < time.Hour, "the lease ended at %v, 50 minutes before %v", h.Crashed, h.Now)
	s.beat("three", time.Minute, day, true)
	s.advance(10 * time.Minute)
	last := s.beat("two", 3*time.Hour, day, true)
	ago = last.Now.Sub(last.Crashed)
	s.require(ago > 5*time.Minute && ago < 10*time.Minute+patience.Limit(), "the last lease ended at %v, nine minutes before %v", last.Crashed, last.Now)
	// three was slow, but had not crashed; one still has
	s.beat("three", time.Hour, day, true)
	s.beat("one", time.Hour, day, false)
}

func runnerEnds(s *stage) {
	s.expireRunners()
	s.beat("one", time.Hour, day, false)
	s.beat("two", time.Hour, day, false)
	for n := range 2 {
		s.inFlight(provider.Worker{Runner: "one", Number: n}, fmt.Sprint("m-", n))
		s.inFlight(provider.Worker{Runner: "two", Number: n}, fmt.Sprint("m-", 8+n))
	}
	s.beat("one", 0, day, false)
	s.isSuspect("after one has ended", []string{"m-0", "m-1", "m-8", "m-9"}, false, false, true, true)
	s.advance(2 * time.Hour)
	s.beat("three", time.Hour, day, true) // two crashed
	s.beat("two", 0, day, false)
	s.beat("three", time.Hour, day, false)
	s.beat("never", 0, day, false)
	s.isSuspect("after all have ended", []string{"m-0", "m-8", "m-9"}, false, false, false)
}

func runnersExpire(s *stage) {
	s.expireRunners()
	s.beat("one", time.Hour, day, false)
	s.beat("two", 20*time.Hour, day, false)
	s.beat("three", 100*time.Hour, day, false)
	for _, runner := range []string{"one", "two", "three"} {
		s.inFlight(provider.Worker{Runner: runner}, "m-"+runner)
	}
	ids := []string{"m-one", "m-two", "m-three"}
	s.advance(24 * time.Hour)
	s.beat("four", time.Hour, day, true) // one ended 23 hours ago, two 4
	s.isSuspect("within the record", ids, true, true, true)
	s.advance(2 * time.Hour)
	h := s.beat("four", time.Hour, day, true)
	ago := h.Now.Sub(h.Crashed)
	s.require(ago > 5*time.Hour && ago < 7*time.Hour, "the last lease ended at %v, six hours before %v", h.Crashed, h.Now)
	s.isSuspect("after the record of one", ids, false, true, true)
	s.beat("four", time.Hour, 2*time.Hour, false)
	s.isSuspect("after a shorter record", ids, false, false, true)
	s.beat("four", time.Hour, day, false)
}

func inFlightReplaced(s *stage) {
	w, other := provider.Worker{Runner: "one", Number: 1}, provider.Worker{Runner: "one", Number: 2}
	ids := []string{"m-1", "m-2", "m-3"}
	s.inFlight(w, "m-1", "m-2")
	s.inFlight(other, "m-2")
	s.isSuspect("at first", ids, true, true, false)
	s.inFlight(w, "m-2", "m-3")
	s.isSuspect("after others are in flight", ids, false, true, true)
	s.inFlight(w, "m-3")
	s.inFlight(w, "m-3")
	s.isSuspect("with the other worker", ids, false, true, true)
	s.inFlight(other)
	s.isSuspect("after the other has none", ids, false, false, true)
	s.inFlight(w)
	s.isSuspect("after both have none", ids, false, false, false)
	many := make([]string, 500)
	for i := range many {
		many[i] = newID()
	}
	s.inFlight(w, many...)
	s.isSuspect("of many", []string{many[0], many[499], "m-1"}, true, true, false)
}

func storesClock(s *stage) {
	s.expireRunners()
	first := s.beat("one", 20*time.Minute, day, false)
	row := s.park(0, s.failed("m-1", ""))[0]
	second := s.beat("two", time.Hour, day, false)
	s.require(!row.At.Before(first.Now.Add(-time.Second)) && !row.At.After(second.Now.Add(time.Second)), "%v, when it was parked, is between %v and %v", row.At, first.Now, second.Now)
	s.require(first.Now.Location() == time.UTC, "%v is in UTC", first.Now)
	s.advance(30 * time.Minute)
	h := s.beat("two", time.Hour, day, true)
	s.require(h.Crashed.Before(h.Now) && h.Crashed.Location() == time.UTC, "the lease ended at %v, before %v", h.Crashed, h.Now)
}

func beatsAtOnce(s *stage) {
	s.expireRunners()
	const n = 20
	errs := make([]error, n)
	together(n, func(i int) {
		runner := fmt.Sprint("runner ", i%5)
		for range 5 {
			_, err := s.db.Beat(s.ctx, runner, time.Hour, day)
			errs[i] = errors.Join(errs[i], err, s.db.InFlight(s.ctx, s.build(), provider.Worker{Runner: runner, Number: i / 5}, []string{"m-1", fmt.Sprint("n-", i)}))
		}
	})
	s.ok(errors.Join(errs...), "beat and record at once")
	s.isSuspect("recorded at once", []string{"m-1", "n-0", fmt.Sprint("n-", n-1)}, true, true, true)
	together(n, func(i int) {
		_, errs[i] = s.db.Beat(s.ctx, fmt.Sprint("runner ", i%5), 0, day)
	})
	s.ok(errors.Join(errs...), "end at once")
	s.isSuspect("after all have ended", []string{"m-1", "n-0"}, slices.Repeat([]bool{false}, 2)...)
}

func livenessOutlives(s *stage) {
	s.expireRunners()
	s.beat("one", time.Minute, day, false)
	s.inFlight(provider.Worker{Runner: "one"}, "m-1")
	later := s.reopen()
	later.isSuspect("through a new handle", []string{"m-1"}, true)
	s.advance(time.Hour)
	later.beat("two", time.Minute, day, true)
}
