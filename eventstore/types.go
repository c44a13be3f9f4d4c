package eventstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/internal/check"
)

// Types is the table of event types: stored name ⇄ Go type, schema versions, upcasters. It is a value to be
// declared at package level; making it cannot fail, and the services that take it report what Err says.
type Types struct {
	byName map[string]*TypeDef
	byGo   map[reflect.Type]*TypeDef
	err    error
}

// NewTypes makes the table. See Err.
func NewTypes(defs ...TypeDef) *Types {
	t := &Types{byName: map[string]*TypeDef{}, byGo: map[reflect.Type]*TypeDef{}}
	for i := range defs {
		t.add(&defs[i])
	}
	return t
}

func (t *Types) add(d *TypeDef) {
	fault := func(format string, args ...any) { t.err = errors.Join(t.err, fmt.Errorf(format, args...)) }
	if d.goType == nil {
		fault("an event type is empty: make it with Type")
		return
	}
	if k := d.goType.Kind(); k == reflect.Pointer || k == reflect.Interface {
		fault("event type %q: register a value type, not %s", d.name, d.goType)
		return
	}
	if d.encode == nil || d.decode == nil {
		fault("event type %q: its codec lacks a function", d.name)
		return
	}
	if slices.ContainsFunc(d.up, func(u Upcast) bool { return u == nil }) {
		fault("event type %q: an upcaster is nil", d.name)
	}
	if other, ok := t.byGo[d.goType]; ok {
		fault("%s is registered as %q and as %q", d.goType, other.name, d.name)
	}
	t.byGo[d.goType] = d
	for _, n := range append([]string{d.name}, d.was...) {
		if err := invalid("event name", check.Text(n, check.MaxID)); err != nil {
			fault("event type %q: %w", d.name, err)
		}
		if _, ok := t.byName[n]; ok {
			fault("event name %q is registered twice", n)
		}
		t.byName[n] = d
	}
}

// Err reports everything that is wrong with the table, or nil. A nil table is an error too.
func (t *Types) Err() error {
	if t == nil {
		return errors.New("no event types: make the table with NewTypes")
	}
	return t.err
}

// Has tells whether the table knows this stored name.
func (t *Types) Has(name string) bool { _, ok := t.byName[name]; return ok }

// Names are the stored names that the table knows, earlier ones included, in order.
func (t *Types) Names() []string { return slices.Sorted(maps.Keys(t.byName)) }

// Encode makes drafts of registered values: with new ids (UUIDv7), and the metadata of ctx (WithMetadata).
// A value of an unregistered type, or a pointer to one, is ErrUnregistered.
func (t *Types) Encode(ctx context.Context, events ...any) ([]Draft, error) {
	meta := MetadataFrom(ctx)
	drafts := make([]Draft, 0, len(events))
	for _, e := range events {
		d, ok := t.byGo[reflect.TypeOf(e)]
		if !ok {
			return nil, fmt.Errorf("encode %T: %w", e, ErrUnregistered)
		}
		data, err := d.encode(e)
		if err != nil {
			return nil, fmt.Errorf("encode %s: %w", d.name, err)
		}
		id, err := uuid.NewV7()
		if err != nil {
			return nil, fmt.Errorf("draw an event id: %w", err)
		}
		drafts = append(drafts, Draft{ID: id.String(), Type: d.name, Schema: len(d.up) + 1, Data: data, Metadata: meta})
	}
	return drafts, nil
}

// Matching lists, sorted, the registered names (old ones too) whose values a handler of E takes: those of E
// itself, or of every type that implements E where E is an interface.
func Matching[E any](t *Types) []string {
	want := reflect.TypeFor[E]()
	var names []string
	for n, d := range t.byName {
		if d.goType == want || want.Kind() == reflect.Interface && d.goType.Implements(want) {
			names = append(names, n)
		}
	}
	slices.Sort(names)
	return names
}

// Decode upcasts and decodes. The result carries the type's current name and schema.
// An unknown name, a schema newer than the table's, or a type that is not an E is ErrUnregistered.
func Decode[E any](t *Types, r Raw) (Event[E], error) {
	d, ok := t.byName[r.Type]
	if !ok {
		return Event[E]{}, fmt.Errorf("decode %q: %w", r.Type, ErrUnregistered)
	}
	schema := max(r.Schema, 1)
	if schema > len(d.up)+1 {
		return Event[E]{}, fmt.Errorf("decode %s: schema %d, newest known %d: %w", r.Type, schema, len(d.up)+1, ErrUnregistered)
	}
	data := r.Data
	for ; schema <= len(d.up); schema++ {
		var err error
		if data, err = d.up[schema-1](data); err != nil {
			return Event[E]{}, fmt.Errorf("upcast %s from schema %d: %w", r.Type, schema, err)
		}
	}
	v, err := d.decode(data)
	if err != nil {
		return Event[E]{}, fmt.Errorf("decode %s: %w", r.Type, err)
	}
	e, ok := v.(E)
	if !ok {
		return Event[E]{}, fmt.Errorf("decode %s: it is a %T: %w", r.Type, v, ErrUnregistered)
	}
	return Event[E]{
		ID: r.ID, Stream: r.Stream, Version: r.Version, Position: r.Position, Type: d.name, Schema: len(d.up) + 1,
		Data: e, Metadata: r.Metadata, RecordedAt: r.RecordedAt,
	}, nil
}
