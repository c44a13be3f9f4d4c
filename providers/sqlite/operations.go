package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"time"

	"github.com/kinora-go/kinora/provider"
)

const (
	reportService = `
insert into kinora_services (id, kind, holder, data, skew, started_at, seen_at, expires_at)
values (?1, ?2, ?3, ?4, ?5 - ` + clock + `, ` + clock + `, ` + clock + `, ` + clock + ` + ?6)
on conflict (id) do update set kind = excluded.kind, holder = excluded.holder, data = excluded.data, skew = excluded.skew,
	seen_at = excluded.seen_at, expires_at = excluded.expires_at`

	forgetServices = `delete from kinora_services where (id = ?1 and ?2) or (id <> ?1 and expires_at < ` + clock + ` - ?3)`

	aliveServices = `
select id, kind, holder, data, skew, started_at, seen_at, expires_at from kinora_services where expires_at > ` + clock + ` order by seen_at desc limit ?1`

	listServices = `select id, kind, holder, data, skew, started_at, seen_at, expires_at from kinora_services order by kind, holder, id limit ?1`

	listPauses = `select kind, name, paused_by, reason, paused_at from kinora_pauses order by kind, name`

	insertPause = `
insert into kinora_pauses (kind, name, paused_by, reason, paused_at) values (?1, ?2, ?3, ?4, ` + clock + `) on conflict do nothing`

	deletePause = `delete from kinora_pauses where kind = ?1 and name = ?2`
)

// Report implements provider.Registry. Its commit is not synced, except on a DB from New.
func (d *Provider) Report(ctx context.Context, r provider.ServiceReport, lease time.Duration) error {
	err := d.writeTx(unsynced(ctx), func(u *unit) error {
		_, err := u.exec(ctx, forgetServices, r.ID, lease <= 0, millis(provider.ReportKept))
		if err == nil && lease > 0 {
			_, err = u.exec(ctx, reportService, r.ID, r.Kind, r.Holder, jsonOf(r), r.Clock.UnixMilli(), millis(lease))
		}
		return err
	})
	return wrap("report a service", err)
}

func servicesOf(ctx context.Context, q querier, query string, limit int) ([]provider.ServiceReport, error) {
	return collect(ctx, q, func(rows *sql.Rows) (r provider.ServiceReport, err error) {
		var data string
		var is provider.ServiceReport
		err = rows.Scan(&is.ID, &is.Kind, &is.Holder, &data, &is.Skew, scanTime(&is.StartedAt), scanTime(&is.SeenAt), scanTime(&is.ExpiresAt))
		_ = json.Unmarshal([]byte(data), &r) // a row that another program wrote shows less
		r.ID, r.Kind, r.Holder, r.Skew = is.ID, is.Kind, is.Holder, is.Skew*time.Millisecond
		r.StartedAt, r.SeenAt, r.ExpiresAt = is.StartedAt, is.SeenAt, is.ExpiresAt
		return r, err
	}, query, limit)
}

// Services implements provider.Registry.
func (d *Provider) Services(ctx context.Context) ([]provider.ServiceReport, error) {
	all, err := servicesOf(ctx, d.reads, aliveServices, provider.MaxServices)
	return result(all, "list services", err)
}

// Pauses implements provider.Registry.
func (d *Provider) Pauses(ctx context.Context) ([]provider.Pause, error) {
	all, err := rowsOf(ctx, d.reads, func(p *provider.Pause) []any { return []any{&p.Kind, &p.Name, &p.By, &p.Reason, scanTime(&p.At)} }, listPauses)
	return result(all, "list pauses", err)
}

// SetPause implements provider.Registry.
func (d *Provider) SetPause(ctx context.Context, p provider.Pause, paused bool) (bool, error) {
	return update(ctx, d, "pause", provider.CheckPause(p), func(u *unit) (bool, error) {
		verb, query, args := "resume", deletePause, []any{p.Kind, p.Name}
		if paused {
			verb, query, args = "pause", insertPause, append(args, p.By, p.Reason)
		}
		n, err := u.changed(ctx, query, args...)
		if err == nil && n == 1 {
			_, err = u.addAct(ctx, provider.Act{Verb: verb, Kind: p.Kind, Name: p.Name, Decision: p.Decision, State: provider.ActDone})
		}
		return n == 1, err
	})
}

