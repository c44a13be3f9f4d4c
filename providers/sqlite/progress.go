package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

// modes are the names of provider.Mode.
var modes = []string{"", "catch-up", "closing", "live", "ended"}

const (
	// ofBuild selects generation ?2 of projector ?1.
	ofBuild = `projector = ?1 and generation = ?2`

	readCheckpoint = `select position, mode, token from kinora_checkpoints where ` + ofBuild

	readWholeCheckpoint = `
select position, mode, token, event_id, recorded_at, lineage, handlers from kinora_checkpoints where ` + ofBuild

	moveCheckpoint = `update kinora_checkpoints set position = ?3, event_id = ?4, recorded_at = ?5 where ` + ofBuild

	setCheckpoint = `
insert into kinora_checkpoints (projector, generation, position, event_id, recorded_at, lineage, mode, token, handlers)
values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)
on conflict (projector, generation) do update set position = excluded.position, event_id = excluded.event_id,
	recorded_at = excluded.recorded_at, lineage = excluded.lineage, mode = excluded.mode, token = excluded.token,
	handlers = excluded.handlers`
)

// briefly returns the position, the mode and the token of a checkpoint. In a unit they do not
// change before the commit.
func briefly(ctx context.Context, q querier, b provider.Build) (provider.Checkpoint, error) {
	return oneCheckpoint(ctx, q, readCheckpoint, b, nil)
}

// wholly returns a checkpoint.
func wholly(ctx context.Context, q querier, b provider.Build) (provider.Checkpoint, error) {
	var id, lineage, handlers string
	var recorded sql.NullInt64
	c, err := oneCheckpoint(ctx, q, readWholeCheckpoint, b, []any{&id, &recorded, &lineage, &handlers})
	if err == nil && c.Mode != 0 {
		c.Place.ID, c.Lineage = id, lineage
		if recorded.Valid {
			c.Place.RecordedAt = time.UnixMicro(recorded.Int64).UTC()
		}
		err = json.Unmarshal([]byte(handlers), &c.Handlers)
	}
	return c, err
}

// oneCheckpoint scans the first columns of query, and the others into more.
func oneCheckpoint(ctx context.Context, q querier, query string, b provider.Build, more []any) (c provider.Checkpoint, err error) {
	var mode string
	var token []byte
	c.Generation = b.Number()
	err = one(ctx, q, append([]any{&c.Place.Position, &mode, &token}, more...), query, b.Projector, c.Generation)
	if errors.Is(err, sql.ErrNoRows) {
		return provider.Checkpoint{Generation: b.Number()}, nil
	}
	copy(c.Token[:], token)
	c.Mode = provider.Mode(slices.Index(modes, mode))
	return c, err
}

// moveCheckpoint moves the checkpoint as p.Advance says. The opening has compared it.
func (u *unit) moveCheckpoint(ctx context.Context, p *provider.Unit) error {
	to := p.Advance.To
	_, err := u.exec(ctx, moveCheckpoint, p.Projector, p.Build().Generation, to.Position, to.ID, microsOf(to.RecordedAt))
	return err
}

// microsOf returns nil (null) for the zero time.
func microsOf(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return t.UnixMicro()
}

// Checkpoint implements provider.Progress.
func (d *Provider) Checkpoint(ctx context.Context, b provider.Build) (c provider.Checkpoint, err error) {
	if err = provider.CheckStorable("projector", b.Projector); err == nil {
		b, err = numbered(ctx, d.reads, b)
	}
	if err == nil {
		c, err = wholly(ctx, d.reads, b)
	}
	return result(c, "read the checkpoint", err)
}

// SetCheckpoint implements provider.Progress. No unit is open while it has the write lock.
func (d *Provider) SetCheckpoint(ctx context.Context, b provider.Build, from, to provider.Checkpoint) (set bool, err error) {
	if err := provider.CheckSetCheckpoint(b.Projector, to); err != nil {
		return false, wrap("set the checkpoint", err)
	}
	err = d.writeTx(ctx, func(u *unit) error {
		b, err := numbered(ctx, u, b)
		if err != nil {
			return err
		}
		is, err := briefly(ctx, u, b)
		set = is.Mode != provider.ModeEnded && is.Place.Position == from.Place.Position && is.Mode == from.Mode && is.Token == from.Token
		if err == nil && set {
			_, err = u.exec(ctx, setCheckpoint, b.Projector, b.Generation, to.Place.Position, to.Place.ID, microsOf(to.Place.RecordedAt),
				to.Lineage, modes[to.Mode], tokenOf(to.Token), jsonOf(to.Handlers))
		}
		return err
	})
	return result(set, "set the checkpoint", err)
}

