package memory

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Report implements provider.Registry.
func (db *Provider) Report(ctx context.Context, r provider.ServiceReport, lease time.Duration) error {
	_, err := update(ctx, db, "report a service", nil, func(s *state, now time.Time) (struct{}, error) {
		for id, other := range s.services.from("") {
			if id != r.ID && other.ExpiresAt.Before(now.Add(-provider.ReportKept)) {
				s.services = s.services.drop(id)
			}
		}
		if lease <= 0 {
			s.services = s.services.drop(r.ID)
			return struct{}{}, nil
		}
		r.Skew, r.StartedAt, r.SeenAt, r.ExpiresAt = r.Clock.Sub(now), now, now, now.Add(lease)
		if before, ok := s.services.get(r.ID); ok {
			r.StartedAt = before.StartedAt
		}
		r.Can, r.Kinds, r.Outages = slices.Clone(r.Can), slices.Clone(r.Kinds), slices.Clone(r.Outages)
		s.services = s.services.put(r.ID, r)
		return struct{}{}, nil
	})
	return err
}

// Services implements provider.Registry.
func (db *Provider) Services(ctx context.Context) ([]provider.ServiceReport, error) {
	return query(ctx, db, "list services", nil, func(s *state, now time.Time) (alive []provider.ServiceReport) {
		for _, r := range s.services.from("") {
			if r.ExpiresAt.After(now) && len(alive) < provider.MaxServices {
				alive = append(alive, r)
			}
		}
		return alive
	})
}

// Pauses implements provider.Registry.
func (db *Provider) Pauses(ctx context.Context) ([]provider.Pause, error) {
	return query(ctx, db, "list pauses", nil, func(s *state, _ time.Time) (all []provider.Pause) {
		for _, p := range s.pauses.from("") {
			all = append(all, p)
		}
		return all
	})
}

