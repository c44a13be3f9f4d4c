package memory

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// Report implements provider.Registry.
func (db *Provider) Report(ctx context.Context, r provider.ServiceReport, lease time.Duration) error {
	_, err := update(ctx, db, "report a service", func(s *state, now time.Time) struct{} {
		for id, other := range s.services.from("") {
			if id != r.ID && other.ExpiresAt.Before(now.Add(-provider.ReportKept)) {
				s.services = s.services.drop(id)
			}
		}
		if lease <= 0 {
			s.services = s.services.drop(r.ID)
			return struct{}{}
		}
		r.Skew, r.StartedAt, r.SeenAt, r.ExpiresAt = r.Clock.Sub(now), now, now, now.Add(lease)
		if before, ok := s.services.get(r.ID); ok {
			r.StartedAt = before.StartedAt
		}
		r.Projectors, r.Outages = slices.Clone(r.Projectors), slices.Clone(r.Outages)
		s.services = s.services.put(r.ID, r)
		return struct{}{}
	})
	return err
}

// Pauses implements provider.Registry.
func (db *Provider) Pauses(ctx context.Context) ([]provider.Pause, error) {
	return query(ctx, db, "list pauses", func(s *state, _ time.Time) (all []provider.Pause) {
		for _, p := range s.pauses.from("") {
			all = append(all, p)
		}
		return all
	})
}

// SetPause implements provider.Registry.
func (db *Provider) SetPause(ctx context.Context, p provider.Pause, paused bool) (bool, error) {
	return checkedUpdate(ctx, db, "pause", provider.CheckPause(p), func(s *state, now time.Time) bool {
		key := p.Kind + "\x00" + p.Name
		if s.pauses.has(key) == paused {
			return false
		}
		verb := "resume"
		if p.At = now; paused {
			verb, s.pauses = "pause", s.pauses.put(key, p)
		} else {
			s.pauses = s.pauses.drop(key)
		}
		s.addAct(provider.Act{Verb: verb, Kind: p.Kind, Name: p.Name, Decision: p.Decision, State: provider.ActDone}, now)
		return true
	})
}

func (s *state) addAct(a provider.Act, now time.Time) int64 {
	s.act++
	a.ID, a.At = s.act, now
	if a.State.IsOver() {
		a.EndedAt = now
	}
	a.Detail, a.Outcome = slices.Clone(a.Detail), slices.Clone(a.Outcome)
	s.acts = s.acts.put(a.ID, a)
	return a.ID
}

// AddAct implements provider.Acts.
func (db *Provider) AddAct(ctx context.Context, a provider.Act) (int64, error) {
	return checkedUpdate(ctx, db, "record an act", provider.CheckAct(a), func(s *state, now time.Time) int64 {
		for id, old := range s.acts.from(0) {
			if !old.EndedAt.IsZero() && old.EndedAt.Before(now.Add(-provider.ActsKept)) {
				s.acts = s.acts.drop(id)
			}
		}
		return s.addAct(a, now)
	})
}

// Acts implements provider.Acts.
func (db *Provider) Acts(ctx context.Context, f provider.ActFilter) ([]provider.Act, error) {
	return query(ctx, db, "list acts", func(s *state, _ time.Time) (all []provider.Act) {
		f := f.WithDefaults()
		for _, a := range s.acts.from(0) {
			if a.ID < f.Before && (f.IDs == nil || slices.Contains(f.IDs, a.ID)) && (f.Verbs == nil || slices.Contains(f.Verbs, a.Verb)) &&
				(f.Kind == "" || f.Kind == a.Kind) && (f.Name == "" || f.Name == a.Name) && (f.States == nil || slices.Contains(f.States, a.State)) {
				all = append(all, a)
			}
		}
		slices.Reverse(all)
		return all[:min(f.Limit, len(all))]
	})
}

// TakeAct implements provider.Acts.
func (db *Provider) TakeAct(ctx context.Context, id int64, holder string, lease time.Duration) (bool, error) {
	return update(ctx, db, "take an act", func(s *state, now time.Time) bool {
		a, ok := s.acts.get(id)
		if !ok || a.State != provider.ActRequested && (a.State != provider.ActRunning || !a.ExpiresAt.Before(now)) {
			return false
		}
		a.State, a.Holder, a.ExpiresAt = provider.ActRunning, holder, now.Add(lease)
		s.acts = s.acts.put(id, a)
		return true
	})
}

// ChangeAct implements provider.Acts.
func (db *Provider) ChangeAct(ctx context.Context, id int64, holder string, c provider.ActChange, lease time.Duration) (bool, error) {
	return checkedUpdate(ctx, db, "change an act", provider.CheckActChange(c), func(s *state, now time.Time) bool {
		a, ok := s.acts.get(id)
		if !ok || a.State != provider.ActRunning || a.Holder != holder {
			return false
		}
		a.State, a.Applied, a.Total, a.ExpiresAt = c.State, c.Applied, c.Total, now.Add(lease)
		if c.State.IsOver() {
			a.Outcome, a.ExpiresAt, a.EndedAt = slices.Clone(c.Outcome), time.Time{}, now
		}
		s.acts = s.acts.put(id, a)
		return true
	})
}

// CancelAct implements provider.Acts.
func (db *Provider) CancelAct(ctx context.Context, id int64, d provider.Decision) (bool, error) {
	by := provider.Act{Verb: "cancel", Decision: d, State: provider.ActDone, Detail: json.RawMessage(fmt.Sprintf(`{"act":%d}`, id))}
	return checkedUpdate(ctx, db, "cancel an act", provider.CheckAct(by), func(s *state, now time.Time) bool {
		a, ok := s.acts.get(id)
		if !ok || a.State.IsOver() {
			return false
		}
		a.State, a.ExpiresAt, a.EndedAt = provider.ActCanceled, time.Time{}, now
		s.acts = s.acts.put(id, a)
		by.Kind, by.Name = a.Kind, a.Name
		s.addAct(by, now)
		return true
	})
}

// SchemaVersion implements provider.Operations. There are no tables.
func (db *Provider) SchemaVersion(context.Context) (database, program int64, err error) {
	return 1, 1, nil
}

// buildOfKey is the inverse of buildKey.
func buildOfKey(key string) provider.Build {
	projector := first(key)
	number, _ := strconv.Atoi(key[len(pair(projector, "")):])
	return provider.Build{Projector: projector, Generation: number}
}

// Streams implements provider.Operations.
func (db *Provider) Streams(ctx context.Context, f provider.StreamFilter) ([]provider.Stream, error) {
	if err := provider.CheckStreamFilter(f); err != nil {
		return nil, fmt.Errorf("list streams: %w", err)
	}
	f.Limit = cmp.Or(max(f.Limit, 0), 100)
	return query(ctx, db, "list streams", func(s *state, _ time.Time) (all []provider.Stream) {
		for id, events := range s.streams.from(f.After) {
			if len(all) == f.Limit {
				break
			}
			if id != f.After && (f.Category == "" || strings.HasPrefix(id, f.Category+"-")) {
				all = append(all, provider.Stream{ID: id, Version: events.last()})
			}
		}
		return all
	})
}
