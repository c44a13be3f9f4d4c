package memory

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// Survey implements provider.Operations. It reads everything, as the other lists of this package do.
func (db *Provider) Survey(ctx context.Context, limit int) (provider.Survey, error) {
	limit = max(limit, 1)
	return query(ctx, db, "survey", func(s *state, now time.Time) provider.Survey {
		all := provider.Survey{Now: now, Settled: s.position, InFlight: map[string]int64{}}
		if e, ok := s.log.get(s.log.last()); ok {
			all.Head = provider.LogPlace{Position: e.Position, ID: e.ID, RecordedAt: e.RecordedAt}
			all.Settled = e.Position
		}
		s.surveyParked(&all, limit)
		all.Entries = entryCounts(s, limit)
		all.Tasks, all.DueTasks = s.surveyTasks(now, limit)
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
	lanes, behind := map[string]bool{}, map[string]int{} // by lane: whether it was seen, and the index of its stuck message
	for _, p := range s.parked.from(0) {
		if !p.State.IsOpen() {
			continue
		}
		b, lane := of(buildOf(&p)), laneOfParked(&p)
		if b.Parked.N++; b.Oldest.IsZero() {
			b.Oldest = p.At
		}
		if i, ok := behind[lane]; ok {
			all.Stuck[i].Behind.N++
		}
		if lanes[lane] {
			continue
		}
		lanes[lane] = true
		b.Lanes.N++
		if p.State == provider.StateStuck {
			if b.StuckLanes.N++; b.StuckLanes.N <= 10 {
				p.Payload, p.Headers = nil, nil
				behind[lane], all.Stuck = len(all.Stuck), append(all.Stuck, provider.StuckLane{First: p})
			}
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
	for i := range all.Stuck {
		all.Stuck[i].Behind = upTo(limit, all.Stuck[i].Behind.N)
	}
	slices.SortStableFunc(all.Stuck, func(a, b provider.StuckLane) int { return cmp.Compare(a.First.Projector, b.First.Projector) })
}

// upTo returns a number as a survey with this limit counts it.
func upTo(limit int, n int64) provider.Count {
	return provider.Count{N: min(n, int64(limit)), AtLeast: n >= int64(limit)}
}

// entryCounts counts entries. Those that claims may take are counted together up to the limit, and so are
// those that failed or are abandoned.
func entryCounts(s *state, limit int) (all []provider.EntryCount) {
	for _, e := range s.entries.from(0) {
		if !e.Status.Open() {
			continue
		}
		one := provider.EntryCount{Status: e.Status, Oldest: e.CreatedAt}
		if e.Status == provider.EntryClaimed {
			one.Holder, one.Until = e.ClaimedBy, e.NextAttemptAt
		}
		all = countHeld(all, one)
	}
	group := func(status provider.EntryStatus) int {
		return slices.IndexFunc([]bool{
			status == provider.EntryPending || status == provider.EntryClaimed, status == provider.EntryFailed || status == provider.EntryAbandoned, true,
		}, func(is bool) bool { return is })
	}
	sums := map[int]int64{}
	for _, c := range all {
		sums[group(c.Status)] += c.N
	}
	for i := range all {
		all[i].Count = provider.Count{N: min(all[i].N, int64(limit)), AtLeast: sums[group(all[i].Status)] >= int64(limit)}
	}
	sortHeld(all)
	return all
}

// countHeld adds one row to the count of its status and holder.
func countHeld[Status ~string](all []provider.HeldCount[Status], one provider.HeldCount[Status]) []provider.HeldCount[Status] {
	i := slices.IndexFunc(all, func(c provider.HeldCount[Status]) bool { return c.Status == one.Status && c.Holder == one.Holder })
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
	return all
}

func sortHeld[Status ~string](all []provider.HeldCount[Status]) {
	slices.SortFunc(all, func(a, b provider.HeldCount[Status]) int {
		return cmp.Or(cmp.Compare(a.Status, b.Status), cmp.Compare(a.Holder, b.Holder))
	})
}

func (s *state) surveyTasks(now time.Time, limit int) (all []provider.TaskCount, due []provider.DueTask) {
	for _, t := range s.work.tasks.from("") {
		if t.Status.Final() {
			continue
		}
		one := provider.TaskCount{Status: t.Status, Oldest: t.CreatedAt}
		if t.Status == provider.TaskClaimed {
			one.Holder, one.Until = t.ClaimedBy, t.NextAt
		}
		all = countHeld(all, one)
		if !t.Status.Open() || t.Suspect || t.NextAt.IsZero() || t.NextAt.After(now) {
			continue
		}
		k := slices.IndexFunc(due, func(d provider.DueTask) bool { return d.Kind == t.Kind })
		if k < 0 {
			k, due = len(due), append(due, provider.DueTask{Kind: t.Kind, Due: t.NextAt})
		}
		if t.NextAt.Before(due[k].Due) {
			due[k].Due = t.NextAt
		}
	}
	for i := range all {
		all[i].Count = upTo(limit, all[i].N)
	}
	sortHeld(all)
	slices.SortFunc(due, func(a, b provider.DueTask) int { return cmp.Compare(a.Kind, b.Kind) })
	return all, due
}
