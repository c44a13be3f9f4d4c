package sqlite

import (
	"context"
	"database/sql"

	"github.com/kinora-go/kinora/provider"
)

// open reads what a unit must know before its handlers run. It holds the write lock, so the rows
// that it reads do not change before the commit.
func (u *unit) open(ctx context.Context, p *provider.Unit) (provider.Found, error) {
	found := p.NewFound(false)
	found.Begin = func(message int) {
		// after a rollback, statements fail because of an earlier one
		if !u.rolledBack.Load() {
			u.message.Store(int64(message))
		}
	}
	findLanes := u.findHeld
	if p.IsReplay() {
		findLanes = u.findLive
	}
	err := findLanes(ctx, p, &found)
	if err == nil {
		err = u.mark(ctx, p, &found)
	}
	if err == nil && p.Careful != nil {
		err = u.findSuspects(ctx, p, &found)
	}
	return found, err
}

const (
	// ?2 is an object with the messages of each handler: their positions, or 0, by their ids.
	ofMarkers = `jsonb_each(?2) j cross join json_each(j.value) i`

	findMarked = `
select j.key, i.key from ` + ofMarkers + `
where exists (select 1 from kinora_markers where handler = j.key and generation = ?1 and message_id = i.key)`

	insertMarkers = `
insert into kinora_markers (handler, generation, message_id, processed_at, position)
select j.key, ?1, i.key, (select ` + clock + `), nullif(i.value, 0) from ` + ofMarkers + `
where true
on conflict do nothing`
)

// mark inserts the markers that do not exist, except with Advance, and sets Fresh and Left.
func (u *unit) mark(ctx context.Context, p *provider.Unit, found *provider.Found) error {
	c, err := inSegment(ctx, u, p.Build(), p.Segment)
	if err == nil {
		err = found.SetProgress(p, c)
	}
	if err != nil {
		return err
	}
	var marked map[provider.Marker]bool
	if asked, n := markersOf(p, found, &c); n > 0 {
		markers := jsonOf(asked)
		marked, err = findMarkers(ctx, u, p.Build(), markers)
		if err == nil && p.Advance == nil && len(marked) < n {
			_, err = u.exec(ctx, insertMarkers, p.Build().Generation, markers)
		}
	}
	if err != nil {
		return err
	}
	found.SetFresh(p, func(m provider.Marker) bool { return !marked[m] })
	return found.SetProgress(p, c)
}

// markersOf returns the markers of p for ofMarkers, and their number, without those of messages
// that are not fresh in any case.
func markersOf(p *provider.Unit, found *provider.Found, c *provider.Checkpoint) (of map[string]map[string]int64, n int) {
	of = map[string]map[string]int64{}
	for i := range p.Messages {
		m := &p.Messages[i]
		if !m.Mark || c.Covers(m) || found.Live != nil && !found.Live[i] || found.Left != nil && found.Left[i] {
			continue
		}
		for j := range m.Handlers {
			n += addMarkers(of, &m.Handlers[j], m)
		}
	}
	return of, n
}

// addMarkers adds the markers of a message under each name of the handler, and returns their
// number.
func addMarkers(of map[string]map[string]int64, h *provider.Handler, m *provider.Message) int {
	add := func(name string) {
		if of[name] == nil {
			of[name] = map[string]int64{}
		}
		of[name][m.ID] = m.Position
	}
	add(h.Name)
	for _, was := range h.Was {
		add(was)
	}
	return 1 + len(h.Was)
}

// findMarkers returns the markers that exist. markers is for ofMarkers.
func findMarkers(ctx context.Context, q querier, b provider.Build, markers string) (map[provider.Marker]bool, error) {
	marked := map[provider.Marker]bool{}
	err := eachRow(ctx, q, func(rows *sql.Rows) error {
		var m provider.Marker
		err := rows.Scan(&m.Handler, &m.MessageID)
		marked[m] = true
		return err
	}, findMarked, b.Number(), markers)
	return marked, err
}

const (
	// findHeld finds the messages whose lanes are held. ?3 has all lanes one after another.
	// Usually no lane is held.
	findHeld = `
with recursive message (i) as (select 0 union all select i + 1 from message where i + 1 < length(?3) / 32)
select message.i
from (select 1 from kinora_parked indexed by kinora_parked_lane where open = 1 and projector = ?1 and generation = ?2 limit 1) cross join message
where exists (
	select 1 from kinora_parked indexed by kinora_parked_lane
	where open = 1 and projector = ?1 and generation = ?2 and lane = substr(?3, 1 + 32 * message.i, 32))`

	// findSuspects finds the messages of ?3 that are in flight in runners other than ?2.
	findSuspects = `
select j.key from json_each(?3) j
where j.value <> '' and exists (
	select 1 from kinora_in_flight where message_id = j.value and build = ?1 and runner <> ?2)`

	clearInFlight = `delete from kinora_in_flight where runner = ?1 and worker = ?2`
)

func (u *unit) findHeld(ctx context.Context, p *provider.Unit, found *provider.Found) error {
	lanes := make([]byte, 0, len(p.Messages)*len(provider.Lane{}))
	for i := range p.Messages {
		lanes = append(lanes, p.Messages[i].Lane[:]...)
	}
	return u.flag(ctx, found.Held, findHeld, p.Projector, p.Build().Generation, lanes)
}

func (u *unit) findSuspects(ctx context.Context, p *provider.Unit, found *provider.Found) error {
	ids := make([]string, len(p.Messages))
	for i := range ids {
		ids[i] = p.Messages[i].ID
	}
	found.Suspect = make([]bool, len(ids))
	return u.flag(ctx, found.Suspect, findSuspects, p.Build().String(), p.Careful.Runner, jsonOf(ids))
}

// flag sets the flags at the indexes that a query selects.
func (u *unit) flag(ctx context.Context, flags []bool, query string, args ...any) error {
	found, err := column[int](ctx, u, query, args...)
	for _, i := range found {
		flags[i] = true
	}
	return err
}

// findFront lists the open messages of lanes. ?3 has the last id to list of each lane. Only a due
// message gets a due time.
const findFront = `
select ` + parkedFields + `, iif(p.due_at <= ` + clock + `, p.due_at, null), '', null
from json_each(?3) j cross join kinora_parked p on p.id in (
	select id from kinora_parked indexed by kinora_parked_lane
	where open = 1 and projector = ?1 and generation = ?2 and lane = unhex(j.key) and id <= j.value)
order by p.id`

func (u *unit) findLive(ctx context.Context, p *provider.Unit, found *provider.Found) error {
	last, due := map[provider.Lane]int64{}, map[provider.Lane]bool{}
	for _, m := range p.Messages {
		last[m.Lane] = max(last[m.Lane], m.Parked.Seq)
	}
	front, err := parkedOf(ctx, u, findFront, p.Projector, p.Build().Generation, jsonOf(last))
	for i := range front {
		due[front[i].Lane] = due[front[i].Lane] || !front[i].DueAt.IsZero()
	}
	found.SetLive(p, front, due)
	return err
}
