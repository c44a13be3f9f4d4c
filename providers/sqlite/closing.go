package sqlite

import (
	"context"
	"net/url"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// close writes all of a unit that commits together with the writes of its handlers.
func (u *unit) close(ctx context.Context, p *provider.Unit, found provider.Found, c provider.Closing) error {
	if err := u.enqueueAll(ctx, c.Output); err != nil {
		return err
	}
	u.entries = u.entries || len(c.Output) > 0
	park := c.Park
	var settled provider.Settlement
	if p.IsReplay() {
		settled = c.Settle(p, found)
		park = settled.Stay
	}
	if err := u.resolve(ctx, settled.Done); err != nil {
		return err
	}
	for _, a := range park {
		if err := u.park(ctx, p.Projector, &p.Messages[a.Message], &a.Parked, a.After); err != nil {
			return err
		}
	}
	if err := u.advance(ctx, settled.Changed); err != nil {
		return err
	}
	if p.Careful == nil {
		return nil
	}
	_, err := u.exec(ctx, forgetNames, p.Careful.Runner, p.Careful.Number)
	return err
}

const (
	// Messages that a person decided on are kept. Others are deleted.
	keepReplayed = `
update kinora_parked set open = 0, state = 'replayed', due_at = null, resolved_at = ` + clock + `
where id in (select value from json_each(?1)) and resolved_by <> ''`

	dropReplayed = `
delete from kinora_parked where id in (select value from json_each(?1)) and resolved_by = ''`
)

// resolve ends the parking of messages that were applied.
func (u *unit) resolve(ctx context.Context, seqs []int64) error {
	if len(seqs) == 0 {
		return nil
	}
	_, err := u.exec(ctx, keepReplayed, jsonOf(seqs))
	if err == nil {
		_, err = u.exec(ctx, dropReplayed, jsonOf(seqs))
	}
	return err
}

// parkMessage parks a message, or says why message ?1 failed again. It is tried in ?4 ms if it is the first of its lane;
// null: it is stuck. A message that is parked already gets the handlers of the new one as well; if it has none, it is
// for all handlers and has no markers, and those of the new one now have theirs.
const parkMessage = `
insert into kinora_parked (
	id, projector, lane, state, due_at, class, code, attempts, handler, handlers, version, message_id, topic, key, type,
	parked_at, headers, payload)
values (?1, ?2, ?3, iif(?4 is null, 'stuck', 'waiting'), iif(exists (
		select 1 from kinora_parked indexed by kinora_parked_lane
		where open = 1 and projector = ?2 and lane = ?3 and id < coalesce(?1, ` + never + `)), null, ` + clock + ` + ?4),
	?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ` + clock + `, ?15, ?16)
on conflict (id) do update set
	state = excluded.state, due_at = excluded.due_at, class = excluded.class, code = excluded.code, attempts = excluded.attempts,
	handler = excluded.handler, handlers = iif(excluded.handlers = '[]', handlers, excluded.handlers), version = excluded.version
on conflict (projector, message_id) where state <> 'replayed' and message_id <> '' do update set handlers = (
	select json_group_array(value) from (
		select value from json_each(kinora_parked.handlers)
		union all
		select value from json_each(excluded.handlers) where value not in (select value from json_each(kinora_parked.handlers))))
	where open = 1`

func (u *unit) park(ctx context.Context, projector string, m *provider.Message, p *provider.Parked, after time.Duration) error {
	var seq, due any
	if m.Parked != nil {
		seq = m.Parked.Seq
	}
	if after >= 0 {
		due = millis(after)
	}
	_, err := u.exec(ctx, parkMessage, seq, projector, m.Lane[:], due, p.Class.String(), p.Code, p.Attempts, p.Handler, arrayOf(p.Handlers),
		p.Version, p.MessageID, p.Topic, p.Key, p.Type, encodeHeaders(p.Headers), blobOf(p.Payload))
	return err
}

// dueNow makes the first messages of the lanes ?1 due, if they wait and have no time yet: what was before them is gone, or
// a person decided about them.
const dueNow = `
update kinora_parked set due_at = ` + clock + `
where due_at is null and state = 'waiting' and id in (
	select (
		select id from kinora_parked indexed by kinora_parked_lane
		where open = 1 and projector = j.value ->> 0 and lane = unhex(j.value ->> 1) order by id limit 1)
	from json_each(?1) j)`

func (u *unit) advance(ctx context.Context, changed provider.Changed) error {
	if len(changed) == 0 {
		return nil
	}
	var lanes [][2]string
	for q := range changed {
		lanes = append(lanes, [2]string{q.Projector, hexOf(q.Lane)})
	}
	_, err := u.exec(ctx, dueNow, jsonOf(lanes))
	return err
}

// arrayOf is a JSON array for json_each, also of a nil list.
func arrayOf(list []string) string { return jsonOf(append([]string{}, list...)) }

// encodeHeaders takes any bytes, which JSON does not.
func encodeHeaders(h map[string]string) string {
	v := url.Values{}
	for name, value := range h {
		v.Set(name, value)
	}
	return v.Encode()
}
