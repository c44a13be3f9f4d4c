package postgres

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

const (
	// skew is the time of the service minus that of the store. Like those of Liveness, this
	// statement skips rows that others have locked.
	reportSQL = `
with ck as materialized (select clock_timestamp() t),
old as (
	delete from kinora.services where ctid = any(array(
		select s.ctid from kinora.services s, ck
		where case when s.id = $1::text then $5::bigint <= 0 else s.expires_at < ck.t - $7::bigint * interval '1 microsecond' end
		for update of s skip locked)))
insert into kinora.services as s (id, kind, holder, data, skew, started_at, seen_at, expires_at)
select $1::text, $2::text, $3::text, $4::jsonb, (extract(epoch from $6::timestamptz - ck.t) * 1000000)::bigint, ck.t, ck.t, ck.t + $5::bigint * interval '1 microsecond'
from ck where $5::bigint > 0
on conflict on constraint services_pkey do update set
	kind = excluded.kind, holder = excluded.holder, data = excluded.data, skew = excluded.skew, seen_at = excluded.seen_at, expires_at = excluded.expires_at`

	servicesSQL = `
select id, kind, holder, data, skew, started_at, seen_at, expires_at from kinora.services order by kind, holder, id limit $1::int`

	aliveSQL = `
select id, kind, holder, data, skew, started_at, seen_at, expires_at from kinora.services where expires_at > clock_timestamp() order by seen_at desc limit $1::int`

	pausesSQL = `select kind, name, paused_by, reason, paused_at from kinora.pauses order by kind, name`

	pauseSQL = `
with put as (
	insert into kinora.pauses (kind, name, paused_by, reason, paused_at) values ($1::text, $2::text, $3::text, $4::text, clock_timestamp())
	on conflict on constraint pauses_pkey do nothing returning paused_at)
insert into kinora.acts (verb, kind, name, decided_by, reason, state, at, ended_at)
select 'pause', $1::text, $2::text, $3::text, $4::text, 'done', paused_at, paused_at from put`

	resumeSQL = `
with gone as (
	delete from kinora.pauses where kind = $1::text and name = $2::text returning clock_timestamp() t)
insert into kinora.acts (verb, kind, name, decided_by, reason, state, at, ended_at)
select 'resume', $1::text, $2::text, $3::text, $4::text, 'done', t, t from gone`
)

// Report implements provider.Registry.
func (db *Provider) Report(ctx context.Context, r provider.ServiceReport, lease time.Duration) error {
	data, invalid := json.Marshal(r)
	crash.Point("report: before")
	_, err := db.exec(ctx, "report a service", invalid,
		reportSQL, planned, r.ID, r.Kind, r.Holder, string(data), lease.Microseconds(), r.Clock, provider.ReportKept.Microseconds())
	crash.Point("report: after")
	return classifyOwn(ctx, err)
}

func scanService(row pgx.CollectableRow) (r provider.ServiceReport, err error) {
	var data []byte
	var skew int64
	var id, kind, holder string
	var started, seen, expires time.Time
	if err = row.Scan(&id, &kind, &holder, &data, &skew, scanTime(&started), scanTime(&seen), scanTime(&expires)); err != nil {
		return r, err
	}
	_ = json.Unmarshal(data, &r) // a row that another program wrote shows less
	r.ID, r.Kind, r.Holder, r.Skew = id, kind, holder, time.Duration(skew)*time.Microsecond
	r.StartedAt, r.SeenAt, r.ExpiresAt = started, seen, expires
	return r, nil
}

// Services implements provider.Registry.
func (db *Provider) Services(ctx context.Context) ([]provider.ServiceReport, error) {
	all, err := read(ctx, db, "list services", nil, scanService, aliveSQL, planned, provider.MaxServices)
	return all, classifyOwn(ctx, err)
}

