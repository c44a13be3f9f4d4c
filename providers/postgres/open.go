package postgres

import (
	"context"
	"crypto/sha256"
	"fmt"
	"math"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/provider"
)

// A unit opens with these statements, in this order, each with a new snapshot. The fence is the
// projector's lock in shared mode; Unit.Switch takes it exclusively. The markers wait for
// concurrent units with the same markers. Only then the unit checks which lanes are held: a
// message whose predecessor was parked by such a unit must find the hold.
const (
	fenceSQL = `
select case when $3::text <> '' and current_setting('lock_timeout') = '0' then set_config('lock_timeout', $3::text, true) end,
	pg_advisory_xact_lock_shared($1::int, $2::int)`
	exclusiveSQL = `select pg_advisory_xact_lock($1::int, $2::int)`

	// In one round trip, an existing marker or a held lane is an error: otherwise the message would take effect again.
	mustMarkSQL = insertMarkers + ` order by 1, 3`

	markSQL = insertMarkers + ` order by 1, 3` + newMarkers

	// Only the markers of messages that the unit can apply. While it waits for other markers, the
	// checkpoint may pass a message: therefore it is read again in a later statement.
	markBehindSQL = insertMarkers + ` left join kinora.checkpoint($5::text, $1::int, '') c on true
where nullif(n.position, 0) is null or c.position is null or n.position > c.position and ($6::boolean or c.mode = 'live')
order by 1, 3` + newMarkers

	insertMarkers = `
insert into kinora.markers (handler, generation, message_id, position)
select n.handler, $1::int, n.message_id, nullif(n.position, 0) from unnest($2::text[], $3::text[], $4::bigint[]) n(handler, message_id, position)`

	newMarkers = ` on conflict on constraint markers_pkey do nothing returning handler, message_id`

	mayHoldSQL = `select kinora.may_hold($1::text, $2::int)`

	heldSQL   = `select kinora.held($1::text, $2::int, $3::bytea[])`
	unheldSQL = `select kinora.unheld($1::text, $2::int, $3::bytea[], $4::bigint)`

	// The worker's messages in flight are deleted, except for locked rows: the backend of a lost
	// connection may have them for hours.
	suspectSQL = `
with own as (
	delete from kinora.in_flight where ctid = any(array(
		select ctid from kinora.in_flight where runner = $3::text and worker = $4::int for update skip locked)))
select m.o::int - 1 from unnest($2::text[]) with ordinality m(id, o), lateral (
	select from kinora.in_flight d where d.message_id = m.id and d.projector = $1::text and d.runner <> $3::text limit 1) d`

	// Parked messages and messages in flight are looked up by index: the tables are usually empty, and
	// the plan of a scan would be kept while they grow. Handlers get the previous setting back.
	noScanSQL = `
select set_config('kinora.enable_seqscan', current_setting('enable_seqscan'), true), set_config('enable_seqscan', 'off', true)`

	scanAgainSQL = `select set_config('enable_seqscan', current_setting('kinora.enable_seqscan'), true)`

	// Parked messages are opened by locking their lanes. Then, with a newer snapshot, the first
	// messages of these lanes are read.
	lockLanesSQL  = lanes + ` for update skip locked) h`
	awaitLanesSQL = lanes + ` for update) h` // an attempt was counted for this unit

	lanes = `
with ck as materialized (select clock_timestamp() t)
select h.lane, h.due_at <= ck.t from ck, unnest($3::bytea[]) l(lane), lateral (
	select lane, due_at from kinora.holds where projector = $1::text and generation = $2::int and holds.lane = l.lane limit 1`

	// A redelivery that adds handlers to a message waits for the unit that runs it, and the other
	// way round.
	firstInLanesSQL = `
select p.id, p.lane, p.attempts, p.state, p.class, p.handlers from (select lane, count(*) n from unnest($3::bytea[]) lane group by lane) l, lateral (
	select id, lane, attempts, state, class, handlers from kinora.parked
	where projector = $1::text and generation = $2::int and parked.lane = l.lane and parked.lane <> '' and state in ('waiting', 'stuck')
	order by id limit l.n for no key update) p`
)

