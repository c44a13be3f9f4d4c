package provider

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
)

// OutboxMessage is a message to be published.
type OutboxMessage struct {
	// ID is the same on every publication. Empty means a new UUIDv7; in output, an id derived from the event.
	ID    string `json:"message_id"`
	Topic string `json:"topic"` // 1 to 255 bytes
	// Key is the ordering key. Empty means ID, so that it waits for no other; in output, the event's stream.
	Key     string            `json:"key"`
	Payload []byte            `json:"payload,omitempty"` // published unchanged; at most the provider's MaxPayload bytes
	Headers map[string]string `json:"headers,omitempty"` // at most 64; names have at most 255 bytes, values 1024
	// OrderedKey makes other transactions that enqueue a message of this topic and key with
	// OrderedKey wait until this transaction ends. So entries of a key that several streams share
	// are published in commit order. Without it, that order holds only if one transaction commits
	// before the other enqueues, which is always true in one stream.
	OrderedKey bool `json:"ordered_key,omitempty"`
}

// Normalize returns m with an ID, a Key and a copy of Headers, to which it adds what messages inherit from ctx. A message
// that no provider can store is an *eventstore.InvalidError. A maxPayload ≤ 0 means DefaultMaxPayload.
func (m OutboxMessage) Normalize(ctx context.Context, maxPayload int) (OutboxMessage, error) {
	if m.ID == "" {
		id, err := uuid.NewV7()
		if err != nil {
			return m, fmt.Errorf("new message id: %w", err)
		}
		m.ID = id.String()
	}
	m.Key = cmp.Or(m.Key, m.ID)
	if maxPayload <= 0 {
		maxPayload = DefaultMaxPayload
	}
	if err := cmp.Or(CheckText("message id", m.ID, MaxIDBytes), CheckText("topic", m.Topic, MaxIDBytes), CheckText("key", m.Key, MaxIDBytes),
		CheckHeaders("headers", m.Headers)); err != nil {
		return m, err
	}
	if len(m.Payload) > maxPayload {
		return m, invalidf("payload", "%d bytes: at most %d are allowed", len(m.Payload), maxPayload)
	}
	m.Headers = maps.Clone(m.Headers)
	return m.Inherit(eventstore.MetadataFrom(ctx)), nil
}

// NormalizeAll calls Normalize for each message. If one is refused, the error says which.
func NormalizeAll(ctx context.Context, ms []OutboxMessage, maxPayload int) ([]OutboxMessage, error) {
	ready := make([]OutboxMessage, len(ms))
	for i, m := range ms {
		var err error
		if ready[i], err = m.Normalize(ctx, maxPayload); err != nil {
			return nil, fmt.Errorf("enqueue message %d: %w", i, err)
		}
	}
	return ready, nil
}

// Topics calls route for each draft, and returns the topics of each draft, without duplicates. A
// topic that no provider can store is an *eventstore.InvalidError. A nil route returns no topics.
func Topics(
	route func(stream string, d eventstore.Draft) []string, stream string, drafts []eventstore.Draft,
) ([][]string, error) {
	topics := make([][]string, len(drafts))
	if route == nil {
		return topics, nil
	}
	for i := range drafts {
		for _, topic := range route(stream, drafts[i]) {
			if err := CheckText("topic", topic, MaxIDBytes); err != nil {
				return nil, err
			}
			if !slices.Contains(topics[i], topic) {
				topics[i] = append(topics[i], topic)
			}
		}
	}
	return topics, nil
}

// Headers of a published event. The payload is the data of the event, unchanged.
const (
	HeaderType        = "kinora_type"        // the stored name; without it a message is not an event
	HeaderSchema      = "kinora_schema"      // its schema version
	HeaderStream      = "kinora_stream"      // its stream
	HeaderVersion     = "kinora_version"     // its version in the stream
	HeaderPosition    = "kinora_position"    // its position in the log
	HeaderLog         = "kinora_log"         // LogID.String of the log
	HeaderKey         = "kinora_key"         // the ordering key: for brokers, the partition key
	HeaderRecordedAt  = "kinora_recorded_at" // RFC 3339 with nanoseconds, UTC
	HeaderCorrelation = "correlation_id"     // as Watermill's own middleware names it
	HeaderCausation   = "causation_id"
	HeaderTraceparent = "traceparent"
	HeaderActor       = "actor"
	HeaderExtra       = "extra_" // the prefix of each key of Metadata.Extra
)

// ErrMalformed: a message does not have the headers of a published event. No retry can help.
var ErrMalformed = errors.New("malformed message")

