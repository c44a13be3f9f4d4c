package decode_test

import (
	"encoding/json"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/decode"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/stretchr/testify/require"
)

// check decodes a message twice. It fails if the decoder panics, changes the message, is not
// deterministic, or claims a position in a log.
func check(t *testing.T, d projector.Decoder, m *message.Message) (eventstore.Raw, error) {
	before := m.Copy()
	before.Payload = append([]byte{}, m.Payload...)
	raw, err := d("orders", m)
	again, errAgain := d("orders", m)
	require.Equal(t, raw, again)
	require.Equal(t, err == nil, errAgain == nil)
	require.True(t, before.Equals(m))
	require.Zero(t, raw.Position)
	return raw, err
}

// Promise: G10.2
func FuzzJSON(f *testing.F) {
	for _, s := range []string{`{"meta":{"id":1,"type":"a","at":"2026-03-01T12:00:00Z"},"body":{}}`, `{"meta":[]}`, `null`, ``, `{"meta":{"id":"\ud800"}}`, "\xff"} {
		f.Add([]byte(s), "order.placed", "u")
	}
	field := decode.Place{Field: "meta.id"}
	d, err := decode.NewJSON(decode.JSONConfig{
		Type: decode.Place{Header: "type"}, ID: field, Key: decode.Place{Field: "meta.type"}, Time: decode.Place{Field: "meta.at"}, Data: decode.Place{Field: "body"},
	})
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, payload []byte, header, uuid string) {
		raw, err := check(t, d, foreign(uuid, string(payload), "type", header))
		if err == nil {
			require.True(t, json.Valid(raw.Data))
			require.Equal(t, header, raw.Type)
		}
	})
}

// Promise: G10.2
func FuzzCQRS(f *testing.F) {
	f.Add([]byte(`{}`), "orders.OrderPlaced", "u")
	f.Add([]byte{}, "", "")
	f.Fuzz(func(t *testing.T, payload []byte, name, uuid string) {
		raw, err := check(t, decode.CQRS, foreign(uuid, string(payload), "name", name))
		require.Equal(t, name != "", err == nil)
		require.Equal(t, uuid, raw.ID)
	})
}

// Promise: G10.2
func FuzzCloudEventsStructured(f *testing.F) {
	for _, name := range []string{"plain", "full", "text", "bytes", "none"} {
		f.Add([]byte(golden(f, name+".structured").Payload))
	}
	for _, s := range []string{`{"specversion":"1.0","id":"a\u0000","source":"/a","type":"t"}`, `{"data":"","data_base64":""}`, `{"":""}`, `null`, ``} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		raw, err := check(t, decode.CloudEvents, foreign("u", string(payload), "content-type", "application/cloudevents+json"))
		if err == nil {
			require.NotEmpty(t, raw.ID)
			require.LessOrEqual(t, len(raw.ID), 255)
			require.NotEmpty(t, raw.Type)
		}
	})
}

// Promise: G10.2
func FuzzCloudEventsBinary(f *testing.F) {
	f.Add("ce_id", "17", "/shops/7", "order.placed", "application/json", []byte(`{}`))
	f.Add("CE-ID", "\x00", "/ ", "\xff", ";;", []byte{})
	f.Fuzz(func(t *testing.T, name, id, source, eventType, contentType string, payload []byte) {
		raw, err := check(t, decode.CloudEvents, foreign("u", string(payload),
			"ce_specversion", "1.0", "ce_type", eventType, "ce_source", source, "content-type", contentType, name, id))
		if err == nil {
			require.NotEmpty(t, raw.ID)
			require.LessOrEqual(t, len(raw.ID), 255)
		}
	})
}
