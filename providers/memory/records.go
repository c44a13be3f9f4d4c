package memory

import (
	"cmp"
	"context"
	"iter"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// marker says when a marker was created, and the position of its message, or 0.
type marker struct {
	at       time.Time
	position int64
}

func markerKey(m provider.Marker, b provider.Build) string {
	return pair(m.Handler, pair(strconv.Itoa(b.Number()), m.MessageID))
}

// generationOf returns the generation in the key of a marker of handler.
func generationOf(key, handler string) string { return first(key[len(pair(handler, "")):]) }

// markersOf yields the markers of handlers in a generation.
func (s *state) markersOf(b provider.Build, handlers []string) iter.Seq2[string, marker] {
	return func(yield func(string, marker) bool) {
		for _, handler := range handlers {
			for key, m := range under(s.markers, handler) {
				if generationOf(key, handler) == strconv.Itoa(b.Number()) && !yield(key, m) {
					return
				}
			}
		}
	}
}

// mark inserts a marker, unless it exists.
func (s *state) mark(m provider.Marker, b provider.Build, as marker) (inserted bool) {
	key := markerKey(m, b)
	if s.markers.has(key) {
		return false
	}
	s.markers = s.markers.put(key, as)
	return true
}

// Outcomes implements provider.Records.
func (db *Provider) Outcomes(ctx context.Context, questions []provider.Question) ([]provider.Outcome, error) {
	return query(ctx, db, "look up outcomes", provider.CheckQuestions(questions), func(s *state, _ time.Time) []provider.Outcome {
		outcomes := make([]provider.Outcome, len(questions))
		for i := range questions {
			outcomes[i] = s.outcome(&questions[i])
		}
		return outcomes
	})
}

func (s *state) outcome(q *provider.Question) provider.Outcome {
	b := s.build(provider.Build{Projector: q.Projector(), Generation: q.Generation})
	f := provider.Facts{
		Checkpoint: s.checkpoint(b),
		Marked: func(handler string) bool {
			return s.markers.has(markerKey(provider.Marker{Handler: handler, MessageID: q.MessageID}, b))
		},
		Pruned: func(handler string) time.Time {
			to, _ := s.lowWater.get(handler)
			return to
		},
	}
	if seq, ok := s.parkedIDs.get(pair(buildKey(b), q.MessageID)); ok {
		p, _ := s.parked.get(seq)
		if f.Parked, f.First = &p, &p; p.State.IsOpen() {
			f.First = &s.front(laneKey(b, p.Lane), 1)[0]
		}
	}
	return q.Outcome(f)
}

// Prune implements provider.Records. The low-water mark rises to the youngest deleted marker.
func (db *Provider) Prune(ctx context.Context, projector string, handlers []string, window time.Duration, limit int) (int, error) {
	return update(ctx, db, "prune", provider.CheckPrune(projector, handlers), func(s *state, now time.Time) (n int, err error) {
		before, resolved := now.Add(-window), map[int64]time.Time{}
		for seq, p := range s.parked.from(0) {
			if p.Projector == projector && !p.State.IsOpen() && p.ResolvedAt.Before(before) {
				resolved[seq] = p.ResolvedAt
			}
		}
		for _, seq := range oldest(resolved, limit) {
			if p, _ := s.parked.get(seq); p.State == provider.StateSkipped {
				s.parkedIDs = s.parkedIDs.drop(messageKey(&p))
			}
			s.parked = s.parked.drop(seq)
			n++
		}
		for _, handler := range handlers {
			marked := map[string]time.Time{}
			for key, m := range under(s.markers, handler) {
				isForLog := m.position > 0 && s.checkpoints.has(pair(projector, generationOf(key, handler)))
				if m.at.Before(before) && !isForLog {
					marked[key] = m.at
				}
			}
			for _, key := range oldest(marked, limit) {
				s.markers = s.markers.drop(key)
				if mark, _ := s.lowWater.get(handler); marked[key].After(mark) {
					s.lowWater = s.lowWater.put(handler, marked[key])
				}
				n++
			}
		}
		return n, nil
	})
}

// oldest returns the keys of the oldest times, at most limit, the oldest first.
func oldest[K cmp.Ordered](times map[K]time.Time, limit int) []K {
	keys := slices.SortedFunc(maps.Keys(times), func(a, b K) int { return cmp.Or(times[a].Compare(times[b]), cmp.Compare(a, b)) })
	return keys[:min(limit, len(keys))]
}

// MarkedHandlers implements provider.MarkerMaintainer.
func (db *Provider) MarkedHandlers(ctx context.Context) ([]string, error) {
	return query(ctx, db, "list handlers with markers", nil, func(s *state, _ time.Time) []string {
		names := map[string]bool{}
		for key := range s.markers.from("") {
			names[first(key)] = true
		}
		return slices.Sorted(maps.Keys(names))
	})
}

// DropMarkers implements provider.MarkerMaintainer.
func (db *Provider) DropMarkers(ctx context.Context, handler string, limit int) (int, error) {
	return update(ctx, db, "drop markers", provider.CheckStorable("handler", handler), func(s *state, _ time.Time) (n int, err error) {
		for key := range under(s.markers, handler) {
			if n == limit {
				break
			}
			s.markers = s.markers.drop(key)
			n++
		}
		return n, nil
	})
}

func workerKey(w provider.Worker) string { return pair(w.Runner, strconv.Itoa(w.Number)) }

// Beat implements provider.Liveness.
func (db *Provider) Beat(ctx context.Context, runner string, lease, record time.Duration) (provider.Health, error) {
	return update(ctx, db, "renew the lease of a runner", nil, func(s *state, now time.Time) (provider.Health, error) {
		health := provider.Health{Now: now}
		s.runners = s.runners.put(runner, now.Add(lease))
		for other, ends := range s.runners.from("") {
			switch {
			case other == runner && lease == 0, ends.Before(now.Add(-record)):
				s.runners = s.runners.drop(other)
				for worker := range under(s.inFlight, other) {
					s.inFlight = s.inFlight.drop(worker)
				}
			case !ends.After(now) && ends.After(health.Crashed):
				health.Crashed = ends
			}
		}
		return health, nil
	})
}

// InFlight implements provider.Liveness.
func (db *Provider) InFlight(ctx context.Context, b provider.Build, w provider.Worker, messages []string) error {
	ids := make([]string, len(messages))
	for i, id := range messages {
		ids[i] = pair(buildKey(b), id)
	}
	_, err := update(ctx, db, "record the messages in flight", nil, func(s *state, _ time.Time) (struct{}, error) {
		s.inFlight = s.inFlight.put(workerKey(w), ids)
		return struct{}{}, nil
	})
	return err
}
