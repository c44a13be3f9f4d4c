package bolt

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
	"strings"
	"time"

	"go.etcd.io/bbolt"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// events is the event store: of a file if tx is nil, and else of a transaction.
type events struct {
	db *DB
	tx *Tx
}

type View struct{ events }

var errForeign = errors.New("not a transaction of this file")

func (db *DB) InTx(tx *Tx) *View { return &View{events{db, tx}} }

func (*View) CallersTx() {}

func (v events) read(ctx context.Context, doing string, invalid error, fn func(s *session)) error {
	if v.tx != nil {
		return v.write(ctx, doing, invalid, func(s *session) error { fn(s); return nil })
	}
	err := cmp.Or(invalid, ctx.Err())
	if err == nil {
		err = v.db.file.bolt.View(func(tx *bbolt.Tx) error {
			s := &session{tx: tx, now: v.db.now()}
			fn(s)
			return s.err
		})
	}
	return doingErr(doing, err)
}

func doingErr(doing string, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return nil
}

func (v events) write(ctx context.Context, doing string, invalid error, fn func(s *session) error) error {
	err := cmp.Or(invalid, ctx.Err())
	switch {
	case err != nil:
	case v.tx == nil:
		err = v.db.Transact(ctx, func(_ context.Context, tx *Tx) error { return tx.use(fn) })
	case v.tx.db.file != v.db.file:
		err = errForeign
	default:
		err = v.tx.use(fn)
	}
	return doingErr(doing, err)
}

func (v events) Append(ctx context.Context, stream string, expected eventstore.Expected, drafts []eventstore.Draft) (at eventstore.Appended, err error) {
	err = provider.CheckAppend(stream, expected, drafts, v.db.cfg.MaxPayload)
	topics, errRoute := [][]string(nil), error(nil)
	if err == nil {
		topics, errRoute = provider.Topics(v.db.cfg.Route, stream, drafts)
	}
	err = v.write(ctx, "append "+stream, cmp.Or(err, errRoute), func(s *session) (err error) {
		at, err = s.append(stream, expected, drafts, topics, v.db.file.lineage)
		return err
	})
	if err != nil {
		return eventstore.Appended{}, err
	}
	return at, nil
}

// append writes nothing if it returns an error.
func (s *session) append(stream string, expected eventstore.Expected, drafts []eventstore.Draft, topics [][]string, lineage string) (eventstore.Appended, error) {
	last, version := s.lastOf(stream)
	at, known, err := provider.Repeated(stream, expected, drafts, s.placeOf)
	if at.Log = lineage; known {
		return at, nil
	} else if last.Type == eventstore.TypeEnded {
		return at, eventstore.ErrStreamEnded
	} else if err != nil {
		return at, err
	}
	if expected != eventstore.Any && int64(expected) != version {
		return at, &eventstore.ConflictError{Stream: stream, Expected: expected, Actual: version}
	}
	for i, d := range drafts {
		for _, topic := range topics[i] {
			if messages.has(s, key(topic, d.ID)) { // an enqueued message has this id
				return at, eventstore.ErrEventIDReused
			}
		}
	}
	at.Stream, at.Count = stream, len(drafts)
	for i, d := range drafts {
		at.Version, at.Position = version+int64(i)+1, log.next(s)
		places.put(s, key(d.ID), eventstore.Appended{Stream: stream, Version: at.Version, Position: at.Position})
		streams.put(s, key(stream, at.Version), at.Position)
		log.put(s, key(at.Position), eventstore.Raw{
			ID: d.ID, Stream: stream, Version: at.Version, Position: at.Position, Type: d.Type, Schema: d.Schema, Data: d.Data, Metadata: d.Metadata, RecordedAt: s.now,
		})
		for _, topic := range topics[i] {
			m := provider.FromEvent(stream, at.Version, d, topic)
			m.SetPlace(at.Position, provider.LogID{Lineage: lineage}.String())
			s.enqueue(m)
		}
	}
	return at, nil
}

func (s *session) placeOf(id string) (eventstore.Appended, bool) { return places.get(s, key(id)) }

