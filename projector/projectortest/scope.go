package projectortest

import "testing"

// scope is the test of one pass: its cleanups run at the end of the pass. So only the databases of one or
// two passes are open at a time.
type scope struct {
	testing.TB
	cleanups []func()
}

func newScope(t testing.TB) *scope {
	s := &scope{TB: t}
	t.Cleanup(s.end) // if the test ends early
	return s
}

// Cleanup implements testing.TB.
func (s *scope) Cleanup(f func()) { s.cleanups = append(s.cleanups, f) }

func (s *scope) end() {
	for len(s.cleanups) > 0 {
		last := s.cleanups[len(s.cleanups)-1]
		s.cleanups = s.cleanups[:len(s.cleanups)-1]
		last()
	}
}
