package sqlite

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

const (
	// ofBuild selects generation ?2 of projector ?1.
	ofBuild = `projector = ?1 and generation = ?2`

	readCheckpoint = `select position, mode, token from kinora_checkpoints where ` + ofBuild

	moveSegment = `
update kinora_segments set position = ?3, event_id = ?4, recorded_at = ?5 where ` + ofBuild + ` and segment = ?6`
	takeSegment = `
insert into kinora_segments (projector, generation, segment, position, event_id, recorded_at, token) values (?1, ?2, ?3, ?4, ?5, ?6, ?7)
on conflict (projector, generation, segment) do update set token = excluded.token`
	dropSegments = `delete from kinora_segments where ` + ofBuild + ` and segment < ?3`

	readWholeCheckpoint = `
select position, mode, token, event_id, recorded_at, lineage, handlers, nullif(splits, '[]'), (
	select json_group_array(json_object(
		'number', segment, 'position', position, 'id', event_id, 'token', hex(token), 'micros', recorded_at) order by segment)
	from kinora_segments s where s.projector = ?1 and s.generation = ?2)
from kinora_checkpoints where ` + ofBuild

	moveCheckpoint = `update kinora_checkpoints set position = ?3, event_id = ?4, recorded_at = ?5 where ` + ofBuild

	setCheckpoint = `
insert into kinora_checkpoints (projector, generation, position, event_id, recorded_at, lineage, mode, token, handlers, splits)
values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
on conflict (projector, generation) do update set position = excluded.position, event_id = excluded.event_id,
	recorded_at = excluded.recorded_at, lineage = excluded.lineage, mode = excluded.mode, token = excluded.token,
	handlers = case when ?11 then kinora_checkpoints.handlers else excluded.handlers end, splits = excluded.splits`
)

// checkpointHead returns position, mode and token. In a unit they do not change before the commit.
func checkpointHead(ctx context.Context, q querier, b provider.Build) (c provider.Checkpoint, err error) {
	err = readInto(ctx, q, &c, readCheckpoint, b)
	return c, err
}

// wholeCheckpoint returns a checkpoint.
func wholeCheckpoint(ctx context.Context, q querier, b provider.Build) (c provider.Checkpoint, err error) {
	var segments []struct {
		Number    int
		Position  int64
		ID, Token string
		Micros    *int64
	}
	err = readInto(ctx, q, &c, readWholeCheckpoint, b,
		&c.Place.ID, scanMicros(&c.Place.RecordedAt), &c.Lineage, scanJSON(&c.Handlers), scanJSON(&c.Splits), scanJSON(&segments))
	for _, s := range segments {
		is := provider.Segment{Number: s.Number, Place: provider.LogPlace{Position: s.Position, ID: s.ID}}
		if s.Micros != nil {
			is.Place.RecordedAt = time.UnixMicro(*s.Micros).UTC()
		}
		token, _ := hex.DecodeString(s.Token) // hex() has written it
		copy(is.Token[:], token)
		c.Segments = append(c.Segments, is)
	}
	return c, err
}

// readInto scans the first columns of a checkpoint, and the others into more.
func readInto(ctx context.Context, q querier, c *provider.Checkpoint, query string, b provider.Build, more ...any) error {
	var mode string
	var token []byte
	c.Generation = b.Number()
	found, err := find(ctx, q, append([]any{&c.Place.Position, &mode, &token}, more...), query, b.Projector, c.Generation)
	if copy(c.Token[:], token); found {
		c.Mode = provider.ParseMode(mode)
	}
	return err
}

// scan is a function that reads a column.
type scan func(stored any) error

// Scan implements sql.Scanner.
func (s scan) Scan(stored any) error { return s(stored) }

// scanMicros returns where a column with a time in microseconds goes. Null is the zero time.
func scanMicros(to *time.Time) scan {
	return func(stored any) error {
		if micros, ok := stored.(int64); ok {
			*to = time.UnixMicro(micros).UTC()
		}
		return nil
	}
}

// scanJSON returns where a column with JSON goes. Null changes nothing.
func scanJSON(to any) scan {
	return func(stored any) error {
		if text, ok := stored.(string); ok {
			return json.Unmarshal([]byte(text), to)
		}
		return nil
	}
}

