package memory

import (
	"bytes"
	"context"
	"fmt"
	"iter"
	"maps"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// place is the position of a stored event.
type place struct {
	stream            string
	version, position int64
}

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
		return eventstore.Appended{}, fmt.Errorf("append %s: %w", stream, err)
	}
	return at, nil
}

func (t *Tx) append(ctx context.Context, stream string, expected eventstore.Expected, events []eventstore.Draft) (eventstore.Appended, error) {
	if err := t.usable(ctx); err != nil {
		return eventstore.Appended{}, err
	}
	if err := provider.CheckAppend(stream, expected, events, t.db.cfg.MaxPayload); err != nil {
		return eventstore.Appended{}, err
	}
	topics, err := provider.Topics(t.db.cfg.Route, stream, events)
	if err != nil {
		return eventstore.Appended{}, err
	}
	// a copy, which replaces the staged state once all events are added
	s := t.tx.staged
	if at, known, err := provider.Repeated(stream, expected, events, s.placeOf); known {
		at.Log = t.db.lineage
		return at, nil
	} else if s.ended(stream) {
		return eventstore.Appended{}, eventstore.ErrStreamEnded
	} else if err != nil {
		return at, err
	}
	version := s.version(stream)
	if expected != eventstore.Any && int64(expected) != version {
		return eventstore.Appended{}, &eventstore.ConflictError{Stream: stream, Expected: expected, Actual: version}
	}
	now := t.db.now()
	for i, d := range events {
		version++
		s.add(stream, version, d, now)
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

// ReadStream implements eventstore.Store. It includes the events that the transaction itself
// appended.
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

// placeOf returns the place of a stored event.
func (s *state) placeOf(id string) (eventstore.Appended, bool) {
	p, ok := s.places.get(id)
	return eventstore.Appended{Stream: p.stream, Version: p.version, Position: p.position}, ok
}

func (s *state) ended(stream string) bool {
	events, _ := s.streams.get(stream)
	last, _ := events.get(events.last())
	return last.Type == eventstore.TypeEnded
}

func (s *state) version(stream string) int64 {
	events, _ := s.streams.get(stream)
	return events.last()
}

func (s *state) add(stream string, version int64, d eventstore.Draft, now time.Time) {
	s.position++
	s.places = s.places.put(d.ID, place{stream, version, s.position})
	e := own(eventstore.Raw{
		ID: d.ID, Stream: stream, Version: version, Position: s.position,
		Type: d.Type, Schema: d.Schema, Data: d.Data, Metadata: d.Metadata, RecordedAt: now,
	})
	events, _ := s.streams.get(stream)
	s.streams = s.streams.put(stream, events.put(version, e))
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
