package postgres

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/provider"
)

const (
	// A message that is parked already keeps its row, and the row gets the handlers that it does not have yet. A skipped one stays.
	parkSQL = `
insert into kinora.parked as p (projector, handler, handlers, message_id, message_hash, topic, key, lane, type,
	payload, headers, class, code, attempts, version, state)
select $1::text, n.handler, string_to_array(n.handlers, ','), n.message_id, n.message_hash, n.topic, n.key, n.lane, n.type,
	n.payload, n.headers, n.class, n.code, n.attempts, n.version, n.state
from unnest($2::text[], $3::text[], $4::text[], $5::bytea[], $6::text[], $7::text[], $8::bytea[], $9::text[],
	$10::bytea[], $11::bytea[], $12::text[], $13::text[], $14::int[], $15::text[], $16::text[]) with ordinality
	n(handler, handlers, message_id, message_hash, topic, key, lane, type,
	payload, headers, class, code, attempts, version, state, o)
order by n.o
on conflict (message_hash, projector) where state <> 'replayed' and message_hash <> '' do update
set handlers = p.handlers || array(select h from unnest(excluded.handlers) h where h <> all(p.handlers))
where p.state in ('waiting', 'stuck') and not excluded.handlers <@ p.handlers`

	// An existing hold stays as it is, and is locked: a unit that applies the last message of the lane must not delete it without
	// seeing the messages that this unit parks.
	holdSQL = `
with ck as materialized (select clock_timestamp() t)
insert into kinora.holds as h (projector, lane, due_at)
select $1::text, l.lane, case when l.after < 0 then 'infinity' else ck.t + l.after * interval '1 microsecond' end
from unnest($2::bytea[], $3::bigint[]) l(lane, after), ck, lateral (
	select from kinora.parked
	where projector = $1::text and parked.lane = l.lane and parked.lane <> '' and state in ('waiting', 'stuck') limit 1) p
order by l.lane
on conflict on constraint holds_pkey do update set due_at = h.due_at`

	// Without new handlers, a message keeps those that it has.
	setAsideSQL = `
update kinora.parked p set class = a.class, code = a.code, attempts = a.attempts, handler = a.handler, version = a.version, state = a.state,
	handlers = case when a.handlers = '' then p.handlers else string_to_array(a.handlers, ',') end
from unnest($1::bigint[], $2::text[], $3::text[], $4::int[], $5::text[], $6::text[], $7::text[], $8::text[])
	a(id, class, code, attempts, handler, version, state, handlers)
where p.id = a.id`

	// A message about which a person decided is kept.
	resolveSQL = `
with gone as (delete from kinora.parked where id = any($1::bigint[]) and resolved_by = '')
update kinora.parked set state = 'replayed', resolved_at = clock_timestamp() where id = any($1::bigint[]) and resolved_by <> ''`

	// The caller has locked these lanes, and has changed messages of each, the first of them $3. A lane without messages is held no more.
	// If its first message is stuck, it waits for a person. If it is one of $4, it is due after that time. Else it is due now, unless
	// its first message is none that changed, nor comes after one.
	releaseSQL = `
with ck as materialized (select clock_timestamp() t),
rest as materialized (
	select h.at, f.id, case
		when f.state = 'stuck' then 'infinity'
		when f.id < l.changed then h.due_at
		else ck.t + coalesce(a.after, 0) * interval '1 microsecond' end as due_at
	from ck, unnest($1::text[], $2::bytea[], $3::bigint[]) l(projector, lane, changed), lateral (
		select ctid as at, due_at from kinora.holds where holds.projector = l.projector and holds.lane = l.lane limit 1) h
	left join lateral (
		select id, state from kinora.parked
		where parked.projector = l.projector and parked.lane = l.lane and parked.lane <> '' and state in ('waiting', 'stuck')
		order by id limit 1) f on true
	left join unnest($4::bigint[], $5::bigint[]) a(id, after) on a.id = f.id),
gone as (delete from kinora.holds where ctid = any(array(select at from rest where id is null)))
update kinora.holds h set due_at = (select due_at from rest where rest.at = h.ctid)
where h.ctid = any(array(select at from rest where id is not null))`

	// Markers that the opening inserted for parked messages that it then found not to be live.
	unmarkSQL = `
delete from kinora.markers m using unnest($2::text[], $3::text[]) n(handler, message_id)
where m.handler = n.handler and m.message_id = n.message_id and m.generation = ` + liveGeneration
)

// queueClosing queues the unit's own writes: output, and the parking or resolving of messages.
func (w *unit) queueClosing(t *trip, c provider.Closing) error {
	t.output = t.Len()
	if err := w.db.queueEnqueue(&t.Batch, c.Output); err != nil {
		return err
	}
	t.closing = t.Len()
	switch {
	case w.isParked():
		w.queueResolved(t, c.Park)
	case len(c.Park) > 0:
		return w.queueParked(t, c.Park)
	}
	return nil
}

// queueParked queues the parking of deliveries.
func (w *unit) queueParked(t *trip, park []provider.Aside) error {
	args, err := parkArgs(w.Projector, park)
	if err != nil {
		return err
	}
	var lanes [][]byte
	var afters []int64
	seen := map[provider.Lane]bool{}
	for i, held := range w.found.Held { // and it stays so
		if held {
			seen[w.Messages[i].Lane] = true
		}
	}
	for i := range park {
		if a := &park[i]; !seen[a.Parked.Lane] {
			seen[a.Parked.Lane] = true
			lanes, afters = append(lanes, a.Parked.Lane[:]), append(afters, afterOf(a))
		}
	}
	t.Queue(lookUpSQL)
	t.Queue(w.db.q(parkSQL), args...)
	if len(lanes) > 0 {
		t.Queue(w.db.q(holdSQL), w.Projector, lanes, afters)
	}
	return nil
}