// TakeSegment implements provider.Progress.
func (d *Provider) TakeSegment(ctx context.Context, b provider.Build, number int, token claim.Token) (was provider.Segment, ok bool, err error) {
	ok, err = update(ctx, d, "take a segment", provider.CheckStorable("projector", b.Projector), func(u *unit) (taken bool, err error) {
		if b, err = numbered(ctx, u, b); err != nil {
			return false, err
		}
		c, err := wholeCheckpoint(ctx, u, b)
		if was, taken = c.TakeSegment(number, token); err == nil && taken {
			to := was.Place
			_, err = u.exec(ctx, takeSegment, b.Projector, b.Generation, number, to.Position, to.ID, microsOf(to.RecordedAt), tokenOf(token))
		}
		return taken, err
	})
	return was, ok, err
}

// moveCheckpoint moves the checkpoint as p.Advance says. The opening has compared it.
func (u *unit) moveCheckpoint(ctx context.Context, p *provider.Unit) error {
	to := p.Advance.To
	query, args := moveCheckpoint, []any{p.Projector, p.Build().Generation, to.Position, to.ID, microsOf(to.RecordedAt)}
	if p.Segment > 0 {
		query, args = moveSegment, append(args, p.Segment)
	}
	_, err := u.exec(ctx, query, args...)
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
func (d *Provider) SetCheckpoint(ctx context.Context, b provider.Build, from, to provider.Checkpoint) (bool, error) {
	return update(ctx, d, "set the checkpoint", provider.CheckSetCheckpoint(b.Projector, to), func(u *unit) (set bool, err error) {
		if b, err = numbered(ctx, u, b); err != nil {
			return false, err
		}
		is, err := wholeCheckpoint(ctx, u, b)
		set = provider.CanSetCheckpoint(is, from)
		if err == nil && set {
			_, err = u.exec(ctx, setCheckpoint, b.Projector, b.Generation, to.Place.Position, to.Place.ID, microsOf(to.Place.RecordedAt),
				to.Lineage, to.Mode.String(), tokenOf(to.Token), jsonOf(to.Handlers), jsonOf(append([]provider.Split{}, to.Splits...)),
				provider.KeepsHandlers(from, to))
		}
		if err == nil && set {
			_, err = u.exec(ctx, dropSegments, b.Projector, b.Generation, to.Oldest())
		}
		return set, err
	})
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

// unapplied reads the checkpoint after the markers, which may be deleted once it has moved.
func unapplied(ctx context.Context, q querier, b provider.Build, messages []provider.Message) ([]bool, error) {
	of := map[string]map[string]int64{}
	for i := range messages {
		addMarkers(of, &messages[i])
	}
	marked, err := findMarkers(ctx, q, b, jsonOf(of))
	if err != nil {
		return nil, err
	}
	c, err := checkpointHead(ctx, q, b)
	return c.Unapplied(messages, func(m provider.Marker) bool { return marked[m] }), err
}

const (
	appliedMarkers = `
	select handler, generation, message_id from kinora_markers indexed by kinora_markers_position
	where handler in (select value from json_each(?3)) and generation = ?2
		and position <= (select position from kinora_checkpoints where ` + ofBuild + `)
	limit ?4`

	pruneApplied = `delete from kinora_markers where (handler, generation, message_id) in (` + appliedMarkers + `)`
)

// PruneApplied implements provider.Progress. It writes only if there are markers to delete.
func (d *Provider) PruneApplied(ctx context.Context, b provider.Build, handlers []string, limit int) (n int, err error) {
	if err = provider.CheckPrune(b.Projector, handlers); err == nil {
		b, err = numbered(ctx, d.reads, b)
	}
	args, exists := []any{b.Projector, b.Generation, jsonOf(handlers), max(limit, 0)}, false
	if err == nil {
		err = one(ctx, d.reads, []any{&exists}, `select exists (`+appliedMarkers+`)`, args...)
	}
	if err == nil && exists {
		n, err = d.changed(ctx, pruneApplied, args...)
	}
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
func (d *Provider) AcquireLease(ctx context.Context, name string, t claim.Terms) (bool, error) {
	return update(unsynced(ctx), d, "acquire the lease on "+name, provider.CheckStorable("name", name), func(u *unit) (bool, error) {
		n, err := u.changed(ctx, acquireLease, name, t.Token[:], t.Holder, millis(t.Lease))
		if err == nil && n == 1 {
			_, err = u.exec(ctx, deleteLeases)
		}
		return n == 1, err
	})
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
	err := provider.CheckStorable("name", name)
	if err == nil {
		_, err = d.changed(unsynced(ctx), releaseLease, name, token[:])
	}
	return wrap("release the lease on "+name, err)
}
