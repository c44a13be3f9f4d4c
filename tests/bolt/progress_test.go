package bolt

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

func (s *session) checkpoint(b provider.Build) provider.Checkpoint {
	c, _ := checkpoints.get(s, buildKey(b))
	c.Generation = b.Number()
	return c
}

func (db *DB) Checkpoint(ctx context.Context, b provider.Build) (provider.Checkpoint, error) {
	return query(ctx, db, "read the checkpoint", provider.CheckStorable("projector", b.Projector), func(s *session) provider.Checkpoint { return s.checkpoint(s.build(b)) })
}

func (db *DB) SetCheckpoint(ctx context.Context, b provider.Build, from, to provider.Checkpoint) (bool, error) {
	return update(ctx, db, "set the checkpoint", provider.CheckSetCheckpoint(b.Projector, to), func(s *session) (bool, error) {
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
		to.Restored, to.Restoring, to.Lost = false, false, 0
		checkpoints.put(s, buildKey(b), to)
		return true, nil
	})
}

func (db *DB) TakeSegment(ctx context.Context, b provider.Build, number int, token claim.Token) (was provider.Segment, ok bool, err error) {
	ok, err = update(ctx, db, "take a segment", provider.CheckStorable("projector", b.Projector), func(s *session) (bool, error) {
		b := s.build(b)
		c := s.checkpoint(b)
		if was, ok = c.TakeSegment(number, token); ok {
			checkpoints.put(s, buildKey(b), c)
		}
		return ok, nil
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

func (db *DB) SetGeneration(ctx context.Context, all ...provider.Generation) (bool, error) {
	return update(ctx, db, "set a generation", provider.CheckGeneration(all...), func(s *session) (bool, error) {
		if !provider.CanSet(s.generationsOf(all[0].Projector), all...) {
			return false, nil
		}
		for _, g := range all {
			s.setGeneration(g)
		}
		return true, nil
	})
}

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

func markerKey(m provider.Marker, b provider.Build) []byte {
	return key(m.Handler, b.Number(), m.MessageID)
}

func generationOf(k []byte) int {
	_, rest := text(k)
	return int(number(rest[:8]))
}

func (db *DB) Outcomes(ctx context.Context, questions []provider.Question) ([]provider.Outcome, error) {
	return query(ctx, db, "look up outcomes", provider.CheckQuestions(questions), func(s *session) []provider.Outcome {
		outcomes := make([]provider.Outcome, len(questions))
		for i := range questions {
			outcomes[i] = s.outcome(&questions[i])
		}
		return outcomes
	})
}

func (s *session) outcome(q *provider.Question) provider.Outcome {
	b := s.build(provider.Build{Projector: q.Projector(), Generation: q.Generation})
	f := provider.Facts{
		Checkpoint: s.checkpoint(b),
		Marked: func(handler string) bool {
			return markers.has(s, markerKey(provider.Marker{Handler: handler, MessageID: q.MessageID}, b))
		},
		Pruned: func(handler string) time.Time {
			to, _ := lowWater.get(s, key(handler))
			return to
		},
	}
	if seq, ok := parkedIDs.get(s, key(b.Projector, b.Number(), q.MessageID)); ok {
		p, _ := parked.get(s, key(seq))
		if f.Parked, f.First = &p, &p; p.State.IsOpen() {
			f.First = &s.front(b, p.Lane, 1)[0]
		}
	}
	return q.Outcome(f)
}

type old struct {
	key []byte
	at  time.Time
}

func oldest(rows []old, limit int) []old {
	slices.SortStableFunc(rows, func(a, b old) int { return a.at.Compare(b.at) })
	return rows[:min(limit, len(rows))]
}

// Prune raises the low-water mark of a handler to the time of the
// youngest marker that it deletes.
func (db *DB) Prune(ctx context.Context, projector string, handlers []string, window time.Duration, limit int) (int, error) {
	return update(ctx, db, "prune", provider.CheckPrune(projector, handlers), func(s *session) (n int, err error) {
		before := s.now.Add(-window)
		var resolved []old
		for k, p := range parked.under(s, nil) {
			if p.Projector == projector && !p.State.IsOpen() && p.ResolvedAt.Before(before) {
				resolved = append(resolved, old{k, p.ResolvedAt})
			}
		}
		for _, row := range oldest(resolved, limit) {
			if p, _ := parked.get(s, row.key); p.State == provider.StateSkipped {
				parkedIDs.drop(s, idKey(&p))
			}
			parked.drop(s, row.key)
			n++
		}
		for _, handler := range handlers {
			var marked []old
			for k, m := range markers.under(s, key(handler)) {
				isForLog := m.Position > 0 && checkpoints.has(s, key(projector, generationOf(k)))
				if m.At.Before(before) && !isForLog {
					marked = append(marked, old{k, m.At})
				}
			}
			for _, row := range oldest(marked, limit) {
				markers.drop(s, row.key)
				if to, _ := lowWater.get(s, key(handler)); row.at.After(to) {
					lowWater.put(s, key(handler), row.at)
				}
				n++
			}
		}
		return n, nil
	})
}

func (s *session) dropMarkers(handlers []string, limit int, is func(k []byte, m marker) bool) (n int) {
	for _, handler := range handlers {
		for k, m := range markers.under(s, key(handler)) {
			if n >= limit {
				return n
			}
			if is(k, m) {
				markers.drop(s, k)
				n++
			}
		}
	}
	return n
}

func (db *DB) MarkedHandlers(ctx context.Context) ([]string, error) {
	return query(ctx, db, "list handlers with markers", nil, func(s *session) (names []string) {
		for k := range markers.under(s, nil) {
			name, _ := text(k)
			names = append(names, name)
		}
		slices.Sort(names)
		return slices.Compact(names)
	})
}

func (db *DB) DropMarkers(ctx context.Context, handler string, limit int) (int, error) {
	return update(ctx, db, "drop markers", provider.CheckStorable("handler", handler), func(s *session) (int, error) {
		return s.dropMarkers([]string{handler}, limit, func([]byte, marker) bool { return true }), nil
	})
}

func (db *DB) AcquireLease(ctx context.Context, name string, t claim.Terms) (bool, error) {
	return update(ctx, db, "acquire a lease", provider.CheckStorable("name", name), func(s *session) (bool, error) {
		if l, ok := leases.get(s, []byte(name)); ok && l.Token != t.Token && l.Until.After(s.now) {
			return false, nil
		}
		for k, l := range leases.under(s, nil) {
			if l.Until.Before(s.now.Add(-time.Hour)) {
				leases.drop(s, k)
			}
		}
		leases.put(s, []byte(name), lease{t.Token, s.now.Add(t.Lease)})
		return true, nil
	})
}

func (db *DB) LeaseNames(ctx context.Context, prefix string) ([]string, error) {
	return query(ctx, db, "list leases", provider.CheckStorable("prefix", prefix), func(s *session) (names []string) {
		for k, l := range leases.under(s, []byte(prefix)) {
			if l.Until.After(s.now) {
				names = append(names, string(k))
			}
		}
		return names
	})
}

func (db *DB) ReleaseLease(ctx context.Context, name string, token claim.Token) error {
	return db.write(ctx, "release a lease", provider.CheckStorable("name", name), func(s *session) error {
		if l, _ := leases.get(s, []byte(name)); l.Token == token {
			leases.drop(s, []byte(name))
		}
		return nil
	})
}

func (db *DB) Unlogged(ctx context.Context, b provider.Build, handler, after string, limit int) ([]string, error) {
	return query(ctx, db, "look up markers", provider.CheckPrune(b.Projector, []string{handler}), func(s *session) (ids []string) {
		prefix := key(handler, b.Number())
		for k, m := range markers.under(s, prefix) {
			if id := string(k[len(prefix)+4:]); m.Position == 0 && id > after {
				ids = append(ids, id)
			}
		}
		slices.Sort(ids)
		return ids[:min(len(ids), limit)]
	})
}

func (db *DB) ClearGeneration(ctx context.Context, b provider.Build, handlers []string, tables []provider.TablePair, limit int) (int, error) {
	return update(ctx, db, "clear a generation", provider.CheckClear(b.Projector, handlers, tables), func(s *session) (int, error) {
		if g, _ := generations.get(s, buildKey(b)); g.State != provider.GenerationRetired {
			return 0, fmt.Errorf("%w: generation %s is not retired: retire it first", provider.ErrInput, b)
		}
		limit := max(limit, 1)
		n := s.dropMarkers(handlers, limit, func(k []byte, _ marker) bool { return generationOf(k) == b.Number() })
		for k, p := range parked.under(s, nil) {
			if n >= limit {
				break
			}
			if p.Projector == b.Projector && p.Generation == b.Number() {
				parked.drop(s, k)
				parkedIDs.drop(s, idKey(&p))
				lanes.drop(s, laneKey(&p))
				n++
			}
		}
		return n, nil
	})
}