const (
	insertAct = `
insert into kinora_acts (verb, kind, name, decided_by, reason, detail, state, outcome, at, ended_at)
values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ` + clock + `, iif(?7 = 'done', ` + clock + `, null)) returning id`

	forgetActs = `
delete from kinora_acts where id in (
	select id from kinora_acts where ended_at < ` + clock + ` - ?1 order by ended_at limit 100)`

	listActs     = `select ` + actColumns + ` from kinora_acts where` + actFiltered
	listOpenActs = `select ` + actColumns + ` from kinora_acts indexed by kinora_acts_open where state in ('requested', 'running') and` + actFiltered
	actColumns   = `id, verb, kind, name, decided_by, reason, detail, state, holder, applied, total, outcome, at, expires_at, ended_at`

	// actFiltered is the condition of an ActFilter.
	actFiltered = `
	id < ?1 and (?2 is null or id in (select value from json_each(?2))) and (?3 is null or verb in (select value from json_each(?3)))
	and (?4 = '' or kind = ?4) and (?5 = '' or name = ?5) and (?6 is null or state in (select value from json_each(?6)))
order by id desc limit ?7`

	takeAct = `
update kinora_acts set state = 'running', holder = ?2, expires_at = ` + clock + ` + ?3
where id = ?1 and (state = 'requested' or state = 'running' and expires_at < ` + clock + `)`

	changeAct = `
update kinora_acts set state = ?3, applied = ?4, total = ?5, outcome = ?6, expires_at = iif(?3 = 'running', ` + clock + ` + ?7, null),
	ended_at = iif(?3 = 'running', null, ` + clock + `)
where id = ?1 and state = 'running' and holder = ?2`

	cancelAct = `
update kinora_acts set state = 'canceled', expires_at = null, ended_at = ` + clock + `
where id = ?1 and state in ('requested', 'running') returning kind, name`
)

func (u *unit) addAct(ctx context.Context, a provider.Act) (id int64, err error) {
	err = one(ctx, u, []any{&id}, insertAct, a.Verb, a.Kind, a.Name, a.By, a.Reason, jsonArg(a.Detail), string(a.State), jsonArg(a.Outcome))
	return id, err
}

// jsonArg returns null if there is no text.
func jsonArg(text json.RawMessage) any {
	if len(text) == 0 {
		return nil
	}
	return string(text)
}

// AddAct implements provider.Acts.
func (d *Provider) AddAct(ctx context.Context, a provider.Act) (id int64, err error) {
	return update(ctx, d, "record an act", provider.CheckAct(a), func(u *unit) (int64, error) {
		if _, err := u.exec(ctx, forgetActs, millis(provider.ActsKept)); err != nil {
			return 0, err
		}
		return u.addAct(ctx, a)
	})
}

// Acts implements provider.Acts.
func (d *Provider) Acts(ctx context.Context, f provider.ActFilter) (all []provider.Act, err error) {
	f, query := f.WithDefaults(), listActs
	if f.OnlyOpen() {
		query = listOpenActs
	}
	all, err = rowsOf(ctx, d.reads, func(a *provider.Act) []any {
		return []any{&a.ID, &a.Verb, &a.Kind, &a.Name, &a.By, &a.Reason, (*[]byte)(&a.Detail), &a.State, &a.Holder, &a.Applied, &a.Total,
			(*[]byte)(&a.Outcome), scanTime(&a.At), scanTime(&a.ExpiresAt), scanTime(&a.EndedAt)}
	}, query, f.Before, anyOf(f.IDs), anyOf(f.Verbs), f.Kind, f.Name, anyOf(f.States), f.Limit)
	return result(all, "list acts", err)
}

// TakeAct implements provider.Acts.
func (d *Provider) TakeAct(ctx context.Context, id int64, holder string, lease time.Duration) (bool, error) {
	n, err := d.changed(ctx, takeAct, id, holder, millis(lease))
	return result(n == 1, "take an act", err)
}

// ChangeAct implements provider.Acts.
func (d *Provider) ChangeAct(ctx context.Context, id int64, holder string, c provider.ActChange, lease time.Duration) (bool, error) {
	invalid := provider.CheckActChange(c)
	if !c.State.IsOver() {
		c.Outcome = nil
	}
	return update(ctx, d, "change an act", invalid, func(u *unit) (bool, error) {
		n, err := u.changed(ctx, changeAct, id, holder, string(c.State), c.Applied, c.Total, jsonArg(c.Outcome), millis(lease))
		return n == 1, err
	})
}

// CancelAct implements provider.Acts.
func (d *Provider) CancelAct(ctx context.Context, id int64, by provider.Decision) (bool, error) {
	a := provider.Act{Verb: "cancel", Decision: by, State: provider.ActDone, Detail: json.RawMessage(jsonOf(map[string]int64{"act": id}))}
	return update(ctx, d, "cancel an act", provider.CheckAct(a), func(u *unit) (bool, error) {
		found, err := find(ctx, u, []any{&a.Kind, &a.Name}, cancelAct, id)
		if err == nil && found {
			_, err = u.addAct(ctx, a)
		}
		return found, err
	})
}

// SchemaVersion implements provider.Operations.
func (d *Provider) SchemaVersion(ctx context.Context) (database, program int64, err error) {
	database, err = versionOf(ctx, d.reads)
	return database, known(), wrap("read the version of the schema", err)
}

