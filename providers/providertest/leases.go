package providertest

import (
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/claim"
)

var leaseCases = []testCase{
	{
		// Promise: G7.7
		name: "a lease is of one token", play: leaseOfOne,
		rule: "AcquireLease returns false if another token has a lease that has not ended. If the token has the lease already, it is extended",
	},
	{
		name: "a lease ends", play: leaseEnds,
		rule: "A lease ends t.Lease after it was last acquired, on the store's clock",
	},
	{
		name: "a lease is released", play: leaseReleased,
		rule: "ReleaseLease ends the lease of a token. It changes nothing if the token does not have it",
	},
	{
		// Promise: G7.7
		name: "leases at once", play: leasesAtOnce,
		rule: "At most one token has a name at a time",
	},
	{
		name: "names of leases", play: leaseNames,
		rule: "LeaseNames returns the names, in order of their bytes, that begin with prefix and that a token has a lease on",
	},
	{
		name: "a new handle knows the leases", unless: Volatile, play: newHandleKnowsLeases,
		rule: "Leases are of the store: another process is refused too",
	},
}

// oldLeaseCases see the leases that have ended in the survey.
var oldLeaseCases = []testCase{
	{
		name: "old leases are deleted", play: oldLeases,
		rule: "AcquireLease deletes the leases on other names that ended more than an hour ago",
	},
}

// terms returns terms with a new token.
func terms(lease time.Duration) claim.Terms {
	return claim.Terms{Holder: `o'hara "日本"`, Token: claim.NewToken(), Lease: lease, Limit: 1}
}

// leased acquires the lease on a name, and fails the case unless the result is this.
func (s *stage) leased(what, name string, t claim.Terms, want bool) {
	s.Helper()
	ok, err := s.db.AcquireLease(s.ctx, s.name+name, t)
	s.ok(err, "acquire a lease")
	same(s, "lease "+what, ok, want)
}

func (s *stage) release(name string, t claim.Terms) {
	s.Helper()
	s.ok(s.db.ReleaseLease(s.ctx, s.name+name, t.Token), "release a lease")
}

func leaseOfOne(s *stage) {
	one, two := terms(time.Hour), terms(time.Hour)
	s.leased("of a free name", "", one, true)
	s.leased("of another token", "", two, false)
	s.leased("of another token, again", "", two, false)
	s.leased("of the same token", "", one, true)
	s.leased("on another name", "x", two, true)
	s.leased("on another name", "X", one, true)
	s.leased("on that name", "x", one, false)
}

func oldLeases(s *stage) {
	names := func() (names []string) {
		all, err := s.operations().Survey(s.ctx, 1000)
		s.ok(err, "survey")
		for _, l := range all.Leases { // other cases have leases too
			if name, mine := strings.CutPrefix(l.Name, s.name+"/"); mine {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		return names
	}
	killed := terms(time.Minute)
	for _, name := range []string{"/killed/a", "/killed/b", "/back"} {
		s.leased("of a process that is killed", name, killed, true)
	}
	s.advance(50 * time.Minute)
	long := terms(3 * time.Hour)
	s.leased("that lives", "/long", long, true)
	s.advance(20 * time.Minute)
	s.leased("that lives", "/long", long, true)
	s.advance(10 * time.Minute)
	s.leased("of a process that comes back", "/back", terms(time.Hour), true)
	s.leased("that ended lately", "/late", terms(time.Minute), true)
	s.advance(50 * time.Minute)
	s.leased("of another process", "/other", terms(time.Minute), true)
	same(s, "leases", names(), []string{"back", "late", "long", "other"})
}

func leaseEnds(s *stage) {
	one, two := terms(time.Hour), terms(3*time.Hour)
	s.leased("of a free name", "", one, true)
	s.advance(50 * time.Minute)
	s.leased("within the lease", "", two, false)
	s.leased("of the same token", "", one, true) // from now on
	s.advance(50 * time.Minute)
	s.leased("within the extended lease", "", two, false)
	s.advance(20 * time.Minute)
	s.leased("after the lease", "", two, true)
	s.leased("of the token whose lease ended", "", one, false)
	s.advance(2 * time.Hour)
	s.leased("within a longer lease", "", one, false)
	s.advance(2 * time.Hour)
	s.leased("after it", "", one, true)
	s.advance(2 * time.Hour)
	s.leased("of the same token, after its end", "", one, true)
	s.leased("of another token", "", two, false)
	short := one
	short.Lease = time.Minute
	s.leased("of the same token, shorter", "", short, true)
	s.advance(5 * time.Minute)
	s.leased("after the shorter one", "", two, true)
}

func leaseReleased(s *stage) {
	one, two := terms(time.Hour), terms(time.Hour)
	s.release("", one)
	s.leased("of a free name", "", one, true)
	s.release("", two)
	s.leased("after another token was released", "", two, false)
	s.release("x", one)
	s.leased("after another name was released", "", two, false)
	s.release("", one)
	s.leased("after a release", "", two, true)
	s.release("", one)
	s.leased("after a late release", "", one, false)
	s.release("", two)
	s.release("", two)
	s.leased("after the second release", "", one, true)
}

func leasesAtOnce(s *stage) {
	const n = 12
	for range 3 {
		all, won, errs := make([]claim.Terms, n), make([]bool, n), make([]error, n)
		for i := range all {
			all[i] = terms(time.Hour)
		}
		together(n, func(i int) {
			for range 3 {
				var ok bool
				ok, errs[i] = s.db.AcquireLease(s.ctx, s.name, all[i])
				won[i] = won[i] || ok
				errs[i] = errors.Join(errs[i], s.db.ReleaseLease(s.ctx, s.name, claim.NewToken()))
			}
		})
		s.ok(errors.Join(errs...), "acquire at once")
		winners := 0
		for i := range won {
			if won[i] {
				winners++
				s.release("", all[i])
			}
		}
		same(s, "tokens with the lease", winners, 1)
	}
}

func newHandleKnowsLeases(s *stage) {
	one, two := terms(time.Hour), terms(time.Hour)
	s.leased("of a free name", "", one, true)
	later := s.reopen()
	later.leased("through a new handle", "", two, false)
	s.advance(2 * time.Hour)
	later.leased("after its end", "", two, true)
	s.leased("of the first handle", "", one, false)
}

func leaseNames(s *stage) {
	one, two, short := terms(2*time.Hour), terms(2*time.Hour), terms(30*time.Minute)
	for name, t := range map[string]claim.Terms{"a/2": one, "a/10": two, "a/B": two, "b/1": one, "a": one, "a/short": short, "A/2": one, "a%": one} {
		s.leased("on "+name, name, t, true)
	}
	names := func(what, prefix string, want ...string) {
		s.Helper()
		got, err := s.db.LeaseNames(s.ctx, s.name+prefix)
		s.ok(err, "list leases")
		for i := range want {
			want[i] = s.name + want[i]
		}
		same(s, what, append([]string{}, got...), append([]string{}, want...))
	}
	names("all of a prefix", "a/", "a/10", "a/2", "a/B", "a/short")
	names("names that have a wildcard", "a%", "a%")
	names("no names", "a_")
	s.advance(time.Hour)
	names("after the end of one", "a/", "a/10", "a/2", "a/B")
	s.release("a/2", one)
	names("after a release", "a/", "a/10", "a/B")
}
