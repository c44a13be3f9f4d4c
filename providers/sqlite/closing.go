package sqlite

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/kinora-go/kinora/provider"
)

// never is the time at which a lane is due whose first message waits for a person.
const never = `9223372036854775807`

// close writes all of a unit that commits together with the writes of its handlers.
func (u *unit) close(ctx context.Context, p provider.Unit, found provider.Found, c provider.Closing) error {
	if err := u.enqueueAll(ctx, c.Output); err != nil {
		return err
	}
	u.entries = u.entries || len(c.Output) > 0
	write := u.park
	if isParked(p) {
		write = u.resolve
	}
	if err := write(ctx, p, found, c.Park); err != nil {
		return err
	}
	if p.Careful == nil {
		return nil
	}
	_, err := u.exec(ctx, forgetNames, p.Careful.Runner, p.Careful.Number)
	return err
}

const (
	insertParked = `
insert into kinora_parked (
	projector, lane, state, class, code, attempts, handler, handlers, message_id, topic, key, type, version, parked_at,
	headers, payload)
values (?1, ?2, iif(?3, 'stuck', 'waiting'), ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ` + clock + `, ?14, ?15)
on conflict do nothing`

	// addHandlers adds the handlers ?3 to message ?2. One that has none is for all handlers, and has no markers; now
	// it has those of ?3.
	addHandlers = `
update kinora_parked indexed by kinora_parked_message set handlers = (
	select json_group_array(value) from (
		select value from json_each(handlers)
		union all
		select value from json_each(?3) where value not in (select value from json_each(handlers))))
where projector = ?1 and message_id = ?2 and message_id <> '' and state <> 'replayed' and open = 1`

	// insertHold holds lane ?2 until ?3 ms from now, or until a person decides if that is null.
	insertHold = `
insert into kinora_holds (projector, lane, due_at) values (?1, ?2, coalesce(` + clock + ` + ?3, ` + never + `))
on conflict do nothing`
)

