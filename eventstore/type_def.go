package eventstore

import (
	"encoding/json"
	"reflect"
	"slices"

	"github.com/kinora-go/kinora/internal/eventtype"
)

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