const (
	surveyHead = `
select ` + clock + `, coalesce(e.position, 0), coalesce(e.id, ''), e.recorded_at
from (select 1) left join (select position, id, recorded_at from kinora_events order by position desc limit 1) e on true`

	// The generations with a checkpoint, or with parked messages: b walks the index of lanes from one
	// generation to the next.
	surveyBuilds = `
with recursive b (projector, generation) as (
	select * from (select projector, generation from kinora_parked indexed by kinora_parked_lane where open = 1 order by projector, generation limit 1)
	union all
	select n.projector, n.generation from b join kinora_parked n on n.id = (
		select id from kinora_parked indexed by kinora_parked_lane
		where open = 1 and (projector, generation) > (b.projector, b.generation) order by projector, generation limit 1))
select projector, generation from b
union
select projector, generation from (select projector, generation from kinora_checkpoints where mode <> 'ended' order by 1, 2 limit 1000)
order by 1, 2`

	surveyParked = `
select (select count(*) from (select 1 from kinora_parked indexed by kinora_parked_lane where open = 1 and ` + ofBuild + ` limit ?3)),
	(select count(*) from (select 1 from kinora_parked indexed by kinora_parked_due where due_at is not null and ` + ofBuild + ` limit ?3))
	/*+*/+ (select count(*) from (
		select 1 from kinora_parked p indexed by kinora_parked_needs
		where open = 1 and needs <> '' and ` + ofBuild + ` and class = 'unable' and state = 'waiting' and due_at is null and id = (
			select id from kinora_parked f indexed by kinora_parked_lane
			where f.open = 1 and f.projector = p.projector and f.generation = p.generation and f.lane = p.lane order by f.id limit 1) limit ?3))/*-*/,
	(select count(*) from (select 1 from kinora_parked indexed by kinora_parked_stuck where state = 'stuck' and ` + ofBuild + ` limit ?3)),
	(select min(parked_at) from (select parked_at from kinora_parked indexed by kinora_parked_lane where open = 1 and ` + ofBuild + ` limit ?3))`

	surveyStuck = `
select ` + parkedColumns + ` from kinora_parked p where p.id in (
	select id from kinora_parked indexed by kinora_parked_stuck where state = 'stuck' and ` + ofBuild + ` order by id limit 10) order by p.id`

	surveyBehind = `
select count(*) from (
	select 1 from kinora_parked indexed by kinora_parked_lane where open = 1 and ` + ofBuild + ` and lane = ?3 and id > ?4 limit ?5)`

	surveyEntries = `
select status, holder, count(*), min(created_at), max(until), max(n) from (
	select status, iif(status = 'claimed', claimed_by, '') as holder, created_at, iif(status = 'claimed', next_attempt_at, null) as until, n
	from (select *, count(*) over () as n from (select * from kinora_outbox indexed by kinora_outbox_open where open = 1 order by id limit ?1)) where status in ('pending', 'claimed')
	union all
	select status, '', created_at, null, count(*) over () from (
		select * from kinora_outbox indexed by kinora_outbox_stuck where status in ('failed', 'abandoned') limit ?1)
	union all
	select status, '', created_at, null, count(*) over () from (
		select * from kinora_outbox indexed by kinora_outbox_held_id where status = 'held' order by id limit ?1))
group by status, holder order by status, holder`

	surveyTasks = `
select status, holder, count(*), min(created_at), max(until), max(n) from (
	select status, iif(status = 'claimed', claimed_by, '') as holder, created_at, iif(status = 'claimed', next_at, null) as until, n
	from (select *, count(*) over () as n from (select * from kinora_tasks indexed by kinora_tasks_due where open = 1 and suspect = 0 limit ?1)) where status <> 'failed'
	union all
	select status, iif(status = 'claimed', claimed_by, ''), created_at, iif(status = 'claimed', next_at, null), n
	from (select *, count(*) over () as n from (select * from kinora_tasks indexed by kinora_tasks_suspect where open = 1 and suspect = 1 limit ?1)) where status <> 'failed'
	union all
	select status, '', created_at, null, count(*) over () from (
		select * from kinora_tasks indexed by kinora_tasks_stuck where status in ('failed', 'abandoned') limit ?1))
group by status, holder order by status, holder`

	surveyDue = `
with recursive k (kind, next_at) as (
	select * from (select kind, next_at from kinora_tasks indexed by kinora_tasks_due where open = 1 and suspect = 0 and next_at is not null order by kind, next_at limit 1)
	union all
	select n.kind, n.next_at from k join kinora_tasks n on n.id = (
		select id from kinora_tasks indexed by kinora_tasks_due
		where open = 1 and suspect = 0 and kind > k.kind and next_at is not null order by kind, next_at limit 1))
select kind, next_at from k where next_at <= ` + clock + ` limit 100`

	surveyLeases = `select name, holder, expires_at from kinora_leases order by name limit ?1`

	surveyInFlight = `select runner, count(*) from (select runner from kinora_in_flight limit ?1) group by runner`
)

