package postgres

import (
	"context"

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
	if err := provider.CheckStorable("name", name); err != nil {
		return false, wrap("acquire a lease", err)
	}
	crash.Point("acquire lease: before")
	tag, err := db.pool.Exec(ctx, db.q(acquireLeaseSQL), name, uuid.UUID(t.Token), t.Holder, t.Lease.Microseconds())
	crash.Point("acquire lease: after")
	return tag.RowsAffected() == 1, classifyOwn(ctx, wrap("acquire a lease", err))
}

// ReleaseLease implements provider.Leases.
func (db *Provider) ReleaseLease(ctx context.Context, name string, token claim.Token) error {
	if err := provider.CheckStorable("name", name); err != nil {
		return wrap("release a lease", err)
	}
	crash.Point("release lease: before")
	_, err := db.pool.Exec(ctx, db.q(releaseLeaseSQL), name, uuid.UUID(token))
	crash.Point("release lease: after")
	return classifyOwn(ctx, wrap("release a lease", err))
}

// LeaseNames implements provider.Leases.
func (db *Provider) LeaseNames(ctx context.Context, prefix string) ([]string, error) {
	if err := provider.CheckStorable("prefix", prefix); err != nil {
		return nil, wrap("list leases", err)
	}
	names, err := collect(ctx, db.pool, pgx.RowTo[string], db.q(leaseNamesSQL), planned, prefix)
	return names, classifyOwn(ctx, wrap("list leases", err))
}
