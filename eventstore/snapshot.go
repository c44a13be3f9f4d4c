package eventstore

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/kinora-go/kinora/internal/check"
)

// Snapshot is the state of an aggregate at a version of its stream, as a SnapshotStore stores it.
type Snapshot struct {
	Schema  string // at most 64 bytes
	Version int64  // zero: there is no snapshot
	EventID string // the id of the event with this version
	State   []byte // at most 4 MiB; the state of a larger aggregate is not stored
}

// SnapshotStore is a Store that also stores snapshots: at most one for each stream and schema. They
// can be deleted at any time. The stores of Kinora and their TxStores implement it.
type SnapshotStore interface {
	// LoadSnapshot returns the snapshot of a stream for a schema, or the zero Snapshot.
	LoadSnapshot(ctx context.Context, stream, schema string) (Snapshot, error)

	// SaveSnapshot replaces the snapshot of the stream for s.Schema. Snapshots of the stream for
	// other schemas, that were not replaced for a day, are deleted.
	SaveSnapshot(ctx context.Context, stream string, s Snapshot) error
}

// Snapshots makes a Repository store the state of its aggregates, so that a load applies only the
// newest events of a long stream.
//   - Update and UpdateTx store a snapshot when they append events, after a load that has applied Every
//     events or more. Update does it after its append, and a failure is only reported to OnError. UpdateTx
//     does it in the caller's transaction, and then a failure is an error of UpdateTx.
//   - The state is the aggregate in JSON. NewRepository returns an error if that would lose fields:
//     unexported ones, interfaces, functions, and two of one name, unless the type implements
//     json.Marshaler and json.Unmarshaler. Two references to one object become two objects. Fields with the tag `json:"-"` keep the value that the function fresh of
//     NewRepository sets.
//   - A snapshot counts only if its checksum is right, and the stream has the event that it names at
//     its version. Otherwise it is reported to OnError, and all events are read.
type Snapshots struct {
	Every int // zero: no snapshots

	// Schema names what the state means, in at most 40 bytes. Change it when Apply, an upcaster or the
	// meaning of a field changes: snapshots with another Schema are not used. Changes of the fields'
	// names and types need no new Schema.
	Schema string

	OnError func(stream string, err error) // nil: errors are not reported
}

// ErrSnapshot is reported to Snapshots.OnError for a snapshot that is not used, and for an aggregate
// whose state cannot be stored.
var ErrSnapshot = errors.New("the snapshot is not used")

// snapshots is the policy of a Repository, checked.
type snapshots struct {
	every   int64
	schema  string // with the fingerprint of the aggregate's type
	onError func(stream string, err error)
}

// newSnapshots returns nil if there are none.
func newSnapshots(s Snapshots, of reflect.Type, store Store) (*snapshots, error) {
	switch _, ok := store.(SnapshotStore); {
	case s.Every == 0:
		return nil, nil
	case s.Every < 0:
		return nil, invalid("snapshots", "Every must not be negative")
	case s.Schema != "" && check.Text(s.Schema, 40) != "":
		return nil, invalid("snapshots", "Schema "+check.Text(s.Schema, 40))
	case !ok:
		return nil, invalid("snapshots", "the store has no snapshots: it must implement SnapshotStore")
	}
	w := typeWalk{seen: map[reflect.Type]bool{}}
	if w.visit(of, of.String()); w.err != nil {
		return nil, w.err
	}
	sum := sha256.Sum256(w.text.Bytes())
	one := &snapshots{every: int64(s.Every), schema: fmt.Sprintf("%s/%x", s.Schema, sum[:8]), onError: s.OnError}
	if one.onError == nil {
		one.onError = func(string, error) {}
	}
	return one, nil
}

// typeWalk writes the structure of a type, as JSON sees it, and finds what JSON would lose.
type typeWalk struct {
	seen map[reflect.Type]bool
	text bytes.Buffer
	err  error
}

var (
	jsonMarshaler   = reflect.TypeFor[json.Marshaler]()
	jsonUnmarshaler = reflect.TypeFor[json.Unmarshaler]()
)

