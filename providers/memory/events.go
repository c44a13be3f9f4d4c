package memory

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// Append implements eventstore.Store.
func (db *DB) Append(ctx context.Context, stream string, expected eventstore.Expected, events []eventstore.Draft) (at eventstore.Appended, err error) {
	err = db.tx(ctx, func(tx *Model) error {
		at, err = db.InTx(tx).Append(ctx, stream, expected, events)
		return err
	})
	if err != nil {
		return eventstore.Appended{}, err
	}
	return at, nil
}

// ReadStream implements eventstore.Store. It yields the events committed when the loop began.
func (db *DB) ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error] {
	return func(yield func(eventstore.Raw, error) bool) {
		db.committed.Load().read(ctx, stream, afterVersion, yield)
	}
}

// Tx is the event store and the outbox inside a transaction of the caller. It claims no entries.
type Tx struct {
	tx *Model
	db *Provider
}

// InTx returns the view of a transaction that Transact or Do began.
func (db *DB) InTx(tx *Model) *Tx { return &Tx{tx: tx, db: db.Provider} }

// CallersTx implements eventstore.TxStore.
func (*Tx) CallersTx() {}

// Append implements eventstore.Store, inside the transaction.
func (t *Tx) Append(ctx context.Context, stream string, expected eventstore.Expected, events []eventstore.Draft) (eventstore.Appended, error) {
	at, err := t.append(ctx, stream, expected, events)
	if err != nil {
		return at, fmt.Errorf("append %s: %w", stream, err)
	}
	return at, nil
}

func (t *Tx) append(ctx context.Context, stream string, expected eventstore.Expected, events []eventstore.Draft) (eventstore.Appended, error) {
	if err := cmp.Or(t.usable(ctx), provider.CheckAppend(stream, expected, events, t.db.cfg.MaxPayload)); err != nil {
		return eventstore.Appended{}, err
	}
	topics, err := provider.Topics(t.db.cfg.Route, stream, events)
	if err != nil {
		return eventstore.Appended{}, err
	}
	// a copy, which replaces the staged state once all events are added
	s := t.tx.staged
	if at, known, err := provider.Repeated(stream, expected, events, s.places.get); known {
		return at, nil
	} else if s.ended(stream) {
		return eventstore.Appended{}, eventstore.ErrStreamEnded
	} else if err != nil {
		return at, err
	}
	stored, _ := s.streams.get(stream)
	version := stored.last()
	if expected != eventstore.Any && int64(expected) != version {
		return eventstore.Appended{}, &eventstore.ConflictError{Stream: stream, Expected: expected, Actual: version}
	}
	now := t.db.now()
	for i, d := range events {
		version++
		s.add(eventstore.Appended{Stream: stream, Version: version, Count: 1, Log: t.db.lineage}, d, now)
		for _, topic := range topics[i] {
			m := provider.FromEvent(stream, version, d, topic)
			m.SetPlace(s.position, provider.LogID{Lineage: t.db.lineage}.String())
			if !s.enqueue(m, now) {
				// an enqueued message has this id
				return eventstore.Appended{}, eventstore.ErrEventIDReused
			}
		}
	}
	t.tx.staged = s
	return eventstore.Appended{Stream: stream, Version: version, Position: s.position, Count: len(events), Log: t.db.lineage}, nil
}

// ReadStream implements eventstore.Store. It includes the events that the transaction has appended.
func (t *Tx) ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error] {
	return func(yield func(eventstore.Raw, error) bool) {
		if err := t.usable(ctx); err != nil {
			yield(eventstore.Raw{}, fmt.Errorf("read %s: %w", stream, err))
			return
		}
		t.tx.staged.read(ctx, stream, afterVersion, yield)
	}
}

func (t *Tx) usable(ctx context.Context) error {
	switch {
	case t.tx.db != t.db: // a Model from View has no db
		return errForeign
	case t.tx.over:
		return errOver
	}
	return ctx.Err()
}

func (s *state) ended(stream string) bool {
	events, _ := s.streams.get(stream)
	last, _ := events.get(events.last())
	return last.Type == eventstore.TypeEnded
}

// add adds an event at the next position.
func (s *state) add(at eventstore.Appended, d eventstore.Draft, now time.Time) {
	s.position++
	at.Position = s.position
	s.places = s.places.put(d.ID, at)
	e := own(eventstore.Raw{
		ID: d.ID, Stream: at.Stream, Version: at.Version, Position: at.Position,
		Type: d.Type, Schema: d.Schema, Data: d.Data, Metadata: d.Metadata, RecordedAt: now,
	})
	events, _ := s.streams.get(at.Stream)
	s.streams = s.streams.put(at.Stream, events.put(at.Version, e))
	s.log = s.log.put(e.Position, e)
}

func (s *state) read(ctx context.Context, stream string, afterVersion int64, yield func(eventstore.Raw, error) bool) {
	if err := provider.CheckStream(stream); err != nil {
		yield(eventstore.Raw{}, fmt.Errorf("read stream: %w", err))
		return
	}
	events, _ := s.streams.get(stream)
	for _, e := range events.from(afterVersion + 1) {
		if err := ctx.Err(); err != nil {
			yield(eventstore.Raw{}, fmt.Errorf("read %s: %w", stream, err))
			return
		}
		if !yield(own(e), nil) {
			return
		}
	}
}