// Pauses implements provider.Registry.
func (db *Provider) Pauses(ctx context.Context) ([]provider.Pause, error) {
	columns := func(p *provider.Pause) []any { return []any{&p.Kind, &p.Name, &p.By, &p.Reason, scanTime(&p.At)} }
	all, err := read(ctx, db, "list pauses", nil, into(columns), pausesSQL, planned)
	return all, classifyOwn(ctx, err)
}

// SetPause implements provider.Registry.
func (db *Provider) SetPause(ctx context.Context, p provider.Pause, paused bool) (bool, error) {
	sql := resumeSQL
	if paused {
		sql = pauseSQL
	}
	return db.act(ctx, "pause", provider.CheckPause(p), sql, planned, p.Kind, p.Name, p.By, p.Reason)
}

// act runs a statement that changes a pause or an act, and reports whether it changed one.
func (db *Provider) act(ctx context.Context, doing string, invalid error, sql string, args ...any) (bool, error) {
	crash.Point("change act: before")
	n, err := db.exec(ctx, doing, invalid, sql, args...)
	crash.Point("change act: after")
	return n == 1, classifyOwn(ctx, err)
}

const (
	addActSQL = `
with ck as materialized (select clock_timestamp() t),
old as (
	delete from kinora.acts where id = any(array(
		select a.id from kinora.acts a, ck where a.ended_at < ck.t - $8::bigint * interval '1 microsecond' order by a.ended_at limit 100 for update of a skip locked)))
insert into kinora.acts (verb, kind, name, decided_by, reason, detail, state, outcome, at, ended_at)
select $1::text, $2::text, $3::text, $4::text, $5::text, $6::jsonb, $7::text, $9::jsonb, t, case when $7::text = 'done' then t end from ck
returning id`

	actsSQL = `
select id, verb, kind, name, decided_by, reason, detail, state, holder, applied, total, outcome, at, expires_at, ended_at from kinora.acts
where id < $1::bigint and ($2::bigint[] is null or id = any($2::bigint[])) and ($3::text[] is null or verb = any($3::text[]))
	and ($4::text = '' or kind = $4::text) and ($5::text = '' or name = $5::text) and ($6::text[] is null or state = any($6::text[]))`

	allActsSQL  = actsSQL + ` order by id desc limit $7::int`
	openActsSQL = actsSQL + ` and state in ('requested', 'running') order by id desc limit $7::int`

	takeActSQL = `
update kinora.acts set state = 'running', holder = $2::text, expires_at = clock_timestamp() + $3::bigint * interval '1 microsecond'
where id = $1::bigint and (state = 'requested' or state = 'running' and expires_at < clock_timestamp())`

	changeActSQL = `
update kinora.acts set state = $3::text, applied = $4::bigint, total = $5::bigint, outcome = $6::jsonb,
	expires_at = case when $3::text = 'running' then clock_timestamp() + $7::bigint * interval '1 microsecond' end,
	ended_at = case when $3::text <> 'running' then clock_timestamp() end
where id = $1::bigint and state = 'running' and holder = $2::text`

	cancelActSQL = `
with gone as (
	update kinora.acts set state = 'canceled', expires_at = null, ended_at = clock_timestamp()
	where id = $1::bigint and state in ('requested', 'running') returning kind, name, ended_at)
insert into kinora.acts (verb, kind, name, decided_by, reason, detail, state, at, ended_at)
select 'cancel', kind, name, $2::text, $3::text, jsonb_build_object('act', $1::bigint), 'done', ended_at, ended_at from gone`
)

// jsonArg returns an argument for jsonb: null if there is no text.
func jsonArg(text json.RawMessage) any {
	if len(text) == 0 {
		return nil
	}
	return string(text)
}

// AddAct implements provider.Acts.
func (db *Provider) AddAct(ctx context.Context, a provider.Act) (id int64, err error) {
	crash.Point("add act: before")
	_, err = db.row(ctx, "record an act", provider.CheckAct(a), []any{&id}, addActSQL, planned, a.Verb, a.Kind, a.Name, a.By, a.Reason,
		jsonArg(a.Detail), string(a.State), provider.ActsKept.Microseconds(), jsonArg(a.Outcome))
	crash.Point("add act: after")
	return id, classifyOwn(ctx, err)
}