func (w *typeWalk) refuse(format string, args ...any) {
	if w.err == nil {
		w.err = invalid("snapshots", fmt.Sprintf(format, args...)+", tag the field with json:\"-\", or implement json.Marshaler and json.Unmarshaler")
	}
}

func (w *typeWalk) visit(t reflect.Type, path string) {
	fmt.Fprintf(&w.text, "%s:%s;", t.Kind(), t)
	pointer := reflect.PointerTo(t)
	if w.seen[t] || pointer.Implements(jsonMarshaler) && pointer.Implements(jsonUnmarshaler) {
		return
	}
	w.seen[t] = true
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array:
		w.visit(t.Elem(), path)
	case reflect.Map:
		w.visit(t.Key(), path)
		if e := t.Elem(); reflect.PointerTo(e).Implements(jsonMarshaler) && !e.Implements(jsonMarshaler) {
			w.refuse("JSON does not call MarshalJSON of %s for the values of %s: give it a value receiver", e, path)
		}
		w.visit(t.Elem(), path)
	case reflect.Interface, reflect.Func, reflect.Chan, reflect.UnsafePointer, reflect.Complex64, reflect.Complex128:
		w.refuse("JSON cannot store %s (%s): use another type", path, t)
	case reflect.Struct:
		w.fields(t, path, map[string]bool{})
	}
}

// fields visits the fields of a struct, and of those that it embeds: their names are in one object.
func (w *typeWalk) fields(t reflect.Type, path string, names map[string]bool) {
	if len(path) > 1000 { // it embeds itself
		w.refuse("JSON cannot store %s: use another type", t)
		return
	}
	for i := range t.NumField() {
		f := t.Field(i)
		tag := f.Tag.Get("json")
		name, _, _ := strings.Cut(tag, ",")
		embedded := f.Type
		if embedded.Kind() == reflect.Pointer {
			embedded = embedded.Elem()
		}
		switch {
		case tag == "-":
		case f.Anonymous && name == "" && embedded.Kind() == reflect.Struct && !embedded.Implements(jsonMarshaler) && !reflect.PointerTo(embedded).Implements(jsonMarshaler):
			fmt.Fprintf(&w.text, "%s{", embedded)
			w.fields(embedded, path+"."+f.Name, names)
			w.text.WriteString("}")
		case !f.IsExported():
			w.refuse("JSON does not store %s.%s: export the field", path, f.Name)
		default:
			name = cmp.Or(name, f.Name)
			if names[name] {
				w.refuse("JSON has one field for two of the name %s in %s: rename one", name, path)
			}
			names[name] = true
			fmt.Fprintf(&w.text, "%s %q", f.Name, tag)
			w.visit(f.Type, path+"."+f.Name)
		}
	}
}

// seal returns the state with a checksum over it and the place that it belongs to.
func seal(stream string, s Snapshot) []byte {
	h := sha256.New()
	for _, text := range []string{stream, s.Schema, s.EventID, string(s.State)} {
		_ = binary.Write(h, binary.BigEndian, int64(len(text))) // a hash never fails
		h.Write([]byte(text))
	}
	_ = binary.Write(h, binary.BigEndian, s.Version)
	return append(h.Sum(nil), s.State...)
}

func (s *snapshots) open(stream string, stored Snapshot) ([]byte, error) {
	if len(stored.State) < sha256.Size {
		return nil, fmt.Errorf("%w: its checksum is wrong", ErrSnapshot)
	}
	sealed := stored.State
	stored.State = sealed[sha256.Size:]
	if stored.Schema != s.schema || !bytes.Equal(seal(stream, stored), sealed) {
		return nil, fmt.Errorf("%w: its checksum is wrong", ErrSnapshot)
	}
	return stored.State, nil
}

// encode returns the snapshot of an aggregate. again is a new aggregate, which is used to check that
// the state can be read back.
func (s *snapshots) encode(a, again any, stream, eventID string, version int64) (Snapshot, error) {
	one := Snapshot{Schema: s.schema, Version: version, EventID: eventID}
	var err error
	if one.State, err = json.Marshal(a); err != nil {
		return one, fmt.Errorf("%w: encode %T: %w", ErrSnapshot, a, err)
	}
	if err := restore(again, one.State); err != nil {
		return one, err
	}
	if read, err := json.Marshal(again); err != nil || !bytes.Equal(read, one.State) {
		return one, fmt.Errorf("%w: %T reads back differently", ErrSnapshot, a)
	}
	if one.State = seal(stream, one); len(one.State) > check.MaxSnapshot {
		return one, fmt.Errorf("%w: the state has %d bytes, the limit is %d", ErrSnapshot, len(one.State), check.MaxSnapshot)
	}
	return one, nil
}

