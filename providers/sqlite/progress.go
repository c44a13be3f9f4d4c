package sqlite

import (
	"context"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

const (
	// ofBuild selects generation ?2 of projector ?1.
	ofBuild = `projector = ?1 and generation = ?2`

	readCheckpoint = `select position, mode, token from kinora_checkpoints where ` + ofBuild

	readSplits  = `select splits from kinora_checkpoints where ` + ofBuild
	readSegment = `select position, event_id, recorded_at, token from kinora_segments where ` + ofBuild + ` and segment = ?3`
	moveSegment = `
update kinora_segments set position = ?3, event_id = ?4, recorded_at = ?5 where ` + ofBuild + ` and segment = ?6`
	takeSegment = `
insert into kinora_segments (projector, generation, segment, position, event_id, recorded_at, token) values (?1, ?2, ?3, ?4, ?5, ?6, ?7)
on conflict (projector, generation, segment) do update set token = excluded.token`
	dropSegments = `delete from kinora_segments where ` + ofBuild + ` and segment < ?3`

	readWholeCheckpoint = `
select position, mode, token, event_id, recorded_at, lineage, handlers, splits,
	(select coalesce(json_group_array(json_array(segment, position, event_id, recorded_at, hex(token)) order by segment), '[]')
	from kinora_segments s where s.projector = ?1 and s.generation = ?2)
from kinora_checkpoints where ` + ofBuild

	moveCheckpoint = `update kinora_checkpoints set position = ?3, event_id = ?4, recorded_at = ?5 where ` + ofBuild

	setCheckpoint = `
insert into kinora_checkpoints (projector, generation, position, event_id, recorded_at, lineage, mode, token, handlers, splits)
values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
on conflict (projector, generation) do update set position = excluded.position, event_id = excluded.event_id,
	recorded_at = excluded.recorded_at, lineage = excluded.lineage, mode = excluded.mode, token = excluded.token,
	handlers = excluded.handlers, splits = excluded.splits`
)

// checkpointHead returns the position, the mode and the token of a checkpoint. In a unit they do not
// change before the commit.
func checkpointHead(ctx context.Context, q querier, b provider.Build) (provider.Checkpoint, error) {
	return oneCheckpoint(ctx, q, readCheckpoint, b, nil)
}

// wholeCheckpoint returns a checkpoint.
func wholeCheckpoint(ctx context.Context, q querier, b provider.Build) (provider.Checkpoint, error) {
	var id, lineage, handlers, splits, segments string
	var recorded sql.NullInt64
	c, err := oneCheckpoint(ctx, q, readWholeCheckpoint, b, []any{&id, &recorded, &lineage, &handlers, &splits, &segments})
	if err == nil && c.Mode != 0 {
		c.Place.ID, c.Lineage = id, lineage
		c.Place.RecordedAt = timeOfMicros(recorded)
		err = json.Unmarshal([]byte(handlers), &c.Handlers)
		if err == nil && splits != "[]" {
			err = json.Unmarshal([]byte(splits), &c.Splits)
		}
		if err == nil {
			c.Segments, err = segmentsOf(segments)
		}
	}
	return c, err
}

func timeOfMicros(t sql.NullInt64) time.Time {
	if !t.Valid {
		return time.Time{}
	}
	return time.UnixMicro(t.Int64).UTC()
}

// segmentsOf reads the segments of readWholeCheckpoint.
func segmentsOf(list string) (all []provider.Segment, err error) {
	var rows [][5]json.RawMessage
	if err := json.Unmarshal([]byte(list), &rows); err != nil {
		return nil, err
	}
	for _, row := range rows {
		var is provider.Segment
		var recorded *int64
		var token string
		for i, to := range []any{&is.Number, &is.Place.Position, &is.Place.ID, &recorded, &token} {
			if err := json.Unmarshal(row[i], to); err != nil {
				return nil, err
			}
		}
		if recorded != nil {
			is.Place.RecordedAt = time.UnixMicro(*recorded).UTC()
		}
		raw, err := hex.DecodeString(token)
		if err != nil {
			return nil, err
		}
		copy(is.Token[:], raw)
		all = append(all, is)
	}
	return all, nil
}

// inSegment returns the checkpoint that a unit is compared with.
func inSegment(ctx context.Context, q querier, b provider.Build, segment int) (provider.Checkpoint, error) {
	c, err := checkpointHead(ctx, q, b)
	if err != nil || segment == 0 || c.Mode == 0 {
		return c, err
	}
	var splits string
	if err := one(ctx, q, []any{&splits}, readSplits, b.Projector, b.Number()); err != nil {
		return c, err
	}
	if err := json.Unmarshal([]byte(splits), &c.Splits); err != nil {
		return c, err
	}
	is, err := oneSegment(ctx, q, b, segment)
	if err == nil {
		c.Segments = []provider.Segment{is}
	}
	if errors.Is(err, sql.ErrNoRows) {
		err = nil
	}
	return c.InSegment(segment), err
}

func oneSegment(ctx context.Context, q querier, b provider.Build, number int) (is provider.Segment, err error) {
	var recorded sql.NullInt64
	var token []byte
	is.Number = number
	err = one(ctx, q, []any{&is.Place.Position, &is.Place.ID, &recorded, &token}, readSegment, b.Projector, b.Number(), number)
	is.Place.RecordedAt = timeOfMicros(recorded)
	copy(is.Token[:], token)
	return is, err
}

// TakeSegment implements provider.Progress.
func (d *Provider) TakeSegment(ctx context.Context, b provider.Build, number int, token claim.Token) (was provider.Segment, ok bool, err error) {
	if err := provider.CheckStorable("projector", b.Projector); err != nil {
		return was, false, wrap("take a segment", err)
	}
	err = d.writeTx(ctx, func(u *unit) error {
		b, err := numbered(ctx, u, b)
		if err != nil {
			return err
		}
		c, err := wholeCheckpoint(ctx, u, b)
		if ok = err == nil && c.Mode == provider.ModeCatchUp && c.Split().Has(number); !ok {
			return err
		}
		was, err = oneSegment(ctx, u, b, number)
		if errors.Is(err, sql.ErrNoRows) {
			was, err = provider.Segment{Number: number, Place: c.Place}, nil
		}
		if err == nil {
			to := was.Place
			_, err = u.exec(ctx, takeSegment, b.Projector, b.Generation, number, to.Position, to.ID, microsOf(to.RecordedAt), tokenOf(token))
		}
		return err
	})
	return was, ok && err == nil, wrap("take a segment", err)
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
	c.Mode = provider.ParseMode(mode)
	return c, err
}

// moveCheckpoint moves the checkpoint as p.Advance says. The opening has compared it.
func (u *unit) moveCheckpoint(ctx context.Context, p *provider.Unit) error {
	to := p.Advance.To
	if p.Segment > 0 {
		_, err := u.exec(ctx, moveSegment, p.Projector, p.Build().Generation, to.Position, to.ID, microsOf(to.RecordedAt), p.Segment)
		return err
	}
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
		c, err = wholeCheckpoint(ctx, d.reads, b)
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
		is, err := wholeCheckpoint(ctx, u, b)
		set = provider.CanSetCheckpoint(is, from)
		if err == nil && set {
			_, err = u.exec(ctx, setCheckpoint, b.Projector, b.Generation, to.Place.Position, to.Place.ID, microsOf(to.Place.RecordedAt),
				to.Lineage, to.Mode.String(), tokenOf(to.Token), jsonOf(to.Handlers), jsonOf(append([]provider.Split{}, to.Splits...)))
		}
		if err == nil && set {
			_, err = u.exec(ctx, dropSegments, b.Projector, b.Generation, to.Oldest())
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
	c, err := checkpointHead(ctx, q, b)
	if err != nil {
		return nil, err
	}
	return c.Unapplied(messages, func(m provider.Marker) bool { return marked[m] }), nil
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
	if exists, err := column[bool](ctx, d.reads, `select exists (`+appliedMarkers+`)`, args...); err != nil || !exists[0] {
		return 0, wrap("prune applied", err)
	}
	n, err = d.changed(ctx, pruneApplied, args...)
	return result(n, "prune applied", err)
}

const (
	acquireLease = `
insert into kinora_leases (name, token, holder, expires_at) values (?1, ?2, ?3, ` + clock + ` + ?4)
on conflict (name) do update set token = excluded.token, holder = excluded.holder, expires_at = excluded.expires_at
where token = excluded.token or expires_at <= ` + clock

	deleteLeases = `delete from kinora_leases where expires_at < ` + clock + ` - 3600000`

	leaseNames = `select name from kinora_leases where name >= ?1 and substr(name, 1, length(?1)) = ?1 and expires_at > ` + clock + ` order by name`

	releaseLease = `delete from kinora_leases where name = ?1 and token = ?2`
)

// AcquireLease implements provider.Leases. Its commit is not synced, except on a DB from New.
func (d *Provider) AcquireLease(ctx context.Context, name string, t claim.Terms) (acquired bool, err error) {
	if err := provider.CheckStorable("name", name); err != nil {
		return false, wrap("acquire a lease", err)
	}
	err = d.writeTx(unsynced(ctx), func(u *unit) error {
		n, err := u.changed(ctx, acquireLease, name, t.Token[:], t.Holder, millis(t.Lease))
		if acquired = n == 1; err == nil && acquired {
			_, err = u.exec(ctx, deleteLeases)
		}
		return err
	})
	return result(acquired, "acquire the lease on "+name, err)
}

// LeaseNames implements provider.Leases.
func (d *Provider) LeaseNames(ctx context.Context, prefix string) (names []string, err error) {
	if err = provider.CheckStorable("prefix", prefix); err == nil {
		names, err = column[string](ctx, d.reads, leaseNames, prefix)
	}
	return result(names, "list leases", err)
}

// ReleaseLease implements provider.Leases. Its commit is not synced, except on a DB from New.
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
