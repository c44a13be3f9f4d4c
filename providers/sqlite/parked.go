package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// lastID is above every message's id.
const lastID = `9223372036854775807`

// dueParked lists the first messages of due lanes of generation ?5, of the lanes ?4 or, if that is null, of all:
// one of each lane, or up to ?3 of class held or with one of the needs ?6, in hexadecimal. Lanes that begin with one of
// these come first.
const dueParked = `
with has (needs) as materialized (select cast(unhex(value) as text) from json_each(?6)),
due (id, lane, class, due_at) as materialized (
	select id, lane, class, due_at from kinora_parked indexed by kinora_parked_due
	where ?4 is null and projector = ?1 and generation = ?5 and due_at <= ` + clock + `
	union all
	select id, lane, class, due_at from kinora_parked
	where due_at <= ` + clock + ` and id in (
		select (
			select id from kinora_parked indexed by kinora_parked_lane
			where open = 1 and projector = ?1 and generation = ?5 and lane = unhex(j.value) order by id limit 1)
		from json_each(?4) j)
	order by due_at limit ?2),
able (id, lane, class, due_at) as materialized (
	/*+*/select id, lane, 'held', 0 from kinora_parked p indexed by kinora_parked_needs
	where ?4 is null and open = 1 and needs <> '' and projector = ?1 and generation = ?5 and needs in has and class = 'unable' and state = 'waiting' and due_at is null
		and id = (
			select id from kinora_parked f indexed by kinora_parked_lane
			where f.open = 1 and f.projector = ?1 and f.generation = ?5 and f.lane = p.lane order by f.id limit 1)
	union all
	select id, lane, 'held', 0 from kinora_parked
	where needs <> '' and needs in has and class = 'unable' and state = 'waiting' and due_at is null and id in (
		select (
			select id from kinora_parked indexed by kinora_parked_lane
			where open = 1 and projector = ?1 and generation = ?5 and lane = unhex(j.value) order by id limit 1)
		from json_each(?4) j)
	limit ?2/*-select 0, '', '', 0 where false*/),
front (id, due_at, others) as (
	select p.id, due.due_at, sum(p.state <> 'waiting' or p.class <> 'held'/*+*/ and (p.class <> 'unable' or p.needs not in has)/*-*/) over (partition by due.lane order by p.id)
	from (select * from able union all select * from due order by due_at limit ?2) due cross join kinora_parked p on p.id in (
		select id from kinora_parked indexed by kinora_parked_lane
		where open = 1 and projector = ?1 and generation = ?5 and lane = due.lane and id <= iif(due.class = 'held', ` + lastID + `, due.id)
		order by id limit ?3))
select ` + parkedColumns + ` from front cross join kinora_parked p on p.id = front.id
where front.others = 0 or p.due_at is not null
order by front.due_at, p.lane, p.id`

// Due implements provider.Parking.
func (d *Provider) Due(ctx context.Context, f provider.DueFilter) (due []provider.Parked, err error) {
	err = provider.CheckDueFilter(f)
	for i := 0; err == nil && i < len(f.Builds); i++ {
		var listed []provider.Parked
		b := f.Builds[i]
		has := []string{}
		for _, n := range f.Needs {
			if n.Projector == b.Projector && n.Number() == b.Number() {
				has = append(has, fmt.Sprintf("%X", n.Needs)) // it may be invalid UTF-8
			}
		}
		listed, err = parkedOf(ctx, d.reads, dueParked, b.Projector, max(f.Keys, 0), max(f.Each, 0), anyOf(f.Lanes), b.Number(), jsonOf(has))
		due = append(due, listed...)
	}
	return result(due, "list due messages", err)
}

// listNeeds walks the index from need to need. Its condition is that of the index, so it also finds stuck messages and
// those of other classes.
const listNeeds = `
with recursive n (needs, i) as (
	select min(needs), 1 from kinora_parked indexed by kinora_parked_needs where open = 1 and needs <> '' and projector = ?1 and generation = ?2 and needs > ?4
	union all
	select (select min(needs) from kinora_parked p indexed by kinora_parked_needs
		where open = 1 and p.needs <> '' and projector = ?1 and generation = ?2 and p.needs > n.needs), i + 1 from n where n.needs is not null and i < ?3)
select needs, (
	select parked_at from kinora_parked p indexed by kinora_parked_needs
	where open = 1 and p.needs <> '' and projector = ?1 and generation = ?2 and p.needs = n.needs order by id limit 1)
from n where needs is not null order by needs`

