package sqlite

import (
	"context"
	"time"

	"github.com/kinora-go/kinora/provider"
)

const (
	extendLease = `
insert into kinora_runners (runner, expires_at) values (?1, ` + clock + ` + ?2)
on conflict (runner) do update set expires_at = ` + clock + ` + ?2`

	// The leases and messages in flight of runners whose leases ended more than ?3 ms ago, and of
	// runner ?1 if ?4.
	deleteInFlight = `delete from kinora_in_flight where runner in (` + ended + `)`
	deleteRunner   = `delete from kinora_runners where runner in (` + ended + `)`

	ended = `
	select ?1 where ?4
	union all
	select runner from kinora_runners where runner <> ?1 and expires_at < ` + clock + ` - ?3`

	lastCrash = `select ` + clock + `, (select max(expires_at) from kinora_runners where runner <> ?1 and expires_at < ` + clock + `)`
)

// Beat implements provider.Liveness. Its commit is not synced, except on a DB from New, where it
// is like every other commit. Like every write it waits for running handlers in any process:
// leases should be longer than handlers take.
func (d *Provider) Beat(ctx context.Context, runner string, lease, record time.Duration) (h provider.Health, err error) {
	err = d.writeTx(unsynced(ctx), func(u *unit) error {
		for _, query := range []string{extendLease, deleteInFlight, deleteRunner} {
			if _, err := u.exec(ctx, query, runner, millis(lease), millis(record), lease == 0); err != nil {
				return err
			}
		}
		return one(ctx, u, []any{scanTime(&h.Now), scanTime(&h.Crashed)}, lastCrash, runner)
	})
	return result(h, "renew the lease of runner "+runner, err)
}

const insertInFlight = `
insert into kinora_in_flight (message_id, build, runner, worker)
select value, ?1, ?2, ?3 from json_each(?4)
where true
on conflict do nothing`

// InFlight implements provider.Liveness. Its commit is not synced, except on a DB from New.
func (d *Provider) InFlight(ctx context.Context, b provider.Build, w provider.Worker, messages []string) error {
	err := d.writeTx(unsynced(ctx), func(u *unit) error {
		if _, err := u.exec(ctx, clearInFlight, w.Runner, w.Number); err != nil {
			return err
		}
		_, err := u.exec(ctx, insertInFlight, b.String(), w.Runner, w.Number, anyOf(messages))
		return err
	})
	return wrap("record the messages in flight of runner "+w.Runner, err)
}