// own copies the bytes and maps of e, so that the caller and the store do not share memory.
func own(e eventstore.Raw) eventstore.Raw {
	e.Data = bytes.Clone(e.Data)
	e.Metadata.Extra = maps.Clone(e.Metadata.Extra)
	return e
}

// FindEvent implements provider.EventFinder.
func (db *DB) FindEvent(ctx context.Context, id string) (eventstore.Appended, error) {
	at, _ := db.committed.Load().places.get(strings.ToLower(id))
	return at, ctx.Err()
}

// FindEvent implements provider.EventFinder. It also finds events that the transaction has appended.
func (t *Tx) FindEvent(ctx context.Context, id string) (eventstore.Appended, error) {
	at, _ := t.tx.staged.places.get(strings.ToLower(id))
	return result(at, "find an event", t.usable(ctx))
}

// snapshot is a stored snapshot.
type snapshot struct {
	eventstore.Snapshot
	savedAt time.Time
}

// LoadSnapshot implements eventstore.SnapshotStore.
func (db *DB) LoadSnapshot(ctx context.Context, stream, schema string) (eventstore.Snapshot, error) {
	return db.committed.Load().snapshot(ctx, stream, schema)
}

// SaveSnapshot implements eventstore.SnapshotStore.
func (db *DB) SaveSnapshot(ctx context.Context, stream string, s eventstore.Snapshot) error {
	return db.tx(ctx, func(tx *Model) error { return db.InTx(tx).SaveSnapshot(ctx, stream, s) })
}

// LoadSnapshot implements eventstore.SnapshotStore.
func (t *Tx) LoadSnapshot(ctx context.Context, stream, schema string) (eventstore.Snapshot, error) {
	if err := t.usable(ctx); err != nil {
		return eventstore.Snapshot{}, fmt.Errorf("load the snapshot of %s: %w", stream, err)
	}
	return t.tx.staged.snapshot(ctx, stream, schema)
}

// SaveSnapshot implements eventstore.SnapshotStore.
func (t *Tx) SaveSnapshot(ctx context.Context, stream string, s eventstore.Snapshot) error {
	if err := provider.CheckSnapshot(stream, s); err != nil {
		return err
	}
	if err := t.usable(ctx); err != nil {
		return fmt.Errorf("save the snapshot of %s: %w", stream, err)
	}
	now, to := t.db.now(), &t.tx.staged
	if to.ended(stream) {
		return nil
	}
	s.State = slices.Clone(s.State)
	all, _ := to.snapshots.get(stream)
	for schema, old := range all.from("") {
		if old.savedAt.Before(now.Add(-24 * time.Hour)) {
			all = all.drop(schema)
		}
	}
	to.snapshots = to.snapshots.put(stream, all.put(s.Schema, snapshot{s, now}))
	return nil
}

func (s *state) snapshot(ctx context.Context, stream, schema string) (eventstore.Snapshot, error) {
	if err := provider.CheckSnapshot(stream, eventstore.Snapshot{Schema: schema}); err != nil {
		return eventstore.Snapshot{}, err
	}
	all, _ := s.snapshots.get(stream)
	found, _ := all.get(schema)
	found.State = slices.Clone(found.State)
	return found.Snapshot, ctx.Err()
}

// Archive deletes the events of an ended stream before its last one, and its snapshots, in one transaction.
// It returns the number of deleted events. To keep them elsewhere, read them with ReadStream before. The
// version and the last event stay, and entries of the outbox and parked messages, which have copies.
//   - eventstore.ErrNotEnded: the stream has not ended, or does not exist.
//   - eventstore.ErrNotPassed: a projector, also one that is being rebuilt, has not passed an event that it
//     takes. Nothing is deleted.
func (db *DB) Archive(ctx context.Context, stream string, o eventstore.ArchiveOptions) (deleted int64, err error) {
	return update(ctx, db.Provider, "archive "+stream, provider.CheckStream(stream), func(s *state, _ time.Time) (int64, error) {
		if !s.ended(stream) {
			return 0, eventstore.ErrNotEnded
		}
		if err := provider.Passed(s.behind(stream, db.lineage), o); err != nil {
			return 0, err
		}
		s.snapshots = s.snapshots.drop(stream)
		return s.archive(stream), nil
	})
}

// behind returns the projectors that take an event, except the last one, that is after their checkpoint.
func (s *state) behind(stream, lineage string) (projectors []string) {
	events, _ := s.streams.get(stream)
	for key, c := range s.checkpoints.from("") {
		if c.Mode == provider.ModeEnded || c.Lineage != lineage && c.Lineage != "" {
			continue
		}
		takes := map[string]bool{}
		for _, b := range c.Handlers {
			takes[b.Type] = true
		}
		for version, e := range events.from(0) {
			if version < events.last() && e.Position > c.Place.Position && takes[e.Type] {
				projectors = append(projectors, first(key))
				break
			}
		}
	}
	return projectors
}

// archive deletes the events before the last one.
func (s *state) archive(stream string) (n int64) {
	events, _ := s.streams.get(stream)
	left := events
	for version, e := range events.from(0) {
		if version < events.last() {
			left = left.drop(version)
			s.log = s.log.drop(e.Position)
			s.places = s.places.drop(e.ID)
			n++
		}
	}
	s.streams = s.streams.put(stream, left)
	return n
}
