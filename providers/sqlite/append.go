package sqlite

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
	sqlite3 "modernc.org/sqlite/lib"
)

// Append implements eventstore.Store in one transaction: four statements for one event with one
// entry, and two for each further pair.
func (d *DB) Append(ctx context.Context, stream string, expected eventstore.Expected, events []eventstore.Draft) (eventstore.Appended, error) {
	a, err := d.check(stream, expected, events)
	if err != nil {
		return eventstore.Appended{}, err
	}
	at, err := d.append(ctx, a)
	if isAmbiguous(err) {
		at, err = d.resolve(ctx, a, err)
	}
	return a.result(at, err)
}

func (d *Provider) append(ctx context.Context, a *appending) (at eventstore.Appended, err error) {
	err = d.writeTx(ctx, func(u *unit) error {
		at, err = a.run(ctx, u.session)
		u.events = !at.Replayed
		u.entries = a.entries > 0 && !at.Replayed
		return err
	})
	return at, err
}

// resolve appends once more after a commit that may have succeeded: the event ids show whether it did.
func (d *Provider) resolve(ctx context.Context, a *appending, lost error) (eventstore.Appended, error) {
	at, err := d.append(ctx, a)
	switch {
	case errors.Is(err, eventstore.ErrConflict), errors.Is(err, eventstore.ErrEventIDReused), errors.Is(err, eventstore.ErrDamaged),
		errors.Is(err, eventstore.ErrStreamEnded):
		return at, err // the first commit did not succeed
	case err != nil:
		return at, fmt.Errorf("%w: %w; then %w", eventstore.ErrAmbiguous, lost, err)
	case at.Replayed:
		at.Replayed = false // this call wrote them
		d.signal(news{entries: a.entries > 0, events: true})
	}
	return at, nil
}

// appending is an append whose arguments are valid.
type appending struct {
	stream   string
	expected eventstore.Expected
	events   []eventstore.Draft
	topics   [][]string
	ids      string // event ids as a JSON array
	entries  int
	db       *Provider
	at       int64   // time of the append on SQLite's clock, in milliseconds
	position []int64 // of each event
}

func (d *Provider) check(stream string, expected eventstore.Expected, events []eventstore.Draft) (*appending, error) {
	if err := provider.CheckAppend(stream, expected, events, d.cfg.MaxPayload); err != nil {
		return nil, err
	}
	topics, err := provider.Topics(d.cfg.Route, stream, events)
	if err != nil {
		return nil, err
	}
	a := &appending{stream: stream, expected: expected, events: events, topics: topics, db: d}
	ids := make([]string, len(events))
	for i := range events {
		ids[i] = events[i].ID
		a.entries += len(topics[i])
	}
	a.ids = jsonOf(ids)
	return a, nil
}

// result adds the stream to an error, except to a conflict, which names its stream.
func (a *appending) result(at eventstore.Appended, err error) (eventstore.Appended, error) {
	switch {
	case err == nil:
		return at, nil
	case errors.Is(err, eventstore.ErrConflict):
		return eventstore.Appended{}, err
	}
	return eventstore.Appended{}, fmt.Errorf("append %s: %w", a.stream, err)
}

// run appends in a transaction. If it returns an error, some rows may have been written.
func (a *appending) run(ctx context.Context, s session) (eventstore.Appended, error) {
	log, err := a.db.logID(ctx, s)
	if err != nil {
		return eventstore.Appended{}, err
	}
	at, known, err := a.find(ctx, s)
	if err == nil && !known {
		at, err = a.writeEvents(ctx, s)
	} else if errors.Is(err, eventstore.ErrEventIDReused) { // perhaps the others are archived
		if e := a.conflict(ctx, s); errors.Is(e, eventstore.ErrStreamEnded) {
			err = e
		}
	}
	if at.Log = log.Lineage; err != nil || known {
		return at, err
	}
	return at, a.writeEntries(ctx, s, at, log.String())
}

const findEvents = `
select e.id, e.stream, e.version, e.position
from json_each(?1) j cross join kinora_events e on e.id = j.value`

// find looks the ids up, and reports whether the append is a repeat (provider.Repeated).
func (a *appending) find(ctx context.Context, s session) (at eventstore.Appended, known bool, err error) {
	places := map[string]eventstore.Appended{}
	err = fill(ctx, s, places, func(id *string, p *eventstore.Appended) []any {
		return []any{id, &p.Stream, &p.Version, &p.Position}
	}, findEvents, a.ids)
	if err != nil || len(places) == 0 {
		return at, false, err
	}
	return provider.Repeated(a.stream, a.expected, a.events, func(id string) (eventstore.Appended, bool) {
		p, ok := places[id]
		return p, ok
	})
}

