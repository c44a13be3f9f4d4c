package bolt

import (
	"cmp"
	"context"
	"slices"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

// checkpoint returns the checkpoint of a generation. Only Generation is set if there is none.
func (s *session) checkpoint(b provider.Build) provider.Checkpoint {
	c, _ := checkpoints.get(s, buildKey(b))
	c.Generation = b.Number()
	return c
}

// setSegment replaces a segment, or adds it.
func (s *session) setSegment(b provider.Build, to provider.Segment) {
	c := s.checkpoint(b)
	i, has := slices.BinarySearchFunc(c.Segments, to.Number, func(is provider.Segment, n int) int { return cmp.Compare(is.Number, n) })
	if !has {
		c.Segments = slices.Insert(c.Segments, i, to)
	}
	c.Segments[i] = to
	checkpoints.put(s, buildKey(b), c)
}

func (db *DB) Checkpoint(ctx context.Context, b provider.Build) (provider.Checkpoint, error) {
	return query(ctx, db, "read the checkpoint", provider.CheckStorable("projector", b.Projector), func(s *session) provider.Checkpoint { return s.checkpoint(s.build(b)) })
}

// No unit is open while SetCheckpoint writes.
func (db *DB) SetCheckpoint(ctx context.Context, b provider.Build, from, to provider.Checkpoint) (bool, error) {
	return update(ctx, db, "set the checkpoint", provider.CheckSetCheckpoint(b.Projector, to), func(s *session) (bool, error) {
		b := s.build(b)
		is := s.checkpoint(b)
		if is.Mode == provider.ModeEnded || is.Place.Position != from.Place.Position || is.Mode != from.Mode || is.Token != from.Token ||
			!slices.Equal(is.Splits, from.Splits) {
			return false, nil
		}
		oldest := to.Oldest()
		to.Segments = slices.DeleteFunc(is.Segments, func(of provider.Segment) bool { return of.Number < oldest })
		to.Restored, to.Restoring, to.Lost = false, false, 0
		checkpoints.put(s, buildKey(b), to)
		return true, nil
	})
}

func (db *DB) TakeSegment(ctx context.Context, b provider.Build, number int, token claim.Token) (was provider.Segment, ok bool, err error) {
	ok, err = update(ctx, db, "take a segment", provider.CheckStorable("projector", b.Projector), func(s *session) (bool, error) {
		b := s.build(b)
		c := s.checkpoint(b)
		if c.Mode != provider.ModeCatchUp || !c.Split().Has(number) {
			return false, nil
		}
		was = provider.Segment{Number: number, Place: c.Place}
		for _, is := range c.Segments {
			if is.Number == number {
				was = is
			}
		}
		s.setSegment(b, provider.Segment{Number: number, Place: was.Place, Token: token})
		return true, nil
	})
	return was, ok, err
}

func (db *DB) Unapplied(ctx context.Context, b provider.Build, messages []provider.Message) ([]bool, error) {
	return query(ctx, db, "look up markers", provider.CheckUnapplied(b.Projector, messages), func(s *session) []bool { return s.unapplied(s.build(b), messages) })
}

func (s *session) unapplied(b provider.Build, messages []provider.Message) []bool {
	c := s.checkpoint(b)
	unapplied := make([]bool, len(messages))
	for i, m := range messages {
		if m.Position > 0 && m.Position <= c.Place.Position {
			continue
		}
		unapplied[i] = slices.ContainsFunc(m.Handlers, func(h provider.Handler) bool {
			return !slices.ContainsFunc(h.Names(), func(name string) bool {
				return markers.has(s, markerKey(provider.Marker{Handler: name, MessageID: m.ID}, b))
			})
		})
	}
	return unapplied
}

func (db *DB) PruneApplied(ctx context.Context, b provider.Build, handlers []string, limit int) (int, error) {
	return update(ctx, db, "prune applied", provider.CheckPrune(b.Projector, handlers), func(s *session) (int, error) {
		b := s.build(b)
		c := s.checkpoint(b)
		return s.dropMarkers(handlers, limit, func(k []byte, m marker) bool {
			return generationOf(k) == b.Number() && m.Position > 0 && m.Position <= c.Place.Position
		}), nil
	})
}

// build returns b, with the live generation of its projector if its number is zero.
func (s *session) build(b provider.Build) provider.Build {
	if b.Generation == 0 {
		b.Generation = provider.LiveGeneration(s.generationsOf(b.Projector))
	}
	return b
}

// generationsOf returns the generations of a projector, or all.
func (s *session) generationsOf(projector string) (all []provider.Generation) {
	for _, g := range generations.under(s, nil) {
		if projector == "" || g.Projector == projector {
			all = append(all, g)
		}
	}
	slices.SortFunc(all, func(a, b provider.Generation) int {
		return cmp.Or(cmp.Compare(a.Projector, b.Projector), cmp.Compare(a.Generation, b.Generation))
	})
	return all
}

func (db *DB) Generations(ctx context.Context, projector string) ([]provider.Generation, error) {
	return query(ctx, db, "list generations", provider.CheckStorable("projector", projector), func(s *session) []provider.Generation { return s.generationsOf(projector) })
}

func (db *DB) SetGeneration(ctx context.Context, g provider.Generation) (bool, error) {
	return update(ctx, db, "set a generation", provider.CheckGeneration(g), func(s *session) (bool, error) {
		can := provider.CanSet(s.generationsOf(g.Projector), g)
		if can {
			s.setGeneration(g)
		}
		return can, nil
	})
}

// setGeneration stores g. Its revision was compared.
func (s *session) setGeneration(g provider.Generation) {
	k := buildKey(g.Build)
	was, _ := generations.get(s, k)
	g = g.Replaces(was, s.now)
	c, _ := checkpoints.get(s, k)
	if c, changes := c.Becomes(g.State); changes && g.State != was.State {
		checkpoints.put(s, k, c)
	}
	generations.put(s, k, g)
}