// Acts implements provider.Acts.
func (db *Provider) Acts(ctx context.Context, f provider.ActFilter) ([]provider.Act, error) {
	f, sql := f.WithDefaults(), allActsSQL
	if f.OnlyOpen() {
		sql = openActsSQL
	}
	columns := func(a *provider.Act) []any {
		return []any{&a.ID, &a.Verb, &a.Kind, &a.Name, &a.By, &a.Reason, (*[]byte)(&a.Detail), &a.State, &a.Holder, &a.Applied, &a.Total,
			(*[]byte)(&a.Outcome), scanTime(&a.At), scanTime(&a.ExpiresAt), scanTime(&a.EndedAt)}
	}
	all, err := read(ctx, db, "list acts", nil, into(columns),
		sql, planned, f.Before, f.IDs, f.Verbs, f.Kind, f.Name, texts(f.States), f.Limit)
	return all, classifyOwn(ctx, err)
}

// TakeAct implements provider.Acts.
func (db *Provider) TakeAct(ctx context.Context, id int64, holder string, lease time.Duration) (bool, error) {
	return db.act(ctx, "take an act", nil, takeActSQL, planned, id, holder, lease.Microseconds())
}

// ChangeAct implements provider.Acts.
func (db *Provider) ChangeAct(ctx context.Context, id int64, holder string, c provider.ActChange, lease time.Duration) (bool, error) {
	invalid := provider.CheckActChange(c)
	if !c.State.IsOver() {
		c.Outcome = nil
	}
	return db.act(ctx, "change an act", invalid, changeActSQL, planned,
		id, holder, string(c.State), c.Applied, c.Total, jsonArg(c.Outcome), lease.Microseconds())
}

// CancelAct implements provider.Acts.
func (db *Provider) CancelAct(ctx context.Context, id int64, d provider.Decision) (bool, error) {
	invalid := provider.CheckAct(provider.Act{Verb: "cancel", State: provider.ActDone, Decision: d})
	return db.act(ctx, "cancel an act", invalid, cancelActSQL, planned, id, d.By, d.Reason)
}

// SchemaVersion implements provider.Operations.
func (db *Provider) SchemaVersion(ctx context.Context) (database, program int64, err error) {
	is, err := db.state(ctx, db.pool)
	if e := pgError(err); e != nil && strings.HasPrefix(e.Code, "42") {
		err = fmt.Errorf("schema %s: %w: %w", db.cfg.Schema, ErrNotMigrated, err)
	}
	if err == nil && is.hidden {
		err = errors.New("the role may not read the version of the schema: grant select on " + db.cfg.Schema + ".migrations")
	}
	return is.version, known(), classifyOwn(ctx, wrap("read the version of the schema", err))
}

const (
	// Leases of processes that were killed are deleted, also if the lease is not free.
	acquireLeaseSQL = `
with old as (
	delete from kinora.leases where ctid = any(array(
		select ctid from kinora.leases where name <> $1::text and expires_at < clock_timestamp() - interval '1 hour' for update skip locked)))
insert into kinora.leases as l (name, token, holder, expires_at)
values ($1::text, $2::uuid, $3::text, clock_timestamp() + $4::bigint * interval '1 microsecond')
on conflict on constraint leases_pkey do update set token = excluded.token, holder = excluded.holder, expires_at = excluded.expires_at
where l.token = excluded.token or l.expires_at <= clock_timestamp()`

	leaseNamesSQL = `select name from kinora.leases where starts_with(name, $1::text) and expires_at > clock_timestamp() order by name`

	releaseLeaseSQL = `delete from kinora.leases where name = $1::text and token = $2::uuid`
)