// raiseStream raises the version of stream ?1 by ?3 if the version is ?4, or if ?4 is -1 (any).
// It inserts a missing stream, unless ?4 is above 0. ?5 says whether the append ends the stream. No row:
// a conflict, or the stream has ended.
const raiseStream = `
insert into kinora_streams (stream, category, version, ended)
select ?1, ?2, ?3, ?5 where ?4 <= 0 or exists (select 1 from kinora_streams where stream = ?1)
on conflict (stream) do update set version = version + ?3, ended = ?5 where not ended and (?4 = -1 or version = ?4)
returning version, ` + clock

const readVersion = `select version, ended from kinora_streams where stream = ?1`

const insertEvent = `
insert into kinora_events (stream, version, id, type, schema_version, data, metadata, recorded_at)
values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)`

func (a *appending) writeEvents(ctx context.Context, s session) (at eventstore.Appended, err error) {
	n := int64(len(a.events))
	raised, err := find(ctx, s, []any{&at.Version, &a.at}, raiseStream, a.stream, provider.Category(a.stream), n, int64(a.expected),
		a.events[n-1].Type == eventstore.TypeEnded)
	if err == nil && !raised {
		err = a.conflict(ctx, s)
	}
	if err != nil {
		return at, err
	}
	at.Stream, at.Count = a.stream, len(a.events)
	a.position = make([]int64, len(a.events))
	for i := range a.events {
		e := &a.events[i]
		r, err := s.exec(ctx, insertEvent, a.stream, at.Version-n+int64(i)+1, e.ID, e.Type, e.Schema,
			string(e.Data), metadataOf(e.Metadata), a.at)
		if isVersionTaken(err) {
			return at, a.damaged()
		}
		if err != nil {
			return at, err
		}
		if at.Position, err = r.LastInsertId(); err != nil {
			return at, err
		}
		a.position[i] = at.Position
	}
	return at, nil
}

func (a *appending) conflict(ctx context.Context, s session) error {
	c := &eventstore.ConflictError{Stream: a.stream, Expected: a.expected}
	var ended bool
	if _, err := find(ctx, s, []any{&c.Actual, &ended}, readVersion, a.stream); err != nil {
		return err
	}
	if ended {
		return eventstore.ErrStreamEnded
	}
	if int64(a.expected) > c.Actual { // a reader has seen no more events than the row counts, unless the row is damaged
		var beyond bool
		if err := one(ctx, s, []any{&beyond}, hasBeyond, a.stream, c.Actual); err != nil {
			return err
		}
		if beyond {
			return a.damaged()
		}
	}
	return c
}

const hasBeyond = `select exists (select 1 from kinora_events where stream = ?1 and version > ?2)`

// isVersionTaken reports whether the stream has an event of this version, which its row does not count.
func isVersionTaken(err error) bool {
	return codeOf(err) == sqlite3.SQLITE_CONSTRAINT_UNIQUE && strings.Contains(err.Error(), "kinora_events.stream, kinora_events.version")
}

// damaged says how to restore the stream's row.
func (a *appending) damaged() error {
	return fmt.Errorf("%w: restore the row: insert into kinora_streams (stream, category, version, ended) select stream, '%s', max(version), max(type = 'kinora.ended') "+
		"from kinora_events where stream = '%s' group by stream on conflict (stream) do update set version = max(version, excluded.version), ended = excluded.ended",
		eventstore.ErrDamaged, provider.Category(a.stream), strings.ReplaceAll(a.stream, "'", "''"))
}

func (a *appending) writeEntries(ctx context.Context, s session, at eventstore.Appended, log string) error {
	first := at.Version - int64(at.Count) + 1
	for i := range a.events {
		for _, topic := range a.topics[i] {
			m := provider.FromEvent(a.stream, first+int64(i), a.events[i], topic)
			m.SetPlace(a.position[i], log)
			added, err := s.enqueue(ctx, m, a.at)
			if err != nil {
				return err
			}
			// an enqueued message has the event's id
			if !added {
				return eventstore.ErrEventIDReused
			}
		}
	}
	return nil
}

// noMetadata is the metadata of most events.
const noMetadata = `{}`

func metadataOf(m eventstore.Metadata) string {
	if len(m.Extra) == 0 && m.CorrelationID == "" && m.CausationID == "" && m.Traceparent == "" && m.Actor == "" {
		return noMetadata
	}
	return jsonOf(m)
}

// jsonOf encodes values that always have a JSON form: strings, and maps and structs of them.
func jsonOf(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(b)
}
