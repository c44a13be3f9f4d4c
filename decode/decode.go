// Package decode has decoders (projector.Decoder) for messages of other software: plain JSON,
// Watermill's CQRS component, and CloudEvents. Set one as RunnerConfig.Decode.
//
//   - A decoder is a function, so a program changes what it returns in a function of its own: it sets
//     the ordering key (Raw.Stream), or chooses a decoder by the topic.
//   - The types of the events are in the table of the projector (eventstore.NewTypes). If the other
//     software has other names, declare them with Was.
//   - The data is decoded as JSON, or by the codec of its type (TypeDef.Codec), such as one for
//     Protobuf.
//   - Decoders do not change messages, never panic, and may be called by several goroutines at once.
package decode

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/projector"
)

// CQRS is a projector.Decoder for messages that the marshalers of Watermill's CQRS component
// (JSONMarshaler, ProtoMarshaler) have made: the type is the name of the struct in the header "name",
// such as "orders.OrderPlaced", and the id is the UUID of the message. There is no ordering key
// unless the producer sets the header kinora_key.
//
// The data of ProtoMarshaler is Protobuf, and requires an eventstore.TypeDef.Codec.
func CQRS(_ string, m *message.Message) (eventstore.Raw, error) {
	raw := eventstore.Raw{ID: m.UUID, Type: m.Metadata["name"], Data: m.Payload}
	raw.Metadata.CorrelationID = m.Metadata["correlation_id"]
	if raw.Type == "" {
		return raw, errors.New("header name is missing")
	}
	return raw, nil
}

// Place is where a message has a value: one of its fields is set.
type Place struct {
	Header string // the name of a header
	Field  string // the path of a field of the payload, such as "meta.id"
	Text   string // this value for every message
}

// JSONConfig says where plain JSON messages have the parts of their events. Field values are strings
// or numbers; a number is taken as it is written.
type JSONConfig struct {
	Type Place // required
	ID   Place // the message id. Zero means the UUID of the message.
	Key  Place // the ordering key. Zero means none. A message may lack it.
	Time Place // when it happened, as CloudEvents reads it. Zero means unknown. A message may lack it.
	Data Place // a field with the data of the event, of any JSON type. Zero means the whole payload.
}

// NewJSON returns a decoder of plain JSON messages. An invalid c is an error.
func NewJSON(c JSONConfig) (projector.Decoder, error) {
	if c.Type == (Place{}) {
		return nil, errors.New("decode JSON: JSONConfig.Type is empty: set where messages have their type")
	}
	for name, p := range map[string]Place{"Type": c.Type, "ID": c.ID, "Key": c.Key, "Time": c.Time, "Data": c.Data} {
		set := 0
		for _, s := range []string{p.Header, p.Field, p.Text} {
			if s != "" {
				set++
			}
		}
		if set > 1 || name == "Data" && p != (Place{Field: p.Field}) || name == "ID" && p.Text != "" {
			return nil, fmt.Errorf("decode JSON: JSONConfig.%s: set one of Header, Field and Text; Data can only be a Field, and ID no Text", name)
		}
		if p.Field != "" && strings.Contains("."+p.Field+".", "..") {
			return nil, fmt.Errorf("decode JSON: JSONConfig.%s: the path %q has an empty name", name, p.Field)
		}
	}
	return c.decode, nil
}

func (c *JSONConfig) decode(_ string, m *message.Message) (raw eventstore.Raw, err error) {
	raw = eventstore.Raw{ID: m.UUID, Data: check.TrimMark(m.Payload)}
	if !json.Valid(raw.Data) {
		return raw, errors.New("the payload is not JSON")
	}
	if c.ID != (Place{}) {
		if raw.ID, err = c.ID.in(m); err != nil {
			return raw, fmt.Errorf("id: %w", err)
		}
	}
	if raw.Stream, err = c.Key.in(m); err != nil {
		return raw, fmt.Errorf("key: %w", err)
	}
	if raw.Type, err = c.Type.in(m); err != nil {
		return raw, fmt.Errorf("type: %w", err)
	}
	if raw.RecordedAt, err = c.Time.time(m); err != nil {
		return raw, fmt.Errorf("time: %w", err)
	}
	if c.Data.Field != "" {
		data, ok := field(raw.Data, c.Data.Field)
		if !ok {
			return raw, fmt.Errorf("data: the payload has no field %s", c.Data.Field)
		}
		raw.Data = data
	}
	return raw, nil
}

// in returns the value of a message, or "" if it has none.
func (p Place) in(m *message.Message) (string, error) {
	if p.Field == "" {
		if p.Header != "" {
			return m.Metadata[p.Header], nil
		}
		return p.Text, nil
	}
	value, ok := field(check.TrimMark(m.Payload), p.Field)
	switch {
	case !ok || string(value) == "null":
		return "", nil
	case value[0] == '"':
		var s string
		err := json.Unmarshal(value, &s)
		return s, err
	case strings.IndexByte("-0123456789", value[0]) >= 0:
		return string(value), nil
	}
	return "", fmt.Errorf("field %s is not a string or a number", p.Field)
}

func (p Place) time(m *message.Message) (at time.Time, err error) {
	text, err := p.in(m)
	if err != nil || text == "" {
		return at, err
	}
	return check.ParseTime(text)
}

// field returns the value at a path of JSON that is valid. If a name occurs twice in an object, the
// last one counts, as in encoding/json.
func field(data []byte, path string) ([]byte, bool) {
	for name := range strings.SplitSeq(path, ".") {
		var object map[string]json.RawMessage
		if json.Unmarshal(data, &object) != nil {
			return nil, false
		}
		value, ok := object[name]
		if !ok {
			return nil, false
		}
		data = bytes.TrimSpace(value)
	}
	return data, true
}
