package provider

import (
	"context"
	"encoding/json"
	"maps"

	"github.com/kinora-go/kinora/eventstore"
)

// Inherited returns what events, messages and tasks inherit from m: the correlation id, the causation
// id and the traceparent. Values that no store accepts are left out.
func Inherited(m eventstore.Metadata) eventstore.Metadata {
	valid := func(value string) string {
		if value == "" || CheckText("metadata", value, maxHeaderValue) != nil {
			return ""
		}
		return value
	}
	return eventstore.Metadata{
		CorrelationID: valid(m.CorrelationID), CausationID: valid(m.CausationID), Traceparent: valid(m.Traceparent),
	}
}

// Inherit returns m with the inherited metadata in its headers, unless it has these headers, or 64
// others. The headers are copied.
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

// ParseTaskMetadata returns the stored metadata of a task; none if another program has written
// something else.
func ParseTaskMetadata(stored []byte) (m eventstore.Metadata) {
	if json.Unmarshal(stored, &m) != nil {
		return eventstore.Metadata{}
	}
	return Inherited(m)
}
