package sqlite

import (
	"context"
	"maps"
	"net/url"
	"slices"

	"github.com/kinora-go/kinora/provider"
)

// close writes all rows of a unit that commit together with the writes of its handlers.
func (u *unit) close(ctx context.Context, p *provider.Unit, found provider.Found, c provider.Closing) error {
	err := u.enqueueAll(ctx, c.Output)
	u.entries = u.entries || len(c.Output) > 0
	if err == nil && p.IsReplay() {
		err = u.resolve(ctx, p, c.Resolution(p, found))
	} else if err == nil {
		err = u.park(ctx, p, c.Park)
	}
	if err == nil && p.Advance != nil {
		err = u.moveCheckpoint(ctx, p)
	}
	if err == nil && p.Careful != nil {
		_, err = u.exec(ctx, clearInFlight, p.Careful.Runner, p.Careful.Number)
	}
	return err
}

const (
	// Messages with a person's decision are kept. Others are deleted.
	keepReplayed = `
update kinora_parked set open = 0, state = 'replayed', due_at = null, resolved_at = ` + clock + `
where id in (select value from json_each(?1)) and resolved_by <> ''`

	dropReplayed = `delete from kinora_parked where id in (select value from json_each(?1)) and resolved_by = ''`
)

// resolve ends the parking of applied messages and stores why others failed again.
func (u *unit) resolve(ctx context.Context, p *provider.Unit, s provider.Resolution) error {
	done := jsonOf(s.Applied)
	for _, query := range []string{keepReplayed, dropReplayed} {
		if _, err := u.exec(ctx, query, done); err != nil {
			return err
		}
	}
	if err := u.park(ctx, p, s.Failed); err != nil {
		return err
	}
	return u.advance(ctx, s.Changed)
}

// parkMessage parks a message, or stores why message ?1 failed again. It is tried in ?4 ms if it
// is the first of its lane; if ?4 is null, it is stuck. If the message is parked already, the
// handlers of the new one are added. A parked message without handlers is for all handlers and
// has no markers; the handlers of the new one then have theirs.
const parkMessage = `
insert into kinora_parked (
	id, projector, generation, lane, state, due_at, class, code, error, attempts, handler, handlers, version, message_id, topic, key, type,
	parked_at, headers, payload)
values (?1, ?2, ?17, ?3, iif(?4 is null, 'stuck', 'waiting'), iif(exists (
		select 1 from kinora_parked indexed by kinora_parked_lane
		where open = 1 and projector = ?2 and generation = ?17 and lane = ?3 and id < coalesce(?1, ` + lastID + `)), null, ` + clock + ` + ?4),
	?5, ?6, ?18, ?7, ?8, coalesce(?9, '[]'), ?10, ?11, ?12, ?13, ?14, ` + clock + `, ?15, ?16)
on conflict (id) do update set
	state = excluded.state, due_at = excluded.due_at, class = excluded.class, code = excluded.code, error = excluded.error, attempts = excluded.attempts,
	handler = excluded.handler, handlers = iif(excluded.handlers = '[]', handlers, excluded.handlers), version = excluded.version
on conflict (projector, generation, message_id) where state <> 'replayed' and message_id <> '' do update set handlers = (
	select json_group_array(distinct value) from (
		select value from json_each(kinora_parked.handlers) union all select value from json_each(excluded.handlers)))
	where open = 1`

func (u *unit) park(ctx context.Context, p *provider.Unit, asides []provider.Aside) error {
	for _, a := range asides {
		m, is := &p.Messages[a.Message], &a.Parked
		var seq, due any
		if m.Parked != nil {
			seq = m.Parked.Seq
		}
		if a.After >= 0 {
			due = millis(a.After)
		}
		_, err := u.exec(ctx, parkMessage, seq, p.Projector, m.Lane[:], due, is.Class.String(), is.Code, is.Attempts, is.Handler,
			anyOf(is.Handlers), is.Version, is.MessageID, is.Topic, is.Key, is.Type, encodeHeaders(is.Headers), blobOf(is.Payload), p.Build().Generation, is.Error)
		if err != nil {
			return err
		}
	}
	return nil
}

// dueNow makes the first messages of the lanes ?1 due if they wait and have no due time: the
// message ahead was resolved, or a person decided to try them again.
const dueNow = `
update kinora_parked set due_at = ` + clock + `
where due_at is null and state = 'waiting' and id in (
	select (
		select id from kinora_parked indexed by kinora_parked_lane
		where open = 1 and projector = j.value ->> 'projector' and generation = j.value ->> 'generation' and lane = unhex(j.value ->> 'lane') order by id limit 1)
	from json_each(?1) j)`

func (u *unit) advance(ctx context.Context, changed provider.Changed) error {
	_, err := u.exec(ctx, dueNow, jsonOf(slices.Collect(maps.Keys(changed))))
	return err
}

// encodeHeaders encodes any bytes, which JSON cannot.
func encodeHeaders(h map[string]string) string {
	v := url.Values{}
	for name, value := range h {
		v.Set(name, value)
	}
	return v.Encode()
}
