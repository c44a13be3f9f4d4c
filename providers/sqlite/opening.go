package sqlite

import (
	"context"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"github.com/kinora-go/kinora/provider"
)

// open looks up all that a unit must know before its handlers run. It holds the write lock, so nothing that it reads
// changes before the commit.
func (u *unit) open(ctx context.Context, p provider.Unit) (found provider.Found, err error) {
	n := len(p.Messages)
	found = provider.Found{
		Fresh: make([][]bool, n), Held: make([]bool, n),
		Begin: func(message int) { u.message.Store(int64(message)) },
	}
	parked := isParked(p)
	if parked {
		found.Live, err = u.live(ctx, p.Projector, p.Messages, func(is provider.Parked, due bool) bool {
			counted := is.Attempts > 0 // Try has put the lane off for this unit
			return p.DryRun != nil || is.State == provider.StateWaiting && (due || counted)
		})
		if err != nil {
			return found, fmt.Errorf("look for parked messages: %w", err)
		}
	}
	for i, m := range p.Messages {
		found.Fresh[i] = slices.Repeat([]bool{!m.Mark && (!parked || found.Live[i])}, len(m.Handlers))
	}
	if err := u.mark(ctx, p, found); err != nil {
		return found, fmt.Errorf("mark: %w", err)
	}
	if !parked {
		if err := u.findHeld(ctx, p, found.Held); err != nil {
			return found, fmt.Errorf("look for holds: %w", err)
		}
	}
	if p.Careful != nil {
		if found.Suspect, err = u.findSuspects(ctx, p); err != nil {
			return found, fmt.Errorf("look for suspects: %w", err)
		}
	}
	return found, nil
}

// isParked reports whether the messages of p are parked ones.
func isParked(p provider.Unit) bool { return len(p.Messages) > 0 && p.Messages[0].Parked != nil }

const (
	// findMarked finds the messages of ?3 that have a marker under one of the names ?2.
	findMarked = `
select j.key from json_each(?3) j
where exists (
	select 1 from kinora_markers m
	where m.handler in (select value from json_each(?2)) and m.generation = ` + live + ` and m.message_id = j.value)`

	// insertMarkers marks each of the messages ?3 under each of the names ?2.
	insertMarkers = `
insert into kinora_markers (handler, generation, message_id, processed_at)
select h.value, ` + live + `, j.value, (select ` + clock + `)
from json_each(?2) h cross join json_each(?3) j
where true
on conflict do nothing`
)

// markers are those of one handler in a unit.
type markers struct {
	names []string // of the handler: its own and its earlier ones
	ids   []string // of the messages
	fresh []*bool  // where to say that they are fresh
}

// mark inserts the markers that are not there, and sets Fresh for them. It is two statements for each handler,
// however many messages there are.
func (u *unit) mark(ctx context.Context, p provider.Unit, found provider.Found) error {
	var all []*markers
	byName := map[string]*markers{}
	for i, m := range p.Messages {
		if !m.Mark || found.Live != nil && !found.Live[i] {
			continue
		}
		for j, h := range m.Handlers {
			of := byName[h.Name]
			if of == nil {
				of = &markers{names: append([]string{h.Name}, h.Was...)}
				byName[h.Name] = of
				all = append(all, of)
			}
			of.ids, of.fresh = append(of.ids, m.ID), append(of.fresh, &found.Fresh[i][j])
		}
	}
	for _, of := range all {
		if err := u.markHandler(ctx, p.Projector, of); err != nil {
			return err
		}
	}
	return nil
}

func (u *unit) markHandler(ctx context.Context, projector string, of *markers) error {
	for _, fresh := range of.fresh {
		*fresh = true
	}
	names := jsonOf(of.names)
	marked, err := u.indexes(ctx, findMarked, projector, names, jsonOf(of.ids))
	if err != nil {
		return err
	}
	for _, i := range marked {
		*of.fresh[i], of.ids[i] = false, ""
	}
	ids := of.ids
	if len(marked) > 0 {
		ids = slices.DeleteFunc(ids, func(id string) bool { return id == "" })
	}
	if len(ids) == 0 {
		return nil
	}
	_, err = u.exec(ctx, insertMarkers, projector, names, jsonOf(ids))
	return err
}

