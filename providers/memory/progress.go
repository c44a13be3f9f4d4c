package memory

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

// checkpoint returns the checkpoint of a generation. Only Generation is set if there is none.
func (s *state) checkpoint(b provider.Build) provider.Checkpoint {
	c, _ := s.checkpoints.get(buildKey(b))
	c.Generation = b.Number()
	return ownCheckpoint(c)
}

func (s *state) setCheckpoint(b provider.Build, c provider.Checkpoint) {
	s.checkpoints = s.checkpoints.put(buildKey(b), ownCheckpoint(c))
}

func ownCheckpoint(c provider.Checkpoint) provider.Checkpoint {
	c.Handlers, c.Splits, c.Segments = slices.Clone(c.Handlers), slices.Clone(c.Splits), slices.Clone(c.Segments)
	return c
}

// TakeSegment implements provider.Progress.
func (db *Provider) TakeSegment(ctx context.Context, b provider.Build, number int, token claim.Token) (was provider.Segment, ok bool, err error) {
	ok, err = update(ctx, db, "take a segment", provider.CheckStorable("projector", b.Projector), func(s *state, _ time.Time) (bool, error) {
		b := s.build(b)
		c := s.checkpoint(b)
		if was, ok = c.TakeSegment(number, token); !ok {
			return false, nil
		}
		s.setCheckpoint(b, c)
		return true, nil
	})
	return was, ok, err
}

// Checkpoint implements provider.Progress.
func (db *Provider) Checkpoint(ctx context.Context, b provider.Build) (provider.Checkpoint, error) {
	return query(ctx, db, "read the checkpoint", provider.CheckStorable("projector", b.Projector), func(s *state, _ time.Time) provider.Checkpoint {
		return s.checkpoint(s.build(b))
	})
}

// SetCheckpoint implements provider.Progress. No unit is open while it has the write lock.
func (db *Provider) SetCheckpoint(ctx context.Context, b provider.Build, from, to provider.Checkpoint) (bool, error) {
	return update(ctx, db, "set the checkpoint", provider.CheckSetCheckpoint(b.Projector, to), func(s *state, _ time.Time) (bool, error) {
		b := s.build(b)
		is := s.checkpoint(b)
		if !provider.CanSetCheckpoint(is, from) {
			return false, nil
		}
		if provider.KeepsHandlers(from, to) {
			to.Handlers = is.Handlers
		}
		oldest := to.Oldest()
		to.Segments = slices.DeleteFunc(is.Segments, func(of provider.Segment) bool { return of.Number < oldest })
		s.setCheckpoint(b, to)
		return true, nil
	})
}

// Unapplied implements provider.Progress.
func (db *Provider) Unapplied(ctx context.Context, b provider.Build, messages []provider.Message) ([]bool, error) {
	return query(ctx, db, "look up markers", provider.CheckUnapplied(b.Projector, messages), func(s *state, _ time.Time) []bool {
		return s.unapplied(s.build(b), messages)
	})
}

func (s *state) unapplied(b provider.Build, messages []provider.Message) []bool {
	c := s.checkpoint(b)
	return c.Unapplied(messages, func(m provider.Marker) bool { return s.markers.has(markerKey(m, b)) })
}

// PruneApplied implements provider.Progress.
func (db *Provider) PruneApplied(ctx context.Context, b provider.Build, handlers []string, limit int) (int, error) {
	return update(ctx, db, "prune applied", provider.CheckPrune(b.Projector, handlers), func(s *state, _ time.Time) (n int, err error) {
		b := s.build(b)
		c := s.checkpoint(b)
		for key, m := range s.markersOf(b, handlers) {
			if m.position > 0 && m.position <= c.Place.Position && n < limit {
				s.markers = s.markers.drop(key)
				n++
			}
		}
		return n, nil
	})
}

// lease is a lease on a name.
type lease struct {
	token  claim.Token
	holder string
	until  time.Time
}

// AcquireLease implements provider.Leases.
func (db *Provider) AcquireLease(ctx context.Context, name string, t claim.Terms) (bool, error) {
	return update(ctx, db, "acquire a lease", provider.CheckStorable("name", name), func(s *state, now time.Time) (bool, error) {
		if l, ok := s.leases.get(name); ok && l.token != t.Token && l.until.After(now) {
			return false, nil
		}
		for other, l := range s.leases.from("") {
			if l.until.Before(now.Add(-time.Hour)) {
				s.leases = s.leases.drop(other)
			}
		}
		s.leases = s.leases.put(name, lease{t.Token, t.Holder, now.Add(t.Lease)})
		return true, nil
	})
}

// LeaseNames implements provider.Leases.
func (db *Provider) LeaseNames(ctx context.Context, prefix string) ([]string, error) {
	return query(ctx, db, "list leases", provider.CheckStorable("prefix", prefix), func(s *state, now time.Time) (names []string) {
		for name, l := range s.leases.from(prefix) {
			if !strings.HasPrefix(name, prefix) {
				break
			}
			if l.until.After(now) {
				names = append(names, name)
			}
		}
		return names
	})
}

// ReleaseLease implements provider.Leases.
func (db *Provider) ReleaseLease(ctx context.Context, name string, token claim.Token) error {
	_, err := update(ctx, db, "release a lease", provider.CheckStorable("name", name), func(s *state, _ time.Time) (bool, error) {
		if l, _ := s.leases.get(name); l.token == token {
			s.leases = s.leases.drop(name)
		}
		return true, nil
	})
	return err
}