// Unapplied implements provider.Progress.
func (d *Provider) Unapplied(ctx context.Context, b provider.Build, messages []provider.Message) (all []bool, err error) {
	if err = provider.CheckUnapplied(b.Projector, messages); err == nil {
		b, err = numbered(ctx, d.reads, b)
	}
	if err == nil {
		all, err = unapplied(ctx, d.reads, b, messages)
	}
	return result(all, "look up markers", err)
}

// unapplied reads the checkpoint after the markers, which may be deleted when the checkpoint has
// moved.
func unapplied(ctx context.Context, q querier, b provider.Build, messages []provider.Message) ([]bool, error) {
	of := map[string]map[string]int64{}
	for i := range messages {
		for j := range messages[i].Handlers {
			addMarkers(of, &messages[i].Handlers[j], &messages[i])
		}
	}
	marked, err := findMarkers(ctx, q, b, jsonOf(of))
	if err != nil {
		return nil, err
	}
	c, err := briefly(ctx, q, b)
	if err != nil {
		return nil, err
	}
	unapplied := make([]bool, len(messages))
	for i := range messages {
		m := &messages[i]
		isMarked := func(name string) bool { return marked[provider.Marker{Handler: name, MessageID: m.ID}] }
		unapplied[i] = (m.Position == 0 || m.Position > c.Place.Position) &&
			slices.ContainsFunc(m.Handlers, func(h provider.Handler) bool {
				return !isMarked(h.Name) && !slices.ContainsFunc(h.Was, isMarked)
			})
	}
	return unapplied, nil
}

const (
	appliedMarkers = `
	select handler, generation, message_id from kinora_markers indexed by kinora_markers_position
	where handler in (select value from json_each(?3)) and generation = ?2
		and position <= (select position from kinora_checkpoints where ` + ofBuild + `)
	limit ?4`

	pruneApplied = `delete from kinora_markers where (handler, generation, message_id) in (` + appliedMarkers + `)`
)

// PruneApplied implements provider.Progress. It takes the write lock only if there are markers to
// delete.
func (d *Provider) PruneApplied(ctx context.Context, b provider.Build, handlers []string, limit int) (n int, err error) {
	if err = provider.CheckPrune(b.Projector, handlers); err == nil {
		b, err = numbered(ctx, d.reads, b)
	}
	if err != nil {
		return 0, wrap("prune applied", err)
	}
	args := []any{b.Projector, b.Generation, jsonOf(handlers), max(limit, 0)}
	if any, err := column[bool](ctx, d.reads, `select exists (`+appliedMarkers+`)`, args...); err != nil || !any[0] {
		return 0, wrap("prune applied", err)
	}
	err = d.writeTx(ctx, func(u *unit) error {
		n, err = u.changed(ctx, pruneApplied, args...)
		return err
	})
	return result(n, "prune applied", err)
}

const (
	acquireLease = `
insert into kinora_leases (name, token, holder, expires_at) values (?1, ?2, ?3, ` + clock + ` + ?4)
on conflict (name) do update set token = excluded.token, holder = excluded.holder, expires_at = excluded.expires_at
where token = excluded.token or expires_at <= ` + clock

	releaseLease = `delete from kinora_leases where name = ?1 and token = ?2`
)

// AcquireLease implements claim.Leases. Its commit is not synced, except on a DB from New.
func (d *Provider) AcquireLease(ctx context.Context, name string, t claim.Terms) (acquired bool, err error) {
	if err := provider.CheckStorable("name", name); err != nil {
		return false, wrap("acquire a lease", err)
	}
	err = d.writeTx(unsynced(ctx), func(u *unit) error {
		n, err := u.changed(ctx, acquireLease, name, t.Token[:], t.Holder, millis(t.Lease))
		acquired = n == 1
		return err
	})
	return result(acquired, "acquire the lease on "+name, err)
}

// ReleaseLease implements claim.Leases. Its commit is not synced, except on a DB from New.
func (d *Provider) ReleaseLease(ctx context.Context, name string, token claim.Token) error {
	if err := provider.CheckStorable("name", name); err != nil {
		return wrap("release a lease", err)
	}
	err := d.writeTx(unsynced(ctx), func(u *unit) error {
		_, err := u.exec(ctx, releaseLease, name, token[:])
		return err
	})
	return wrap("release the lease on "+name, err)
}
