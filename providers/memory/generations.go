package memory

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kinora-go/kinora/provider"
)

func buildKey(b provider.Build) string { return pair(b.Projector, strconv.Itoa(b.Number())) }

// build returns b, with the live generation of its projector if its number is zero.
func (s *state) build(b provider.Build) provider.Build {
	if b.Generation == 0 {
		b.Generation = provider.LiveGeneration(s.generationsOf(b.Projector))
	}
	return b
}

func (s *state) generationsOf(projector string) (all []provider.Generation) {
	for _, g := range under(s.generations, projector) {
		all = append(all, g)
	}
	return all
}

// Generations implements provider.Builds.
func (db *Provider) Generations(ctx context.Context, projector string) ([]provider.Generation, error) {
	return query(ctx, db, "list generations", provider.CheckStorable("projector", projector), func(s *state, _ time.Time) (all []provider.Generation) {
		for _, g := range s.generations.from("") {
			if projector == "" || g.Projector == projector {
				g.Data = bytes.Clone(g.Data)
				all = append(all, g)
			}
		}
		slices.SortFunc(all, func(a, b provider.Generation) int {
			return cmp.Or(strings.Compare(a.Projector, b.Projector), cmp.Compare(a.Generation, b.Generation))
		})
		return all
	})
}

// SetGeneration implements provider.Builds.
func (db *Provider) SetGeneration(ctx context.Context, all ...provider.Generation) (bool, error) {
	return update(ctx, db, "set a generation", provider.CheckGeneration(all...), func(s *state, now time.Time) (bool, error) {
		if !provider.CanSet(s.generationsOf(all[0].Projector), all...) {
			return false, nil
		}
		for _, g := range all {
			s.setGeneration(g, now)
		}
		return true, nil
	})
}

// setGeneration stores g. Its revision was compared.
func (s *state) setGeneration(g provider.Generation, now time.Time) {
	key := buildKey(g.Build)
	was, _ := s.generations.get(key)
	g = g.Replaces(was, now)
	g.Data = bytes.Clone(g.Data)
	c, _ := s.checkpoints.get(key)
	if c, changes := c.Becomes(g.State); changes && g.State != was.State {
		s.checkpoints = s.checkpoints.put(key, c)
	}
	s.generations = s.generations.put(key, g)
}

// Unlogged implements provider.Builds.
func (db *Provider) Unlogged(ctx context.Context, b provider.Build, handler, after string, limit int) ([]string, error) {
	return query(ctx, db, "look up markers", provider.CheckPrune(b.Projector, []string{handler}), func(s *state, _ time.Time) (ids []string) {
		prefix := markerKey(provider.Marker{Handler: handler}, b)
		for key, m := range s.markersOf(b, []string{handler}) {
			if id := strings.TrimPrefix(key, prefix); m.position == 0 && id > after {
				ids = append(ids, id)
			}
		}
		slices.Sort(ids)
		return ids[:min(len(ids), limit)]
	})
}

// ClearGeneration implements provider.Builds.
func (db *Provider) ClearGeneration(ctx context.Context, b provider.Build, handlers []string, tables []provider.TablePair, limit int) (int, error) {
	invalid := provider.CheckClear(b.Projector, handlers, tables)
	return update(ctx, db, "clear a generation", invalid, func(s *state, _ time.Time) (n int, err error) {
		if g, _ := s.generations.get(buildKey(b)); g.State != provider.GenerationRetired {
			return 0, fmt.Errorf("%w: generation %s is not retired: retire it first", provider.ErrInput, b)
		}
		if n = s.clear(b, handlers, max(limit, 1)); n == 0 {
			for _, table := range tables {
				if s.tables = s.tables.drop(table.Table); s.shownBy(table.Other) == table.Table {
					s.views = s.views.drop(table.Other)
				}
			}
		}
		return n, nil
	})
}

// clear deletes at most limit markers and parked messages of a generation.
func (s *state) clear(b provider.Build, handlers []string, limit int) (n int) {
	for key := range s.markersOf(b, handlers) {
		if n < limit {
			s.markers = s.markers.drop(key)
			n++
		}
	}
	for seq, p := range s.parked.from(0) {
		if n < limit && buildOf(&p) == (provider.Build{Projector: b.Projector, Generation: b.Number()}) {
			s.parked = s.parked.drop(seq)
			s.parkedIDs = s.parkedIDs.drop(messageKey(&p))
			s.leaveLane(&p)
			n++
		}
	}
	return n
}