// open begins the transaction and opens the unit. The transaction is not nil if it has begun, also with an error.
func (w *unit) open(ctx context.Context, conn *pgx.Conn) (tx pgx.Tx, err error) {
	b := &pgx.Batch{}
	if w.Switch == nil {
		b.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
		w.queueFence(b)
	} else if tx, err = w.beginSwitch(ctx, conn); err != nil {
		return tx, err
	}
	w.found = w.NewFound(false)
	w.queueOpen(b)
	if b.Len() > 0 {
		results := conn.SendBatch(ctx, b)
		err = results.Close() // this calls the callbacks
		if tx == nil {
			tx = results.Tx()
		}
	}
	if err == nil && w.mayHold {
		b := &pgx.Batch{}
		w.queueLanesHeld(b)
		err = conn.SendBatch(ctx, b).Close()
	}
	if err != nil {
		return tx, classifyOwn(ctx, wrap("open the unit", err))
	}
	w.checkpoint = w.checkpoint.InSegment(w.Segment)
	w.found.SetFresh(&w.Unit, func(m provider.Marker) bool { return w.marked[m] })
	return tx, classifyOwn(ctx, wrap("open the unit", w.found.SetProgress(&w.Unit, w.checkpoint)))
}

// queueOpen queues the opening after the fence. All units of a projector read the checkpoint,
// which shows that the generation is not retired.
func (w *unit) queueOpen(b *pgx.Batch) {
	sql, locked := markSQL, unlocked
	if w.Reader != nil || w.lowest() != nil {
		sql = markBehindSQL
	}
	if w.Reader != nil && !w.isSnapshot() {
		locked = mustStay
	}
	if w.Advance != nil {
		if w.Segment == 0 {
			w.db.queueCheckpoint(b, w.Build(), isToBeSet, &w.checkpoint)
		} else { // the fence keeps its split, and its mode
			w.db.queueCheckpoint(b, w.Build(), unlocked, &w.checkpoint)
			w.db.queueSegment(b, w.Build(), w.Segment, &w.checkpoint)
		}
		w.queueMarked(b)
	} else {
		w.queueMarkers(b, sql)
		if w.Projector != "" {
			w.db.queueCheckpoint(b, w.Build(), locked, &w.checkpoint)
		}
	}
	if !w.IsReplay() && len(w.Messages) > 0 {
		w.queueHeld(b)
	}
	if w.IsReplay() || w.Careful != nil {
		b.Queue(noScanSQL)
		if w.IsReplay() {
			w.queueLanes(b)
		}
		if w.Careful != nil {
			w.queueSuspects(b)
		}
		b.Queue(scanAgainSQL)
	}
}

// fewLanes is how many lanes a unit looks up in its first round trip. One of more lanes first asks whether
// its projector has any that is held, and looks them up in a second one: to send and to look up 500 lanes
// took a tenth of the time of a unit whose read model is in Redis.
const fewLanes = 16

// queueFence queues the beginning of the opening. A lock_timeout of the operator stays.
func (w *unit) queueFence(b *pgx.Batch) {
	key, limit := w.db.fence(w.Projector), ""
	if w.Timeout > 0 {
		limit = itoa(min(max(w.Timeout.Milliseconds()/2, 1), math.MaxInt32))
	}
	b.Queue(fenceSQL, lockClassFence, key, limit)
	if w.Serial {
		b.Queue(exclusiveSQL, lockClassSerial, key)
	}
}

// fence returns the key of a projector's lock.
func (db *Provider) fence(projector string) int32 { return lockKey(db.cfg.Schema + "/" + projector) }

// queueMarkers queues the insert of the markers, and records those that did not exist.
func (w *unit) queueMarkers(b *pgx.Batch, sql string) {
	if all := w.Markers(nil); len(all) > 0 {
		var m provider.Marker
		w.marked = map[provider.Marker]bool{}
		handlers, messages := columns(all)
		args := []any{w.Generation, handlers, messages, w.positions()}
		if sql == markBehindSQL {
			args = append(args, w.Projector, w.Reader != nil)
		}
		queueRows(b, []any{&m.Handler, &m.MessageID}, func() { w.marked[m] = true }, w.db.q(sql), args...)
	}
}

// queueMarked queues the lookup of the markers, and records those that do not exist.
func (w *unit) queueMarked(b *pgx.Batch) {
	if args, all := w.lookup(); len(all) > 0 {
		var m provider.Marker
		w.marked = map[provider.Marker]bool{}
		for _, m := range all {
			w.marked[m] = true
		}
		queueRows(b, []any{&m.Handler, &m.MessageID}, func() { delete(w.marked, m) }, w.db.q(markedSQL), args...)
	}
}