func restore(a any, state []byte) error {
	if err := json.Unmarshal(state, a); err != nil {
		return fmt.Errorf("%w: decode %T: %w", ErrSnapshot, a, err)
	}
	return nil
}

// target returns what json.Unmarshal sets.
func target[A Aggregate](a *A) any {
	if reflect.TypeFor[A]().Kind() == reflect.Pointer {
		return *a
	}
	return a
}

// loadSnapshot loads the aggregate from its snapshot and the events after it. used is false if there is
// no snapshot, or it does not belong to the stream: then all events must be read.
func (r *Repository[A]) loadSnapshot(ctx context.Context, store Store, id string, l *loaded[A]) (used bool, err error) {
	from, ok := store.(SnapshotStore)
	if !ok {
		return false, nil
	}
	stream := l.at.Stream
	stored, err := from.LoadSnapshot(ctx, stream, r.snaps.schema)
	if err != nil {
		return false, fmt.Errorf("load %s: snapshot: %w", stream, err)
	}
	if stored.Version == 0 {
		return false, nil
	}
	discard := func(why error) (bool, error) {
		*l = loaded[A]{at: Appended{Stream: stream}}
		r.snaps.onError(stream, why)
		return false, nil
	}
	state, err := r.snaps.open(stream, stored)
	if err != nil {
		return discard(err)
	}
	l.aggregate = r.fresh(id)
	if err := restore(target(&l.aggregate), state); err != nil {
		return discard(err)
	}
	for raw, err := range store.ReadStream(ctx, stream, stored.Version-1) {
		switch {
		case err != nil:
			*l = loaded[A]{at: Appended{Stream: stream}}
			return false, fmt.Errorf("load %s: %w", stream, err)
		case !used && (raw.Version != stored.Version || raw.ID != stored.EventID):
			return discard(fmt.Errorf("%w: version %d of the stream is another event", ErrSnapshot, stored.Version))
		case !used:
			used = true
			l.at.Version, l.at.Position, l.eventID = raw.Version, raw.Position, raw.ID
		default:
			if err := r.apply(l, raw); err != nil {
				*l = loaded[A]{at: Appended{Stream: stream}}
				return false, fmt.Errorf("load %s: %w", stream, err)
			}
		}
	}
	if !used {
		return discard(fmt.Errorf("%w: the stream has no version %d", ErrSnapshot, stored.Version))
	}
	return true, nil
}

// snapshot returns a snapshot of a loaded aggregate if one is due, else the zero Snapshot.
func (r *Repository[A]) snapshot(id string, l *loaded[A]) Snapshot {
	if r.snaps == nil || l.applied < r.snaps.every {
		return Snapshot{}
	}
	again := r.fresh(id)
	s, err := r.snaps.encode(l.aggregate, target(&again), l.at.Stream, l.eventID, l.at.Version)
	if err != nil {
		r.snaps.onError(l.at.Stream, err)
		return Snapshot{}
	}
	return s
}

// saveSnapshot stores s, unless it is zero. at is the result of the update.
func (r *Repository[A]) saveSnapshot(ctx context.Context, store Store, at Appended, s Snapshot) error {
	to, ok := store.(SnapshotStore)
	if !ok || s.Version == 0 || at.Count == 0 { // without the lock of an append, it could wait for another transaction
		return nil
	}
	err := to.SaveSnapshot(ctx, at.Stream, s)
	if _, inTx := store.(TxStore); inTx && err != nil {
		return fmt.Errorf("update %s: save the snapshot: %w", at.Stream, err)
	} else if err != nil {
		r.snaps.onError(at.Stream, fmt.Errorf("save the snapshot: %w", err))
	}
	return nil
}
