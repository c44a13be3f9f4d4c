package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"maps"
	"net/url"
	"slices"

	"github.com/kinora-go/kinora/provider"
)

// runFunc is the function that Do calls between the opening and the closing of a unit.
type runFunc = func(ctx context.Context, tx *sql.Tx, found provider.Found) (provider.Closing, error)

// Keeps implements provider.Units.
func (d *Provider) Keeps() provider.Keeps {
	return provider.Keeps{Atomic: true, Markers: true, Output: true, DryRun: d.owned, Tables: true, Reset: true}
}

// Do implements provider.Units. It calls run once. run may read through SQL, but must write
// through tx. If ctx ends, the transaction is rolled back and the write lock released at once,
// even if run has not returned.
func (d *Provider) Do(ctx context.Context, p provider.Unit, run func(ctx context.Context, tx *sql.Tx, found provider.Found) (provider.Closing, error)) error {
	if err := checkUnit(&p); err != nil {
		return unitError(ctx, err)
	}
	switch {
	case p.Switch != nil:
		return d.doSwitch(ctx, &p, run)
	case p.DryRun != nil:
		return d.dryRun(ctx, &p, run)
	}
	return unitError(ctx, d.writeTx(ctx, func(u *unit) error { return u.work(ctx, &p, run) }))
}

// work opens p, runs it and closes it. The caller commits.
func (u *unit) work(ctx context.Context, p *provider.Unit, run runFunc) error {
	found, err := u.open(ctx, p)
	if err != nil {
		return inStep("open", err)
	}
	if p.Switch != nil {
		if err := u.reset(ctx, p.Switch.Reset); err != nil {
			return err
		}
	}
	closing, err := run(u.inside(ctx), u.tx, found)
	if err == nil && u.rolledBack.Load() {
		err = sql.ErrTxDone
	}
	if err != nil {
		return u.withMessage(err)
	}
	if err := p.CheckClosing(&closing); err != nil {
		return err
	}
	if closing.Output, err = provider.NormalizeAll(ctx, closing.Output, u.db.cfg.MaxPayload); err != nil {
		return err
	}
	return inStep("close", u.close(ctx, p, found, closing))
}

// withMessage adds to an error the message whose statement failed or ended the transaction.
func (u *unit) withMessage(err error) error {
	_, classed := errors.AsType[*provider.Error](err)
	of := int(u.message.Load())
	if classed || of < 0 || !u.rolledBack.Load() && codeOf(err) == 0 && !isTxEnded(err) {
		return err
	}
	return &provider.MessageError{Message: of, Err: err}
}

// checkUnit refuses invalid markers. A message without markers can be parked whatever its id is.
func checkUnit(p *provider.Unit) error {
	for i, m := range p.Messages {
		err := provider.CheckText("message id", m.ID, provider.MaxIDBytes)
		for _, h := range m.Handlers {
			err = cmp.Or(err, provider.CheckText("handler", h.Name, provider.MaxIDBytes))
		}
		if m.Mark && err != nil {
			return &provider.MessageError{Message: i, Err: err}
		}
	}
	return nil
}