// SetPause implements provider.Registry.
func (db *Provider) SetPause(ctx context.Context, p provider.Pause, paused bool) (bool, error) {
	return update(ctx, db, "pause", provider.CheckPause(p), func(s *state, now time.Time) (bool, error) {
		key := p.Kind + "\x00" + p.Name
		if s.pauses.has(key) == paused {
			return false, nil
		}
		verb := "resume"
		if p.At = now; paused {
			verb, s.pauses = "pause", s.pauses.put(key, p)
		} else {
			s.pauses = s.pauses.drop(key)
		}
		s.addAct(provider.Act{Verb: verb, Kind: p.Kind, Name: p.Name, Decision: p.Decision, State: provider.ActDone}, now)
		return true, nil
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
	return update(ctx, db, "record an act", provider.CheckAct(a), func(s *state, now time.Time) (int64, error) {
		for id, old := range s.acts.from(0) {
			if !old.EndedAt.IsZero() && old.EndedAt.Before(now.Add(-provider.ActsKept)) {
				s.acts = s.acts.drop(id)
			}
		}
		return s.addAct(a, now), nil
	})
}

// Acts implements provider.Acts.
func (db *Provider) Acts(ctx context.Context, f provider.ActFilter) ([]provider.Act, error) {
	return query(ctx, db, "list acts", nil, func(s *state, _ time.Time) (all []provider.Act) {
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
	return update(ctx, db, "take an act", nil, func(s *state, now time.Time) (bool, error) {
		a, ok := s.acts.get(id)
		if !ok || a.State != provider.ActRequested && (a.State != provider.ActRunning || !a.ExpiresAt.Before(now)) {
			return false, nil
		}
		a.State, a.Holder, a.ExpiresAt = provider.ActRunning, holder, now.Add(lease)
		s.acts = s.acts.put(id, a)
		return true, nil
	})
}

// ChangeAct implements provider.Acts.
func (db *Provider) ChangeAct(ctx context.Context, id int64, holder string, c provider.ActChange, lease time.Duration) (bool, error) {
	return update(ctx, db, "change an act", provider.CheckActChange(c), func(s *state, now time.Time) (bool, error) {
		a, ok := s.acts.get(id)
		if !ok || a.State != provider.ActRunning || a.Holder != holder {
			return false, nil
		}
		a.State, a.Applied, a.Total, a.ExpiresAt = c.State, c.Applied, c.Total, now.Add(lease)
		if c.State.IsOver() {
			a.Outcome, a.ExpiresAt, a.EndedAt = slices.Clone(c.Outcome), time.Time{}, now
		}
		s.acts = s.acts.put(id, a)
		return true, nil
	})
}

// CancelAct implements provider.Acts.
func (db *Provider) CancelAct(ctx context.Context, id int64, d provider.Decision) (bool, error) {
	by := provider.Act{Verb: "cancel", Decision: d, State: provider.ActDone, Detail: json.RawMessage(fmt.Sprintf(`{"act":%d}`, id))}
	return update(ctx, db, "cancel an act", provider.CheckAct(by), func(s *state, now time.Time) (bool, error) {
		a, ok := s.acts.get(id)
		if !ok || a.State.IsOver() {
			return false, nil
		}
		a.State, a.ExpiresAt, a.EndedAt = provider.ActCanceled, time.Time{}, now
		s.acts = s.acts.put(id, a)
		by.Kind, by.Name = a.Kind, a.Name
		s.addAct(by, now)
		return true, nil
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
	f.Limit = cmp.Or(max(f.Limit, 0), 100)
	return query(ctx, db, "list streams", provider.CheckStreamFilter(f), func(s *state, _ time.Time) (all []provider.Stream) {
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

// Survey implements provider.Operations. It reads everything, as the other lists of this package do.
func (db *Provider) Survey(ctx context.Context, limit int) (provider.Survey, error) {
	limit = max(limit, 1)
	return query(ctx, db, "survey", nil, func(s *state, now time.Time) provider.Survey {
		all := provider.Survey{Now: now, Settled: s.position, InFlight: map[string]int64{}}
		if e, ok := s.log.get(s.log.last()); ok {
			all.Head, all.Settled = logPlace(e), e.Position
		}
		s.surveyParked(&all, limit)
		like := map[outbox.Status]outbox.Status{outbox.Claimed: outbox.Pending, outbox.Abandoned: outbox.Failed}
		all.Entries, all.Tasks = countHeld(limit, like, s.surveyEntries), countHeld(limit, nil, s.surveyTasks)
		for kind := range s.work.open.from("") {
			for _, t := range s.work.candidates(provider.TaskQuery{Kinds: []string{kind}}, 1, now) {
				all.DueTasks = append(all.DueTasks, provider.DueTask{Kind: kind, Due: t.NextAt})
			}
		}
		for _, r := range s.services.from("") {
			all.Services = append(all.Services, r)
		}
		slices.SortFunc(all.Services, func(a, b provider.ServiceReport) int {
			return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Holder, b.Holder), cmp.Compare(a.ID, b.ID))
		})
		for name, l := range s.leases.from("") {
			all.Leases = append(all.Leases, provider.NamedLease{Name: name, Holder: l.holder, ExpiresAt: l.until})
		}
		for worker, ids := range s.inFlight.from("") {
			all.InFlight[first(worker)] += int64(len(ids))
		}
		return all
	})
}

func (s *state) surveyParked(all *provider.Survey, limit int) {
	builds := map[provider.Build]*provider.SurveyedBuild{}
	of := func(b provider.Build) *provider.SurveyedBuild {
		if builds[b] == nil {
			builds[b] = &provider.SurveyedBuild{Build: b, Checkpoint: s.checkpoint(b)}
		}
		return builds[b]
	}
	for lane := range s.lanes.from("") {
		queue := s.front(lane, math.MaxInt)
		first, b := queue[0], of(buildOf(&queue[0]))
		b.Parked.N += int64(len(queue))
		if b.Lanes.N++; b.Oldest.IsZero() || first.At.Before(b.Oldest) {
			b.Oldest = first.At
		}
		if first.State == provider.StateStuck {
			b.StuckLanes.N++
			first.Payload, first.Headers = nil, nil
			all.Stuck = append(all.Stuck, provider.StuckLane{First: first, Behind: upTo(limit, int64(len(queue)-1))})
		}
	}
	for key, c := range s.checkpoints.from("") {
		if c.Mode != provider.ModeEnded && c.Mode != 0 {
			of(buildOfKey(key))
		}
	}
	for _, b := range slices.SortedFunc(maps.Values(builds), func(a, b *provider.SurveyedBuild) int {
		return cmp.Or(cmp.Compare(a.Projector, b.Projector), cmp.Compare(a.Generation, b.Generation))
	}) {
		for _, n := range []*provider.Count{&b.Parked, &b.Lanes, &b.StuckLanes} {
			*n = upTo(limit, n.N)
		}
		all.Builds = append(all.Builds, *b)
	}
	slices.SortFunc(all.Stuck, func(a, b provider.StuckLane) int {
		return cmp.Or(cmp.Compare(a.First.Projector, b.First.Projector), cmp.Compare(a.First.Seq, b.First.Seq))
	})
	listed := map[provider.Build]int{}
	all.Stuck = slices.DeleteFunc(all.Stuck, func(l provider.StuckLane) bool {
		listed[buildOf(&l.First)]++
		return listed[buildOf(&l.First)] > 10
	})
}

// upTo returns a number as a survey with this limit counts it.
func upTo(limit int, n int64) provider.Count {
	return provider.Count{N: min(n, int64(limit)), AtLeast: n >= int64(limit)}
}

func (s *state) surveyEntries(yield func(provider.EntryCount) bool) {
	for _, e := range s.entries.from(0) {
		one := provider.EntryCount{Status: e.Status, Oldest: e.CreatedAt}
		if e.Status == provider.EntryClaimed {
			one.Holder, one.Until = e.ClaimedBy, e.NextAttemptAt
		}
		if e.Status.Open() && !yield(one) {
			return
		}
	}
}

func (s *state) surveyTasks(yield func(provider.TaskCount) bool) {
	for _, t := range s.work.tasks.from("") {
		one := provider.TaskCount{Status: t.Status, Oldest: t.CreatedAt}
		if t.Status == provider.TaskClaimed {
			one.Holder, one.Until = t.ClaimedBy, t.NextAt
		}
		if !t.Status.Final() && !yield(one) {
			return
		}
	}
}

// countHeld counts rows by their status and holder. Statuses with the same value in like are counted together up to the limit.
func countHeld[S ~string](limit int, like map[S]S, rows iter.Seq[provider.HeldCount[S]]) (all []provider.HeldCount[S]) {
	sums := map[S]int64{}
	for one := range rows {
		sums[cmp.Or(like[one.Status], one.Status)]++
		i := slices.IndexFunc(all, func(c provider.HeldCount[S]) bool { return c.Status == one.Status && c.Holder == one.Holder })
		if i < 0 {
			i, all = len(all), append(all, one)
		}
		all[i].N++
		if one.Oldest.Before(all[i].Oldest) {
			all[i].Oldest = one.Oldest
		}
		if one.Until.After(all[i].Until) {
			all[i].Until = one.Until
		}
	}
	for i := range all {
		all[i].Count = provider.Count{N: min(all[i].N, int64(limit)), AtLeast: sums[cmp.Or(like[all[i].Status], all[i].Status)] >= int64(limit)}
	}
	slices.SortFunc(all, func(a, b provider.HeldCount[S]) int {
		return cmp.Or(cmp.Compare(a.Status, b.Status), cmp.Compare(a.Holder, b.Holder))
	})
	return all
}