// park sets deliveries aside, in order, and holds their lanes.
func (u *unit) park(ctx context.Context, p provider.Unit, found provider.Found, park []provider.Aside) error {
	held := map[provider.Lane]bool{} // by this unit
	for _, a := range park {
		m, lane := a.Parked, p.Messages[a.Message].Lane
		n, err := u.changed(ctx, insertParked, p.Projector, lane[:], a.After < 0, m.Class.String(), m.Code, m.Attempts,
			m.Handler, arrayOf(m.Handlers), m.MessageID, m.Topic, m.Key, m.Type, m.Version, anyHeadersOf(m.Headers), blobOf(m.Payload))
		switch {
		case err != nil:
		case n == 0: // it is parked already
			_, err = u.exec(ctx, addHandlers, p.Projector, m.MessageID, arrayOf(m.Handlers))
		case !found.Held[a.Message] && !held[lane]:
			held[lane] = true
			_, err = u.exec(ctx, insertHold, p.Projector, lane[:], millisOrNever(a.After))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// millisOrNever is d in milliseconds, or null if it is negative.
func millisOrNever(d time.Duration) any {
	if d < 0 {
		return nil
	}
	return millis(d)
}

const (
	// failParked writes why message ?1 failed. ?7 are the handlers that are to run it from now on; if empty, they
	// stay as they are.
	failParked = `
update kinora_parked set class = ?2, code = ?3, attempts = ?4, handler = ?5, version = ?6,
	handlers = iif(?7 = '[]', handlers, ?7), state = iif(?8, 'stuck', state)
where id = ?1`

	// Messages that a person decided on are kept. Others are deleted.
	keepReplayed = `
update kinora_parked set open = 0, state = 'replayed', resolved_at = ` + clock + `
where id in (select value from json_each(?1)) and resolved_by <> ''`

	dropReplayed = `
delete from kinora_parked where id in (select value from json_each(?1)) and resolved_by = ''`
)

// resolve ends the parking of the live messages that are not set aside again.
func (u *unit) resolve(ctx context.Context, p provider.Unit, found provider.Found, park []provider.Aside) error {
	asides, after := map[int]bool{}, map[int64]any{}
	for _, a := range park {
		if !found.Live[a.Message] {
			continue
		}
		m := p.Messages[a.Message].Parked
		asides[a.Message], after[m.Seq] = true, millisOrNever(a.After)
		_, err := u.exec(ctx, failParked, m.Seq, a.Parked.Class.String(), a.Parked.Code, a.Parked.Attempts, a.Parked.Handler,
			a.Parked.Version, arrayOf(a.Parked.Handlers), a.After < 0)
		if err != nil {
			return err
		}
	}
	var resolved []int64
	lanes := map[string]int64{}
	for i, m := range p.Messages {
		if !found.Live[i] {
			continue
		}
		if lane := hexOf(m.Lane); lanes[lane] == 0 {
			lanes[lane] = m.Parked.Seq
		}
		if !asides[i] {
			resolved = append(resolved, m.Parked.Seq)
		}
	}
	if len(resolved) > 0 {
		for _, query := range []string{keepReplayed, dropReplayed} {
			if _, err := u.exec(ctx, query, jsonOf(resolved)); err != nil {
				return err
			}
		}
	}
	return u.settle(ctx, p.Projector, lanes, after)
}

const (
	// changedLanes are the lanes of ?2 with their first messages, or null if nothing is parked in one.
	changedLanes = `
	select unhex(j.key) as lane, j.value as changed, (
		select id from kinora_parked indexed by kinora_parked_lane
		where open = 1 and projector = ?1 and lane = unhex(j.key) order by id limit 1) as first
	from json_each(?2) j`

	dropHolds = `
delete from kinora_holds
where projector = ?1 and lane in (select lane from (` + changedLanes + `) where first is null)`

	// dueHolds makes lanes due whose first message is not before the one in ?2. ?3 says of some messages in how many
	// milliseconds they are due.
	dueHolds = `
update kinora_holds set due_at = (
	select iif(state = 'stuck', ` + never + `, ` + clock + ` + coalesce(?3 ->> cast(id as text), 0))
	from kinora_parked indexed by kinora_parked_lane
	where open = 1 and projector = ?1 and lane = kinora_holds.lane order by id limit 1)
where projector = ?1 and lane in (select lane from (` + changedLanes + `) where first >= changed)`
)

// settle brings holds in line with the messages that are still parked. lanes has, for each lane, the first message that was changed.
// A lane is no longer held if nothing is parked in it. It is due now if its first message was changed, or comes
// after one that was; but after says of some messages when they are due. It is never due if its first message is
// stuck.
func (u *unit) settle(ctx context.Context, projector string, lanes map[string]int64, after map[int64]any) error {
	if len(lanes) == 0 {
		return nil
	}
	of := jsonOf(lanes)
	if _, err := u.exec(ctx, dropHolds, projector, of); err != nil {
		return err
	}
	_, err := u.exec(ctx, dueHolds, projector, of, jsonOf(after))
	return err
}

// anyHeadersOf is an object, or an array of names and values in base64 if one of them is not UTF-8.
func anyHeadersOf(h map[string]string) string {
	var all [][]byte
	valid := true
	for k, v := range h {
		all = append(all, []byte(k), []byte(v))
		valid = valid && utf8.ValidString(k) && utf8.ValidString(v)
	}
	if valid {
		return headersOf(h)
	}
	return jsonOf(all)
}

// parseHeaders is the inverse of anyHeadersOf.
func parseHeaders(stored []byte) (h map[string]string, err error) {
	if !bytes.HasPrefix(stored, []byte("[")) {
		err = json.Unmarshal(stored, &h)
		return h, err
	}
	var all [][]byte
	if err := json.Unmarshal(stored, &all); err != nil {
		return nil, err
	}
	h = map[string]string{}
	for pair := range slices.Chunk(all, 2) {
		h[string(pair[0])] = string(pair[1])
	}
	return h, nil
}

// arrayOf is a JSON array for json_each, also of an empty list.
func arrayOf[T any](list []T) string {
	if len(list) == 0 {
		return `[]`
	}
	return jsonOf(list)
}
