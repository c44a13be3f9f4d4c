package postgres

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

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
	err = db.pool.QueryRow(ctx, db.q(beatSQL), planned, runner, lease.Microseconds(), record.Microseconds()).Scan(&h.Now, &h.Crashed)
	crash.Point("beat: after")
	h.Now, h.Crashed = h.Now.UTC(), h.Crashed.UTC()
	return h, classifyOwn(ctx, wrap("renew the lease of a runner", err))
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