// Needs implements provider.Parking.
func (d *Provider) Needs(ctx context.Context, after []provider.Need) (all []provider.Need, err error) {
	err = provider.CheckNeeds(after)
	if err == nil && d.older.Load() { // the version before has none
		if err = d.users.warmUp(ctx); d.older.Load() {
			return nil, wrap("list needs", err)
		}
	}
	for i := 0; err == nil && i < len(after); i++ {
		var listed []provider.Need
		listed, err = rowsOf(ctx, d.reads, func(n *provider.Need) []any { return []any{&n.Needs, scanTime(&n.Since)} },
			listNeeds, after[i].Projector, after[i].Number(), provider.MaxNeeds, after[i].Needs)
		for j := range listed {
			listed[j].Build = after[i].Build
		}
		all = append(all, listed...)
	}
	return result(all, "list needs", err)
}

// tryParked counts an attempt at message ?1, if it is as it was listed, and postpones its lane by ?2 ms
// or, if that is null, makes it stuck. Only the first message of a lane has a due time.
const tryParked = `
update kinora_parked set
	attempts = attempts + (?2 is not null), state = iif(?2 is null, 'stuck', state), due_at = ` + clock + ` + ?2
where id = ?1 and projector = ?3 and attempts = ?4 and state = 'waiting' and due_at <= ` + clock + `
	and (select json_group_array(value) from json_each(handlers)) = (select json_group_array(value) from json_each(?5))`

// Try implements provider.Parking.
func (d *Provider) Try(ctx context.Context, p provider.Parked, limit int, again time.Duration) (tried bool, err error) {
	tried = limit < 0 || p.Attempts < limit
	var after any
	if tried {
		after = millis(again)
	}
	n, err := d.changed(ctx, tryParked, p.Seq, after, p.Projector, p.Attempts, anyOf(p.Handlers))
	return result(tried && n == 1, fmt.Sprint("try parked message ", p.Seq), err)
}

const (
	// matches is the condition of a ParkedFilter.
	matches = `
	(?1 = '' or projector = ?1)
	and state in (select value from json_each(?2))
	and id > ?3 and id <= ?4
	and (?5 = '' or handler = ?5)
	and (?6 = '' or key = ?6)
	and (?7 is null or class = ?7)
	and (?8 = '' or code = ?8)
	and (?9 is null or id in (select value from json_each(?9)))
	and (?10 is null or hex(type) in (select value from json_each(?10)))
	and (?13 = 0 or generation = ?13)`

	// selected returns the ids that a ParkedFilter selects, at most ?11. If ?12, all selected
	// states are open and the filter names a projector.
	selected = `
	select id from kinora_parked indexed by kinora_parked_open
	where ?12 and open = 1 and projector = ?1 and` + matches + `
	union all
	select id from kinora_parked where not ?12 and` + matches + `
	order by id limit ?11`

	listParked = `select ` + parkedColumns + ` from kinora_parked p where p.id in (` + selected + `) order by p.id`

	// decideParked sets open messages to state ?14, by decision of ?15 for reason ?16. If both
	// are empty, the last decision is kept.
	decideParked = `
update kinora_parked set
	state = ?14, open = ?14 = 'waiting', due_at = null, attempts = iif(?14 = 'waiting', 0, attempts),
	resolved_at = iif(?14 = 'waiting', null, ` + clock + `),
	resolved_by = iif(?15 || ?16 = '', resolved_by, ?15), reason = iif(?15 || ?16 = '', reason, ?16)
where open = 1 and id in (` + selected + `)
returning projector, generation, lane`
)

// filterOf returns the arguments of selected. limit is for a filter without one.
func filterOf(f *provider.ParkedFilter, limit int) []any {
	after, upto := span(f.After, f.Seqs)
	names, open := []string{}, f.Projector != ""
	for _, s := range f.InStates() {
		names, open = append(names, s.String()), open && s.IsOpen()
	}
	types := f.Types[:0:0] // nil if f.Types is nil
	for _, t := range f.Types {
		types = append(types, fmt.Sprintf("%X", t)) // it may be invalid UTF-8
	}
	var class any
	if f.Class != nil {
		class = f.Class.String()
	}
	return []any{f.Projector, jsonOf(names), after, upto, f.Handler, f.Key, class, f.Code, anyOf(f.Seqs), anyOf(types),
		cmp.Or(max(f.Limit, 0), limit), open, f.Generation}
}