func (s *session) lastOf(stream string) (e eventstore.Raw, version int64) {
	k, position := streams.last(s, key(stream))
	if k == nil {
		return e, 0
	}
	e, _ = log.get(s, key(position))
	return e, number(k)
}

// ReadStream reads the stream before the loop begins: an open transaction would keep a writer waiting.
func (v events) ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error] {
	return func(yield func(eventstore.Raw, error) bool) {
		var all []eventstore.Raw
		err := v.read(ctx, "read "+stream, provider.CheckStream(stream), func(s *session) { all = s.stream(stream, afterVersion) })
		for _, e := range all {
			if err = ctx.Err(); err != nil || !yield(e, nil) {
				break
			}
		}
		if err != nil {
			yield(eventstore.Raw{}, err)
		}
	}
}

func (s *session) stream(stream string, afterVersion int64) (all []eventstore.Raw) {
	for _, position := range streams.from(s, key(stream), key(stream, max(afterVersion, 0)+1)) {
		e, _ := log.get(s, key(position))
		all = append(all, e)
	}
	return all
}

func (v events) FindEvent(ctx context.Context, id string) (at eventstore.Appended, err error) {
	err = v.read(ctx, "find an event", nil, func(s *session) {
		var ok bool
		if at, ok = s.placeOf(strings.ToLower(id)); ok {
			at.Count, at.Log = 1, v.db.file.lineage
		}
	})
	return at, err
}

func (v events) LoadSnapshot(ctx context.Context, stream, schema string) (found eventstore.Snapshot, err error) {
	err = v.read(ctx, "load a snapshot", provider.CheckSnapshot(stream, eventstore.Snapshot{Schema: schema}), func(s *session) {
		row, _ := snapshots.get(s, key(stream, schema))
		found = row.Snapshot
	})
	return found, err
}

// SaveSnapshot deletes snapshots of other schemas after a day.
func (v events) SaveSnapshot(ctx context.Context, stream string, one eventstore.Snapshot) error {
	return v.write(ctx, "save a snapshot", provider.CheckSnapshot(stream, one), func(s *session) error {
		if last, _ := s.lastOf(stream); last.Type == eventstore.TypeEnded {
			return nil
		}
		for k, old := range snapshots.under(s, key(stream)) {
			if old.SavedAt.Before(s.now.Add(-24 * time.Hour)) {
				snapshots.drop(s, k)
			}
		}
		snapshots.put(s, key(stream, one.Schema), snapshot{one, s.now})
		return nil
	})
}

func (v *View) Enqueue(ctx context.Context, ms ...outbox.Message) error {
	ready, err := provider.NormalizeAll(ctx, ms, v.db.cfg.MaxPayload)
	if err != nil {
		return err
	}
	return v.write(ctx, "enqueue", nil, func(s *session) error {
		for _, m := range ready {
			if !messages.has(s, key(m.Topic, m.ID)) {
				s.enqueue(m)
			}
		}
		return nil
	})
}

func (db *DB) ReadLog(ctx context.Context, from eventstore.From, f eventstore.LogFilter) iter.Seq2[eventstore.Raw, error] {
	return provider.ReadLog(ctx, db, from, f)
}

func (db *DB) LogID(ctx context.Context) (provider.LogID, error) {
	return provider.LogID{Lineage: db.file.lineage}, ctx.Err()
}

func (db *DB) LogPage(ctx context.Context, q provider.LogQuery) (provider.LogPage, error) {
	return query(ctx, db, "read the log", provider.CheckLogQuery(q), func(s *session) provider.LogPage {
		return q.Page(s.after(q.After), s.head(), s.now)
	})
}

func (s *session) after(position int64) iter.Seq[eventstore.Raw] {
	return func(yield func(eventstore.Raw) bool) {
		if position == math.MaxInt64 {
			return
		}
		for _, e := range log.from(s, nil, key(position+1)) {
			if !yield(e) {
				return
			}
		}
	}
}

// head returns the position of the last event, which is never deleted.
func (s *session) head() int64 {
	_, e := log.last(s, nil)
	return e.Position
}

