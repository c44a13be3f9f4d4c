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
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"strconv"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
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

// CloudEvents is a projector.Decoder for CloudEvents 1.x. In binary mode the attributes are headers
// with the prefix "ce_" (Kafka) or "ce-" (NATS, HTTP), in upper or lower case. In structured mode the
// header content-type is "application/cloudevents+json", and the payload is the JSON envelope, with
// data or data_base64. A batch, and another structured format, are errors.
//
//   - Type is the attribute type.
//   - ID: source and id together identify a CloudEvent. The message id is both with a space between
//     them, "/orders 17", if that has at most 255 bytes and source has no space. Otherwise it is
//     "sha256:" and the SHA-256 of both with a NUL between them, in hexadecimal.
//   - Stream is the extension partitionkey. RecordedAt is time, an RFC 3339 time of the years 1 to 9999.
//     Its letters may be in lower case, and second 60 is the first one of the next minute.
//   - Metadata: traceparent is Traceparent; source, subject, datacontenttype, dataschema and the
//     other extensions are in Extra, under their names.
//   - Data is the data: in structured mode the JSON value, or if datacontenttype is not JSON, the
//     text of the string. A string with a JSON object is taken as that object if datacontenttype ends
//     in "+json", because an SDK writes it so. Without data it is JSON's null: a message of a type that
//     cannot be null is parked as undecodable (see eventstore.Type).
//
// With other types of JSON, such as application/json, a string is a string, also if its text is JSON. So
// does the specification say. Converters such as that of Debezium write JSON so that a database has in a
// column of text; the message is then parked as undecodable, if its type is a struct. The example unwraps it.
//
// Values of headers are taken as they are, without decoding percent signs. A byte order mark before the
// JSON of the envelope or of the data is ignored.
func CloudEvents(_ string, m *message.Message) (eventstore.Raw, error) {
	attributes := map[string]string{}
	for name, value := range m.Metadata {
		name = strings.ToLower(name)
		rest, ok := strings.CutPrefix(name, "ce_")
		if !ok {
			rest, ok = strings.CutPrefix(name, "ce-")
		}
		if name == "content-type" {
			rest, ok = name, true
		}
		if other := attributes[rest]; ok && value != "" && other != "" && other != value {
			return eventstore.Raw{}, fmt.Errorf("two headers have different values of the attribute %.20q", rest)
		} else if ok && value != "" {
			attributes[rest] = value
		}
	}
	kind, _, _ := mime.ParseMediaType(attributes["content-type"])
	switch {
	case kind == "application/cloudevents+json":
		return structured(m.Payload)
	case strings.HasPrefix(kind, "application/cloudevents"):
		return eventstore.Raw{}, fmt.Errorf("content-type %s: only JSON of one event is decoded", kind)
	}
	delete(attributes, "content-type")
	if attributes["datacontenttype"] == "" && kind != "" {
		attributes["datacontenttype"] = kind
	}
	return cloudEvent(attributes, m.Payload)
}

func structured(payload []byte) (raw eventstore.Raw, err error) {
	var envelope map[string]json.RawMessage
	if err := json.Unmarshal(check.TrimMark(payload), &envelope); err != nil {
		return raw, errors.New("the payload is not the JSON of one CloudEvent")
	}
	attributes := map[string]string{}
	for name, value := range envelope {
		if value = bytes.TrimSpace(value); name == "data" || name == "data_base64" || string(value) == "null" {
			continue
		}
		if attributes[name], err = attribute(value); err != nil {
			return raw, fmt.Errorf("attribute %.20q: %w", name, err)
		}
	}
	data, hasData := envelope["data"]
	encoded, isBinary := envelope["data_base64"]
	switch {
	case hasData && isBinary:
		err = errors.New("both data and data_base64 are given")
	case isBinary:
		data, err = fromBase64(encoded)
	case hasData:
		data = embedded(attributes["datacontenttype"], bytes.TrimSpace(data))
	}
	raw, invalid := cloudEvent(attributes, data)
	return raw, errors.Join(invalid, err)
}

// attribute returns the value of an attribute in text: a string, a number or a boolean.
func attribute(value json.RawMessage) (text string, err error) {
	switch value[0] {
	case '"':
		err = json.Unmarshal(value, &text)
		return text, err
	case '{', '[':
		return "", errors.New("is not a string, a number or a boolean")
	}
	return string(value), nil
}

func fromBase64(value json.RawMessage) ([]byte, error) {
	var text string
	if err := json.Unmarshal(value, &text); err != nil {
		return nil, errors.New("data_base64 is not a string")
	}
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, errors.New("data_base64 is not base64")
	}
	return data, nil
}

// embedded returns the data of an envelope. Go's SDK puts JSON of a type such as
// "application/vnd.order+json" into a string.
func embedded(contentType string, data []byte) []byte {
	var text string
	if data[0] != '"' || json.Unmarshal(data, &text) != nil {
		return data
	}
	kind, _, _ := mime.ParseMediaType(contentType)
	if !isJSON(contentType) || strings.HasSuffix(kind, "+json") && strings.HasPrefix(text, "{") && json.Valid([]byte(text)) {
		return []byte(text)
	}
	return data
}

// isJSON reports whether a content type is JSON, as without one.
func isJSON(contentType string) bool {
	kind, _, err := mime.ParseMediaType(contentType)
	if err != nil {
		return contentType == ""
	}
	return strings.HasSuffix(kind, "/json") || strings.HasSuffix(kind, "+json")
}

// cloudEvent returns the event with attributes and data. attributes is changed.
func cloudEvent(attributes map[string]string, data []byte) (raw eventstore.Raw, err error) {
	take := func(name string) string {
		value := attributes[name]
		delete(attributes, name)
		return value
	}
	version, id, at := take("specversion"), take("id"), take("time")
	source := attributes["source"]
	raw = eventstore.Raw{Type: take("type"), Stream: take("partitionkey"), Data: data}
	raw.Metadata.Traceparent, raw.Metadata.Extra = take("traceparent"), attributes
	if id != "" && source != "" && !strings.Contains(source+id, "\x00") {
		raw.ID = identity(source, id)
	}
	switch {
	case !strings.HasPrefix(version, "1."):
		return raw, fmt.Errorf("specversion is %s: only 1.x is decoded", strconv.Quote(version[:min(len(version), 20)]))
	case id == "" || source == "" || raw.Type == "":
		return raw, errors.New("one of the attributes id, source and type is missing")
	case strings.Contains(source+id, "\x00"):
		return raw, errors.New("one of the attributes id and source has a NUL")
	}
	if len(data) == 0 && isJSON(attributes["datacontenttype"]) {
		raw.Data = []byte("null")
	}
	if at != "" {
		if raw.RecordedAt, err = check.ParseTime(at); err != nil {
			return raw, fmt.Errorf("the attribute time is %w", err)
		}
	}
	return raw, nil
}

func identity(source, id string) string {
	both := source + " " + id
	if len(both) <= provider.MaxIDBytes && !strings.Contains(source, " ") && provider.CheckText("id", both, provider.MaxIDBytes) == nil {
		return both
	}
	sum := sha256.Sum256([]byte(source + "\x00" + id))
	return "sha256:" + hex.EncodeToString(sum[:])
}
