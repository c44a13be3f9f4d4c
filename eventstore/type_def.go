package eventstore

import (
	"encoding/json"
	"reflect"
	"slices"
)

// TypeDef is one line of the table. Make it with Type.
type TypeDef struct {
	name   string
	was    []string
	up     []Upcast
	goType reflect.Type
	decode func([]byte) (any, error)
	encode func(any) ([]byte, error)
}

// Was declares earlier stored names: events under them decode into this type.
func (d TypeDef) Was(names ...string) TypeDef {
	d.was = append(slices.Clip(d.was), names...)
	return d
}

// Codec replaces encoding/json for this type. encode must yield JSON, and decode must return a value of
// the registered type.
func (d TypeDef) Codec(encode func(any) ([]byte, error), decode func([]byte) (any, error)) TypeDef {
	d.encode, d.decode = encode, decode
	return d
}

// Upcast turns data of one schema version into data of the next. The i-th of a type (from 0) turns version
// i+1 into i+2, so a type with n upcasters writes schema n+1.
type Upcast func(old json.RawMessage) (json.RawMessage, error)

// Type says that values of E are stored under name, as JSON unless Codec says otherwise.
// E is a value type; a pointer or an interface is reported by Err.
func Type[E any](name string, up ...Upcast) TypeDef {
	return TypeDef{
		name: name, up: up, goType: reflect.TypeFor[E](),
		decode: func(b []byte) (any, error) { var e E; err := json.Unmarshal(b, &e); return e, err },
		encode: json.Marshal,
	}
}