func (db *DB) LogPosition(ctx context.Context, from eventstore.From) (int64, error) {
	var failed error
	at, err := query(ctx, db, "find a position", nil, func(s *session) (at int64) {
		at, failed = provider.PositionIn(from, s.head(), s.after(0))
		return at
	})
	return at, cmp.Or(err, failed)
}

func (db *DB) LogStreams(ctx context.Context, versions map[string]int64, after int64) ([]eventstore.Raw, error) {
	return query(ctx, db, "read streams of the log", nil, func(s *session) (found []eventstore.Raw) {
		for stream, last := range versions {
			for position, ok := streams.get(s, key(stream, last)); ok && position > after; position, ok = streams.get(s, key(stream, last)) {
				e, _ := log.get(s, key(position))
				found, last = append(found, e), last-1
			}
		}
		slices.SortFunc(found, func(a, b eventstore.Raw) int { return cmp.Compare(a.Position, b.Position) })
		return found
	})
}

func (db *DB) LogEvents(ctx context.Context, ids []string) (map[string]eventstore.Raw, error) {
	return lookUp(ctx, db, ids, func(e eventstore.Raw) eventstore.Raw { return e })
}

func (db *DB) LogPlaces(ctx context.Context, ids []string) (map[string]provider.LogPlace, error) {
	return lookUp(ctx, db, ids, func(e eventstore.Raw) provider.LogPlace {
		return provider.LogPlace{Position: e.Position, ID: e.ID, RecordedAt: e.RecordedAt}
	})
}

func lookUp[V any](ctx context.Context, db *DB, ids []string, of func(eventstore.Raw) V) (map[string]V, error) {
	return query(ctx, db, "read events by id", nil, func(s *session) map[string]V {
		found := map[string]V{}
		for _, id := range ids {
			if at, ok := s.placeOf(id); ok {
				e, _ := log.get(s, key(at.Position))
				found[id] = of(e)
			}
		}
		return found
	})
}

func (s *session) enqueue(m outbox.Message) {
	e := outbox.Entry{OutboxMessage: m, Seq: entries.next(s), Status: outbox.Pending, NextAttemptAt: s.now, CreatedAt: s.now}
	messages.put(s, key(m.Topic, m.ID), e.Seq)
	s.putEntry(e)
}

func (s *session) putEntry(all ...outbox.Entry) {
	for _, e := range all {
		entries.put(s, key(e.Seq), e)
		if s.close(e); e.Status.Open() {
			open.put(s, key(e.Seq), true)
			queues.put(s, key(e.Topic, e.Key, e.Seq), true)
		}
	}
}

func (s *session) close(e outbox.Entry) {
	open.drop(s, key(e.Seq))
	queues.drop(s, key(e.Topic, e.Key, e.Seq))
}

func (s *session) dropEntry(e outbox.Entry) {
	entries.drop(s, key(e.Seq))
	messages.drop(s, key(e.Topic, e.ID))
	s.close(e)
}

func (s *session) allOpen(yield func(outbox.Entry) bool) {
	for k := range open.under(s, nil) {
		if e, _ := entries.get(s, k); !yield(e) {
			return
		}
	}
}

func (db *DB) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) ([]outbox.Entry, error) {
	return update(ctx, db, "claim entries", provider.CheckQuery(q), func(s *session) ([]outbox.Entry, error) {
		taken, abandoned := q.Claim(s.allOpen, t, s.now)
		s.putEntry(slices.Concat(taken, abandoned)...)
		return taken, nil
	})
}

func (db *DB) MarkEntries(ctx context.Context, marks []outbox.Mark) ([]int64, error) {
	return update(ctx, db, "mark entries", provider.CheckMarks(marks), func(s *session) (late []int64, err error) {
		for _, m := range marks {
			e, ok := entries.get(s, key(m.Seq))
			if !ok || e.Status != outbox.Claimed || e.Token != m.Token {
				late = append(late, m.Seq)
				continue
			}
			if m.Drop {
				s.dropEntry(e)
			} else {
				s.putEntry(m.Apply(e, s.now))
			}
			if m.To == outbox.Published {
				s.releaseHeld(e)
			}
		}
		return late, nil
	})
}

