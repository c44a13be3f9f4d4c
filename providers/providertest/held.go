package providertest

import (
	"time"
)

// hold holds what waits for an hour or longer, and ends the case where that is not so many.
func (s *stage) hold(want int) {
	s.Helper()
	n, err := s.db.HoldEntries(s.ctx, time.Hour, 10_000)
	s.ok(err, "hold entries")
	same(s, "entries held", n, want)
}
