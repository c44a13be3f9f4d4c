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

// Types is a table of event types: stored names, Go types, schema versions and upcasters. Declare
// it at package level. NewTypes cannot fail: NewRepository and projector.NewRunner return the
// errors of Err.
type Types struct {
	byName map[string]*TypeDef
	byGo   map[reflect.Type]*TypeDef
	err    error
}

// NewTypes returns a table of defs and of Ended. Err returns their errors.
func NewTypes(defs ...TypeDef) *Types {
	t := &Types{byName: map[string]*TypeDef{}, byGo: map[reflect.Type]*TypeDef{}}
	ended := Type[Ended](TypeEnded)
	t.add(&ended)
	for i := range defs {
		t.add(&defs[i])
	}
	return t
}

func (t *Types) add(d *TypeDef) {
	fault := func(format string, args ...any) { t.err = errors.Join(t.err, fmt.Errorf(format, args...)) }
	if d.goType == nil {
		fault("an event type is empty: create it with Type")
		return
	}
	if k := d.goType.Kind(); k == reflect.Pointer || k == reflect.Interface {
		fault("event type %q: %s is a pointer or an interface: register a value type", d.name, d.goType)
		return
	}
	if d.encode == nil || d.decode == nil {
		fault("event type %q: a function of its codec is nil: give both", d.name)
		return
	}
	if slices.ContainsFunc(d.up, func(u Upcast) bool { return u == nil }) {
		fault("event type %q: an upcaster is nil: leave it out", d.name)
	}
	if other, ok := t.byGo[d.goType]; ok {
		fault("%s is registered as %q and as %q: register it once, and use Was for old names", d.goType, other.name, d.name)
	}
	t.byGo[d.goType] = d
	for _, n := range append([]string{d.name}, d.was...) {
		if err := invalid("event name", check.Text(n, check.MaxID)); err != nil {
			fault("event type %q: %w", d.name, err)
		}
		if _, ok := t.byName[n]; ok {
			fault("event name %q is registered twice: use each name once", n)
		}
		t.byName[n] = d
	}
}

// Err returns the joined errors of the table, or nil. A nil table is an error.
func (t *Types) Err() error {
	if t == nil {
		return errors.New("the event types are nil: create them with NewTypes")
	}
	return t.err
}

// Has reports whether name is a stored name of the table, current or earlier.
func (t *Types) Has(name string) bool { _, ok := t.byName[name]; return ok }

// Names returns the stored names of the registered types, including earlier ones, sorted. TypeEnded is not
// among them.
func (t *Types) Names() []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(t.byName)), func(name string) bool { return name == TypeEnded })
}

// Encode returns drafts of events, with new ids (UUID version 7) and the metadata of ctx
// (WithMetadata). A value of an unregistered type, or a pointer to a registered one, is
// ErrUnregistered.
func (t *Types) Encode(ctx context.Context, events ...any) ([]Draft, error) {
	meta := MetadataFrom(ctx)
	drafts := make([]Draft, 0, len(events))
	for _, e := range events {
		d, ok := t.byGo[reflect.TypeOf(e)]
		if !ok {
			return nil, fmt.Errorf("encode %T: %w: register the type, and return a value, not a pointer", e, ErrUnregistered)
		}
		data, err := d.encode(e)
		if err != nil {
			return nil, fmt.Errorf("encode %s: %w", d.name, err)
		}
		id, err := uuid.NewV7()
		if err != nil {
			return nil, fmt.Errorf("new event id: %w", err)
		}
		drafts = append(drafts, Draft{ID: id.String(), Type: d.name, Schema: len(d.up) + 1, Data: data, Metadata: meta})
	}
	return drafts, nil
}

// Matching returns the stored names of the events that a handler of E takes, sorted and including
// earlier names: those of E, or of every registered type that implements E if E is an
// interface.
func Matching[E any](t *Types) []string {
	want := reflect.TypeFor[E]()
	var names []string
	for n, d := range t.byName {
		if d.goType == want || want.Kind() == reflect.Interface && d.goType != endedType && d.goType.Implements(want) {
			names = append(names, n)
		}
	}
	slices.Sort(names)
	return names
}

// Decode upcasts and decodes r. The result has the current name and schema version of the type. A
// name that is not in t, a newer schema version, and a type that is not E or does not implement
// it are ErrUnregistered.
//
// Stores and programs write one JSON value in several ways, so Decode brings the data into one form first.
// It has no spaces, sorted keys, and numbers without exponents: 1E+2 is 100. Of a key that occurs twice,
// the last one counts. So upcasters, decoders and fields of the type json.RawMessage get the same bytes
// from the log as over a broker. Numbers to which this would add more than 1 MiB in one event stay as they are.
func Decode[E any](t *Types, r Raw) (Event[E], error) {
	d, ok := t.byName[r.Type]
	if !ok {
		return Event[E]{}, fmt.Errorf("decode %q: %w", r.Type, ErrUnregistered)
	}
	schema := max(r.Schema, 1)
	if schema > len(d.up)+1 {
		return Event[E]{}, fmt.Errorf("decode %s: schema version %d, the newest registered is %d: %w",
			r.Type, schema, len(d.up)+1, ErrUnregistered)
	}
	if !d.ownCodec && check.IsNull(r.Data) && !check.TakesNull(d.goType) {
		return Event[E]{}, fmt.Errorf("decode %s: null is no %s", r.Type, d.goType)
	}
	data, err := d.upcast(schema, r.Data)
	if err != nil {
		return Event[E]{}, fmt.Errorf("upcast %s %w", r.Type, err)
	}
	v, err := d.decode(data)
	if err != nil {
		return Event[E]{}, fmt.Errorf("decode %s: %w", r.Type, err)
	}
	e, ok := v.(E)
	if !ok {
		return Event[E]{}, fmt.Errorf("decode %s: registered as %T, not as %s: %w",
			r.Type, v, reflect.TypeFor[E](), ErrUnregistered)
	}
	return Event[E]{
		ID: r.ID, Stream: r.Stream, Version: r.Version, Position: r.Position, Type: d.name, Schema: len(d.up) + 1,
		Data: e, Metadata: r.Metadata, RecordedAt: r.RecordedAt,
	}, nil
}
