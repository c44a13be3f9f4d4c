package postgres

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/provider"
)

// A unit opens with these statements, in this order, each with a snapshot of its own. The fence is the projector's lock in shared
// mode; Switch takes it exclusively. The markers read the generation after the wait for the fence. They wait for concurrent
// units with the same ones, and only then the unit asks which lanes are held: a message whose predecessor is parked by such
// a unit must find the hold.
const (
	fenceSQL  = `select pg_advisory_xact_lock_shared($1::int, $2::int)`
	serialSQL = `select pg_advisory_xact_lock($1::int, $2::int)`

	// One marker, the usual case, travels as scalars.
	markSQL = `
insert into kinora.markers (handler, generation, message_id) select $2::text, ` + liveGeneration + `, $3::text
on conflict on constraint markers_pkey do nothing returning handler, message_id`

	markAllSQL = `
insert into kinora.markers (handler, generation, message_id) select n.handler, ` + liveGeneration + `, n.message_id ` + markerNames + `
on conflict on constraint markers_pkey do nothing returning handler, message_id`

	liveGeneration = `coalesce((select live from kinora.generations where projector = $1::text), 1)`

	markerNames = `from unnest($2::text[], $3::text[]) n(handler, message_id) order by n.handler collate "C", n.message_id collate "C"`

	heldSQL = `select kinora.held($1::text, $2::bytea[])`

	suspectSQL = `
select m.o::int - 1 from unnest($2::text[]) with ordinality m(id, o), lateral (
	select from kinora.doing d where d.message_id = m.id and d.projector = $1::text and d.runner <> $3::text limit 1) d`

	// It does not wait for rows that are locked: the backend of a lost connection may have them for hours.
	unnameSQL = `
delete from kinora.doing where ctid = any(array(
	select ctid from kinora.doing where runner = $1::text and worker = $2::int for update skip locked))`
)

// Parked messages and names are looked up by index, whatever the server thinks of the tables: they are empty most of the time,
// and the plan of a scan would be kept while they grow. Handlers have the setting that was there before.
const (
	lookUpSQL = `
select set_config('kinora.enable_seqscan', current_setting('enable_seqscan'), true), set_config('enable_seqscan', 'off', true)`

	lookedUpSQL = `select set_config('enable_seqscan', current_setting('kinora.enable_seqscan'), true)`
)

// Parked messages are opened by locking their lanes; then, with a newer snapshot, the first messages of these are read.
const (
	lockLanesSQL = `
with ck as materialized (select clock_timestamp() t)
select h.lane, h.due_at <= ck.t from unnest($2::bytea[]) with ordinality l(lane, o), ck, lateral (
	select lane, due_at from kinora.holds where projector = $1::text and holds.lane = l.lane limit 1 for update skip locked) h
order by l.o`

	// A message with attempts was counted for this unit, so the unit waits for the lane.
	awaitLanesSQL = `
with ck as materialized (select clock_timestamp() t)
select h.lane, h.due_at <= ck.t from unnest($2::bytea[]) with ordinality l(lane, o), ck, lateral (
	select lane, due_at from kinora.holds where projector = $1::text and holds.lane = l.lane limit 1 for update) h
order by l.o`

	// A redelivery that adds handlers to a message waits for the unit that runs it, and the other way round.
	firstInLanesSQL = `
select p.id, p.lane, p.attempts, p.state, p.handlers from unnest($2::bytea[], $3::int[]) l(lane, n), lateral (
	select id, lane, attempts, state, handlers from kinora.parked
	where projector = $1::text and parked.lane = l.lane and parked.lane <> '' and state in ('waiting', 'stuck')
	order by id limit l.n for no key update) p`
)

// listed is a parked message as the opening found it.
type listed struct {
	Seq      int64
	Lane     []byte
	Attempts int
	State    string
	Handlers []string
}

// open begins the transaction and opens the unit, in one round trip.
func (w *unit) open(ctx context.Context, conn *pgx.Conn) (pgx.Tx, error) {
	w.found = newFound(w.Messages, false)
	looksUp := w.isParked() || w.Careful != nil
	b := &pgx.Batch{}
	b.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	w.queueFence(b)
	if looksUp {
		b.Queue(lookUpSQL)
	}
	w.queueMarkers(b)
	if w.isParked() {
		w.queueLanes(b)
	} else if len(w.Messages) > 0 {
		w.queueHeld(b)
	}
	if w.Careful != nil {
		w.queueSuspects(b)
	}
	if looksUp {
		b.Queue(lookedUpSQL)
	}
	results := conn.SendBatch(ctx, b)
	if err := results.Close(); err != nil { // this calls the callbacks
		return results.Tx(), err
	}
	if w.isParked() {
		w.findLive()
	}
	w.findFresh()
	return results.Tx(), nil
}

func (w *unit) queueFence(b *pgx.Batch) {
	key := w.db.fence(w.Projector)
	b.Queue(fenceSQL, lockClassFence, key)
	if w.Serial {
		b.Queue(serialSQL, lockClassSerial, key)
	}
}

func (db *DB) fence(projector string) int32 { return lockKey(db.cfg.Schema + "/" + projector) }

// mark is a marker: of a handler, by one of its names, and a message.
type mark struct{ handler, message string }

// markers are the markers of the messages with Mark: one for each name of each handler.
func (w *unit) markers() (handlers, messages []string) {
	handlers, messages = make([]string, 0, len(w.Messages)), make([]string, 0, len(w.Messages))
	for i := range w.Messages {
		m := &w.Messages[i]
		if !m.Mark {
			continue
		}
		id := markerID(m.ID)
		for _, h := range m.Handlers {
			handlers, messages = append(handlers, h.Name), append(messages, id)
			for _, was := range h.Was {
				handlers, messages = append(handlers, was), append(messages, id)
			}
		}
	}
	return handlers, messages
}

