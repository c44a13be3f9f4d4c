package providertest

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"reflect"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// newID returns a random UUID in lower-case canonical form.
func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// draft returns a valid draft with a new id.
func draft() eventstore.Draft {
	return eventstore.Draft{ID: newID(), Type: "thing.happened", Schema: 1, Data: []byte(`{"n":1}`)}
}

func drafts(n int) []eventstore.Draft {
	ds := make([]eventstore.Draft, n)
	for i := range ds {
		ds[i] = draft()
		ds[i].Data = fmt.Appendf(nil, `{"n":%d}`, i+1)
	}
	return ds
}

func idsOf(ds []eventstore.Draft) []string {
	ids := make([]string, len(ds))
	for i, d := range ds {
		ids[i] = d.ID
	}
	return ids
}

// append appends, and fails the case on an error.
func (s *stage) append(stream string, expected eventstore.Expected, ds ...eventstore.Draft) eventstore.Appended {
	s.Helper()
	at, err := s.db.Append(s.ctx, stream, expected, ds)
	s.ok(err, "append "+stream)
	return at
}

// read reads a stream to its end, and fails the case on an error.
func (s *stage) read(from eventstore.Store, stream string, after int64) []eventstore.Raw {
	s.Helper()
	var events []eventstore.Raw
	for e, err := range from.ReadStream(s.ctx, stream, after) {
		s.ok(err, "read "+stream)
		events = append(events, e)
	}
	return events
}

// readIDs returns the ids of a stream in order. It fails the case if the versions are not 1, 2, 3
// and so on, except for the last event of a stream that has ended: the others may be archived.
func (s *stage) readIDs(stream string) []string {
	s.Helper()
	ids := []string{}
	for i, e := range s.read(s.db, stream, 0) {
		if e.Type != eventstore.TypeEnded {
			same(s, "version in "+stream, e.Version, int64(i+1))
		}
		same(s, "stream of an event in "+stream, e.Stream, stream)
		ids = append(ids, e.ID)
	}
	return ids
}

// dump is the content of a store.
type dump struct {
	events  map[string][]eventstore.Raw
	entries []outbox.Entry
	parked  []provider.Parked
}

// dump reads all entries and parked messages, and the events of these streams.
func (s *stage) dump(streams ...string) dump {
	s.Helper()
	d := dump{events: map[string][]eventstore.Raw{}, entries: s.entries(outbox.Filter{})}
	for _, stream := range streams {
		d.events[stream] = s.read(s.db, stream, 0)
	}
	if s.db.projectorContracts != nil {
		d.parked = s.list(provider.ParkedFilter{States: allStates, Limit: 10_000})
	}
	return d
}

// unchanged fails the case if anything was written since the dump before.
func (s *stage) unchanged(before dump, since string) {
	s.Helper()
	streams := make([]string, 0, len(before.events))
	for stream := range before.events {
		streams = append(streams, stream)
	}
	if now := s.dump(streams...); !reflect.DeepEqual(before, now) {
		s.Fatalf("%s wrote something:\nbefore %+v\nnow    %+v", since, before, now)
	}
}

// entries reads all that f selects, page by page, with times and empty values in one form.
func (s *stage) entries(f outbox.Filter) []outbox.Entry {
	s.Helper()
	all := []outbox.Entry{}
	for {
		page, err := s.db.Entries(s.ctx, f)
		s.ok(err, "list entries")
		if len(page) == 0 {
			return all
		}
		for _, e := range page {
			s.require(e.Seq > f.After, "entry %d comes after %d", e.Seq, f.After)
			f.After = e.Seq
			all = append(all, plain(e))
		}
	}
}

// plain returns e in a form that reflect.DeepEqual can compare.
func plain(e outbox.Entry) outbox.Entry {
	for _, at := range []*time.Time{&e.NextAttemptAt, &e.CreatedAt, &e.LastAttemptedAt, &e.PublishedAt} {
		*at = at.UTC().Round(0)
	}
	if len(e.Headers) == 0 {
		e.Headers = nil
	}
	if len(e.Payload) == 0 {
		e.Payload = nil
	}
	return e
}

// entry reads one entry.
func (s *stage) entry(seq int64) outbox.Entry {
	s.Helper()
	found := s.entries(outbox.Filter{Seqs: []int64{seq}})
	same(s, "entries of that Seq", len(found), 1)
	return found[0]
}

// enqueue adds messages in a separate transaction and returns their entries.
func (s *stage) enqueue(ms ...outbox.Message) []outbox.Entry {
	s.Helper()
	var after int64
	if all := s.entries(outbox.Filter{}); len(all) > 0 {
		after = all[len(all)-1].Seq
	}
	s.ok(s.inTx(s.ctx, func(view TxView, _ Add) error { return view.Enqueue(s.ctx, ms...) }), "enqueue")
	return s.entries(outbox.Filter{After: after})
}

// line returns n messages of one topic and key.
func line(n int, topic, key string) []outbox.Message {
	ms := make([]outbox.Message, n)
	for i := range ms {
		ms[i] = outbox.Message{ID: newID(), Topic: topic, Key: key, Payload: fmt.Appendf(nil, "%s %d", key, i+1)}
	}
	return ms
}

func seqsOf(entries []outbox.Entry) []int64 {
	seqs := make([]int64, len(entries))
	for i, e := range entries {
		seqs[i] = e.Seq
	}
	return seqs
}

// invalid fails the case unless err is an *eventstore.InvalidError.
func (s *stage) invalid(err error, doing string) {
	s.Helper()
	if _, ok := errors.AsType[*eventstore.InvalidError](err); !ok || !errors.Is(err, eventstore.ErrInvalid) {
		s.Fatalf("%s: got error %v, want an *eventstore.InvalidError", doing, err)
	}
}

// sameJSON compares JSON as values: a database may spell an event's data differently, but every
// digit of a number counts.
func sameJSON(a, b []byte) bool {
	x, errX := jsonValue(a)
	y, errY := jsonValue(b)
	return errX == nil && errY == nil && reflect.DeepEqual(x, y)
}

func jsonValue(b []byte) (any, error) {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.UseNumber()
	var v any
	err := dec.Decode(&v)
	return exact(v), err
}

func exact(v any) any {
	switch v := v.(type) {
	case json.Number:
		r, _ := new(big.Rat).SetString(v.String())
		return r.RatString()
	case []any:
		for i := range v {
			v[i] = exact(v[i])
		}
	case map[string]any:
		for k := range v {
			v[k] = exact(v[k])
		}
	}
	return v
}