// AcquireLease implements provider.Leases.
func (db *Provider) AcquireLease(ctx context.Context, name string, t claim.Terms) (bool, error) {
	crash.Point("acquire lease: before")
	n, err := db.exec(ctx, "acquire a lease", provider.CheckStorable("name", name),
		acquireLeaseSQL, name, uuid.UUID(t.Token), t.Holder, t.Lease.Microseconds())
	crash.Point("acquire lease: after")
	return n == 1, classifyOwn(ctx, err)
}

// ReleaseLease implements provider.Leases.
func (db *Provider) ReleaseLease(ctx context.Context, name string, token claim.Token) error {
	crash.Point("release lease: before")
	_, err := db.exec(ctx, "release a lease", provider.CheckStorable("name", name), releaseLeaseSQL, name, uuid.UUID(token))
	crash.Point("release lease: after")
	return classifyOwn(ctx, err)
}

// LeaseNames implements provider.Leases.
func (db *Provider) LeaseNames(ctx context.Context, prefix string) ([]string, error) {
	names, err := read(ctx, db, "list leases", provider.CheckStorable("prefix", prefix), pgx.RowTo[string], leaseNamesSQL, planned, prefix)
	return names, classifyOwn(ctx, err)
}

// The tables are unlogged, so these statements wait for no disk. They skip rows that another
// transaction has locked: the backend of a lost connection may have them for hours.
const (
	// A runner that ends ($2 <= 0) is deleted like an expired one.
	beatSQL = `
with ck as materialized (select clock_timestamp() t),
me as (
	insert into kinora.runners (runner, expires_at) select $1::text, ck.t + $2::bigint * interval '1 microsecond' from ck where $2::bigint > 0
	on conflict on constraint runners_pkey do update set expires_at = excluded.expires_at),
old as (
	delete from kinora.runners where ctid = any(array(
		select r.ctid from kinora.runners r, ck
		where case when r.runner = $1::text then $2::bigint <= 0 else r.expires_at < ck.t - $3::bigint * interval '1 microsecond' end
		for update of r skip locked))
	returning runner),
names as (
	delete from kinora.in_flight where ctid = any(array(
		select d.ctid from kinora.in_flight d
		where d.runner = any(array(select runner from old union all select $1::text where $2::bigint <= 0)) for update skip locked)))
select ck.t, coalesce((
	select max(r.expires_at) from kinora.runners r
	where r.runner <> $1::text and r.expires_at <= ck.t and r.expires_at >= ck.t - $3::bigint * interval '1 microsecond'), ` + never + `)
from ck`

	inFlightSQL = `
with back as (
	delete from kinora.in_flight where ctid = any(array(
		select ctid from kinora.in_flight
		where runner = $2::text and worker = $3::int and (projector = $1::text and message_id = any($4::text[])) is not true
		for update skip locked)))
insert into kinora.in_flight (message_id, projector, runner, worker)
select distinct m collate "C", $1::text, $2::text, $3::int from unnest($4::text[]) m where m <> '' order by 1
on conflict on constraint in_flight_pkey do nothing`
)

// Beat implements provider.Liveness.
func (db *Provider) Beat(ctx context.Context, runner string, lease, record time.Duration) (h provider.Health, err error) {
	crash.Point("beat: before")
	_, err = db.row(ctx, "renew the lease of a runner", nil, []any{scanTime(&h.Now), scanTime(&h.Crashed)},
		beatSQL, planned, runner, lease.Microseconds(), record.Microseconds())
	crash.Point("beat: after")
	return h, classifyOwn(ctx, err)
}

// InFlight implements provider.Liveness.
func (db *Provider) InFlight(ctx context.Context, of provider.Build, w provider.Worker, messages []string) error {
	ids := mapSlice(messages, func(id *string) string { return markerID(*id) })
	b := &pgx.Batch{}
	b.Queue(noScanSQL)
	b.Queue(db.q(inFlightSQL), of.String(), w.Runner, w.Number, ids)
	crash.Point("in flight: before")
	err := db.pool.SendBatch(ctx, b).Close()
	crash.Point("in flight: after")
	return classifyOwn(ctx, wrap("record the messages in flight", err))
}
