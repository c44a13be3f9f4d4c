package eventstore

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"

	"github.com/kinora-go/kinora/internal/check"
)

// TypeDef is the definition of one event type. Type returns it.
type TypeDef struct {
	name     string
	was      []string
	up       []Upcast
	added    []string
	removed  []string
	goType   reflect.Type
	decode   func([]byte) (any, error)
	encode   func(any) ([]byte, error)
	ownCodec bool
}

// Was declares earlier stored names. Events that are stored under them decode into this type.
func (d TypeDef) Was(names ...string) TypeDef {
	d.was = append(slices.Clip(d.was), names...)
	return d
}

// Added declares fields of the type that events stored earlier do not have: such an event decodes to
// the zero value. A field is named as in JSON, such as "language" or "address.country". Without the
// declaration, GoldenTypes reports the field. Decoding ignores the declaration.
func (d TypeDef) Added(fields ...string) TypeDef {
	d.added = append(slices.Clip(d.added), fields...)
	return d
}

// Removed declares fields that events stored earlier have and the type does not read any more.
// Without the declaration, GoldenTypes reports the field. Decoding ignores the declaration.
func (d TypeDef) Removed(fields ...string) TypeDef {
	d.removed = append(slices.Clip(d.removed), fields...)
	return d
}

// Codec replaces encoding/json for this type. encode must return JSON, and decode must return a
// value of the registered type. decode gets objects and arrays in the form that Decode describes. It also
// gets the data of messages of other software, as their projector.Decoder returns it, for example Protobuf.
func (d TypeDef) Codec(encode func(any) ([]byte, error), decode func([]byte) (any, error)) TypeDef {
	d.encode, d.decode, d.ownCodec = encode, decode, true
	return d
}

// Upcast converts data of one schema version to the next version. The first upcaster of a type
// converts version 1 to 2, the second one 2 to 3. So a type with n upcasters writes schema
// version n+1.
type Upcast func(old json.RawMessage) (json.RawMessage, error)

// Type defines an event type: values of E are stored under name, as JSON unless Codec is used.
// E must not be a pointer or an interface; Types.Err reports it.
//
// JSON's null, such as a CloudEvent without data, is decoded only if E is a map, a slice such as
// json.RawMessage, a struct without fields, or implements json.Unmarshaler. Otherwise it is an error, also
// with upcasters, and no event of zeros.
func Type[E any](name string, up ...Upcast) TypeDef {
	return TypeDef{
		name: name, up: up, goType: reflect.TypeFor[E](),
		decode: func(b []byte) (any, error) { var e E; err := json.Unmarshal(b, &e); return e, err },
		encode: json.Marshal,
	}
}

// upcast converts data of a schema version to the current one. Before that, it brings the data into the
// one form that they have from every store and over every broker.
func (d *TypeDef) upcast(schema int, data []byte) ([]byte, error) {
	if !d.ownCodec || bytes.HasPrefix(data, []byte("{")) || bytes.HasPrefix(data, []byte("[")) { // other data may be no JSON, and look like it
		data = check.CanonicalJSON(data)
	}
	for ; schema <= len(d.up); schema++ {
		next, err := d.up[schema-1](data)
		if err != nil {
			return nil, fmt.Errorf("from schema %d: %w", schema, err)
		}
		data = next
	}
	return data, nil
}