// Parked implements provider.Parking.
func (d *DB) Parked(ctx context.Context, f provider.ParkedFilter) (parked []provider.Parked, err error) {
	if err = provider.CheckParkedFilter(f); err == nil {
		parked, err = parkedOf(ctx, d.reads, listParked, filterOf(&f, defaultPage)...)
	}
	return result(parked, "list parked messages", err)
}

// Decide implements provider.Parking. Like every write, it waits for a unit that has the messages.
func (d *Provider) Decide(ctx context.Context, f provider.ParkedFilter, to provider.ParkedState, by provider.Decision) (int, error) {
	invalid := cmp.Or(provider.CheckDecision(to, by), provider.CheckParkedFilter(f))
	return update(ctx, d, "decide about parked messages", invalid, func(u *unit) (int, error) {
		queues, err := rowsOf(ctx, u, func(q *provider.Queue) []any { return []any{&q.Projector, &q.Generation, &q.Lane} },
			decideParked, append(filterOf(&f, -1), to.String(), by.By, by.Reason)...)
		changed := provider.Changed{}
		for _, q := range queues {
			changed[q] = 0
		}
		if err == nil {
			err = u.advance(ctx, changed)
		}
		return len(queues), err
	})
}

// A blob is greater than any text, so the range includes all projectors if ?1 is empty.
const countParked = `
select count(*) from kinora_parked p indexed by kinora_parked_open
where open = 1 and projector between ?1 and iif(?1 = '', x'', ?1) and not exists (
	select 1 from kinora_generations g where g.projector = p.projector and g.generation = p.generation and g.state <> 'live')`

// ParkedCount returns how many messages of a projector's live generation wait or are stuck. If the
// name is empty, it counts those of all projectors.
func (d *DB) ParkedCount(ctx context.Context, projector string) (n int64, err error) {
	if err = provider.CheckStorable("projector", projector); err == nil {
		err = one(ctx, d.reads, []any{&n}, countParked, projector)
	}
	return result(n, "count parked messages", err)
}

const (
	parkedFields = `p.id, p.projector, p.generation, p.handler, nullif(p.handlers, '[]'), p.message_id, p.topic, p.key, p.lane, p.type,
	p.class, /*+*/p.needs/*-''*/, p.code, p.error, p.attempts, p.version, p.parked_at, p.state, p.resolved_at, p.resolved_by, p.reason`

	parkedColumns = parkedFields + `, (
		select f.due_at from kinora_parked f indexed by kinora_parked_lane
		where p.open = 1 and f.open = 1 and f.projector = p.projector and f.generation = p.generation and f.lane = p.lane order by f.id limit 1),
	p.headers, p.payload`
)

// parkedOf returns the messages of a query that selects parkedColumns.
func parkedOf(ctx context.Context, q querier, query string, args ...any) ([]provider.Parked, error) {
	return collect(ctx, q, func(rows *sql.Rows) (p provider.Parked, err error) {
		var handlers []byte
		var headers, class, state string
		err = rows.Scan(&p.Seq, &p.Projector, &p.Generation, &p.Handler, &handlers, &p.MessageID, &p.Topic, &p.Key, &p.Lane, &p.Type,
			&class, &p.Needs, &p.Code, &p.Error, &p.Attempts, &p.Version, scanTime(&p.At), &state, scanTime(&p.ResolvedAt), &p.By, &p.Reason, scanTime(&p.DueAt), &headers, &p.Payload)
		p.Class, p.State = provider.ParseClass(class), provider.ParseParkedState(state)
		p.Headers = decodeHeaders(headers)
		// a row of another writer may have an invalid list
		_ = json.Unmarshal(handlers, &p.Handlers)
		return p, err
	}, query, args...)
}

// decodeHeaders is the inverse of encodeHeaders.
func decodeHeaders(stored string) map[string]string {
	if stored == "" {
		return nil
	}
	h := map[string]string{}
	for pair := range strings.SplitSeq(stored, "&") { // url.ParseQuery limits their number
		name, value, _ := strings.Cut(pair, "=")
		name, err := url.QueryUnescape(name)
		value, errValue := url.QueryUnescape(value)
		if err == nil && errValue == nil { // another writer may have written the rest
			h[name] = value
		}
	}
	return h
}