// Survey implements provider.Operations. Its statements do not see the same moment.
func (d *Provider) Survey(ctx context.Context, limit int) (provider.Survey, error) {
	s, err := d.survey(ctx, max(limit, 1))
	return result(s, "survey", err)
}

func (d *Provider) survey(ctx context.Context, limit int) (s provider.Survey, err error) {
	err = one(ctx, d.reads, []any{scanTime(&s.Now), &s.Head.Position, &s.Head.ID, scanTime(&s.Head.RecordedAt)}, surveyHead)
	if s.Settled = s.Head.Position; err != nil {
		return s, err
	}
	s.Builds, err = rowsOf(ctx, d.reads, func(b *provider.SurveyedBuild) []any { return []any{&b.Projector, &b.Generation} }, surveyBuilds)
	for i := range s.Builds {
		if err == nil {
			err = d.surveyBuild(ctx, &s, &s.Builds[i], limit)
		}
	}
	if err != nil {
		return s, err
	}
	var errs [6]error
	s.Entries, errs[0] = heldCounts[provider.EntryStatus](ctx, d.reads, surveyEntries, limit)
	s.Tasks, errs[1] = heldCounts[provider.TaskStatus](ctx, d.reads, surveyTasks, limit)
	s.DueTasks, errs[2] = rowsOf(ctx, d.reads, func(t *provider.DueTask) []any { return []any{&t.Kind, scanTime(&t.Due)} }, surveyDue)
	s.Leases, errs[3] = rowsOf(ctx, d.reads, func(l *provider.NamedLease) []any { return []any{&l.Name, &l.Holder, scanTime(&l.ExpiresAt)} }, surveyLeases, limit)
	s.Services, errs[4] = servicesOf(ctx, d.reads, listServices, limit)
	s.InFlight = map[string]int64{}
	errs[5] = count(ctx, d.reads, s.InFlight, surveyInFlight, limit)
	return s, cmp.Or(errs[:]...)
}

// heldCounts returns the numbers of rows with a status. The last column is the number of rows that were looked at.
func heldCounts[Status ~string](ctx context.Context, q querier, query string, limit int) ([]provider.HeldCount[Status], error) {
	return collect(ctx, q, func(rows *sql.Rows) (c provider.HeldCount[Status], err error) {
		var seen int
		err = rows.Scan(&c.Status, &c.Holder, &c.N, scanTime(&c.Oldest), scanTime(&c.Until), &seen)
		c.AtLeast = seen >= limit
		return c, err
	}, query, limit)
}

func (d *Provider) surveyBuild(ctx context.Context, s *provider.Survey, b *provider.SurveyedBuild, limit int) (err error) {
	if b.Checkpoint, err = d.Checkpoint(ctx, b.Build); err != nil {
		return err
	}
	counts := []any{&b.Parked.N, &b.Lanes.N, &b.StuckLanes.N, scanTime(&b.Oldest)}
	err = one(ctx, d.reads, counts, surveyParked, b.Projector, b.Generation, limit)
	b.Lanes.N += b.StuckLanes.N
	for _, n := range []*provider.Count{&b.Parked, &b.Lanes, &b.StuckLanes} {
		n.AtLeast = n.N >= int64(limit)
	}
	if err != nil || b.StuckLanes.N == 0 {
		return err
	}
	stuck, err := parkedOf(ctx, d.reads, surveyStuck, b.Projector, b.Generation)
	for _, p := range stuck {
		if err != nil {
			break
		}
		l := provider.StuckLane{First: p}
		l.First.Payload, l.First.Headers = nil, nil
		err = one(ctx, d.reads, []any{&l.Behind.N}, surveyBehind, b.Projector, b.Generation, p.Lane[:], p.Seq, limit)
		l.Behind.AtLeast = l.Behind.N >= int64(limit)
		s.Stuck = append(s.Stuck, l)
	}
	return err
}

// The streams of a category are between "category-" and "category.", because "." follows "-".
const listStreams = `
select stream, version from kinora_streams
where stream > ?1 and (?2 = '' or stream >= ?2 || '-' and stream < ?2 || '.') order by stream limit ?3`

// Streams implements provider.Operations.
func (d *Provider) Streams(ctx context.Context, f provider.StreamFilter) (all []provider.Stream, err error) {
	if err = provider.CheckStreamFilter(f); err == nil {
		all, err = rowsOf(ctx, d.reads, func(s *provider.Stream) []any { return []any{&s.ID, &s.Version} },
			listStreams, f.After, f.Category, cmp.Or(max(f.Limit, 0), defaultPage))
	}
	return result(all, "list streams", err)
}