// parkArgs are the arguments of parkSQL. A message is parked and kept as it came, also if PostgreSQL refuses its texts.
func parkArgs(projector string, park []provider.Aside) ([]any, error) {
	headers := make([][]byte, len(park))
	for i, a := range park {
		h, err := headersJSON(inHeaders(a.Parked.Headers, storable))
		if err != nil {
			return nil, fmt.Errorf("park: %w", err)
		}
		headers[i] = h
	}
	text := func(of func(p *provider.Parked) string) []string {
		return each(park, func(a *provider.Aside) string { return storable(of(&a.Parked)) })
	}
	data := func(of func(p *provider.Parked) []byte) [][]byte {
		return each(park, func(a *provider.Aside) []byte { return of(&a.Parked) })
	}
	return []any{
		projector,
		text(func(p *provider.Parked) string { return p.Handler }),
		text(handlersOf),
		text(func(p *provider.Parked) string { return p.MessageID }),
		data(func(p *provider.Parked) []byte { return hashOf(p.MessageID) }),
		text(func(p *provider.Parked) string { return p.Topic }),
		text(func(p *provider.Parked) string { return p.Key }),
		data(func(p *provider.Parked) []byte { return p.Lane[:] }),
		text(func(p *provider.Parked) string { return p.Type }),
		data(func(p *provider.Parked) []byte { return append([]byte{}, p.Payload...) }),
		headers,
		text(func(p *provider.Parked) string { return p.Class.String() }),
		text(func(p *provider.Parked) string { return p.Code }),
		each(park, func(a *provider.Aside) int { return a.Parked.Attempts }),
		text(func(p *provider.Parked) string { return p.Version }),
		each(park, stateOf),
	}, nil
}

// handlersOf are the handlers of p as statements take them. No name has a comma.
func handlersOf(p *provider.Parked) string { return strings.Join(p.Handlers, ",") }

// stateOf is the state of a message that is set aside.
func stateOf(a *provider.Aside) string {
	if a.After < 0 {
		return provider.StateStuck.String()
	}
	return provider.StateWaiting.String()
}

// afterOf is After in microseconds. It stays negative if it is less than one of them.
func afterOf(a *provider.Aside) int64 {
	if a.After < 0 {
		return -1
	}
	return a.After.Microseconds()
}

// each is of for each element.
func each[T, R any](list []T, of func(*T) R) []R {
	all := make([]R, len(list))
	for i := range list {
		all[i] = of(&list[i])
	}
	return all
}

// queueResolved queues what becomes of parked messages, and of their lanes.
func (w *unit) queueResolved(t *trip, park []provider.Aside) {
	stays := map[int]bool{}
	park = slices.DeleteFunc(slices.Clone(park), func(a provider.Aside) bool { return !w.found.Live[a.Message] })
	for _, a := range park {
		stays[a.Message] = true
	}
	seq := func(a *provider.Aside) int64 { return w.Messages[a.Message].Parked.Seq }
	var done []int64
	var of laneList
	for i := range w.Messages {
		if m := &w.Messages[i]; w.found.Live[i] {
			if of.add(w.Projector, m.Lane, m.Parked.Seq); !stays[i] {
				done = append(done, m.Parked.Seq)
			}
		}
	}
	w.queueUnmark(t)
	if of.empty() {
		return
	}
	t.Queue(lookUpSQL)
	if len(park) > 0 {
		t.Queue(w.db.q(setAsideSQL), each(park, seq),
			each(park, func(a *provider.Aside) string { return a.Parked.Class.String() }),
			each(park, func(a *provider.Aside) string { return storable(a.Parked.Code) }),
			each(park, func(a *provider.Aside) int { return a.Parked.Attempts }),
			each(park, func(a *provider.Aside) string { return storable(a.Parked.Handler) }),
			each(park, func(a *provider.Aside) string { return storable(a.Parked.Version) }),
			each(park, stateOf),
			each(park, func(a *provider.Aside) string { return handlersOf(&a.Parked) }))
	}
	if len(done) > 0 {
		t.Queue(w.db.q(resolveSQL), done)
	}
	t.Queue(w.db.q(releaseSQL), of.projectors, of.lanes, of.changed, each(park, seq),
		each(park, afterOf))
}

// queueUnmark takes back the markers of parked messages that are not live.
func (w *unit) queueUnmark(t *trip) {
	var handlers, messages []string
	for i := range w.Messages {
		m := &w.Messages[i]
		if w.found.Live[i] || !m.Mark {
			continue
		}
		id := markerID(m.ID)
		for _, h := range m.Handlers {
			for _, name := range append([]string{h.Name}, h.Was...) {
				if w.marked[mark{name, id}] {
					handlers, messages = append(handlers, name), append(messages, id)
				}
			}
		}
	}
	if len(handlers) > 0 {
		t.Queue(w.db.q(unmarkSQL), w.Projector, handlers, messages)
	}
}

// laneList is lanes, each once, with the first message of each that is changed.
type laneList struct {
	projectors []string
	lanes      [][]byte
	changed    []int64
	at         map[laneOf]int
}

type laneOf struct {
	projector string
	lane      provider.Lane
}

func (l *laneList) empty() bool { return len(l.lanes) == 0 }

func (l *laneList) add(projector string, lane provider.Lane, seq int64) {
	if i, ok := l.at[laneOf{projector, lane}]; ok {
		l.changed[i] = min(l.changed[i], seq)
		return
	}
	if l.at == nil {
		l.at = map[laneOf]int{}
	}
	l.at[laneOf{projector, lane}] = len(l.lanes)
	l.projectors, l.lanes, l.changed = append(l.projectors, projector), append(l.lanes, lane[:]), append(l.changed, seq)
}
