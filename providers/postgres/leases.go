package postgres

import (
	"context"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

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
