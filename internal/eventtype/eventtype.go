// Package eventtype has the definition of an event type, which packages eventstore and goldentest
// share.
package eventtype

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"

	"github.com/kinora-go/kinora/internal/check"
)

// Def is a definition that eventstore.Type returned.
type Def struct {
	Name           string
	Was            []string // earlier stored names
	Up             []func(old json.RawMessage) (json.RawMessage, error)
	Added, Removed []string // declared JSON fields
	Go             reflect.Type
	Decode         func([]byte) (any, error)
	Encode         func(any) ([]byte, error)
	OwnCodec       bool
}

// Schema returns the current schema version.
func (d *Def) Schema() int { return len(d.Up) + 1 }

// Upcast converts data of a schema version to the current one. Before that, it brings the data into the
// one form that they have from every store and over every broker.
func (d *Def) Upcast(schema int, data []byte) ([]byte, error) {
	if !d.OwnCodec || bytes.HasPrefix(data, []byte("{")) || bytes.HasPrefix(data, []byte("[")) { // other data may be no JSON, and look like it
		data = check.CanonicalJSON(data)
	}
	for ; schema < d.Schema(); schema++ {
		next, err := d.Up[schema-1](data)
		if err != nil {
			return nil, fmt.Errorf("from schema %d: %w", schema, err)
		}
		data = next
	}
	return data, nil
}