// FromEvent returns the message of an event that has this version in stream.
func FromEvent(stream string, version int64, d eventstore.Draft, topic string) OutboxMessage {
	h := map[string]string{
		HeaderType:    d.Type,
		HeaderSchema:  strconv.Itoa(d.Schema),
		HeaderStream:  stream,
		HeaderVersion: strconv.FormatInt(version, 10),
	}
	for _, m := range [...]struct{ name, value string }{
		{HeaderCorrelation, d.Metadata.CorrelationID}, {HeaderCausation, d.Metadata.CausationID},
		{HeaderTraceparent, d.Metadata.Traceparent}, {HeaderActor, d.Metadata.Actor},
	} {
		if m.value != "" {
			h[m.name] = m.value
		}
	}
	for k, v := range d.Metadata.Extra {
		h[HeaderExtra+k] = v
	}
	return OutboxMessage{ID: d.ID, Topic: topic, Key: stream, Payload: d.Data, Headers: h}
}

// SetPlace adds the headers of the position of an event in its log. log is LogID.String.
func (m *OutboxMessage) SetPlace(position int64, log string) {
	m.Headers[HeaderPosition] = strconv.FormatInt(position, 10)
	m.Headers[HeaderLog] = log
}

// Inherited returns what events, messages and tasks inherit from m: the correlation id, the causation
// id and the traceparent. Values that no store accepts are left out.
func Inherited(m eventstore.Metadata) eventstore.Metadata {
	valid := func(value string) string {
		if checkValue("metadata", value) != nil {
			return ""
		}
		return value
	}
	return eventstore.Metadata{
		CorrelationID: valid(m.CorrelationID), CausationID: valid(m.CausationID), Traceparent: valid(m.Traceparent),
	}
}

// Inherit returns m with the inherited metadata in a copy of its headers, unless it has them, or 64 others.
func (m OutboxMessage) Inherit(from eventstore.Metadata) OutboxMessage {
	from = Inherited(from)
	copied := false
	for name, value := range map[string]string{
		HeaderCorrelation: from.CorrelationID, HeaderCausation: from.CausationID, HeaderTraceparent: from.Traceparent,
	} {
		if _, ok := m.Headers[name]; ok || value == "" || len(m.Headers) >= maxHeaders {
			continue
		}
		if !copied {
			h := make(map[string]string, len(m.Headers)+3)
			maps.Copy(h, m.Headers)
			m.Headers, copied = h, true
		}
		m.Headers[name] = value
	}
	return m
}

// TaskMetadata returns the metadata of ctx that a task inherits, as it is stored.
func TaskMetadata(ctx context.Context) string {
	data, err := json.Marshal(Inherited(eventstore.MetadataFrom(ctx)))
	if err != nil { // never: it has texts only
		return "{}"
	}
	return string(data)
}

// ParseTaskMetadata returns the stored metadata of a task; none if another program has written it.
func ParseTaskMetadata(stored []byte) (m eventstore.Metadata) {
	if json.Unmarshal(stored, &m) != nil {
		return eventstore.Metadata{}
	}
	return Inherited(m)
}

// ParseHeaders parses headers that a provider stored as a JSON object of strings. Any other text
// is ErrMalformed. Names and values share the memory of text.
func ParseHeaders(text string) (map[string]string, error) {
	p := headerParser{rest: text}
	if !utf8.ValidString(p.rest) || !p.skip('{') {
		return nil, errNoObject
	}
	headers := make(map[string]string, min(strings.Count(p.rest, `:`), 64))
	for first := true; !p.skip('}'); first = false {
		if !first && !p.skip(',') {
			return nil, errNoObject
		}
		name, ok := p.text()
		if !ok || !p.skip(':') {
			return nil, errNoObject
		}
		if headers[name], ok = p.text(); !ok {
			return nil, errNoObject
		}
	}
	if p.space(); p.rest != "" {
		return nil, errNoObject
	}
	return headers, nil
}

var errNoObject = fmt.Errorf("%w: the headers are not a JSON object of strings", ErrMalformed)

type headerParser struct{ rest string }

func (p *headerParser) space() { p.rest = strings.TrimLeft(p.rest, " \t\r\n") }

// skip skips white space and c. It returns false if another character follows.
func (p *headerParser) skip(c byte) bool {
	if p.rest == "" || p.rest[0] != c {
		if p.space(); p.rest == "" || p.rest[0] != c {
			return false
		}
	}
	p.rest = p.rest[1:]
	return true
}

// text reads a string after white space.
func (p *headerParser) text() (s string, ok bool) {
	if !p.skip('"') {
		return "", false
	}
	escaped := false
	for i := 0; i < len(p.rest); i++ {
		switch c := p.rest[i]; {
		case c == '"':
			s, p.rest = p.rest[:i], p.rest[i+1:]
			ok = !escaped || json.Unmarshal([]byte(`"`+s+`"`), &s) == nil
			return s, ok
		case c == '\\':
			escaped = true
			i++
		case c < ' ':
			return "", false
		}
	}
	return "", false
}