// queueMarkers queues the insert of the markers, and notes those that were not there.
func (w *unit) queueMarkers(b *pgx.Batch) {
	var q *pgx.QueuedQuery
	switch handlers, messages := w.markers(); len(handlers) {
	case 0:
		return
	case 1:
		q = b.Queue(w.db.q(markSQL), w.Projector, handlers[0], messages[0])
	default:
		q = b.Queue(w.db.q(markAllSQL), w.Projector, handlers, messages)
	}
	w.marked = map[mark]bool{}
	q.Query(func(rows pgx.Rows) error {
		var m mark
		_, err := pgx.ForEachRow(rows, []any{&m.handler, &m.message}, func() error {
			w.marked[m] = true
			return nil
		})
		return err
	})
}

// findFresh says which handlers are to run: those of messages with Mark for which a marker was inserted under each of their names.
func (w *unit) findFresh() {
	for i := range w.Messages {
		m := &w.Messages[i]
		if w.found.Live != nil && !w.found.Live[i] {
			continue
		}
		id := markerID(m.ID)
		for j, h := range m.Handlers {
			w.found.Fresh[i][j] = !m.Mark || w.marked[mark{h.Name, id}] &&
				!slices.ContainsFunc(h.Was, func(was string) bool { return !w.marked[mark{was, id}] })
		}
	}
}

// lanes are the lanes of the unit's messages, each once, in an order in which all units lock them.
func (w *unit) lanes() [][]byte {
	lanes := make([][]byte, len(w.Messages))
	for i := range w.Messages {
		lanes[i] = w.Messages[i].Lane[:]
	}
	slices.SortFunc(lanes, bytes.Compare)
	return slices.CompactFunc(lanes, bytes.Equal)
}

func (w *unit) queueHeld(b *pgx.Batch) {
	b.Queue(w.db.q(heldSQL), w.Projector, w.lanes()).Query(func(rows pgx.Rows) error {
		var lane []byte
		_, err := pgx.ForEachRow(rows, []any{&lane}, func() error {
			for i := range w.Messages {
				w.found.Held[i] = w.found.Held[i] || provider.Lane(lane) == w.Messages[i].Lane
			}
			return nil
		})
		return err
	})
}

func (w *unit) queueSuspects(b *pgx.Batch) {
	w.found.Suspect = make([]bool, len(w.Messages))
	ids := make([]string, len(w.Messages))
	for i := range w.Messages {
		ids[i] = markerID(w.Messages[i].ID)
	}
	b.Queue(w.db.q(suspectSQL), w.Projector, ids, w.Careful.Runner).Query(func(rows pgx.Rows) error {
		var i int
		_, err := pgx.ForEachRow(rows, []any{&i}, func() error {
			w.found.Suspect[i] = true
			return nil
		})
		return err
	})
	b.Queue(w.db.q(unnameSQL), w.Careful.Runner, w.Careful.Number)
}

// queueLanes queues the locks of the lanes of parked messages, and the reading of the first messages in them.
func (w *unit) queueLanes(b *pgx.Batch) {
	count, counted := map[provider.Lane]int{}, false
	for _, m := range w.Messages {
		count[m.Lane]++
		counted = counted || m.Parked.Attempts > 0
	}
	lock, lanes := lockLanesSQL, w.lanes()
	if counted {
		lock = awaitLanesSQL
	}
	w.inLane = map[provider.Lane]bool{}
	b.Queue(w.db.q(lock), w.Projector, lanes).Query(func(rows pgx.Rows) error {
		var lane []byte
		var due bool
		_, err := pgx.ForEachRow(rows, []any{&lane, &due}, func() error {
			w.inLane[provider.Lane(lane)] = due
			return nil
		})
		return err
	})
	most := make([]int, len(lanes))
	for i, lane := range lanes {
		most[i] = count[provider.Lane(lane)]
	}
	b.Queue(w.db.q(firstInLanesSQL), w.Projector, lanes, most).Query(func(rows pgx.Rows) (err error) {
		w.listed, err = pgx.CollectRows(rows, pgx.RowToStructByPos[listed])
		return err
	})
}

// findLive says which parked messages are still waiting as they were listed, and first in their lanes.
func (w *unit) findLive() {
	w.found.Live = make([]bool, len(w.Messages))
	at := make(map[int64]int, len(w.Messages))
	for i := range w.Messages {
		at[w.Messages[i].Parked.Seq] = i
	}
	slices.SortFunc(w.listed, func(a, b listed) int { return cmp.Compare(a.Seq, b.Seq) })
	last := map[provider.Lane]int{} // the last live message of the lane
	for _, is := range w.listed {
		lane := provider.Lane(is.Lane)
		due, locked := w.inLane[lane]
		i, ok := at[is.Seq]
		before, any := last[lane]
		if !ok || !locked || any && i < before || !w.isAsListed(i, is, due) {
			last[lane] = len(w.Messages) // none after it is
			continue
		}
		w.found.Live[i], last[lane] = true, i
	}
}

func (w *unit) isAsListed(i int, is listed, due bool) bool {
	p := w.Messages[i].Parked
	open := w.DryRun != nil || is.State == provider.StateWaiting.String() && (due || p.Attempts > 0)
	return open && is.Attempts == p.Attempts && slices.Equal(is.Handlers, p.Handlers)
}

// markerID is the id of a message as markers and names have it.
func markerID(id string) string {
	if len(id) <= maxMarkerID && storable(id) == id {
		return id
	}
	return "sha256:" + hex.EncodeToString(hashOf(id))
}

// maxMarkerID is the longest id that markers have as it is, in bytes: an index takes about 2,700 a row.
const maxMarkerID = 1024