// indexes lists the integers that a query selects.
func (s session) indexes(ctx context.Context, query string, args ...any) (all []int, err error) {
	err = each(ctx, s, func(rows *sql.Rows) error {
		var i int
		err := rows.Scan(&i)
		all = append(all, i)
		return err
	}, query, args...)
	return all, err
}

const (
	anyHold  = `select exists (select 1 from kinora_holds where projector = ?1)`
	findHeld = `
select j.key from json_each(?2) j cross join kinora_holds h
where h.projector = ?1 and h.lane = unhex(j.value)`
)

// findHeld finds the messages whose lanes are held. Usually nothing of a projector is.
func (u *unit) findHeld(ctx context.Context, p provider.Unit, held []bool) error {
	var some bool
	if err := one(ctx, u, []any{&some}, anyHold, p.Projector); err != nil || !some {
		return err
	}
	lanes := make([]string, len(p.Messages))
	for i, m := range p.Messages {
		lanes[i] = hexOf(m.Lane)
	}
	found, err := u.indexes(ctx, findHeld, p.Projector, jsonOf(lanes))
	for _, i := range found {
		held[i] = true
	}
	return err
}

func hexOf(l provider.Lane) string { return hex.EncodeToString(l[:]) }

const (
	findSuspects = `
select j.key from json_each(?3) j
where exists (
	select 1 from kinora_doing d
	where d.message_id = j.value and d.projector = ?1 and d.runner <> ?2)`

	forgetNames = `delete from kinora_doing where runner = ?1 and worker = ?2`
)

// findSuspects finds the messages that other runners have named.
func (u *unit) findSuspects(ctx context.Context, p provider.Unit) ([]bool, error) {
	suspect, ids := make([]bool, len(p.Messages)), make([]string, len(p.Messages))
	for i, m := range p.Messages {
		ids[i] = m.ID
	}
	found, err := u.indexes(ctx, findSuspects, p.Projector, p.Careful.Runner, jsonOf(ids))
	for _, i := range found {
		suspect[i] = ids[i] != ""
	}
	return suspect, err
}

// firstOfLanes lists the parked messages of lanes, in order. ?2 has the last id to list of each lane.
const firstOfLanes = `
select p.id, p.lane, p.state, p.attempts, p.handlers, h.due_at <= ` + clock + `
from json_each(?2) j
cross join kinora_holds h on h.projector = ?1 and h.lane = unhex(j.key)
cross join kinora_parked p on p.id in (
	select id from kinora_parked indexed by kinora_parked_lane
	where open = 1 and projector = ?1 and lane = h.lane and id <= j.value)
order by p.id`

// live says which of messages, which are parked ones, are as they were listed, ready, and first in their lanes: before
// them come only earlier ones of messages that are live too.
func (u *unit) live(ctx context.Context, projector string, messages []provider.Message, ready func(is provider.Parked, due bool) bool) ([]bool, error) {
	live, last := make([]bool, len(messages)), map[string]int64{}
	index, next := map[int64]int{}, map[provider.Lane]int{}
	for i, m := range messages {
		lane := hexOf(m.Lane)
		last[lane] = max(last[lane], m.Parked.Seq)
		index[m.Parked.Seq] = i
	}
	err := each(ctx, u, func(rows *sql.Rows) error {
		var is provider.Parked
		var lane, handlers []byte
		var state string
		var due bool
		err := rows.Scan(&is.Seq, &lane, &state, &is.Attempts, &handlers, &due)
		if err == nil {
			err = json.Unmarshal(handlers, &is.Handlers)
		}
		if err != nil {
			return err
		}
		copy(is.Lane[:], lane)
		is.State = provider.ParseParkedState(state)
		i, asked := index[is.Seq]
		if !asked || i < next[is.Lane] || !isAsListed(is, *messages[i].Parked) || !ready(is, due) {
			next[is.Lane] = math.MaxInt // none of those behind it comes first
			return nil
		}
		live[i], next[is.Lane] = true, i+1
		return nil
	}, firstOfLanes, projector, jsonOf(last))
	return live, err
}

func isAsListed(is, listed provider.Parked) bool {
	return is.Attempts == listed.Attempts && slices.Equal(is.Handlers, listed.Handlers)
}