func (s *session) releaseHeld(e outbox.Entry) {
	for k := range queues.under(s, key(e.Topic, e.Key)) {
		if held, _ := entries.get(s, key(number(k))); held.Status == outbox.Held {
			held.Status = outbox.Pending
			s.putEntry(held)
		}
	}
}

func (db *DB) HoldEntries(ctx context.Context, long time.Duration, limit int) (int, error) {
	return update(ctx, db, "hold entries", nil, func(s *session) (int, error) {
		changed, n := provider.HoldEntries(s.allOpen, long, limit, s.now)
		s.putEntry(changed...)
		return n, nil
	})
}

func (db *DB) DeleteEntries(ctx context.Context, keep outbox.EntryRetention, after int64) (n int, next int64, err error) {
	next, err = update(ctx, db, "delete entries", nil, func(s *session) (next int64, err error) {
		scanned := 0
		for _, e := range entries.from(s, nil, key(after+1)) {
			if scanned++; scanned > 1000 {
				return next, nil
			}
			next = e.Seq
			if keep.IsOver(&e, s.now) {
				s.dropEntry(e)
				n++
			}
		}
		return 0, nil
	})
	if err != nil {
		return 0, after, err
	}
	return n, next, nil
}

func (db *DB) Entries(ctx context.Context, f outbox.Filter) ([]outbox.Entry, error) {
	f.Limit = cmp.Or(f.Limit, 100)
	return query(ctx, db, "list entries", provider.CheckFilter(f), func(s *session) []outbox.Entry { return s.pick(f) })
}

func (s *session) pick(f outbox.Filter) []outbox.Entry {
	return pick(entries.from(s, nil, key(max(f.After, 0)+1)), f.Limit, func(e *outbox.Entry) bool { return f.Selects(e, s.now) })
}

func pick[V any](rows iter.Seq2[[]byte, V], limit int, selects func(*V) bool) (picked []V) {
	for _, v := range rows {
		if !selects(&v) {
			continue
		}
		if picked = append(picked, v); len(picked) == limit {
			break
		}
	}
	return picked
}

func (db *DB) StatusCounts(ctx context.Context, of ...outbox.Status) (map[outbox.Status]int64, error) {
	return query(ctx, db, "count entries", provider.CheckFilter(outbox.Filter{Status: of}), func(s *session) map[outbox.Status]int64 {
		counts := provider.ZeroCounts(of)
		for _, e := range s.pick(outbox.Filter{Status: of}) {
			counts[e.Status]++
		}
		return counts
	})
}

func (db *DB) Requeue(ctx context.Context, f outbox.Filter) (int, error) {
	return db.change(ctx, f, []outbox.Status{outbox.Failed, outbox.Abandoned}, func(s *session, e *outbox.Entry) error {
		if !f.Force && e.LastAttemptedAt.Before(s.now.Add(-db.cfg.RequeueWindow)) {
			return fmt.Errorf("entry %d: %w", e.Seq, outbox.ErrStale)
		}
		e.Status, e.Attempts, e.Suspect, e.NextAttemptAt = outbox.Pending, 0, false, s.now
		return nil
	})
}

func (db *DB) Skip(ctx context.Context, f outbox.Filter) (int, error) {
	return db.change(ctx, f, []outbox.Status{outbox.Pending, outbox.Failed, outbox.Held, outbox.Abandoned}, func(s *session, e *outbox.Entry) error {
		e.Status, e.NextAttemptAt = outbox.Skipped, s.now
		return nil
	})
}

func (db *DB) change(ctx context.Context, f outbox.Filter, in []outbox.Status, to func(*session, *outbox.Entry) error) (int, error) {
	invalid := provider.CheckFilter(f)
	if len(f.Status) > 0 {
		in = slices.DeleteFunc(in, func(status outbox.Status) bool { return !slices.Contains(f.Status, status) })
	}
	if f.Status = in; len(in) == 0 {
		return 0, cmp.Or(invalid, ctx.Err())
	}
	return update(ctx, db, "change entries", invalid, func(s *session) (int, error) {
		picked := s.pick(f)
		for _, e := range picked {
			if err := to(s, &e); err != nil {
				return 0, err
			}
			s.putEntry(e)
			s.releaseHeld(e)
		}
		return len(picked), nil
	})
}