// lookup returns the markers of the unit, and the arguments of a statement that looks them up.
func (w *unit) lookup() ([]any, []provider.Marker) {
	all := w.Markers(nil)
	handlers, messages := columns(all)
	var names []string
	for _, name := range handlers {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return []any{w.Generation, w.Advance.From, names, handlers, messages}, all
}

// positions returns the positions of the markers, in the order of Markers(nil), or nil if there are none.
func (w *unit) positions() []int64 {
	if !slices.ContainsFunc(w.Messages, func(m provider.Message) bool { return m.Position > 0 }) {
		return nil
	}
	var all []int64
	for i := range w.Messages {
		m := &w.Messages[i]
		if !m.Mark {
			continue
		}
		for j := range m.Handlers {
			for range len(m.Handlers[j].Was) + 1 {
				all = append(all, m.Position)
			}
		}
	}
	return all
}

// lowest returns the lowest position of the messages that are compared with the checkpoint, or nil.
func (w *unit) lowest() (least *int64) {
	for i := range w.Messages {
		if m := &w.Messages[i]; m.Mark && m.Position > 0 && m.Parked == nil && (least == nil || m.Position < *least) {
			least = &m.Position
		}
	}
	return least
}

// columns splits markers into the arguments of a statement.
func columns(markers []provider.Marker) (handlers, messages []string) {
	handlers = mapSlice(markers, func(m *provider.Marker) string { return m.Handler })
	return handlers, mapSlice(markers, func(m *provider.Marker) string { return m.MessageID })
}

func (w *unit) lanes() [][]byte {
	return mapSlice(w.Lanes(), func(l *provider.Lane) []byte { return l[:] })
}

// queueHeld queues the question which lanes are held, or whether any may be.
func (w *unit) queueHeld(b *pgx.Batch) {
	if len(w.Messages) <= fewLanes {
		w.queueLanesHeld(b)
		return
	}
	queueRow(b, []any{&w.mayHold}, w.db.q(mayHoldSQL), w.Projector, w.Generation)
}

func (w *unit) queueLanesHeld(b *pgx.Batch) {
	var lane provider.Lane
	queueRows(b, []any{&lane}, func() { w.found.SetHeld(&w.Unit, lane) }, w.db.q(heldSQL), w.Projector, w.Generation, w.lanes())
}

func (w *unit) queueSuspects(b *pgx.Batch) {
	var i int
	w.found.Suspect = make([]bool, len(w.Messages))
	ids := mapSlice(w.Messages, func(m *provider.Message) string { return m.ID })
	queueRows(b, []any{&i}, func() { w.found.Suspect[i] = true },
		w.db.q(suspectSQL), w.Build().String(), ids, w.Careful.Runner, w.Careful.Number)
}

func (w *unit) queueLanes(b *pgx.Batch) {
	var lane provider.Lane
	var isDue bool
	due := map[provider.Lane]bool{} // of the lanes that it locks
	sql := lockLanesSQL
	if slices.ContainsFunc(w.Messages, func(m provider.Message) bool { return m.Parked.Attempts > 0 }) {
		sql = awaitLanesSQL
	}
	queueRows(b, []any{&lane, &isDue}, func() { due[lane] = isDue }, w.db.q(sql), w.Projector, w.Generation, w.lanes())
	all := mapSlice(w.Messages, func(m *provider.Message) []byte { return m.Lane[:] })
	b.Queue(w.db.q(firstInLanesSQL), w.Projector, w.Generation, all).Query(func(rows pgx.Rows) error {
		front, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (p provider.Parked, err error) {
			var state, class string
			err = row.Scan(&p.Seq, &p.Lane, &p.Attempts, &state, &class, &p.Handlers)
			p.State, p.Class = provider.ParseParkedState(state), provider.ParseClass(class)
			return p, err
		})
		w.found.SetLive(&w.Unit, front, due)
		return err
	})
}

// markerID returns the id of a message as the tables have it: an index takes about 2,700 bytes a row.
func markerID(id string) string {
	if len(id) <= 1024 && storable(id) == id {
		return id
	}
	return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(id)))
}
