package memory

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

func (s *state) checkpointKey(projector string) string {
	return pair(projector, strconv.Itoa(s.generation(projector)))
}

func (s *state) checkpoint(projector string) provider.Checkpoint {
	c, _ := s.checkpoints.get(s.checkpointKey(projector))
	return c
}

func (s *state) setCheckpoint(projector string, c provider.Checkpoint) {
	s.checkpoints = s.checkpoints.put(s.checkpointKey(projector), c)
}

// Checkpoint implements provider.Progress.
func (db *Provider) Checkpoint(ctx context.Context, projector string) (provider.Checkpoint, error) {
	if err := provider.CheckStorable("projector", projector); err != nil {
		return provider.Checkpoint{}, fmt.Errorf("read the checkpoint: %w", err)
	}
	return query(ctx, db, "read the checkpoint", func(s *state, _ time.Time) provider.Checkpoint {
		c := s.checkpoint(projector)
		c.Handlers = slices.Clone(c.Handlers)
		return c
	})
}

// SetCheckpoint implements provider.Progress. No unit is open while it has the write lock.
func (db *Provider) SetCheckpoint(ctx context.Context, projector string, from, to provider.Checkpoint) (bool, error) {
	if err := provider.CheckSetCheckpoint(projector, to); err != nil {
		return false, fmt.Errorf("set the checkpoint: %w", err)
	}
	return update(ctx, db, "set the checkpoint", func(s *state, _ time.Time) bool {
		is := s.checkpoint(projector)
		if is.Place.Position != from.Place.Position || is.Mode != from.Mode || is.Token != from.Token {
			return false
		}
		to.Handlers = slices.Clone(to.Handlers)
		s.setCheckpoint(projector, to)
		return true
	})
}

// Unapplied implements provider.Progress.
func (db *Provider) Unapplied(ctx context.Context, projector string, messages []provider.Message) ([]bool, error) {
	if err := provider.CheckUnapplied(projector, messages); err != nil {
		return nil, fmt.Errorf("look up markers: %w", err)
	}
	return query(ctx, db, "look up markers", func(s *state, _ time.Time) []bool {
		generation, c := s.generation(projector), s.checkpoint(projector)
		unapplied := make([]bool, len(messages))
		for i, m := range messages {
			if m.Position > 0 && m.Position <= c.Place.Position {
				continue
			}
			marked := func(h provider.Handler) bool {
				return slices.ContainsFunc(h.Names(), func(name string) bool {
					return s.markers.has(markerKey(provider.Marker{Handler: name, MessageID: m.ID}, generation))
				})
			}
			unapplied[i] = slices.ContainsFunc(m.Handlers, func(h provider.Handler) bool { return !marked(h) })
		}
		return unapplied
	})
}

// PruneApplied implements provider.Progress.
func (db *Provider) PruneApplied(ctx context.Context, projector string, handlers []string, limit int) (int, error) {
	if err := provider.CheckPrune(projector, handlers); err != nil {
		return 0, fmt.Errorf("prune applied: %w", err)
	}
	return update(ctx, db, "prune applied", func(s *state, _ time.Time) (n int) {
		live, c := pair(strconv.Itoa(s.generation(projector)), ""), s.checkpoint(projector)
		for _, handler := range handlers {
			for key, m := range under(s.markers, handler) {
				isLive := strings.HasPrefix(key[len(pair(handler, "")):], live)
				if isLive && m.position > 0 && m.position <= c.Place.Position && n < limit {
					s.markers = s.markers.drop(key)
					n++
				}
			}
		}
		return n
	})
}

// lease is a lease on a name.
type lease struct {
	token claim.Token
	until time.Time
}

// AcquireLease implements claim.Leases.
func (db *Provider) AcquireLease(ctx context.Context, name string, t claim.Terms) (bool, error) {
	if err := provider.CheckStorable("name", name); err != nil {
		return false, fmt.Errorf("acquire a lease: %w", err)
	}
	return update(ctx, db, "acquire a lease", func(s *state, now time.Time) bool {
		if l, ok := s.leases.get(name); ok && l.token != t.Token && l.until.After(now) {
			return false
		}
		s.leases = s.leases.put(name, lease{t.Token, now.Add(t.Lease)})
		return true
	})
}

// ReleaseLease implements claim.Leases.
func (db *Provider) ReleaseLease(ctx context.Context, name string, token claim.Token) error {
	if err := provider.CheckStorable("name", name); err != nil {
		return fmt.Errorf("release a lease: %w", err)
	}
	_, err := update(ctx, db, "release a lease", func(s *state, _ time.Time) bool {
		if l, _ := s.leases.get(name); l.token == token {
			s.leases = s.leases.drop(name)
		}
		return true
	})
	return err
}