// open reads what a unit must know. With the write lock, these rows do not change before the commit.
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
	read := checkpointHead
	if p.Segment > 0 {
		read = wholeCheckpoint
	}
	c, err := read(ctx, u, p.Build())
	if c = c.InSegment(p.Segment); err == nil {
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

// markersOf returns the markers for ofMarkers, without those of messages that cannot be fresh.
func markersOf(p *provider.Unit, found *provider.Found, c *provider.Checkpoint) (of map[string]map[string]int64, n int) {
	of = map[string]map[string]int64{}
	for i := range p.Messages {
		m := &p.Messages[i]
		if !m.Mark || c.Covers(m) || found.Live != nil && !found.Live[i] || found.Left != nil && found.Left[i] {
			continue
		}
		n += addMarkers(of, m)
	}
	return of, n
}

// addMarkers adds the markers of a message under each name of its handlers, and returns their number.
func addMarkers(of map[string]map[string]int64, m *provider.Message) (n int) {
	add := func(name string) {
		if of[name] == nil {
			of[name] = map[string]int64{}
		}
		of[name][m.ID] = m.Position
		n++
	}
	for i := range m.Handlers {
		add(m.Handlers[i].Name)
		for _, was := range m.Handlers[i].Was {
			add(was)
		}
	}
	return n
}

// findMarkers returns the markers that exist. markers is for ofMarkers.
func findMarkers(ctx context.Context, q querier, b provider.Build, markers string) (map[provider.Marker]bool, error) {
	marked := map[provider.Marker]bool{}
	err := fill(ctx, q, marked, func(m *provider.Marker, is *bool) []any {
		*is = true
		return []any{&m.Handler, &m.MessageID}
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
	ids := mapSlice(p.Messages, func(m provider.Message) string { return m.ID })
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

// close writes all rows of a unit that commit together with the writes of its handlers.
func (u *unit) close(ctx context.Context, p *provider.Unit, found provider.Found, c provider.Closing) error {
	err := u.enqueueAll(ctx, c.Output)
	u.add(news{entries: len(c.Output) > 0})
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
	err := u.execAll(ctx, []string{keepReplayed, dropReplayed}, jsonOf(s.Applied))
	if err == nil {
		err = u.park(ctx, p, s.Failed)
	}
	if err == nil {
		err = u.advance(ctx, s.Changed)
	}
	return err
}

// parkMessage parks a message, or stores why message ?1 failed again. It is tried in ?4 ms if it is the
// first of its lane and ?4 is not null. One that is parked already gets the handlers too. One
// without handlers is for all, and has no markers; the handlers of the new one then have theirs.
const parkMessage = `
insert into kinora_parked (
	id, projector, generation, lane, state, due_at, class, /*+*/needs, /*-*/code, error, attempts, handler, handlers, version, message_id, topic, key, type,
	parked_at, headers, payload)
values (?1, ?2, ?17, ?3, ?20, iif(exists (
		select 1 from kinora_parked indexed by kinora_parked_lane
		where open = 1 and projector = ?2 and generation = ?17 and lane = ?3 and id < coalesce(?1, ` + lastID + `)), null, ` + clock + ` + ?4),
	?5, /*+*/?19, /*-*/?6, ?18, ?7, ?8, coalesce(?9, '[]'), ?10, ?11, ?12, ?13, ?14, ` + clock + `, ?15, ?16)
on conflict (id) do update set
	state = excluded.state, due_at = excluded.due_at, class = excluded.class, /*+*/needs = excluded.needs, /*-*/code = excluded.code, error = excluded.error, attempts = excluded.attempts,
	handler = excluded.handler, handlers = iif(excluded.handlers = '[]', handlers, excluded.handlers), version = excluded.version
on conflict (projector, generation, message_id) where state <> 'replayed' and message_id <> '' do update set handlers = (
	select json_group_array(distinct value) from (
		select value from json_each(kinora_parked.handlers) union all select value from json_each(excluded.handlers)))
	where open = 1`

func (u *unit) park(ctx context.Context, p *provider.Unit, asides []provider.Aside) error {
	for _, a := range asides {
		m, is := &p.Messages[a.Message], &a.Parked
		var seq, due any
		state := provider.StateWaiting
		if m.Parked != nil {
			seq = m.Parked.Seq
		}
		switch {
		case a.After < 0:
			state = provider.StateStuck
		case !is.IsUnable() || u.db.older.Load():
			due = millis(a.After)
		}
		_, err := u.exec(ctx, parkMessage, seq, p.Projector, m.Lane[:], due, is.Class.String(), is.Code, is.Attempts, is.Handler,
			anyOf(is.Handlers), is.Version, is.MessageID, is.Topic, is.Key, is.Type, encodeHeaders(is.Headers), blobOf(is.Payload), p.Build().Generation, is.Error, is.Needs, state.String())
		if err != nil {
			return err
		}
	}
	return nil
}

// dueNow makes the first messages of the lanes ?1 due if they wait, have no due time, and are not unable.
const dueNow = `
update kinora_parked set due_at = ` + clock + `
where due_at is null and state = 'waiting' /*+*/and (class <> 'unable' or needs = '') /*-*/and id in (
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
