package eventstore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/internal/eventtype"
)

// Types is a table of event types: stored names, Go types, schema versions and upcasters. Declare
// it at package level. NewTypes cannot fail: NewRepository and projector.NewRunner return the
// errors of Err.
type Types struct {
	byName map[string]*eventtype.Def
	byGo   map[reflect.Type]*eventtype.Def
	err    error
}

// NewTypes returns a table of defs and of Ended. Err returns their errors.
func NewTypes(defs ...TypeDef) *Types {
	t := &Types{byName: map[string]*eventtype.Def{}, byGo: map[reflect.Type]*eventtype.Def{}}
	ended := Type[Ended](TypeEnded)
	t.add(&ended.def)
	for i := range defs {
		t.add(&defs[i].def)
	}
	return t
}

func (t *Types) add(d *eventtype.Def) {
	fault := func(format string, args ...any) { t.err = errors.Join(t.err, fmt.Errorf(format, args...)) }
	if d.Go == nil {
		fault("an event type is empty: create it with Type")
		return
	}
	if k := d.Go.Kind(); k == reflect.Pointer || k == reflect.Interface {
		fault("event type %q: %s is a pointer or an interface: register a value type", d.Name, d.Go)
		return
	}
	if d.Encode == nil || d.Decode == nil {
		fault("event type %q: a function of its codec is nil: give both", d.Name)
		return
	}
	if slices.ContainsFunc(d.Up, func(up func(json.RawMessage) (json.RawMessage, error)) bool { return up == nil }) {
		fault("event type %q: an upcaster is nil: leave it out", d.Name)
	}
	if other, ok := t.byGo[d.Go]; ok {
		fault("%s is registered as %q and as %q: register it once, and use Was for old names", d.Go, other.Name, d.Name)
	}
	t.byGo[d.Go] = d
	for _, n := range append([]string{d.Name}, d.Was...) {
		if err := invalid("event name", check.Text(n, check.MaxID)); err != nil {
			fault("event type %q: %w", d.Name, err)
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

// Newest returns the newest schema version that Decode takes of a stored name, current or earlier; 0 if the table does
// not have the name.
func (t *Types) Newest(name string) int {
	if d, ok := t.byName[name]; ok {
		return d.Schema()
	}
	return 0
}

// Names returns the stored names of the registered types, including earlier ones, sorted. TypeEnded is not
// among them.
func (t *Types) Names() []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(t.byName)), func(name string) bool { return name == TypeEnded })
}

// Defs returns the definitions, sorted by name, without that of Ended. They are for package goldentest.
func (t *Types) Defs() (defs []*eventtype.Def) {
	for _, name := range t.Names() {
		if d := t.byName[name]; d.Name == name {
			defs = append(defs, d)
		}
	}
	return defs
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
		data, err := d.Encode(e)
		if err != nil {
			return nil, fmt.Errorf("encode %s: %w", d.Name, err)
		}
		id, err := uuid.NewV7()
		if err != nil {
			return nil, fmt.Errorf("new event id: %w", err)
		}
		drafts = append(drafts, Draft{ID: id.String(), Type: d.Name, Schema: d.Schema(), Data: data, Metadata: meta})
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
		if d.Go == want || want.Kind() == reflect.Interface && d.Go != endedType && d.Go.Implements(want) {
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
	if schema > d.Schema() {
		return Event[E]{}, fmt.Errorf("decode %s: schema version %d, the newest registered is %d: %w",
			r.Type, schema, d.Schema(), ErrUnregistered)
	}
	if !d.OwnCodec && check.IsNull(r.Data) && !check.TakesNull(d.Go) {
		return Event[E]{}, fmt.Errorf("decode %s: null is no %s", r.Type, d.Go)
	}
	data, err := d.Upcast(schema, r.Data)
	if err != nil {
		return Event[E]{}, fmt.Errorf("upcast %s %w", r.Type, err)
	}
	v, err := d.Decode(data)
	if err != nil {
		return Event[E]{}, fmt.Errorf("decode %s: %w", r.Type, err)
	}
	e, ok := v.(E)
	if !ok {
		return Event[E]{}, fmt.Errorf("decode %s: registered as %T, not as %s: %w",
			r.Type, v, reflect.TypeFor[E](), ErrUnregistered)
	}
	return Event[E]{
		ID: r.ID, Stream: r.Stream, Version: r.Version, Position: r.Position, Type: d.Name, Schema: d.Schema(),
		Data: e, Metadata: r.Metadata, RecordedAt: r.RecordedAt,
	}, nil
}

// TypeDef is the definition of one event type. Type returns it.
type TypeDef struct{ def eventtype.Def }

// Was declares earlier stored names. Events that are stored under them decode into this type.
func (d TypeDef) Was(names ...string) TypeDef {
	d.def.Was = append(slices.Clip(d.def.Was), names...)
	return d
}

// Added declares fields of the type that events stored earlier do not have: such an event decodes to
// the zero value. A field is named as in JSON, such as "language" or "address.country". Without the
// declaration, goldentest.Check reports the field. Decoding ignores the declaration.
func (d TypeDef) Added(fields ...string) TypeDef {
	d.def.Added = append(slices.Clip(d.def.Added), fields...)
	return d
}

// Removed declares fields that events stored earlier have and the type does not read any more.
// Without the declaration, goldentest.Check reports the field. Decoding ignores the declaration.
func (d TypeDef) Removed(fields ...string) TypeDef {
	d.def.Removed = append(slices.Clip(d.def.Removed), fields...)
	return d
}

// Codec replaces encoding/json for this type. encode must return JSON, and decode must return a
// value of the registered type. decode gets objects and arrays in the form that Decode describes. It also
// gets the data of messages of other software, as their projector.Decoder returns it, for example Protobuf.
func (d TypeDef) Codec(encode func(any) ([]byte, error), decode func([]byte) (any, error)) TypeDef {
	d.def.Encode, d.def.Decode, d.def.OwnCodec = encode, decode, true
	return d
}

// Type defines an event type: values of E are stored under name, as JSON unless Codec is used.
// E must not be a pointer or an interface; Types.Err reports it.
//
// An upcaster converts data of one schema version to the next version. The first one converts version 1
// to 2, the second one 2 to 3. So a type with n upcasters writes schema version n+1.
//
// JSON's null, such as a CloudEvent without data, is decoded only if E is a map, a slice such as
// json.RawMessage, a struct without fields, or implements json.Unmarshaler. Otherwise it is an error, also
// with upcasters, and no event of zeros.
func Type[E any](name string, upcasters ...func(old json.RawMessage) (json.RawMessage, error)) TypeDef {
	return TypeDef{eventtype.Def{
		Name: name, Up: upcasters, Go: reflect.TypeFor[E](),
		Decode: func(b []byte) (any, error) { var e E; err := json.Unmarshal(b, &e); return e, err },
		Encode: json.Marshal,
	}}
}
